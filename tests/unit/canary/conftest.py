"""A built release whose server is the scripted one, in a root of its own."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from ansible.module_utils import sglang_proc

FAKE = pathlib.Path(__file__).resolve().parents[2] / "fake_sglang"
CONFIG = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 1024, "layer_types": ["full"] * 8}


def free_port():
    """Return a TCP port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Root:
    """A root with releases, of which one may serve."""

    def __init__(self, path):
        self.path = path
        self.servers = []
        (path / "model").mkdir(parents=True)
        (path / "model" / "config.json").write_text(json.dumps(CONFIG))

    def release(self, digest, script=None, flags=(), args=None, env=None):
        """Build a release; return its path."""
        release = self.path / "releases" / f"20260101T000000Z-v-{digest}"
        (release / "logs").mkdir(parents=True)
        port = free_port()
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.path / "model")]
        argv += [
            "--served-model-name",
            "tiny",
            "--host",
            "0.0.0.0",
            "--port",
            str(port),
            "--disable-cuda-graph",
            *flags,
        ]
        variables = {"PYTHONPATH": str(FAKE), "SGLANG_DEPLOY_RELEASE": str(release), "SPT_NOENV": "1", "A": "1"}
        launch = {
            "schema": 1,
            "release": release.name,
            "argv": argv,
            "env": {**variables, "FAKE_SGLANG_SCRIPT": json.dumps(script or {})},
            "cwd": str(release),
            "user": None,
            "endpoint": f"http://127.0.0.1:{port}",
            "served_model_name": "tiny",
            "tp_size": 1,
            "log": str(release / "logs" / "server.log"),
            "expect": {"env": env or {"A": "1"}, "packages": {}, "args": args or {"disable-cuda-graph": True}},
        }
        (release / "launch.json").write_text(json.dumps(launch))
        return release

    def serve(self, release):
        """Start the server of a release as the live one; return its pid once it listens."""
        launch = json.loads((release / "launch.json").read_text())
        (self.path / "current").symlink_to(release)
        with open(launch["log"], "wb") as log:
            process = subprocess.Popen(
                launch["argv"], env=launch["env"], stdout=log, stderr=log, cwd=release, start_new_session=True
            )
        self.servers.append(process)
        end = time.monotonic() + 30
        while b"ready to roll" not in pathlib.Path(launch["log"]).read_bytes():
            assert time.monotonic() < end and process.poll() is None, pathlib.Path(launch["log"]).read_text()
            time.sleep(0.02)
        return process.pid

    def ledger(self):
        """Return the events of the ledger."""
        return [json.loads(line) for line in (self.path / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture
def root(tmp_path):
    """Return a root; what it started is ended with the test."""
    made = Root(tmp_path)
    yield made
    for process in made.servers:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    for item in sglang_proc.scan(str(tmp_path / "canary")):
        try:
            os.kill(item["pid"], signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def canary(root, run_module):
    """Return ``canary(release, check=False, **args)``: the result of the module with little to wait for."""

    def run(release, check=False, **args):
        small = {
            "overhead_mb": 50,
            "keep_mb": 50,
            "layers": 2,
            "nice": 0,
            "generation_timeout": 5,
            "live_interval": 0.05,
        }
        given = {"root": str(root.path), "release": str(release), "device": "cpu", "variant": "v", **small, **args}
        return run_module("sglang_canary", given, check=check)

    return run
