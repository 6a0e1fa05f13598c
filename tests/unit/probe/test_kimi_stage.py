"""What the stage for many GPUs reads from a profile and from the schedulers; the stage itself needs GPUs."""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess
import sys

import pytest

GPU = pathlib.Path(__file__).resolve().parents[2] / "gpu"


@pytest.fixture(scope="module")
def stage():
    """Return the stage as a module."""
    sys.path.insert(0, str(GPU))
    import kimi_stage

    return kimi_stage


def kernel(name, microseconds, start=0):
    """Return a kernel's event of a trace."""
    return {"cat": "kernel", "name": name, "dur": microseconds, "ts": start}


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


def test_a_rank_that_waits_spends_no_more_on_collectives(stage):
    """The kernel of the rank that came last is the collective's time, whoever that was; the rest is waiting."""
    early = [kernel("ncclDevKernel_AllReduce", 100, 1), kernel("gemm", 90, 2), kernel("ncclDevKernel_AllGather", 5, 3)]
    late = [kernel("ncclDevKernel_AllGather", 50, 3), kernel("gemm", 90, 2), kernel("ncclDevKernel_AllReduce", 10, 1)]
    found = stage.of_ranks([early, late])
    assert (found["ranks"], found["alike"], found["share"]) == (2, True, round(15 / 105, 3))
    assert found["waiting"] == round(1 - 105 / 172.5, 3)
    different = stage.of_ranks([early, late[1:]])
    assert (different["alike"], different["share"], different["waiting"]) == (False, None, None)
    assert stage.of_ranks([[kernel("gemm", 9)]])["share"] is None


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


def test_the_order_of_the_ladder_and_its_summary(stage, tmp_path, monkeypatch, capsys):
    """Every step has the stage's inventory; a refused tree is as expected, and the summary says what was seen."""
    played = []

    def play(_python, folder, _bundle, arguments, _limit):
        played.append(arguments[0])
        said = json.loads((folder / "variables.json").read_text())
        assert (said["model_files_source"], said["sglang_server_tp_size"]) == ("config", 2)
        assert said["sglang_variant_base"]["args"]["load-format"] == "dummy"
        tree = "variant=tree" in arguments
        (folder / "play.log").write_text("fatal: [probe/probe-fails] tree" if tree else "")
        return {"rc": 2 if tree else 0, "seconds": 1.0, "tail": ""}

    seen = {"schedulers": [{"rank": rank, "nccl": {}} for rank in (0, 1)], "nccl": {"ignored": {}}}
    monkeypatch.setattr(stage.run, "play", play)
    monkeypatch.setattr(stage.run, "gpus", lambda: [("H200", "580", "0")] * 2)
    monkeypatch.setattr(stage.run, "make_engine", lambda *_: "python3")
    monkeypatch.setattr(stage.run, "schedulers", lambda *_: seen)

    def profile(_folder, name, _size):
        played.append(f"profile {name}")
        return {"decode": {"per_step": 9.0}}

    monkeypatch.setattr(stage, "profile", profile)
    monkeypatch.setattr(stage.time, "sleep", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["kimi_stage.py", str(tmp_path / "k"), "--bundle", str(tmp_path)])
    assert stage.main() == 0
    assert played == [
        "probe.yml", "deploy.yml", "deploy.yml", "canary.yml", "profile baseline", "deploy.yml", "profile fewchan",
        "rollback.yml", "stop.yml",
    ]  # fmt: skip
    summary = json.loads((tmp_path / "k" / "summary.json").read_text())
    assert summary["profile"]["fewchan"]["decode"]["per_step"] == 9.0
    assert summary["steps"]["deploy_fewchan"]["environment_ok"]
    seen["schedulers"].pop()
    monkeypatch.setattr(sys, "argv", ["kimi_stage.py", str(tmp_path / "l"), "--only", "rollback"])
    assert stage.main() == 1, "a scheduler is missing"
    assert "rollback: rc 0" in capsys.readouterr().out


def test_the_engine_sees_what_a_package_adds_to_the_path(stage, tmp_path):
    """Python reads no .pth file below a bundle, so the engine's own names those folders as well."""
    inner = tmp_path / "bundle" / "site" / "nested" / "packages"
    inner.mkdir(parents=True)
    (inner / "only_nested.py").write_text("found = True\n")
    (tmp_path / "bundle" / "site" / "nested.pth").write_text("nested/packages")
    python = stage.run.make_engine(tmp_path, tmp_path / "bundle")
    subprocess.run([python, "-c", "import only_nested; assert only_nested.found"], check=True)
