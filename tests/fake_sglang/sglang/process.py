"""What the two process kinds share: log lines in the real shape, titles, and dying with the parent."""

from __future__ import annotations

import ctypes
import signal
import sys
import time

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def log(message, rank=None, end="\n"):
    """Write one line as SGLang's logger does: ``[date time TP0] message``."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    raw(f"[{stamp}{'' if rank is None else f' TP{rank}'}] {message}", end)


def raw(text, end="\n"):
    """Write text with no stamp (progress bars, tracebacks)."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def set_title(title):
    """Rename this process: comm and command line, the environment left alone as setproctitle does with SPT_NOENV=1."""
    _libc.prctl(PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    with open("/proc/self/stat", encoding="ascii") as handle:
        fields = handle.read().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    data = title.encode()[: end - start - 1]
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def die_with_parent():
    """Ask the kernel for SIGKILL when the parent goes, as the real workers do."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
