"""What the stage for many GPUs reads from a profile and from the schedulers; the stage itself needs GPUs."""

from __future__ import annotations

import gzip
import json
import pathlib
import sys

import pytest

GPU = pathlib.Path(__file__).resolve().parents[2] / "gpu"


@pytest.fixture(scope="module")
def stage():
    """Return the stage as a module."""
    sys.path.insert(0, str(GPU))
    import kimi_stage

    return kimi_stage


def kernel(name, microseconds):
    """Return a kernel's event of a trace."""
    return {"cat": "kernel", "name": name, "dur": microseconds}


def test_collectives_of_a_trace(stage, tmp_path):
    """NCCL's kernels are counted by kind; all-gathers, one a step, give the all-reduces of a step."""
    reduce, gather = (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL",
    )
    events = [kernel(reduce, 12), kernel(reduce, 14), kernel(gather, 11), kernel("fused_moe_kernel", 90)] * 3
    events.append({"cat": "cpu_op", "name": "c10d::allreduce_", "dur": 40})
    found = stage.collectives(events)
    assert found == {
        "count": {"allgather": 3, "allreduce": 6}, "called": {"allreduce": 1}, "per_step": 2,
        "p50_us": {"allgather": 11, "allreduce": 13},
    }  # fmt: skip
    path = tmp_path / "x-TP-0-DECODE.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert stage.complete(path)
    path.write_bytes(path.read_bytes()[:40])
    assert not stage.complete(path)
    assert stage.collectives([])["per_step"] is None
    called = [
        {"cat": "cpu_op", "name": name, "dur": 9} for name in ["c10d::allreduce_"] * 5 + ["c10d::_allgather_base_"]
    ]
    assert stage.collectives(called)["per_step"] == 5, "without a GPU the calls count"


@pytest.mark.parametrize(("change", "right"), [({}, True), ({"NCCL_ALGO": "Tree"}, False), (None, False)])
def test_environments(stage, change, right):
    """All schedulers are there, alike, and NCCL took what was asked."""
    ranks = [{"rank": rank, "nccl": {"NCCL_ALGO": "Ring"}} for rank in range(8)]
    if change is None:
        ranks.pop()
    else:
        ranks[3]["nccl"].update(change)
    seen = {"schedulers": ranks, "nccl": {"ignored": {}}}
    assert stage.environments(seen, 8) is right
    assert not stage.environments({**seen, "nccl": {"ignored": {"NCCL_ALGO": "is ignored"}}}, 8)
    assert not stage.environments({"schedulers": [], "nccl": None}, 8)


def test_model_has_no_weights(stage, tmp_path):
    """The directory is one that model_files takes as a configuration."""
    from ansible.module_utils import sglang_model

    stage.write_model(tmp_path / "m")
    assert sglang_model.describe({"source": "config", "path": str(tmp_path / "m")})["present"]
    assert sglang_model.check(str(tmp_path / "m"), weights=False) == []
    assert not list((tmp_path / "m").glob("*.safetensors"))
