"""What a host must have before anything is built on it.

A check is a function ``(wanted, host) -> [finding]``. ``wanted`` is the dict of the module's parameters, ``host`` a
:class:`sglang_precheck_host.Host`. A new check is one more function, named in :data:`HOST_CHECKS` or its like.
"""

from __future__ import annotations

import os
import re

from ansible.module_utils.sglang_engine import EngineError, find_interpreter
from ansible.module_utils.sglang_findings import errors, finding
from ansible.module_utils.sglang_ports import derived_ports
from ansible.module_utils.sglang_proc import describe

RUNG = "precheck"
# A UNIX socket path has at most 107 bytes, and supervisor's lies below the root.
MAX_ROOT = 80
MB = 1 << 20
# A CPU engine has about 30,000 files.
ENGINE_INODES = 40_000


def report(rule, level, message, evidence="", advice=""):
    """Return a finding of this rung."""
    return finding(RUNG, rule, level, message, evidence, advice)


def run_checks(wanted, host, checks):
    """Run the checks and return ``(findings, verdict)``; the verdict is ``{ok: bool, failures: [rule]}``.

    A check that trips over something unforeseen is itself a finding: the others still speak.
    """
    findings = []
    for function in checks:
        try:
            findings += function(wanted, host)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
            name = function.__name__.replace("_", "-")
            findings.append(
                report(
                    name, "error", f"The check {name} could not be made", repr(error), "report this with the evidence"
                )
            )
    refusals = errors(findings)
    return findings, {"ok": not refusals, "failures": sorted({item["rule"] for item in refusals})}


def in_range(version, limits):
    """Return whether a version satisfies a text such as ``>=3.10,<3.14``; an empty text admits all.

    :raises ValueError: the text is no such range.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    for part in filter(None, (item.strip() for item in limits.split(","))):
        match = re.match(r"^(>=|<)\s*(\d+(?:\.\d+)*)$", part)
        if not match:
            raise ValueError(f"python_range must look like >=3.10,<3.14, not {limits!r}")
        bound = tuple(int(item) for item in match.group(2).split("."))
        if (numbers >= bound) != (match.group(1) == ">="):
            return False
    return True


def root_path(wanted, host):
    """The root is absolute, short, writable, and open to the service user."""
    root = wanted["root"]
    if not os.path.isabs(root):
        return [
            report(
                "root-path",
                "error",
                f"sglang_root must be an absolute path, not {root!r}",
                "",
                "give a path that begins with /",
            )
        ]
    found = []
    if len(os.path.normpath(root).encode()) > MAX_ROOT:
        found.append(
            report(
                "root-path",
                "error",
                f"sglang_root has {len(root.encode())} bytes and may have {MAX_ROOT}, because sockets lie below it",
                root,
                "choose a shorter path",
            )
        )
    nearest = host.existing(root)
    if not host.is_directory(nearest):
        found.append(
            report(
                "root-path",
                "error",
                f"sglang_root {root} leads through something that is no directory",
                nearest,
                "choose another path or remove the file",
            )
        )
    elif not host.writable(nearest):
        found.append(
            report(
                "root-path",
                "error",
                f"sglang_root {root} cannot be created or written by the deploying account",
                nearest,
                "deploy with become, or give a directory that this account owns",
            )
        )
    user = wanted["user"]
    if user and host.account(user) and not host.can_enter(nearest, user):
        found.append(
            report(
                "root-path",
                "error",
                f"the service user {user} cannot enter {nearest}",
                "",
                "open the directories of sglang_root to that user, or choose another root",
            )
        )
    return found


def service_user(wanted, host):
    """The service user exists."""
    user = wanted["user"]
    if not user or host.account(user):
        return []
    return [
        report(
            "service-user",
            "error",
            f"the service user {user} does not exist on this host",
            "",
            "create the account, or leave sglang_server_user empty",
        )
    ]


def interpreter(wanted, host):
    """The interpreter that is adopted, or that a build will stand on, exists and has a fitting version."""
    declared = wanted["engine"]
    state = host.engine(declared)
    if declared["mode"] == "adopt":
        if not state["present"]:
            advice = "correct sglang_engine_python and sglang_engine_version, or set sglang_engine_mode to build"
            return [report("engine", "error", "The adopted engine cannot be used", state["problem"], advice)]
        path, version = state["python"], state["python_version"]
    elif state["present"]:
        return []
    else:
        name = declared.get("base_python") or "python3"
        path = find_interpreter(name)
        try:
            if path is None:
                raise EngineError(f"{name} is not found in PATH")
            version = host.python(path)["python_version"]
        except EngineError as error:
            advice = "install Python, or give the path of an interpreter in sglang_engine_base_python"
            return [report("interpreter", "error", "The interpreter below the engine cannot be used", error, advice)]
    if in_range(version, wanted["python_range"]):
        return []
    message = f"{path} is Python {version}, and {wanted['python_range']} is needed"
    return [report("interpreter", "error", message, "", "give the path of an interpreter in that range")]


def disk_space(wanted, host):
    """There is room for what a deploy writes."""
    declared = wanted["engine"]
    if not os.path.isabs(wanted["root"]):
        return []
    needs = [(wanted["root"], wanted["release_mb"], 0, "a release")]
    if declared["mode"] == "build" and not host.engine(declared)["present"]:
        needs.append((declared["root"], wanted["engine_mb"], ENGINE_INODES, "the engine"))
    volumes = {}
    for path, megabytes, inodes, what in needs:
        nearest = host.existing(path)
        free, free_inodes, device = host.free(nearest)
        volume = volumes.setdefault(
            device,
            {
                "path": nearest,
                "free": free,
                "free_inodes": free_inodes,
                "need": wanted["margin_mb"],
                "inodes": 0,
                "for": [],
            },
        )
        volume["need"] += megabytes
        volume["inodes"] += inodes
        volume["for"].append(what)
    found = []
    for volume in volumes.values():
        what = " and ".join(volume["for"])
        if volume["free"] < volume["need"] * MB:
            found.append(
                report(
                    "disk-space",
                    "error",
                    f"{what} with its margin needs {volume['need']} MB at {volume['path']}",
                    f"{volume['free'] // MB} MB free",
                    "free some space or move sglang_root",
                )
            )
        elif volume["free_inodes"] is not None and volume["free_inodes"] < volume["inodes"]:
            found.append(
                report(
                    "disk-space",
                    "error",
                    f"{what} needs {volume['inodes']} files at {volume['path']}",
                    f"{volume['free_inodes']} inodes free",
                    "free some inodes or move sglang_root",
                )
            )
    return found


def url_of(address, port):
    """Return the URL at which a listener of an address can be asked from this host."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def port(wanted, host):
    """The HTTP port is free, or held by a release of this root; so are the ports that SGLang derives."""
    number = wanted["port"]
    if not 1 <= number <= 65535:
        return [
            report(
                "port", "error", f"sglang_server_port must be from 1 to 65535, not {number}", "", "give another port"
            )
        ]
    found = []
    for item in host.listeners(number):
        if host.is_ours(item["pid"]):
            continue
        models = host.served_models(url_of(item["address"], number))
        who = describe(item) + (f", serves {', '.join(models)}" if models else "")
        # Another SGLang there would answer the new server's warm-up: that one prints its ready line and dies.
        found.append(
            report(
                "port-taken",
                "error",
                f"port {number} is taken by {'another model server' if models else 'another program'}",
                who,
                "stop it, or give another sglang_server_port",
            )
        )
    for other, reason in sorted(derived_ports(wanted["args"], wanted["port"]).items()):
        found += [
            report(
                "port-derived",
                "error",
                f"port {other}, which {reason} makes SGLang use besides {number}, is taken by another program",
                describe(item),
                "stop it, or give another sglang_server_port or another value of the flag",
            )
            for item in host.listeners(other)
            if not host.is_ours(item["pid"])
        ]
    return found


