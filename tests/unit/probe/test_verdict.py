"""From trials to findings: first cause, its place, what is slower, what NCCL ignored; and the predicted step."""

from __future__ import annotations

import pytest
from ansible.module_utils import sglang_nccl_log, sglang_nccl_run, sglang_nccl_verdict
from ansible.module_utils.sglang_nccl_plan import make_plan

KIMI = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}
PLAN = make_plan(KIMI, {}, 2)
TREE = "no algorithm/protocol available for function AllGather with datatype ncclInt8. NCCL_ALGO was set to Tree."
# Microseconds for the all-reduces of the two settings that were measured on two GPUs, by bytes.
DEFAULT = {14336: 12.5, 57344: 12.1, 458752: 14.6, 7340032: 45.5, 58720256: 232}
FEWCHAN = {14336: 15.1, 57344: 26.7, 458752: 145, 7340032: 2198, 58720256: 22754}


def trial(events, log=""):
    """Return the trial of these events, completed."""
    logs = {0: sglang_nccl_log.parse(log)}
    return sglang_nccl_verdict.complete(sglang_nccl_run.digest(events, PLAN, logs, 5.0), PLAN)


def measured(times, env=None):
    """Return the events of a trial that worked."""
    events = []
    for index, step in enumerate(PLAN["steps"]):
        for mode in step["modes"]:
            value = times.get(step["bytes"], 20) if step["collective"] == "all_reduce" else 20
            for rank in (0, 1):
                events.append({
                    "event": "result", "rank": rank, "step": index, "mode": mode, "calls": 20, "batches": 50,
                    "p50_us": value - rank, "p99_us": value + 5, "mean_us": value,
                })  # fmt: skip
    for rank in (0, 1):
        events.append(
            {"event": "rank", "rank": rank, "env": env or {}, "version": "2.28.9", "library": "/lib/libnccl.so.2"}
        )
    return events + [{"event": "end", "codes": {"0": 0, "1": 0}, "killed": [], "timed_out": False, "stuck": []}]


def error(rank, message, step=1, mode="eager", kind="DistBackendError"):
    """Return a rank's error."""
    return {
        "event": "error",
        "rank": rank,
        "type": kind,
        "message": message,
        "phase": "check",
        "step": step,
        "mode": mode,
    }


def judge(found, variables=None, base=None, **more):
    """Return ``{rule: finding}``."""
    setting = {"name": "x", "variables": variables or {}}
    return {item["rule"]: item for item in sglang_nccl_verdict.judge(found, setting, PLAN, base, **more)}


def test_tree_names_the_collective_and_the_way_out():
    """F01: AllGather has no Tree; the advice is the list by collective."""
    end = {"event": "end", "codes": {"0": 1, "1": 1}, "killed": [], "timed_out": False, "stuck": []}
    follow = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
    log = f"host:1:1 [0] 12.5 enqueue.cc:2012 NCCL WARN {TREE}\n"
    found = judge(trial([error(0, follow), error(1, follow), end], log), {"NCCL_ALGO": "Tree"})
    finding = found["probe-fails"]
    assert "all_gather for decode of 1 token" in finding["message"]
    assert "2 of 2 ranks" in finding["message"]
    assert finding["evidence"] == TREE
    assert "ring;allreduce:tree" in finding["advice"]


def test_the_first_error_is_the_cause():
    """F05: what the other ranks say afterwards, elsewhere, is not counted as the cause."""
    first = error(1, "CUDA error: operation not permitted when stream is capturing", step=0, mode="graph")
    after = [error(0, "NCCL error: unhandled cuda error", step=1)]
    end = {"event": "end", "codes": {"0": 1, "1": 1}, "killed": [], "timed_out": False, "stuck": []}
    log = "host:1:1 [0] NCCL WARN Cuda failure 900 'unhandled cuda error'\n"
    finding = judge(trial([first, *after, end], log))["probe-fails"]
    assert "captured in a CUDA graph, 1 of 2 ranks" in finding["message"]
    assert "stream is capturing" in finding["evidence"]


