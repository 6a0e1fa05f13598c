"""Begin a new log for each start of a server: the program ``newlog.py`` of a release, which ``watch.py`` loads.

Under supervisor the log is supervisord's, which only opens it anew; else it is a file of this process. Standard library
only.
"""

from __future__ import annotations

import os
import re
import select
import signal
import stat as modes
import sys
import time

# As supervisord writes it when a program ends by itself.
ENDED = re.compile(r"exited: \S+ \((?:terminated by (SIG\w+)|exit status \d+); not expected\)")


def supervised():
    """Return whether the parent of this process is a supervisord."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as handle:
            return b"supervisord" in handle.read()
    except OSError:
        return False


def last_signal(root):
    """Return the signal that ended the program before this one, from supervisord's own log; empty where unknown."""
    if not supervised():
        return ""
    try:
        with open(os.path.join(root, "service", "supervisord.log"), "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - (1 << 14)))
            found = ENDED.findall(handle.read().decode("utf-8", "replace"))
    except OSError:
        return ""
    return found[-1] if found else ""


def rotate(log, keep):
    """Move ``server.log`` to ``.1`` and so on, as the service module does at its start: each start has its own log."""
    for number in range(max(keep, 1) - 1, 0, -1):
        if os.path.lexists(f"{log}.{number}"):
            os.replace(f"{log}.{number}", f"{log}.{number + 1}")
    if os.path.lexists(log):
        os.replace(log, f"{log}.1")


def unread(descriptor):
    """Return whether a pipe has lost its reader."""
    ends = select.poll()
    ends.register(descriptor, 0)
    return bool(ends.poll(0))


def fresh_log(log, keep):
    """Begin a new log for the next start; where it cannot be had the old one goes on."""
    piped = modes.S_ISFIFO(os.fstat(1).st_mode)
    try:
        ours = not supervised()
        # A supervisord that was killed left a pipe that nobody reads: each line would be an error of the next server.
        if piped and ours and not unread(1):
            return
        owner = os.stat(os.path.dirname(log))
        rotate(log, keep)
        if piped and not ours:
            # supervisord writes the log itself; this makes it open its files anew.
            os.kill(os.getppid(), signal.SIGUSR2)
            for _ in range(250):
                if not os.path.exists(log):
                    time.sleep(0.02)
            return
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    except OSError as problem:
        print(f"watch.py: {log}: {problem}", file=sys.stderr)
