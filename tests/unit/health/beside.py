"""A release with a scripted server whose watch.py runs, and what is seen of it."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import requests
from ansible.module_utils import (
    sglang_launch_files,
    sglang_launch_policy,
    sglang_launcher,
    sglang_ledger,
    sglang_proc,
)

FAKE = pathlib.Path(__file__).resolve().parents[2] / "fake_sglang"

QUICK = {"look_seconds": 0.05, "confirm_seconds": 1.0, "pause_seconds": 0.05, "probe_interval": 1, "hang_seconds": 1}


def until(condition, seconds=60):
    """Wait until CONDITION returns something true, and return it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def note(release):
    """Return run/health.json of a release; empty where there is none yet."""
    return sglang_launch_policy.read_json(release.path / "run/health.json")


def events(tmp_path, *names):
    """Return the ledger's events, those of some names or all."""
    found, problems = sglang_ledger.read(str(tmp_path))
    assert not problems
    found = [dict(item, event=item.get("kind", item["event"])) for item in found]
    return [item for item in found if not names or item["event"] in names]


def alive(release, role):
    """Return the living processes of a role of a release."""
    found = sglang_proc.scan(str(release.path))
    return [item for item in found if item["role"] == role and sglang_proc.alive(item["state"])]


def server(release):
    """Return the pid of the living server, None where there is none."""
    return next((item["pid"] for item in alive(release, "server")), None)


def serving(release, after=None):
    """Return the pid of a server other than AFTER that serves, or None."""
    pid = server(release)
    try:
        ok = pid != after and requests.get(f"http://127.0.0.1:{release.port}/health", timeout=2).status_code == 200
    except requests.RequestException:
        return None
    return pid if ok else None


class Watched:
    """A release whose watch.py runs."""

    def __init__(self, release, script, tmp_path, state, watch, piped=False):
        self.release, self.root, self.path, self.port = release, tmp_path, release.path, release.port
        env = {"PYTHONPATH": str(FAKE), "SGLANG_DEPLOY_RELEASE": str(self.path)}
        env["FAKE_SGLANG_SCRIPT"] = str(self.path / "script.json")
        self.script(**script)
        self.launch = dict(release.launch, env=env, watch={**QUICK, **watch})
        (self.path / "launch.json").write_text(json.dumps(self.launch))
        (self.path / "launch.py").write_text(sglang_launcher.LAUNCH_PY)
        for name, module in sglang_launch_files.BESIDE.items():
            (self.path / f"{name}.py").write_text(inspect.getsource(module))
        (tmp_path / "ledger.jsonl").write_text("")
        (tmp_path / "current").symlink_to(self.path)
        self.state(state)
        self.begin(piped)
        self.reader = self.watch.stdout
        self.pid = until(lambda: serving(self))
        release.pid = self.pid

    def begin(self, piped=False):
        """Start the watch, as a service manager does."""
        command = [sys.executable, "-I", "-S", str(self.path / "watch.py")]
        with open(self.launch["log"], "ab") as log:
            out, again = (subprocess.PIPE, subprocess.STDOUT) if piped else (log, log)
            self.watch = subprocess.Popen(command, stdout=out, stderr=again, start_new_session=True)

    def kill_watch(self):
        """Kill the watch; its server ends with it."""
        self.watch.kill()
        self.watch.wait()
        until(lambda: not server(self))

    def script(self, **script):
        """Set the faults of the next start."""
        (self.path / "script.json").write_text(json.dumps(script))

    def state(self, state):
        """Set the release's state."""
        (self.path / "manifest.json").write_text(json.dumps({"state": state}))

    def kill(self, role="server"):
        """Kill the first process of a role and return its pid."""
        pid = alive(self, role)[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def down(self):
        """Return run/health.json once the watch has ended and everything with it."""
        self.watch.wait(60)
        until(lambda: not server(self))
        return note(self)
