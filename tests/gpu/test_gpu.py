"""The runner for machines with GPUs, as a test: skipped with its reason where there is none."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

RUNNER = pathlib.Path(__file__).with_name("run.py")
sys.path.insert(0, str(RUNNER.parent))
import run  # noqa: E402


def test_verbs_on_gpus(tmp_path):
    """Every step of the runner ends as it must, and the GPUs are as free afterwards as before."""
    bundle = os.environ.get("SGLANG_GPU_BUNDLE")
    before = run.gpus()
    if not before:
        pytest.skip("not exercised: this machine has no GPU; make gpu-bundle builds what a machine with GPUs needs")
    if not bundle:
        pytest.skip("SGLANG_GPU_BUNDLE names no unpacked bundle (make gpu-bundle)")
    command = [sys.executable, RUNNER, tmp_path / "gpu", "--bundle", bundle]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = json.loads((tmp_path / "gpu" / "summary.json").read_text())
    assert done.returncode == 0, {
        name: step["tail"] for name, step in summary["steps"].items() if not step["as_expected"]
    }
    assert summary["steps"]["tree_forced"]["seconds"] < 20
    for (_name, _driver, used), (_same, _too, now) in zip(before, summary["gpus_after"]):
        assert float(now) - float(used) < 64
