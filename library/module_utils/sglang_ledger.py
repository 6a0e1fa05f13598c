"""The ledger: ``<root>/ledger.jsonl``, one JSON object a line, only ever appended to.

Fields of every line: ``{schema, time, run, user, controller, event, variant, release}``; the rest depends on the event
and is described in docs/ledger.md.
"""

from __future__ import annotations

import fcntl
import json
import os

from ansible.module_utils.sglang_release_store import utc_now, without_secrets

SCHEMA = 1


def ledger_path(root):
    """Return ``<root>/ledger.jsonl``."""
    return os.path.join(root, "ledger.jsonl")


def append(root, event):
    """Append one event and return the line's dict.

    :param event: dict with at least ``event``; ``run`` may be the run dict, of which id, user and controller are kept.
    :raises ValueError: ``event`` has no name. :raises OSError: the line is not on disk (and no part of it is).
    """
    if not event.get("event"):
        raise ValueError("a ledger event needs the key 'event'")
    # Time and schema are those of the line, whatever the event brings along.
    line = {"variant": None, "release": None, **without_secrets(event), "schema": SCHEMA, "time": utc_now()}
    run = event.get("run")
    if isinstance(run, dict):
        line.update(run=run.get("id"), user=run.get("user"), controller=run.get("controller"))
    data = (json.dumps(line, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")
    descriptor = os.open(ledger_path(root), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        # A crash in the middle of a write leaves a line without an end: end it, or this event would be lost with it.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        written = os.write(descriptor, data)
        if written != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(f"{ledger_path(root)}: only {written} of {len(data)} bytes were written; is the disk full?")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return line


def read(root):
    """Return ``(events in order, problems)``: a torn line is a problem and is skipped; a missing ledger is empty."""
    events, problems = [], []
    try:
        with open(ledger_path(root), encoding="utf-8", errors="replace") as handle:
            for number, text in enumerate(handle, 1):
                try:
                    event = json.loads(text)
                except ValueError:
                    event = None
                if isinstance(event, dict) and "event" in event:
                    events.append(event)
                elif text.strip():
                    problems.append(f"{ledger_path(root)} line {number} is torn and is skipped: {text.strip()[:80]}")
    except FileNotFoundError:
        pass
    return events, problems
