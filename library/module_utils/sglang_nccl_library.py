"""Which libnccl runs: the file that workers have mapped, and the version that the file itself states."""

from __future__ import annotations

import mmap
import os
import re

from ansible.module_utils import sglang_proc


def version_of_library(path):
    """Return the version of a libnccl, from its file name or else from the text in it, None where neither says."""
    match = re.search(r"\.so\.(\d+\.\d+[\d.]*)$", os.path.realpath(path))
    if match:
        return match.group(1)
    try:
        with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(rb"NCCL version (\d+\.\d+\.\d+)", content)
            return found.group(1).decode() if found else None
    except (OSError, ValueError):
        return None


def mapped(root, name="libnccl", proc="/proc"):
    """Return ``{path: [pid]}`` of the files with a name that the workers below a root have mapped."""
    found = {}
    for process in sglang_proc.scan(root, proc):
        if process["role"] != "scheduler":
            continue
        try:
            with open(f"{proc}/{process['pid']}/maps", encoding="utf-8", errors="replace") as handle:
                lines = handle.read().splitlines()
        except OSError:
            continue
        for line in lines:
            path = line.split(None, 5)[5] if line.count("/") else ""
            pids = found.setdefault(path, []) if os.path.basename(path).startswith(name) else []
            if process["pid"] not in pids:
                pids.append(process["pid"])
    return found
