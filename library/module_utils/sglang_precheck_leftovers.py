"""NCCL settings that reach the server and that no variant knows of: left by hand, by an image, by an older deployment.

The checks have the form that :mod:`sglang_prechecks` describes.
"""

from __future__ import annotations

import os
import re

from ansible.module_utils.sglang_engine import find_interpreter
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_prechecks import report

UNITS = (
    "/etc/systemd/system/*.service",
    "/etc/systemd/system/*.service.d/*.conf",
    "/run/systemd/system/*.service.d/*.conf",
    "/lib/systemd/system/*sglang*.service",
    "/etc/supervisord.conf",
    "/etc/supervisor/*.conf",
    "/etc/supervisor/conf.d/*.conf",
    "/etc/supervisor/conf.d/*.ini",
    "/etc/supervisord.d/*.ini",
)
# Settings that reach every service or every session.
GLOBAL_FILES = ("/etc/environment", "/etc/systemd/system.conf", "/etc/default/sglang")
# NCCL does not read NCCL_VERSION: NVIDIA's images state there what they were built with.
_NAME = r"\bNCCL_(?!VERSION\b)[A-Z0-9_]+"
_SETTING = re.compile(_NAME)
# With what it is set to, in a unit, a shell or Python.
_ASSIGNED = re.compile(rf"""({_NAME})(?:["'\]]*\s*[=,:]\s*("[^"]*"|'[^']*'|[^\s"',;)]*))?""")


def settings(text):
    """Return each NCCL variable that a text names as ``NAME=value`` or, where it is not set, ``NAME``; no comments.

    What stands beside it in the same line is left out too: it may be a secret.
    """
    lines = [line.strip() for line in (text or "").splitlines()]
    found = [_ASSIGNED.findall(line) for line in lines if not line.startswith(("#", ";"))]
    return [name + ("=" + value.strip("\"'") if value else "") for line in found for name, value in line]


def nccl_files(wanted, host):
    """No file gives NCCL settings that no variant knows of."""
    account = host.account(wanted["user"]) if wanted["user"] else None
    home = account.pw_dir if account else host.environ.get("HOME", "/root")
    found = []
    for path in ("/etc/nccl.conf", f"{home}/.nccl.conf"):
        lines = [line.strip() for line in (host.read(path) or "").splitlines()]
        left = [line for line in lines if line and not line.startswith("#")]
        if left:
            found.append(
                report(
                    "nccl-conf",
                    "warning",
                    f"{path} holds NCCL settings that reach every server",
                    "; ".join(left),
                    "remove them, and name what is wanted in a variant",
                )
            )
    return found


def environment(wanted, host):
    """The environment that the deployment itself runs in gives no NCCL settings on to a service."""
    left = sorted(f"{name}={value}" for name, value in host.environ.items() if _SETTING.fullmatch(name))
    lines = [(path, line) for path in GLOBAL_FILES for line in settings(host.read(path))]
    found = []
    if left:
        advice = "unset them in the login of the deploying account, and name what is wanted in a variant"
        message = "the environment of the deploying account has NCCL settings"
        found.append(report("nccl-environment", "warning", message, "; ".join(left), advice))
    for path in dict.fromkeys(path for path, _line in lines):
        seen = "; ".join(line for other, line in lines if other == path)
        advice = "remove them, and name what is wanted in a variant"
        found.append(report("nccl-environment", "warning", f"{path} holds NCCL settings", seen, advice))
    return found


def units(wanted, host):
    """No service description that starts SGLang carries NCCL settings."""
    groups = {}
    for path in (path for pattern in UNITS for path in host.glob(pattern)):
        folder, name = os.path.split(path)
        unit = os.path.basename(folder)[: -len(".d")] if folder.endswith(".service.d") else name
        groups.setdefault(unit, []).append(path)
    found = []
    for unit, paths in sorted(groups.items()):
        texts = {path: host.read(path) or "" for path in paths}
        if "sglang" not in unit + "".join(texts.values()):
            continue
        for path in re.findall(r"(?m)^\s*EnvironmentFile=-?(\S+)", "\n".join(texts.values())):
            texts[path] = host.read(path) or ""
        for path, text in texts.items():
            left = settings(text)
            if left:
                found.append(
                    report(
                        "unit-nccl",
                        "warning",
                        f"{path} gives NCCL settings to a service that starts SGLang",
                        "; ".join(left),
                        "a variable that is set before the start wins over the variant: remove it there, or retire the "
                        "old service",
                    )
                )
    return found


def sitecustomize(wanted, host):
    """What the engine's interpreter runs at start sets no NCCL variable."""
    state, declared = host.engine(wanted["engine"]), wanted["engine"]
    python = state["python"] if state["present"] else find_interpreter(declared.get("base_python") or "python3")
    if not python or (declared["mode"] == "adopt" and not state["present"]):
        return []
    try:
        folders = host.python_path(python, wanted["env"])
    except SiteError as error:
        advice = "run the interpreter by hand with the service's environment"
        message = "it is not known what the engine's interpreter runs at start"
        return [report("sitecustomize", "warning", message, error, advice)]
    files = [f"{folder}/{name}.py" for name in ("sitecustomize", "usercustomize") for folder in folders]
    files += [path for folder in folders if folder.endswith("-packages") for path in host.glob(f"{folder}/*.pth")]
    found, chain = [], []
    for path in dict.fromkeys(files):
        text = host.read(path)
        if text is None:
            continue
        lines = settings(text)
        if not path.endswith(".pth"):
            chain.append(path)
        if lines:
            found.append(
                report(
                    "sitecustomize-nccl",
                    "warning",
                    f"{path} sets NCCL variables in every process of this interpreter",
                    "; ".join(lines),
                    "restore the file as its package has it, and name what is wanted in a variant",
                )
            )
    if chain:
        message = f"{python} has a start file of its own, which each server runs after the release's"
        advice = "nothing to do where it sets no variable of the variant"
        found.append(report("sitecustomize", "info", message, ", ".join(chain), advice))
    return found


LEFTOVER_CHECKS = (nccl_files, environment, units, sitecustomize)
