"""A root with releases, made through the module itself."""

from __future__ import annotations

import os
import pathlib

import pytest
from ansible.module_utils import sglang_lock, sglang_release_compare

ENGINE = {
    "present": True,
    "python": "/opt/engine/bin/python3",
    "version": "0.5.9",
    "fingerprint": "e1",
    "problem": None,
}
MODEL = {"present": True, "fingerprint": "m1", "problem": None}


def make_run(name="run-1", **changes):
    """Return the run of this very process, as the controller's action names it."""
    run = {
        "id": name,
        "time": "2026-01-31T03:00:00Z",
        "controller": os.uname().nodename,
        "boot_id": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid": os.getpid(),
        "pid_start": sglang_lock._pid_start(os.getpid()),
        "user": "operator",
    }
    return dict(run, **changes)


class Host:
    """One root, driven through ``main()`` of sglang_release."""

    def __init__(self, run_module, root):
        self.run_module, self.root, self.run = run_module, str(root), make_run()

    def call(self, state, check=False, diff=False, **args):
        """Run one state and return the result, failed or not."""
        args = dict({"root": self.root, "run": self.run, "state": state}, **args)
        return self.run_module("sglang_release", args, check=check, diff=diff)

    def ok(self, state, **args):
        """Run one state that must succeed."""
        result = self.call(state, **args)
        assert not result.get("failed"), result["msg"]
        return result

    def compare(self, variant="baseline", inputs=None, **args):
        """Return the plan for a variant."""
        return self.ok("compared", variant=variant, inputs=inputs or {"args": {"variant": variant}}, **args)["plan"]

    def path(self, release):
        """Return the directory of a release."""
        return pathlib.Path(self.root) / "releases" / release

    def build(self, variant="baseline", inputs=None):
        """Create, fill and seal a release; return its id."""
        release = self.compare(variant, inputs)["release"]["id"]
        self.ok("created", release=release, record={"engine": ENGINE, "model": MODEL})
        self.fill(release)
        self.ok("built", release=release)
        return release

    def fill(self, release):
        """Write what a release must hold before it is sealed."""
        (self.path(release) / "site" / "sitecustomize.py").write_text("x = 1\n")
        (self.path(release) / "launch.json").write_text('{"schema": 1}\n')

    def deploy(self, variant="baseline", inputs=None):
        """Build, activate and promote a release; return its id."""
        release = self.build(variant, inputs)
        self.ok("active", release=release)
        self.ok("promoted", release=release)
        return release


@pytest.fixture
def host(run_module, tmp_path, monkeypatch):
    """Return a :class:`Host` whose engine, model and live processes are as declared."""
    monkeypatch.setattr(sglang_release_compare, "describe_engine", lambda declared: dict(ENGINE, **declared))
    monkeypatch.setattr(sglang_release_compare, "describe_model", lambda declared: dict(MODEL, **declared))
    monkeypatch.setattr(sglang_release_compare.sglang_proc, "drift", lambda launch, root: [])
    return Host(run_module, tmp_path / "root")
