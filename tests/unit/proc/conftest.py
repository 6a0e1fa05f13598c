"""A process table of one's own: files laid out like procfs, for what cannot be started in a test."""

from __future__ import annotations

import os

import pytest


class FakeProc:
    """Lays out ``/proc`` below a directory."""

    def __init__(self, path):
        self.path = path
        (path / "net").mkdir(parents=True)
        (path / "uptime").write_text("9000.00 1.00\n")
        self.sockets = []

    def add(self, pid, argv=(), env=None, state="S", ppid=1, pgid=None, sid=None, start=100, comm="python"):
        """Add one process."""
        folder = self.path / str(pid)
        (folder / "fd").mkdir(parents=True)
        tail = [state, ppid, pgid or pid, sid or pgid or pid, *[0] * 15, start, *[0] * 5]
        (folder / "stat").write_text(f"{pid} ({comm}) " + " ".join(str(item) for item in tail) + "\n")
        (folder / "cmdline").write_bytes(b"".join(os.fsencode(item) + b"\0" for item in argv))
        block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in (env or {}).items())
        (folder / "environ").write_bytes(block)
        return pid

    def listen(self, pid, port, inode, address="0100007F", family="tcp"):
        """Add a listening socket; ``pid`` None leaves its holder hidden."""
        self.sockets.append(family)
        path = self.path / "net" / family
        head = "" if path.exists() else "  sl  local_address rem_address   st ...\n"
        line = (
            f"   0: {address}:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  0 {inode} 1\n"
        )
        with path.open("a") as handle:
            handle.write(head + line)
        if pid is not None:
            (self.path / str(pid) / "fd" / "7").symlink_to(f"socket:[{inode}]")

    def __str__(self):
        return str(self.path)


@pytest.fixture
def proc(tmp_path):
    """Return an empty process table."""
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def root(tmp_path):
    """Return a root with one release ``r1``, as a path."""
    (tmp_path / "root" / "releases" / "r1").mkdir(parents=True)
    return tmp_path / "root"
