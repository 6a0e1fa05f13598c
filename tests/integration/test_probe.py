"""The probe over gloo with the torch of a built engine: bfloat16, a rank that adds wrong and one that hangs."""

from __future__ import annotations

import json
import pathlib

import pytest

RANK_1 = "import os, time\nimport torch.distributed as dist\nif os.environ['SGLANG_NCCL_PROBE_RANK'] == '1':\n"
WRONG = (
    "    real = dist.all_reduce\n"
    "    def all_reduce(tensor, *args, **more):\n"
    "        real(tensor, *args, **more)\n"
    "        tensor[3] += 1\n"
    "    dist.all_reduce = all_reduce\n"
)
HANGS = "    dist.all_gather_into_tensor = lambda *args, **more: time.sleep(60)\n"


@pytest.fixture
def engine(node):
    """Return the interpreter of the node's engine."""
    (server,) = (item for item in pathlib.Path(node.root).glob("releases/*/launch.json"))
    return json.loads(server.read_text())["argv"][0]


def test_probe_over_gloo(engine, tmp_path, run_module):
    """What works is measured at every size; what does not is placed, and ends at its limit."""
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "torch_dtype": "bfloat16"})
    )
    settings = [
        {"name": "works", "variables": {"NCCL_ALGO": "Ring"}},
        {"name": "wrong", "variables": {}, "site": RANK_1 + WRONG},
        {"name": "hangs", "variables": {}, "site": RANK_1 + HANGS},
    ]
    result = run_module(
        "sglang_nccl_probe",
        {"root": str(tmp_path), "python": engine, "model": str(tmp_path), "device": "cpu", "tp_size": 2, "limit": 5,
         "env": {"OMP_NUM_THREADS": 1}, "settings": settings, "enforce": False},
    )  # fmt: skip
    rows = {row["name"]: row for row in result["results"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {"works": "ok", "wrong": "wrong", "hangs": "hung"}
    steps = rows["works"]["steps"]
    assert {step["collective"] for step in steps} == {"all_reduce", "all_gather"}
    assert all(step["eager"]["p50_us"] > 0 and step["busbw_gbs"] > 0 and step["graph"] is None for step in steps)
    assert rows["works"]["seconds"] < 15
    assert rows["wrong"]["failed_ranks"] == [1]
    assert rows["hangs"]["seconds"] < 8
    assert [item["rule"] for item in result["findings"] if item["level"] == "info"] == ["not-exercised"]
