"""A release whose server is the scripted launcher of ``overlay/``."""

from __future__ import annotations

import pathlib
import shutil
import socket
import sys
import tempfile
import time

import pytest
from ansible.module_utils import sglang_proc

OVERLAY = pathlib.Path(__file__).parent / "overlay" / "sglang"


class Node:
    """One root on this machine. Its path is short: a UNIX socket lies in it."""

    def __init__(self, run_module):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="sgl-"))
        self.run_module = run_module
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def release(self, name="r1", **env):
        """Render a release whose faults ``env`` names and return its path."""
        path = self.root / "releases" / name
        if not (path / "site").exists():
            shutil.copytree(OVERLAY, path / "site" / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
        result = self.launch(path, env={key: str(value) for key, value in env.items()})
        assert not result.get("failed"), result
        return path

    def launch(self, path, check=False, diff=False, **more):
        """Run the module sglang_launch."""
        args = {
            "root": str(self.root),
            "release": str(path),
            "provider": "supervisor",
            "python": sys.executable,
            "model_path": "/models/none",
            "port": self.port,
            "tp_size": 2,
        }
        return self.run_module("sglang_launch", dict(args, **more), check=check, diff=diff)

    def service(self, state, path=None, check=False, **more):
        """Run the module sglang_service with supervisor."""
        lock = pathlib.Path(__file__).parents[3] / "roles/sglang_server/files/supervisor.lock"
        args = {
            "state": state,
            "root": str(self.root),
            "release": str(path) if path else None,
            "provider": "supervisor",
            "python": sys.executable,
            "supervisor_lock": lock.read_text(),
            "stop_timeout": 5,
        }
        return self.run_module("sglang_service", dict(args, **more), check=check)

    def living(self):
        """Return the living processes of the root."""
        return [item for item in sglang_proc.scan(str(self.root)) if sglang_proc.alive(item["state"])]

    def wait(self, count=4, seconds=10):
        """Wait until COUNT processes live and return them."""
        end = time.monotonic() + seconds
        while len(self.living()) != count or (count and not sglang_proc.listeners(self.port)):
            assert time.monotonic() < end, self.living()
            time.sleep(0.05)
        return self.living()

    def ledger(self):
        """Return the ledger's events as (event, release)."""
        from ansible.module_utils import sglang_ledger

        return [(item["event"], item["release"]) for item in sglang_ledger.read(str(self.root))[0]]


@pytest.fixture
def node(run_module):
    """Return a :class:`Node`; afterwards nothing of it runs and its directory is gone."""
    node = Node(run_module)
    yield node
    node.service("stopped", stop_timeout=1)
    shutil.rmtree(node.root)
