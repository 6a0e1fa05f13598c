"""What the server is started with: command line, environment, endpoint, and the content of ``launch.json``."""

from __future__ import annotations

import inspect
import json
import re

from ansible.module_utils import (
    sglang_launch_newlog,
    sglang_launch_policy,
    sglang_launch_probe,
    sglang_launch_watch,
    sglang_launcher,
    sglang_watch_signatures,
)
from ansible.module_utils.sglang_api_key import API_KEY_ENV
from ansible.module_utils.sglang_managed_flags import MANAGED
from ansible.module_utils.sglang_proc import MARKER

SCHEMA = 1
# The order of the flags that lead the command line; all others follow in the order in which they are given.
_LEADING = (
    "model-path",
    "served-model-name",
    "trust-remote-code",
    "tp-size",
    "mem-fraction-static",
    "host",
    "port",
)
# The programs of a release that are modules here, by the name that they have there.
BESIDE = {
    "watch": sglang_launch_watch,
    "policy": sglang_launch_policy,
    "probe": sglang_launch_probe,
    "newlog": sglang_launch_newlog,
    "signatures": sglang_watch_signatures,
}
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def _text(value):
    """Return one value as one argument; a dict becomes JSON, which is what SGLang takes for such flags."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def flag_list(args):
    """Return ``{flag: value}`` as a list of arguments.

    True is a bare flag, False and None leave the flag out, a list is several values after one flag.

    :raises ValueError: a flag is written with dashes in front, is not a flag name, or has an empty list.
    """
    result = []
    for flag, value in args.items():
        if not re.match(r"^[a-z0-9][a-z0-9-]*$", str(flag)):
            raise ValueError(f"'{flag}' is not a flag: write it in lower case without leading dashes, as in tp-size")
        if value is None or value is False:
            continue
        result.append(f"--{flag}")
        if value is True:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ValueError(f"flag '{flag}' has an empty list; use false to leave the flag out")
        result += [_text(item) for item in values]
    return result


def server_flags(model_path, served_model_name, host, port, tp_size, args):
    """Return all flags of ``sglang.launch_server`` as a list of arguments.

    :param args: the other flags, see :func:`flag_list`.
    :raises ValueError: a flag of ``args`` has an input of its own, or is not valid.
    """
    for flag in args:
        if flag in MANAGED:
            raise ValueError(f"flag '{flag}' is not for sglang_server_args: use {MANAGED[flag]}")
    own = {
        "model-path": model_path,
        "served-model-name": served_model_name or None,
        "tp-size": int(tp_size),
        "host": host,
        "port": int(port),
    }
    known = dict(args, **own)
    ordered = {flag: known[flag] for flag in _LEADING if flag in known}
    ordered.update((flag, value) for flag, value in args.items() if flag not in ordered)
    return flag_list(ordered)


def endpoint(host, port):
    """Return the URL at which this host itself reaches the server; a wildcard address becomes loopback."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{int(port)}" if ":" in host else f"http://{host}:{int(port)}"


def check_env(env, what):
    """Raise ValueError when a name cannot be a variable or a value cannot be one; ``what`` names the input."""
    for name, value in env.items():
        if not _NAME.match(str(name)):
            raise ValueError(f"{what}: '{name}' is not a variable name")
        if "\0" in str(value):
            raise ValueError(f"{what}: {name} holds a NUL character, which no environment can")


# Least values of numbers that supervisor, systemd and watch.py would take as they are.
LEAST = {"stop_timeout": 1, "log_keep": 1, "log_max_mb": 1, "restart_limit": 0, "restart_minutes": 1,
         "probe_interval": 0, "hang_seconds": 1}  # fmt: skip


def check_numbers(params):
    """Refuse numbers below what makes sense.

    :raises ValueError: one is; the message names all of them.
    """
    wrong = [f"sglang_server_{name} {params[name]} (at least {least})" for name, least in LEAST.items()
             if params.get(name, least) < least]  # fmt: skip
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: too small. Way out: give a larger number, or leave it out.")


def launch_dict(params):
    """Return the content of ``launch.json`` from the parameters of the module ``sglang_launch``.

    :raises ValueError: an input is not usable; the message names it.
    """
    release = params["release"]
    check_numbers(params)
    check_env(params["env"], "sglang_server_env")
    check_env(params["expect_env"], "sglang_server_expect_env")
    flags = server_flags(
        params["model_path"],
        params["served_model_name"],
        params["host"],
        params["port"],
        params["tp_size"],
        params["args"],
    )
    env = {str(name): str(value) for name, value in params["env"].items()}
    # Ours come last: without them the overlay, the readable environment of the workers and the stop would be lost.
    env.update(PYTHONPATH=f"{release}/site", SPT_NOENV="1")
    env[MARKER] = release
    module = ["-m", "sglang.launch_server"]
    if params["api_key_file"]:
        env[API_KEY_ENV] = params["api_key_file"]
        module = [f"{release}/serve.py"]
    return {
        "schema": SCHEMA,
        "release": params["id"],
        "argv": [params["python"], *module, *flags],
        "env": env,
        "cwd": release,
        "user": params["user"] or None,
        "endpoint": endpoint(params["host"], params["port"]),
        "served_model_name": params["served_model_name"] or params["model_path"],
        "tp_size": int(params["tp_size"]),
        "log": f"{release}/logs/server.log",
        "watch": {
            **{name: params[name] for name in ("restart_limit", "restart_minutes", "restart_on_hang")},
            **{name: params[name] for name in ("probe_interval", "hang_seconds", "log_keep")},
        },
        "expect": {
            "env": {str(name): str(value) for name, value in params["expect_env"].items()},
            "packages": params["expect_packages"],
            "args": params["args"],
        },
    }


def launch_files(launch, provider, unit, stop_timeout, log_keep, log_max_mb):
    """Return the files of a release that start its server, as ``{name: text}``.

    :param provider: ``supervisor`` or ``systemd``; it decides between ``supervisor.conf`` and the unit file.
    :param unit: name of the unit or program.
    """
    files = {
        "launch.json": json.dumps(launch, indent=2, ensure_ascii=False) + "\n",
        "launch.py": sglang_launcher.LAUNCH_PY,
        **{f"{name}.py": inspect.getsource(source) for name, source in BESIDE.items()},
    }
    if API_KEY_ENV in launch["env"]:
        files["serve.py"] = sglang_launcher.SERVE_PY
    if provider == "systemd":
        files[f"{unit}.service"] = sglang_launcher.systemd_unit(unit, launch, stop_timeout)
    else:
        files["supervisor.conf"] = sglang_launcher.supervisor_program(unit, launch, stop_timeout, log_keep, log_max_mb)
    return files
