"""Whether a dead server is started again, and why it died: the program ``policy.py`` of a release, for ``watch.py``.

Everything is read from disk at the moment of the question, so a promotion, a stop, the deploy lock and the file
``norestart`` in the root count at once. Standard library only, and ``signatures.py`` of the same release.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time

try:
    from ansible.module_utils import sglang_watch_signatures as signatures
except ImportError:  # in a release
    import signatures

# As sglang_lock: a holder that has been silent for so long is no run any more.
LOCK_LIMIT = 15 * 60
ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception)\b|\berror:|Out of memory: Killed process")


def read_json(path):
    """Return a JSON file as a dict; empty where it is missing or not valid."""
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def oom_kills():
    """Return how many processes the kernel has killed for want of memory since it was booted, None where unknown."""
    try:
        with open("/proc/vmstat", encoding="ascii") as handle:
            return next((int(line.split()[1]) for line in handle if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def boot_id():
    """Return the identifier of this boot of the kernel, empty where it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def dead(pid, start):
    """Return whether the process that began at a time (ticks, as a text) is gone; a zombie is."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            field = handle.read().rpartition(")")[2].split()
    except OSError:
        return True
    return not field or field[0] in "ZXx" or field[19] != start


def gone(run):
    """Return whether a run began on this very host and its process is dead, as :func:`sglang_lock.judge` finds out.

    :param run: ``run`` of the lock; anything else is never known to be dead.
    """
    try:
        if run["controller"] != socket.gethostname() or not run["boot_id"]:
            return False
        if run["boot_id"] != boot_id():
            # Two machines may share a name; only the same one was restarted.
            with open("/etc/machine-id", encoding="ascii") as handle:
                return bool(run.get("machine_id")) and run["machine_id"] == handle.read().strip()
        if run.get("pid_ns") not in (None, "", os.readlink("/proc/self/ns/pid")):
            return False
        pid, start = int(run["pid"]), str(run["pid_start"])
    except (OSError, KeyError, TypeError, ValueError):
        return False
    return dead(pid, start)


def predecessor(release):
    """Return what the watch of a release wrote last, where it was killed in this boot; else an empty dict.

    :returns: content of ``run/health.json``; ``restarted`` are the times (``time.monotonic``) of the restarts so far.
    """
    found = read_json(os.path.join(release, "run", "health.json"))
    # Who starts the service by a play removes the file; one that ended in order says so in it.
    if found.get("ended", True) or not found.get("watch") or not found.get("boot_id") or found["boot_id"] != boot_id():
        return {}
    if not dead(found["watch"], str(found.get("watch_start"))):
        return {}
    times = found.get("restarted")
    times = [item for item in times if isinstance(item, (int, float))] if isinstance(times, list) else []
    history = found.get("restarts")
    return dict(found, restarted=times, restarts=history if isinstance(history, list) else [])


def killed(release):
    """Return that the watch of a release was killed and nothing has followed it, as a text; else an empty text."""
    before = predecessor(release)
    return reason_of_watch(before, before.get("signal"))["reason"] if before else ""


def holder(root):
    """Return who holds the deploy lock and may still live, as a text; empty where nobody does."""
    path = os.path.join(root, "lock")
    try:
        if time.time() - os.stat(path).st_mtime > LOCK_LIMIT:
            return ""
    except OSError:
        return ""
    run = read_json(path).get("run") or {}
    if gone(run):
        return ""
    return f"run {run.get('id')} of {run.get('user')} has the deploy lock"


def verdict(release, policy, restarts):
    """Return ``(restart, wait or leave, why)`` for a server that is dead, or of no use any more.

    :param policy: ``watch`` of launch.json: ``restart_limit``, ``restart_minutes``.
    :param restarts: times (``time.monotonic``) of the restarts so far.
    """
    root = os.path.dirname(os.path.dirname(release))
    if os.path.exists(os.path.join(root, "stopped")):
        return "leave", "it was stopped on purpose"
    state = read_json(os.path.join(release, "manifest.json")).get("state")
    if state != "promoted":
        return "leave", f"the release is {state or 'not known'} and only a promoted one is restarted"
    if os.path.realpath(os.path.join(root, "current")) != os.path.realpath(release):
        return "leave", "it is not the current release"
    if holder(root):
        return "wait", holder(root)
    if os.path.exists(os.path.join(root, "norestart")):
        return "leave", f"{root}/norestart forbids it"
    limit, minutes = policy.get("restart_limit", 0), policy.get("restart_minutes", 120)
    recent = sum(time.monotonic() - item < 60 * minutes for item in restarts)
    if recent >= limit:
        return "leave", f"it was restarted {recent} times in {minutes} minutes (sglang_server_restart_limit: {limit})"
    return "restart", f"restart {recent + 1} of {limit} in {minutes} minutes"


def reason_of(log, code, first):
    """Return ``{reason, status, process, signature, first_error, advice}``: why a server ended.

    :param code: as of ``subprocess.Popen``. :param first: what was seen before the end, ``{process, text}`` or empty.
    """
    try:
        name = signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        name = f"signal {-code}"
    status = f"killed by {name}" if code < 0 else f"exit status {code}"
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - (1 << 18)))
            lines = handle.read().decode("utf-8", "replace").splitlines()[-400:]
    except OSError:
        lines = []
    told = [re.sub(r"^\[[^\]]*\]\s*", "", line)[:400] for line in lines]
    told = [line for line in told if ERROR.search(line) or signatures.match(line, "serving")]
    errors = [{"line": 0, "rank": None, "phase": "serving", "text": line} for line in told]
    cause = signatures.classify(errors, "serving") or signatures.cause("died_silently", "serving")
    text = first.get("text") or f"the server process ended ({status})"
    if cause["first_error"]:
        text += f"; {cause['signature']}: {cause['detail'] or cause['first_error']}"
    return {
        "reason": text,
        "status": status,
        "process": first.get("process") or "server",
        "signature": first.get("signature") or cause["signature"],
        "first_error": cause["first_error"],
        "advice": cause["advice"],
    }


def reason_of_watch(before, name):
    """Return the same for a watch that was killed, with its server.

    :param before: as of :func:`predecessor`. :param name: of the signal; empty where nobody knows it.
    """
    text = f"watch.py (pid {before['watch']}) was killed{f' by {name}' if name else ''}, and the server with it"
    if isinstance(before.get("oom"), int) and (oom_kills() or 0) > before["oom"]:
        text += "; the kernel's OOM killer has killed a process meanwhile"
    if before.get("text"):
        text += f"; it had reported: {before['text']}"
    cause = signatures.cause("died_silently", "serving")
    return {
        "reason": text,
        "status": f"killed by {name or 'an unknown signal'}",
        "process": "watch.py",
        "signature": cause["signature"],
        "first_error": "",
        "advice": cause["advice"],
    }
