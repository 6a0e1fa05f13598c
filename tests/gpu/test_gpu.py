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


def test_a_refusal_for_another_reason_is_not_as_expected():
    """A typing error of the inventory fails as well; each step that must be refused says by which words."""
    assert run.as_expected(0, "", "") and not run.as_expected(2, "", "") and not run.as_expected(124, "", "")
    word = "[probe/probe-fails]"
    assert run.as_expected(2, f"fatal: {word} variant tree fails", word)
    assert not run.as_expected(2, "fatal: [lint/flag-unknown]", word)
    assert not run.as_expected(0, word, word) and not run.as_expected(124, word, word)
    refused = {name: refusal for name, _play, _limit, refusal, _gpus in run.STEPS if refusal}
    assert refused == {"tree_forced": word, "fusion_inactive": "[verify/allreduce-fusion]"}


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
