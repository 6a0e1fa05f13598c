#!/usr/bin/env python3
"""List, or end, the processes that belong to a deployment root.

    processes.py ROOT          print one line for each process; exit 1 when there is one
    processes.py --end ROOT    end them: SIGTERM, five seconds, SIGKILL; exit 1 when one is left

A process belongs to ROOT when SGLANG_DEPLOY_RELEASE in its environment is a path below ROOT, or when it is in the
session or process group of one that has it. Nothing else is touched. This tool stands apart from the modules on
purpose: tests and `make destroy` use it to find what the modules left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time

MARKER = b"SGLANG_DEPLOY_RELEASE="
GRACE_SECONDS = 5


def _read(pid, name):
    """Return the bytes of /proc/PID/NAME, empty where the process is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as handle:
            return handle.read()
    except OSError:
        return b""


def _stat(pid):
    """Return (state, process group, session) of PID, or None where it is gone."""
    # The command name may hold blanks and parentheses: fields are counted from the last one.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[2]), int(fields[3])) if len(fields) > 3 else None


def belonging(root):
    """Return {pid: command line} of the live processes that belong to the absolute path ROOT."""
    prefix = os.fsencode(os.path.realpath(root)).rstrip(b"/") + b"/"
    alive = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        stat = _stat(pid)
        if stat and stat[0] not in "ZX":
            alive[pid] = stat
    marked = set()
    for pid in alive:
        for entry in _read(pid, "environ").split(b"\0"):
            if entry.startswith(MARKER) and (os.path.realpath(entry[len(MARKER) :]) + b"/").startswith(prefix):
                marked.add(pid)
    # A server that was started without a session of its own shares ours: then only the marker counts.
    groups = {alive[pid][1] for pid in marked} - {os.getpgrp()}
    sessions = {alive[pid][2] for pid in marked} - {os.getsid(0)}
    found = marked | {pid for pid, (_state, group, session) in alive.items() if group in groups or session in sessions}
    found -= {os.getpid(), os.getppid()}
    return {pid: _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() for pid in sorted(found)}


def end(root):
    """End every process that belongs to ROOT and return {pid: command line} of those that are left."""
    deadline = time.monotonic() + GRACE_SECONDS
    wanted = signal.SIGTERM
    while True:
        found = belonging(root)
        if not found or time.monotonic() > deadline + GRACE_SECONDS:
            return found
        if time.monotonic() > deadline:
            wanted = signal.SIGKILL
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, wanted)
        time.sleep(0.2)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", help="deployment root, for example .embedded")
    parser.add_argument("--end", action="store_true", help="end the processes instead of only listing them")
    options = parser.parse_args()
    found = belonging(options.root)
    for pid, command in found.items():
        print(pid, command)
    left = end(options.root) if options.end and found else found
    for pid in left if options.end else ():
        print(f"still alive: {pid}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
