"""The processes of a start: which died, who listens, what compiles, what the kernel says."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.parse

from ansible.module_utils import sglang_proc

COMPILERS = ("nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "ninja")
SCAN_INTERVAL = 0.5
# Processes that use less of one core than this between two scans do nothing; the idle loops of a server need less.
BUSY_SHARE = 0.05
# A service that was just told to start may need this long until its process carries the marker.
ABSENT = 1.0
_KERNEL = re.compile(r"NVRM: Xid|Out of memory: Killed process")


def _text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def state_of(pid, proc="/proc"):
    """Return ``(state letter, start time in ticks)`` of a process, or None where it is gone."""
    field = _text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return (field[0], int(field[19])) if field else None


class Processes:
    """Server and workers of one release, watched cheaply: a full scan twice a second, a look at known pids otherwise.

    :param release: absolute path of the release.
    :param pid: the server's pid where it is known.
    """

    def __init__(self, release, pid=None, proc="/proc", clock=time.monotonic):
        self.release, self.pid, self._proc, self._clock = release, pid, proc, clock
        self.workers = {}
        self._items = []
        self._start = None
        self._scanned = None
        self._absent = None
        self._headless = None
        self._ticks = {}
        self._busy = clock()
        self._oom_before = None
        self._memory_events = ""
        self.check()

    def _scan(self):
        now = self._clock()
        if self._scanned is not None and now - self._scanned < SCAN_INTERVAL:
            return
        spent = now - self._scanned if self._scanned is not None else 0.0
        self._scanned = now
        found = sglang_proc.scan(self.release, self._proc)
        self._items = [item for item in found if sglang_proc.alive(item["state"])]
        self._measure(now, spent)
        if self.pid is None:
            self.pid = next((item["pid"] for item in self._items if item["role"] == "server"), None)
        server = next((item for item in found if item["pid"] == self.pid), None)
        if server is None:
            return
        for item in found:
            # An orphan of an earlier start of the same release is no worker of this one. A zombie may be one: a worker
            # that died before it was ever seen alive.
            related = item["ppid"] == server["pid"] or item["pgid"] == server["pgid"]
            if item["role"] in sglang_proc.WORKER_ROLES and related and item["start"] >= server["start"]:
                self.workers.setdefault((item["pid"], item["start"]), item)

    def _measure(self, now, spent):
        """Remember when the processes last worked: used CPU time, waited for a disk, or came and went."""
        before, self._ticks = self._ticks, {(i["pid"], i["start"]): i["ticks"] for i in self._items}
        used = sum(ticks - before.get(key, 0) for key, ticks in self._ticks.items()) / os.sysconf("SC_CLK_TCK")
        waits = any(item["state"] in ("R", "D") for item in self._items)
        if waits or before.keys() != self._ticks.keys() or used >= BUSY_SHARE * spent:
            self._busy = now

    def idle(self):
        """Return for how many seconds no process of the release has worked."""
        self._scan()
        return self._clock() - self._busy

    def _living(self, pid, start):
        found = state_of(pid, self._proc)
        return found is not None and sglang_proc.alive(found[0]) and (start is None or found[1] == start)

    def check(self):
        """Look once.

        :returns: None while all is well, else ``(name of the cause, text)``; the name is died_silently, worker_died or
            not_running.
        """
        self._scan()
        if self.pid is None:
            self._absent = self._absent or self._clock()
            if self._clock() - self._absent >= ABSENT:
                return "not_running", f"no process carries the marker of {self.release}"
            return None
        if not self._living(self.pid, self._start):
            return "died_silently", f"the server process {self.pid} is gone"
        if self._start is None:
            self._start = state_of(self.pid, self._proc)[1]
            self._remember_memory()
        for (pid, start), item in self.workers.items():
            if not self._living(pid, start):
                return "worker_died", f"{sglang_proc.describe(item)} died, the server process {self.pid} lives on"
        return None

    def headless(self):
        """Look whether a scheduler lives, once the server is so far that it must.

        A scheduler that died between two scans and was reaped is in no list of known pids. That the detokenizer is seen
        shows that this release names its processes.

        :returns: as :meth:`check`; not None when no scheduler was seen beside a living detokenizer for a second.
        """
        self._scan()
        roles = {item["role"] for item in self._items}
        if "scheduler" in roles or "detokenizer" not in roles:
            self._headless = None
            return None
        self._headless = self._headless or self._clock()
        if self._clock() - self._headless < ABSENT:
            return None
        return "worker_died", f"no scheduler process lives, the server process {self.pid} and the detokenizer do"

    @property
    def server_alive(self):
        """Whether the server process itself lives."""
        return self.pid is not None and self._living(self.pid, self._start)

    def compiling(self):
        """Return the names of the compilers that run below the server, sorted."""
        self._scan()
        return sorted({item["comm"] for item in self._items if item["comm"] in COMPILERS})

    def _remember_memory(self):
        lines = _text(f"{self._proc}/{self.pid}/cgroup").split("\n")
        group = next((line[3:] for line in lines if line.startswith("0::")), "")
        self._memory_events = f"/sys/fs/cgroup{group}/memory.events"
        self._oom_before = self._oom_kills()

    def _oom_kills(self):
        found = re.search(r"^oom_kill (\d+)", _text(self._memory_events), re.M)
        return int(found.group(1)) if found else None

    def oom_killed(self):
        """Return whether the kernel killed a process of the server's control group since the first look."""
        now = self._oom_kills()
        return now is not None and self._oom_before is not None and now > self._oom_before


def kernel_complaints(since, path="/dev/kmsg"):
    """Return the kernel's lines on GPUs (Xid) and killed processes, newer than a time of the monotonic clock.

    Empty where the kernel log may not be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    found = []
    try:
        while True:
            head, _, text = os.read(handle, 8192).decode("utf-8", "replace").partition(";")
            if not text:
                break
            stamp = head.split(",")
            if _KERNEL.search(text) and int(stamp[2]) / 1e6 >= since:
                found.append(text.split("\n")[0])
    except (OSError, ValueError, IndexError):
        pass  # the end of the log (EAGAIN), or a record that was overwritten while it was read
    finally:
        os.close(handle)
    return found


def foreign_listeners(endpoint, release):
    """Return the processes that would answer at an endpoint and are not of a release, and whether ours listens there.

    :returns: ``(list of texts, bool)``.
    """
    parts = urllib.parse.urlsplit(endpoint)
    port = parts.port or 80
    addresses = {"0.0.0.0", "::"}
    try:
        addresses |= {item[4][0] for item in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    except OSError:
        pass  # a name that does not resolve shows itself in the first request
    wanted = os.path.realpath(release)
    everywhere = parts.hostname in ("0.0.0.0", "::")
    there = [i for i in sglang_proc.listeners(port) if everywhere or i["address"] in addresses]
    ours = [item for item in there if item["release"] and os.path.realpath(item["release"]) == wanted]
    # A socket that a worker inherited shows up once more under the worker's pid: same inode, so ours.
    inodes = {item["inode"] for item in ours}
    return [sglang_proc.describe(item) for item in there if item["inode"] not in inodes], bool(ours)
