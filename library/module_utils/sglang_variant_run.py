"""Name one run of a playbook, for the lock on the host and for the ledger."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from datetime import datetime, timezone

from ansible.module_utils.sglang_proc import boot_id, stat_of


def user():
    """Return who runs the playbook; the number where the account has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def identify_run(pid):
    """Return ``{id, time, controller, boot_id, pid, pid_start, user}`` of the ansible-playbook process ``pid``."""
    now, stat = datetime.now(timezone.utc), stat_of(pid, "/proc")
    return {
        "id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "controller": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": pid,
        "pid_start": stat["start"] if stat else 0,
        "user": user(),
    }
