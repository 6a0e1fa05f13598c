"""The log: following the file, phases, progress, and the cause of a failure."""

from __future__ import annotations

import os
import pathlib

import pytest
from ansible.module_utils.sglang_watch import PHASES, LogFollower, StartLog
from ansible.module_utils.sglang_watch_signatures import OBSERVED, SIGNATURES, cause, classify, match

FAKE = pathlib.Path(__file__).resolve().parents[2] / "fake_sglang"


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def read(path):
    """Return the state after a whole log."""
    log, follower = StartLog(), LogFollower(str(path))
    log.feed(follower.read())
    log.feed(follower.flush())
    follower.close()
    return log


# signature, phase, ranks that reported a failure, part of the first error
EXPECTED = {
    "bad_flag": ("bad_flag", "imports", [], "--no-such-flag"),
    "chat_template": ("tokenizer", "imports", [], "Chat template"),
    "cut_shard": ("missing_shard", "weights", [0], "SafetensorError"),
    "disk_full": ("disk_full", "graph", [1], "No space left"),
    "driver_mismatch": ("driver_mismatch", "distributed", [0], "Error 803"),
    "flashinfer_gate": ("flashinfer_gate", "graph", [0], "major versions [9, 10]"),
    "many_ranks": ("cuda_fault", "graph", list(range(8)), "illegal memory access"),
    "missing_shard": ("missing_shard", "weights", [0], "model-00022-of-00064"),
    "model_missing": ("model_missing", "imports", [], "LocalEntryNotFoundError"),
    "nccl_algorithm": ("nccl_algorithm", "graph", [0], "NCCL_ALGO was set to Tree"),
    "nccl_unhandled": ("nccl_unhandled", "distributed", [3], "unhandled system error"),
    "no_weights": ("missing_shard", "weights", [0], "Cannot find any model weights"),
    "oom_graph": ("oom_graph", "graph", [2], "out of memory"),
    "oom_killed": ("oom_killed", "weights", [], "exitcode=-9"),
    "oom_kv_cache": ("oom_kv_cache", "kv_cache", [2], "Not enough memory"),
    "oom_weights": ("oom_weights", "weights", [2], "out of memory"),
    "p2p_hang": ("p2p_hang", "distributed", [], "Watchdog caught"),
    "port_taken": ("port_taken", "warmup", [], "Errno 98"),
    "tokenizer": ("tokenizer", "imports", [], "backend tokenizer"),
    "undefined_name": ("undefined_name", "weights", [0], "_is_sm120_supported"),
    "unknown": ("unknown", "weights", [0, 1], "KeyError: 'vt_hidden_size'"),
    "xid": ("xid", "graph", [4], "unspecified launch failure"),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_crash_is_named_with_phase_ranks_and_first_error(name):
    log = read(FAKE / "faults" / f"{name}.log")
    signature, phase, ranks, first = EXPECTED[name]
    found = classify(log.errors, log.phase, log.ranks_failed())
    assert (found["signature"], found["phase"], found["ranks"]) == (signature, phase, ranks)
    assert first in found["first_error"]
    assert found["message"] and found["advice"]


def test_every_recorded_crash_is_expected_here():
    assert {path.stem for path in (FAKE / "faults").glob("*.log")} == set(EXPECTED)


def test_a_real_healthy_start_has_no_cause_and_reaches_ready():
    log = read(FAKE / "logs" / "healthy_start.log")
    assert log.phase == "ready"
    assert log.fatal is None
    assert classify(log.errors, log.phase) is None


def test_a_root_error_that_comes_late_still_beats_the_generic_ones():
    errors = [
        {"line": 1, "rank": 0, "phase": "graph", "text": "RuntimeError: NCCL error: unhandled cuda error"},
        {"line": 9, "rank": 0, "phase": "graph", "text": "NameError: name 'x' is not defined"},
    ]
    found = classify(errors, "graph")
    assert found["signature"] == "undefined_name"
    assert "NCCL error" in found["first_error"]


@pytest.mark.parametrize("item", SIGNATURES, ids=lambda item: item["name"])
def test_the_catalogue_is_complete(item):
    assert item["message"].endswith(".") and not item["advice"].endswith(".")
    assert set(item.get("phases", ())) <= set(PHASES)


def test_observed_causes_do_not_hide_signatures():
    assert not {item["name"] for item in SIGNATURES} & set(OBSERVED)
    assert cause("stalled", "weights")["advice"]


def test_a_second_announcement_is_a_new_start_and_a_warning_before_the_first_is_none():
    log = StartLog()
    log.feed(["a warning of an import"])
    begun = log.phases[0]
    log.feed(["[2026-01-01 00:00:00] server_args=ServerArgs(model_path='m')"])
    assert log.phases[0] is begun
    log.feed(["ValueError: of the first start"])
    assert log.errors
    log.feed(["[2026-01-01 00:00:01] server_args=ServerArgs(model_path='m')"])
    assert not log.errors and log.phase == "imports"


def test_a_bar_counts_once_the_slowest_rank_is_in_its_phase():
    log = StartLog()
    log.feed(f"[2026-01-01 00:00:00 TP{rank}] Init torch distributed begin." for rank in (0, 1))
    log.feed(["[2026-01-01 00:00:00 TP0] Load weight begin.", "Loading safetensors shards: 25% | 1/4 [00:00"])
    assert (log.phase, log.progress()) == ("distributed", None)
    log.feed(["[2026-01-01 00:00:00 TP1] Load weight begin."])
    assert log.progress()["percent"] == 25


def test_the_phase_is_that_of_the_slowest_rank():
    log = StartLog()
    log.feed(
        [
            "[2026-01-01 00:00:00 TP0] Init torch distributed begin.",
            "[2026-01-01 00:00:00 TP1] Init torch distributed begin.",
            "[2026-01-01 00:00:00 TP1] Load weight begin. avail mem=1 GB",
        ]
    )
    assert log.phase == "distributed"
    log.feed(["[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1 GB"])
    assert log.phase == "weights"


def test_our_own_requests_are_no_sign_of_life():
    clock = Clock()
    log = StartLog(clock)
    log.feed(["[2026-01-01 00:00:00] INFO:     Uvicorn running on http://127.0.0.1:1"])
    clock.now += 50
    log.feed(['[2026-01-01 00:00:50] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable'])
    assert clock.now - log.moved == 50


def test_progress_has_rate_and_estimate_of_the_running_bar():
    clock = Clock()
    log = StartLog(clock)
    bar = "Loading safetensors checkpoint shards: {0}% Completed | {0}/100 [00:00<00:00, 1it/s]"
    log.feed(["[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1 GB", bar.format(10)])
    assert log.progress()["estimate"] is None
    clock.now += 20
    log.feed([bar.format(20)])
    assert log.progress() == {"done": 20, "total": 100, "percent": 20, "rate": 0.5, "estimate": 160.0}
    log.feed(["[2026-01-01 00:00:00 TP0] KV Cache is allocated. #tokens: 1"])
    assert log.progress() is None


def test_a_second_start_in_the_same_file_begins_anew():
    log = StartLog()
    log.feed(["[2026-01-01 00:00:00] The server is fired up and ready to roll!", "KeyError: 'old'"])
    log.feed(["[2026-01-01 00:10:00] server_args=ServerArgs(model_path='x')"])
    assert (log.phase, log.errors, log.fatal) == ("imports", [], None)


def test_the_follower_survives_rotation_truncation_and_a_late_file(tmp_path):
    path = tmp_path / "server.log"
    follower = LogFollower(str(path))
    assert follower.read() == []
    path.write_text("one\ntw")
    assert follower.read() == ["one"]
    with open(path, "a") as handle:
        handle.write("o\nlast of the old file\n")
    os.rename(path, tmp_path / "server.log.1")
    path.write_text("first of the new file\n")
    assert follower.read() == ["two", "last of the old file", "first of the new file"]
    os.truncate(path, 0)
    with open(path, "a") as handle:
        handle.write("again\n")
    assert follower.read() == ["again"]
    with open(path, "a") as handle:
        handle.write("\rbar 1/4\rbar 2/4\r")
    assert follower.read() == ["bar 1/4", "bar 2/4"]
    follower.close()


@pytest.mark.parametrize("phase", ["weights", "kv_cache", "graph"])
def test_a_failed_capture_names_its_phase_itself(phase):
    """A slower rank may still be in an earlier phase when the first one runs out of memory."""
    assert match("Exception: Capture cuda graph failed: CUDA out of memory. Tried", phase)["name"] == "oom_graph"


@pytest.mark.parametrize(
    "line",
    [
        "Capture cuda graph begin. This can take up to several minutes. avail mem=78.5 GB",
        "Capture piecewise CUDA graph begin. avail mem=78.5 GB",
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2], avail mem=78.53 GB",
    ],
)
def test_graph_capture_begins_in_the_words_of_each_release(line):
    """0.5.15 names role and phase; without it the capture counted as part of the KV cache."""
    log = StartLog(Clock())
    log.feed([f"[2026-11-30 03:13:56 TP0] {line}"])
    assert log.phase == "graph"