def model_files(wanted, host):
    """Existing model files are there and whole."""
    declared = wanted["model"]
    if not declared or declared["source"] == "generate":
        return []
    user = wanted["user"] if wanted["user"] and host.account(wanted["user"]) else None
    return [
        report(
            "model-files",
            "error",
            f"the model {declared['path']} cannot be served",
            problem,
            "copy the file again from where the model came from, or correct model_files_path",
        )
        for problem in host.model_problems(declared, user, wanted["model_sha256"])
    ]


def memory_lock(wanted, host):
    """NCCL and pinned buffers want to lock memory."""
    limit = host.memlock() if wanted["device"] == "cuda" else None
    if limit is None:
        return []
    return [
        report(
            "memory-lock",
            "warning",
            "locked memory is limited for processes of this account",
            f"{limit // 1024} KiB",
            "set memlock to unlimited in limits.conf; a systemd unit of this deployment sets it itself",
        )
    ]


def proxies(wanted, host):
    """A proxy that does not spare the own address swallows health requests."""
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if host.environ.get(name)]
    spared = {item.strip() for name in ("no_proxy", "NO_PROXY") for item in host.environ.get(name, "").split(",")}
    if not names or spared & {"*", "127.0.0.1", "localhost"}:
        return []
    return [
        report(
            "proxy",
            "warning",
            "the environment names a proxy and no_proxy does not spare this host",
            ", ".join(names),
            "add 127.0.0.1,localhost to no_proxy; this deployment's own requests use no proxy",
        )
    ]


HOST_CHECKS = (root_path, service_user, interpreter, disk_space, port, model_files, memory_lock, proxies)