@pytest.mark.parametrize(("variables", "word"), [({}, "IOMMU"), ({"NCCL_P2P_DISABLE": "1"}, "more channels")])
def test_hang(variables, word):
    """F02: a hang is placed, and the advice depends on whether peer-to-peer is in use."""
    events = [{"event": "step", "rank": rank, "phase": "check", "step": 0, "mode": "eager"} for rank in (0, 1)]
    events.append({"event": "end", "codes": {"0": -9, "1": -9}, "killed": [0, 1], "timed_out": True, "stuck": []})
    finding = judge(trial(events), variables, host=["ACS redirects (0000:00:01.0)"])["probe-hangs"]
    assert "at all_reduce for decode of 1 token" in finding["message"]
    assert word in finding["advice"]
    assert ("0000:00:01.0" in finding["evidence"]) is (not variables)


def test_a_worker_that_never_answers():
    """No event at all is a hang before the first message, not a success."""
    found = trial([])
    assert found["outcome"] == "hung"
    assert "before the first message" in judge(found)["probe-hangs"]["message"]


def test_stuck_processes_are_an_error():
    """A rank that the kernel does not end is said."""
    events = measured(DEFAULT)
    events[-1] = {**events[-1], "stuck": [1]}
    assert judge(trial(events))["probe-left"]["level"] == "error"


def test_fewchan_is_slow_where_it_is_slow():
    """The worst message of each phase, as a warning: prefill 98 times, verify 2 times; decode within the threshold."""
    base, found = trial(measured(DEFAULT)), trial(measured(FEWCHAN))
    items = sglang_nccl_verdict.judge(found, {"name": "fewchan", "variables": {}}, PLAN, base)
    texts = [item["message"] for item in items if item["rule"] == "probe-slower"]
    assert any("98.1 times as slow as the base at prefill" in text for text in texts)
    assert any("2.2 times as slow as the base at verify" in text for text in texts)
    assert {item["level"] for item in items} == {"warning"}
    assert judge(base, base=base) == {}


def test_the_cost_of_a_launch_is_not_slowness():
    """What the CPU needs for a call moves between 24 and 48 us for the same setting; the replayed message decides."""
    base, found = trial(measured(DEFAULT)), trial(measured(DEFAULT))
    for step in found["steps"]:
        if step["phase"] != "prefill":
            step["eager"] = {**step["eager"], "p50_us": 48.0}
    assert sglang_nccl_verdict.slower(found, base, 1.25) == []
    found["steps"][0]["graph"] = {**found["steps"][0]["graph"], "p50_us": 48.0}
    assert [(step["bytes"], mode) for step, mode, _ in sglang_nccl_verdict.slower(found, base, 1.25)] == [
        (14336, "graph")
    ]


def test_predicted_step():
    """122 all-reduces and one all-gather of the slowest rank, in milliseconds."""
    predicted = trial(measured(DEFAULT))["predicted"]
    assert predicted["decode"] == pytest.approx((122 * 12.5 + 20) / 1e3, abs=1e-3)
    assert predicted["verify_eager"] == predicted["verify"] == pytest.approx((122 * 12.1 + 20) / 1e3, abs=1e-3)
    assert predicted["prefill"] == pytest.approx(122 * 232 / 1e3, abs=1e-3)


def test_ignored_and_kept_values():
    """A value that NCCL does not announce, and one that was set before."""
    log = "h:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\nh:1:1 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n"
    found = trial(measured(DEFAULT, {"NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "sys", "X": "2"}), log)
    items = judge(found, {"NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "sys", "X": "1"})
    assert "NCCL_P2P_LEVEL is ignored by NCCL in silence" in items["probe-ignored"]["message"]
    assert items["probe-environment"]["evidence"] == "2"
    assert judge(found, {"NCCL_P2P_LEVEL": "sys"}, exercised=False).keys() == set()


def test_ranking():
    """What works comes first, by decode; the table has a line for each."""
    rows = [
        {"name": "b", "outcome": "ok", "predicted": {"decode": 2.0}}, {"name": "c", "outcome": "hung", "predicted": {}},
        {"name": "a", "outcome": "ok", "predicted": {"decode": 1.0}},
    ]  # fmt: skip
    ranked = sglang_nccl_verdict.ranking(rows)
    assert [row["name"] for row in ranked] == ["a", "b", "c"]
    assert len(sglang_nccl_verdict.table(ranked).splitlines()) == 4
