"""The file ``stopped`` of a root: while it is there, ``watch.py`` starts no server; whoever starts one removes it."""

from __future__ import annotations

import json
import os
import time

from ansible.module_utils import sglang_ledger
from ansible.module_utils.sglang_provider import write_if_changed


def write(root, run, state, temporary):
    """Note before a stop that it is wanted.

    :param run: run that stops, as of the ledger.
    :param state: what it wants in the end: ``stopped``, or ``started`` where a start stops what runs first.
    :param temporary: whether it starts the same server again by itself.
    """
    note = {"schema": 1, "time": sglang_ledger.utc_now(), "run": run.get("id"), "user": run.get("user")}
    note.update(state=state, temporary=bool(temporary))
    write_if_changed(os.path.join(root, "stopped"), json.dumps(note) + "\n")


def read(root):
    """Return ``{time, user, temporary}`` of a stop that was wanted, None where there is none.

    Where a start was killed between its stop and its start nobody wanted a stop; times are UTC, the user may be None.
    """
    path = os.path.join(root, "stopped")
    try:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(os.stat(path).st_mtime))
        with open(path, encoding="utf-8") as handle:
            note = json.load(handle)
    except OSError:
        return None
    except ValueError:
        note = {}
    note = note if isinstance(note, dict) else {}
    if note.get("state", "stopped") != "stopped":
        return None
    return {"time": note.get("time") or at, "user": note.get("user"), "temporary": note.get("temporary") is True}


def left(stopped):
    """Return what is to be said of a server that a killed run left stopped, as a text; empty for any other stop."""
    if not stopped or not stopped["temporary"]:
        return ""
    return (
        f"the server was stopped at {stopped['time']} by {stopped['user'] or 'an unknown user'} for a canary in its "
        "place, and that run ended before it brought it back"
    )
