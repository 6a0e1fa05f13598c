"""A scripted server under a release of its own, for the faults that the real one cannot show."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
from ansible.module_utils import sglang_proc

from .beside import FAKE, Watched, server, until


def free_port():
    """Return a TCP port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Return ``start(script, name=, port=, host=, flags=())`` which gives a release whose scripted server was started.

    The release is an object with ``path``, ``pid``, ``port`` and ``launch``; ``script=None`` starts nothing.
    """
    servers = []

    class Release:
        """One release."""

        def __init__(self, script, name="r1", port=None, host="127.0.0.1", endpoint=None, flags=()):
            self.path = tmp_path / "releases" / name
            for part in ("logs", "model"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
            self.port = port or free_port()
            argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.path / "model")]
            argv += ["--served-model-name", "tiny", "--host", host, "--port", str(self.port), "--tp-size", "2"]
            self.launch = {
                "schema": 1,
                "release": name,
                "argv": [*argv, "--enable-metrics", *flags],
                "env": {},
                "cwd": str(self.path),
                "endpoint": (endpoint or "http://127.0.0.1:{port}").format(port=self.port),
                "served_model_name": "tiny",
                "tp_size": 2,
                "log": str(self.path / "logs" / "server.log"),
                "expect": {"env": {}, "packages": {}, "args": {}},
            }
            (self.path / "launch.json").write_text(json.dumps(self.launch))
            self.pid = None
            if script is not None:
                self.run(script)

        def run(self, script):
            """Start the server."""
            env = {
                **os.environ,
                "PYTHONPATH": str(FAKE),
                "FAKE_SGLANG_SCRIPT": json.dumps(script),
                "SGLANG_DEPLOY_RELEASE": str(self.path),
            }
            log = pathlib.Path(self.launch["log"])
            log.write_text("")
            with open(log, "ab") as log:
                server = subprocess.Popen(
                    self.launch["argv"], cwd=self.path, env=env, stdout=log, stderr=log, start_new_session=True
                )
            servers.append(server)
            self.pid = server.pid

    yield Release
    for one in servers:
        try:
            os.killpg(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it crashed, as its script says
        one.wait()


@pytest.fixture
def health(run_module):
    """Return ``health(release, check=False, **args)`` which runs the module on a release."""

    def run(release, check=False, **args):
        given = {"release": str(release.path), "timeout": 20, "request_timeout": 3, "generation_timeout": 5, **args}
        if release.pid and "pid" not in args:
            given["pid"] = release.pid
        return run_module("sglang_health", {k: v for k, v in given.items() if v is not None}, check=check)

    return run


@pytest.fixture
def watched(start, tmp_path):
    """Return ``watched(script, state="promoted", **watch)``: a release that serves and is watched, looked at often."""
    found = []

    def run(script=None, state="promoted", restart_limit=2, piped=False, **watch):
        settings = dict(watch, restart_limit=restart_limit)
        found.append(Watched(start(None), script or {}, tmp_path, state, settings, piped))
        return found[-1]

    yield run
    for item in found:
        item.watch.terminate()
        try:
            item.watch.wait(20)
        except subprocess.TimeoutExpired:
            item.watch.kill()
            item.watch.wait()
        until(lambda item=item: not server(item))
        # What was made to outlive its server, by marker.
        for process in sglang_proc.scan(str(item.path)):
            if sglang_proc.alive(process["state"]):
                os.kill(process["pid"], signal.SIGKILL)
