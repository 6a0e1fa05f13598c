"""What the live workers of a release hold, compared with its ``launch.json``; read-only, and never from the parent.

What a ``sitecustomize.py`` sets is in no ``/proc/PID/environ`` of the process that ran it; only the workers, which
inherit it, prove it.
"""

from __future__ import annotations

import json
import os

from ansible.module_utils import sglang_proc
from ansible.module_utils.sglang_findings import finding

RUNG = "verify"


def read_imports(release, item):
    """Return ``{package: origin}`` that the release's sitecustomize wrote for a process; empty if it wrote none.

    :param item: process of :func:`sglang_proc.scan`; a note of another process that had the same pid does not count.
    """
    try:
        with open(os.path.join(release, "run", f"imports-{item['pid']}.json"), encoding="utf-8") as handle:
            note = json.load(handle)
    except (OSError, ValueError):
        return {}
    if not isinstance(note, dict) or note.get("start") != item["start"]:
        return {}
    return note.get("imports") or {}


def package_state(origin, wanted):
    """Return ``copy``, ``other`` or ``unknown``: whether a module's origin lies in the wanted package directory."""
    if not origin:
        return "unknown"
    inside = os.path.realpath(origin).startswith(os.path.join(os.path.realpath(wanted), ""))
    return "copy" if inside else "other"


def inspect(item, launch, proc="/proc"):
    """Return one worker of :func:`sglang_proc.scan` with label, env_readable, env, imports and packages added."""
    expect = launch.get("expect") or {}
    env = sglang_proc.environ(item["pid"], proc)
    readable = sglang_proc.MARKER in env
    origins = read_imports(launch["cwd"], item)
    packages = {}
    for name, wanted in (expect.get("packages") or {}).items():
        if wanted:
            origin = origins.get(name)
            packages[name] = {"expected": wanted, "origin": origin, "status": package_state(origin, wanted)}
    rank = "" if item["tp_rank"] is None else f" TP{item['tp_rank']}"
    return dict(
        item,
        label=f"{item['role']}{rank} (pid {item['pid']})",
        env_readable=readable,
        env=sglang_proc.compare_env(env, expect.get("env") or {}) if readable else {},
        imports=origins,
        packages=packages,
    )


def _env_findings(workers):
    found = {}
    for worker in workers:
        for name, one in worker["env"].items():
            if one["status"] != "equal":
                found.setdefault((one["status"], name, one["expected"]), []).append((worker["label"], one["actual"]))
    advice = {
        "missing": "look for an error of sitecustomize.py at the top of the log, and that PYTHONPATH names the release",
        "different": "something set it before ours, and what is already set wins: look at sglang_server_env and at the "
        "engine's own environment",
        "overridden": "take the variable out of the variant: setting it has no effect",
    }
    text = {
        "missing": "{} is missing in the workers",
        "different": "{} has another value in the workers",
        "overridden": "{} is overridden by the engine",
    }
    for (status, name, expected), seen in sorted(found.items()):
        yield finding(
            RUNG,
            f"env-{status}",
            "warning" if status == "overridden" else "error",
            text[status].format(name),
            f"expected {expected!r}; " + ", ".join(f"{label}: {actual!r}" for label, actual in seen),
            advice[status],
        )
    hidden = [worker["label"] for worker in workers if not worker["env_readable"]]
    if hidden:
        yield finding(
            RUNG,
            "env-not-readable",
            "error",
            "the environment of workers cannot be read, so nothing proves what they hold",
            ", ".join(hidden),
            "keep SPT_NOENV=1 in the server's environment (a process title overwrites it else) and read as root or as "
            "the server's user",
        )


def _package_findings(workers):
    for worker in workers:
        for name, one in sorted(worker["packages"].items()):
            if one["status"] == "copy":
                continue
            what = "runs another" if one["status"] == "other" else "did not say which"
            yield finding(
                RUNG,
                "package-not-the-copy" if one["status"] == "other" else "package-unknown",
                "error",
                f"{worker['label']} {what} {name}, so the release's patches are not proved to run",
                f"expected below {one['expected']}, imported from {one['origin']}",
                "check that PYTHONPATH names the release's site/ and that no path file puts another copy first",
            )


def _process_findings(launch, items, holders):
    release = os.path.realpath(launch["cwd"])
    living = [item for item in items if sglang_proc.alive(item["state"])]
    foreign = [item for item in living if os.path.realpath(item["release"]) != release]
    own = [item for item in items if os.path.realpath(item["release"]) == release]
    for item in foreign:
        yield finding(
            RUNG,
            "foreign-process",
            "error",
            f"a process of release {os.path.basename(item['release'])} still runs",
            sglang_proc.describe(item),
            "stop.yml stops every process of this root",
        )
    known = {item["pid"] for item in own}
    for item in holders:
        if item["pid"] not in known:
            yield finding(
                RUNG,
                "foreign-listener",
                "error",
                f"another process listens on the server's port {sglang_proc.port_of(launch)}",
                sglang_proc.describe(item),
                "stop it, or choose another sglang_server_port",
            )
    servers = [item for item in own if item["role"] == "server" and sglang_proc.alive(item["state"])]
    if not servers:
        yield finding(
            RUNG, "server-missing", "error", "no server process of the release runs", "", f"read {launch['log']}"
        )
    for item in own:
        if item["role"] in sglang_proc.WORKER_ROLES and not sglang_proc.alive(item["state"]):
            yield finding(
                RUNG,
                "worker-dead",
                "error",
                f"a {item['role']} has died and the server has not noticed",
                f"pid {item['pid']} is a zombie",
                f"read {launch['log']} and dmesg (out of memory?), then deploy again",
            )
    count = sum(item["role"] == "scheduler" and sglang_proc.alive(item["state"]) for item in own)
    wanted = sglang_proc.expected_schedulers(launch)
    if count != wanted:
        yield finding(
            RUNG,
            "scheduler-missing" if count < wanted else "scheduler-surplus",
            "error",
            f"{count} scheduler processes run and {wanted} are expected",
            ", ".join(f"pid {i['pid']} {i['role']}" for i in own) or "no process at all",
            f"read {launch['log']}",
        )
    if servers and all(item["cmdline"] != launch["argv"] for item in servers):
        yield finding(
            RUNG,
            "argv-differs",
            "error",
            "the server runs with other arguments than launch.json",
            " ".join(servers[0]["cmdline"]),
            "deploy again: the server was started before launch.json was written, or by hand",
        )


def report(launch, root, proc="/proc"):
    """Return ``{processes, workers, drift, findings, ok}`` for a release.

    :param launch: content of its ``launch.json``.
    :param root: the deployment's root; processes of its other releases are findings.
    """
    items = sglang_proc.scan(root, proc)
    release = os.path.realpath(launch["cwd"])
    workers = [
        inspect(item, launch, proc)
        for item in items
        if item["role"] in sglang_proc.WORKER_ROLES
        and sglang_proc.alive(item["state"])
        and os.path.realpath(item["release"]) == release
    ]
    findings = [
        *_process_findings(launch, items, sglang_proc.listeners(sglang_proc.port_of(launch), proc)),
        *_env_findings(workers),
        *_package_findings(workers),
    ]
    own = (item for item in items if os.path.realpath(item["release"]) == release)
    servers = [item for item in own if item["role"] == "server" and sglang_proc.alive(item["state"])]
    loading = sglang_proc.loading(launch, servers[0] if servers else None, proc)
    return {
        "processes": items,
        "workers": workers,
        "drift": sglang_proc.drift(launch, root, loading=loading, proc=proc),
        "findings": findings,
        "ok": all(item["level"] != "error" for item in findings),
    }
