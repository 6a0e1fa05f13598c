"""NCCL's own logs, as two H200 wrote them under the probe (NCCL 2.28.9), reduced to the lines that say something.

Both ranks' logs of each setting are in ``captured/``; head and numbers of processes are made uniform, and of 24
channels' lines the first two are kept.
"""

from __future__ import annotations

import pathlib

import pytest
from ansible.module_utils import sglang_nccl_log, sglang_nccl_run, sglang_nccl_verdict
from ansible.module_utils.sglang_nccl_plan import make_plan

CAPTURED = pathlib.Path(__file__).with_name("captured")
PLAN = make_plan({"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}, {}, 2)
FEWCHAN = {
    "NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "131072", "NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_NCHANNELS": "1",
    "NCCL_NTHREADS": "64", "NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL",
}  # fmt: skip
NO_TREE = "Error : no algorithm/protocol available for function AllGather with datatype ncclInt8. NCCL_ALGO was set"


def logs(name):
    """Return both ranks' parsed logs."""
    return {rank: sglang_nccl_log.parse((CAPTURED / f"{name}-{rank}.log").read_text()) for rank in (0, 1)}


def merged(name):
    """Return what the logs of both ranks say together."""
    return sglang_nccl_log.merge(logs(name).values())


def trial(name, events=()):
    """Return a completed trial with these logs."""
    found = sglang_nccl_run.digest(list(events), PLAN, logs(name), 2.0)
    return sglang_nccl_verdict.complete(found, PLAN)


def test_baseline():
    """Version, values taken, transport of each pair, channels, threads, and no warning where nothing is wrong."""
    seen = merged("baseline")
    assert seen["version"] == "2.28.9+cuda13.0"
    assert seen["environment"] == {
        "NCCL_ALGO": "Ring", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_LEVEL": "SYS",
        "NCCL_PROTO": "LL",
    }  # fmt: skip
    assert seen["transports"] == {"0>1": ["P2P/IPC"], "1>0": ["P2P/IPC"]}
    assert (seen["channels"], seen["threads"], seen["warnings"], seen["invalid"]) == (24, 512, [], {})


def test_each_message_has_its_choice():
    """All-gathers are found by what one rank puts in; every message of the plan has algorithm, protocol, channels."""
    steps = trial("baseline")["steps"]
    assert [(step["collective"], step["bytes"], step["choice"]["channels"]) for step in steps] == [
        ("all_reduce", 14336, 1), ("all_gather", 327680, 20), ("all_reduce", 57344, 7), ("all_gather", 1310720, 23),
        ("all_reduce", 458752, 23), ("all_gather", 10485760, 24), ("all_reduce", 7340032, 24),
        ("all_reduce", 58720256, 24),
    ]  # fmt: skip
    assert {(step["choice"]["algorithm"], step["choice"]["protocol"]) for step in steps} == {("RING", "LL")}
    split = {step["collective"]: step["choice"]["algorithm"] for step in trial("tree_allreduce")["steps"]}
    assert split == {"all_reduce": "TREE", "all_gather": "RING"}


def test_tree():
    """The failure is NCCL's own line, at the first all-gather, with the way out."""
    follow = "DistBackendError: NCCL error: invalid usage\nncclInvalidUsage: This usually reflects invalid usage"
    events = [
        {"event": "error", "rank": rank, "type": "DistBackendError", "message": follow, "phase": "check", "step": 1,
         "mode": "eager"} for rank in (0, 1)
    ]  # fmt: skip
    events.append({"event": "end", "codes": {"0": 1, "1": 1}, "killed": [], "timed_out": False, "stuck": []})
    found = trial("tree", events)
    assert found["message"].startswith(NO_TREE)
    setting = {"name": "tree", "variables": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "SYS"}}
    (item,) = sglang_nccl_verdict.judge(found, setting, PLAN)
    assert (item["rule"], item["level"]) == ("probe-fails", "error")
    assert "all_gather for decode of 1 token (327680 bytes), called directly, 2 of 2 ranks" in item["message"]
    assert "ring;allreduce:tree" in item["advice"]


def test_unknown_algorithm():
    """NCCL ends while the communicator is made; the advice names variable and word."""
    events = [
        {"event": "error", "rank": rank, "type": "DistBackendError", "message": "invalid usage", "phase": "init",
         "step": None, "mode": None} for rank in (0, 1)
    ]  # fmt: skip
    events.append({"event": "end", "codes": {"0": 1, "1": 1}, "killed": [], "timed_out": False, "stuck": []})
    (item,) = sglang_nccl_verdict.judge(
        trial("algo_unknown", events), {"name": "x", "variables": {"NCCL_ALGO": "Rings"}}, PLAN
    )
    assert item["evidence"] == 'Unrecognized element token "Rings" when parsing "Rings"'
    assert item["advice"] == "correct NCCL_ALGO: NCCL knows no 'Rings'"


def test_transport_without_peer_to_peer():
    """Host memory stands where peer-to-peer is off, and 16 channels are within what was asked."""
    seen = merged("p2p_off")
    assert seen["transports"] == {"0>1": ["SHM/direct/direct"], "1>0": ["SHM/direct/direct"]}
    asked = {"NCCL_P2P_DISABLE": "1", "NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "32", "NCCL_ALGO": "Ring"}
    assert sglang_nccl_log.ignored({**asked, "NCCL_BUFFSIZE": "33554432"}, seen) == {}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("baseline", {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "SYS"}),
        ("tree_allreduce", {"NCCL_ALGO": "ring;allreduce:tree", "NCCL_PROTO": "LL"}),
        ("fewchan", FEWCHAN),
    ],
)
def test_what_was_taken_is_not_called_ignored(name, asked):
    """Settings that NCCL took, down to two channels and 64 threads, are no finding."""
    assert sglang_nccl_log.ignored(asked, merged(name)) == {}


def test_silence_and_a_refusal_that_is_no_warning():
    """A lower-case level is passed over in silence; 100 threads are announced, then refused at INFO: 512 run."""
    found = sglang_nccl_log.ignored({"NCCL_P2P_LEVEL": "sys"}, merged("level_lower_case"))
    assert found == {"NCCL_P2P_LEVEL": "is ignored by NCCL in silence"}
    seen = merged("threads_100")
    assert (seen["environment"]["NCCL_NTHREADS"], seen["threads"]) == ("100", 512)
    found = sglang_nccl_log.ignored({"NCCL_NTHREADS": "100"}, seen)
    assert found == {"NCCL_NTHREADS": "is not taken: Invalid NCCL_NTHREADS 100 (must be a multiple of 32)"}


@pytest.mark.parametrize(
    ("name", "variable", "value", "words"),
    [
        ("p2p_off", "NCCL_MIN_CTAS", "24", "the communicator has 16 channels"),
        ("baseline", "NCCL_MAX_NCHANNELS", "8", "the communicator has 24 channels"),
        ("baseline", "NCCL_NTHREADS", "64", "a block has 512 threads"),
        ("baseline", "NCCL_PROTO", "Simple", "NCCL chose LL"),
        ("baseline", "NCCL_P2P_DISABLE", "1", "ranks are connected by P2P/IPC"),
    ],
)
def test_announced_without_effect(name, variable, value, words):
    """What NCCL announces is not yet what runs: the rest of the log is held against it."""
    seen = merged(name)
    seen["environment"][variable] = value
    assert words in sglang_nccl_log.ignored({variable: value}, seen)[variable]
