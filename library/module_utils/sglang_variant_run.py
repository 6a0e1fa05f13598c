"""Name one run of a playbook, for the lock on the host and for the ledger."""

from __future__ import annotations

import getpass
import os
import pathlib
import secrets
import socket
from datetime import datetime, timezone


def start_ticks(pid):
    """Return when a process started, in clock ticks since boot, which outlives reuse of its pid; 0 where gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    return int(text.rpartition(")")[2].split()[19])


def boot_id():
    """Return the controller's boot identifier, or an empty text where the kernel offers none."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def user():
    """Return who runs the playbook; the number where the account has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def identify_run(pid):
    """Return ``{id, time, controller, boot_id, pid, pid_start, user}`` of the ansible-playbook process ``pid``."""
    now = datetime.now(timezone.utc)
    return {
        "id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "controller": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": pid,
        "pid_start": start_ticks(pid),
        "user": user(),
    }
