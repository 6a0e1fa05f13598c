"""The probe for real: torch of a built engine, two ranks over gloo, and what goes wrong in a rank.

A fault is the text of a setting's sitecustomize: each rank runs it before it joins, as it runs that of a release.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import pytest

MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "torch_dtype": "bfloat16"}
LIMIT = 4


def rank_1(text):
    """Return a sitecustomize that does something in rank 1 only."""
    return f"import os, time\nimport torch.distributed as dist\nif os.environ['SGLANG_NCCL_PROBE_RANK'] == '1':\n{text}"


FAULTS = {
    "works": "",
    "hangs": rank_1("    dist.all_gather_into_tensor = lambda *args, **more: time.sleep(60)\n"),
    "is_missing": rank_1("    time.sleep(60)\n"),
    "fails_above": (
        "import torch.distributed as dist\nreal = dist.all_reduce\n"
        "def all_reduce(tensor, *args, **more):\n"
        "    if tensor.numel() > 64 * 32:\n"
        "        raise RuntimeError('NCCL error: unhandled cuda error')\n"
        "    return real(tensor, *args, **more)\n"
        "dist.all_reduce = all_reduce\n"
    ),
    "adds_wrong": rank_1(
        "    real = dist.all_reduce\n"
        "    def all_reduce(tensor, *args, **more):\n"
        "        real(tensor, *args, **more)\n"
        "        tensor[3] += 1\n"
        "    dist.all_reduce = all_reduce\n"
    ),
    "dies": rank_1("    dist.all_reduce = lambda *args, **more: os.kill(os.getpid(), 9)\n"),
}


@pytest.fixture(scope="module")
def python(request):
    """Return the interpreter of a built engine."""
    engines = os.environ.get("SGLANG_TEST_ENGINES") or pathlib.Path(__file__).parents[2] / ".embedded" / "engines"
    found = sorted(pathlib.Path(engines).glob("0.5.9-*/bin/python3"))
    if not found:
        pytest.skip("no built engine: deploy the embedded node once, or set SGLANG_TEST_ENGINES")
    return str(found[0])


@pytest.fixture
def probe(tmp_path, run_module, python):
    """Return ``probe(settings, **params)``, which gives the module's result."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))

    def call(settings, *, check=False, **more):
        params = {
            "root": str(tmp_path), "python": python, "model": str(tmp_path / "model"), "device": "cpu", "tp_size": 2,
            "env": {"OMP_NUM_THREADS": 1}, "limit": LIMIT, "settings": settings, "enforce": False, **more,
        }  # fmt: skip
        return run_module("sglang_nccl_probe", params, check=check)

    return call


def workers():
    """Return the processes of this machine that run the worker program."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"/probe/run-" in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def test_faults(probe, tmp_path):
    """Each fault is named with its place, within the limit, and nothing is left of any of them."""
    run = {"id": "r1", "user": "u", "controller": "c"}
    result = probe([{"name": name, "variables": {}, "site": text} for name, text in FAULTS.items()], run=run)
    rows = {row["name"]: row for row in result["results"]}
    seen = {name: (row["outcome"], row["where"] and row["where"]["phase"]) for name, row in rows.items()}
    assert seen == {
        "works": ("ok", None), "hangs": ("hung", "check"), "is_missing": ("hung", None),
        "fails_above": ("failed", "check"),
        "adds_wrong": ("wrong", "check"), "dies": ("crashed", "check"),
    }  # fmt: skip
    assert rows["hangs"]["seconds"] < LIMIT + 2
    assert rows["is_missing"]["failed_ranks"] == [1], "the rank that never came is named"
    assert rows["adds_wrong"]["failed_ranks"] == [1]
    messages = {item["rule"]: item["message"] for item in result["findings"] if "fails_above" in item["message"]}
    assert "prefill of 512 tokens" in messages["probe-fails"], "the first size that fails"
    assert result["verdict"] == {
        "ok": False,
        "failures": ["probe-crashes", "probe-fails", "probe-hangs", "probe-wrong"],
    }
    assert any("IOMMU" in item["advice"] for item in result["findings"] if item["rule"] == "probe-hangs")
    assert any(item["message"].startswith("not exercised: NCCL") for item in result["findings"])
    assert workers() == []
    assert [path.name for path in (tmp_path / "probe").iterdir() if path.is_dir()] == [], "no scratch folder is left"
    event = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert event["event"] == "probe"
    assert len(event["results"]) == len(FAULTS)
    works = rows["works"]
    assert works["predicted"]["decode"] > 0
    assert all(step["eager"]["p50_us"] > 0 and step["busbw_gbs"] > 0 for step in works["steps"])
    assert all(step["graph"] is None for step in works["steps"]), "gloo has no graphs"


def test_kept_result(probe):
    """What worked is not tried again under the same conditions, and is under others."""
    one = [{"name": "one", "variables": {"NCCL_ALGO": "Ring"}}]
    assert probe(one, check=True)["results"] == []
    first = probe(one)
    assert (first["changed"], first["reused"]) == (True, [])
    started = time.monotonic()
    again = probe(one)
    assert (again["changed"], again["reused"]) == (False, ["one"])
    assert time.monotonic() - started < 1
    assert again["results"][0]["steps"] == first["results"][0]["steps"]
    assert probe(one, check=True)["reused"] == ["one"]
    assert probe(one, fingerprint="another engine")["reused"] == []


def test_environment_that_is_set_already(probe):
    """A variable of the service wins over the variant's, and that is said; one setting alone starts with its file."""
    site = "import os\nos.environ.setdefault('NCCL_ALGO', 'Ring')\nos.environ['SEEN_BY'] = 'site'\n"
    setting = {"name": "one", "variables": {"NCCL_ALGO": "Ring", "SEEN_BY": "site"}, "site": site}
    result = probe([setting], env={"OMP_NUM_THREADS": 1, "NCCL_ALGO": "Tree"})
    said = [item for item in result["findings"] if item["rule"] == "probe-environment"]
    assert [item["evidence"] for item in said] == ["Tree"]
    assert result["verdict"]["ok"]
