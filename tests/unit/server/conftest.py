"""A release whose server is the scripted launcher of ``overlay/``."""

from __future__ import annotations

import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from ansible.module_utils import sglang_proc, sglang_provider

LOCK = pathlib.Path(__file__).parents[3] / "roles/sglang_server/files/supervisor.lock"
OVERLAY = pathlib.Path(__file__).parent / "overlay" / "sglang"


class Node:
    """One root on this machine. Its path is short: a UNIX socket lies in it."""

    def __init__(self, run_module, venv):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="sgl-"))
        (self.root / "service").mkdir()
        (self.root / "service" / "venv").symlink_to(venv)
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
        args = {
            "state": state,
            "root": str(self.root),
            "release": str(path) if path else None,
            "provider": "supervisor",
            "python": sys.executable,
            "supervisor_lock": LOCK.read_text(),
            "start_timeout": 60,
            "stop_timeout": 30,
        }
        return self.run_module("sglang_service", dict(args, **more), check=check)

    def living(self):
        """Return the living processes of the root."""
        return [item for item in sglang_proc.scan(str(self.root)) if sglang_proc.alive(item["state"])]

    def wait(self, count=4, seconds=60):
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


@pytest.fixture(scope="session")
def venv(tmp_path_factory):
    """Return the virtual environment with supervisor, installed once by the code under test."""

    def run(command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    root = tmp_path_factory.mktemp("supervisor")
    supervisor = sglang_provider.Supervisor(str(root), "sglang-server", run, sys.executable, LOCK.read_text())
    assert supervisor.install() and not supervisor.install()
    return root / "service" / "venv"


@pytest.fixture
def node(run_module, venv):
    """Return a :class:`Node`; afterwards nothing of it runs and its directory is gone."""
    node = Node(run_module, venv)
    yield node
    node.service("stopped", stop_timeout=1)
    shutil.rmtree(node.root)
