"""Name one run of a playbook, for the lock on the host and for the ledger."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from datetime import datetime, timezone

from ansible.module_utils.sglang_lock import machine_id, pid_namespace
from ansible.module_utils.sglang_proc import alive, boot_id, stat_of

# More of them than that are not listed at all.
LIMIT = 500
_HEAD = 16384


def user():
    """Return who runs the playbook; the number where the account has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _head_of_cmdline(pid):
    """Return the beginning of a command line; empty where the process is gone, a kernel thread or hidden."""
    try:
        descriptor = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _HEAD)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def playbooks():
    """Return ``[[pid, start ticks]]`` of the living processes here that have "ansible" in an argument.

    Ansible's workers, forks with their parent's command line, are left out. Empty where the list would not be whole:
    processes of others are hidden, or there are more than LIMIT.
    """
    if stat_of(1, "/proc") is None:
        return []
    heads = {int(name): _head_of_cmdline(name) for name in os.listdir("/proc") if name.isdigit()}
    found = []
    for pid, head in heads.items():
        stat = stat_of(pid, "/proc") if b"ansible" in head else None
        if stat and alive(stat["state"]) and heads.get(stat["ppid"]) != head:
            found.append([pid, stat["start"]])
    return found if len(found) <= LIMIT else []


def identify_run(pid):
    """Name the run of the process ``pid``: ``{id, time, controller, machine_id, boot_id, pid_ns, pid, pid_start, user,
    alive}``.

    ``alive``, see :func:`playbooks`, is for the lock's judgement and recorded nowhere. ``pid_ns`` is empty where the
    process is not in it: who is not found while living must not be taken for dead when missing.
    """
    now, stat, living = datetime.now(timezone.utc), stat_of(pid, "/proc"), playbooks()
    start = stat["start"] if stat else 0
    return {
        "id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "controller": socket.gethostname(),
        "machine_id": machine_id(),
        "boot_id": boot_id(),
        "pid_ns": pid_namespace() if [pid, start] in living else "",
        "pid": pid,
        "pid_start": start,
        "user": user(),
        "alive": living,
    }
