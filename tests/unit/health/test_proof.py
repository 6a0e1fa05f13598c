"""The proof in one call, against a scripted server: answers, soak, what is active, and the record of all."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import threading
import time

import pytest
from ansible.module_utils import sglang_proc

# What the scripted server says to everything.
TEXT = "w136 w94 w514 w235"
TOKENS = [100, 101, 102, 103]


@pytest.fixture
def proof(health, run_module):
    """Return ``proof(release, check=False, **args)``: the module's result once the release is ready."""

    def run(release, check=False, **args):
        assert health(release, generations=1, api_key=args.get("api_key"))["ready"]
        given = {"release": str(release.path), "device": "cpu", "soak_requests": 0, "generation_timeout": 5, **args}
        return run_module("sglang_proof", given, check=check)

    return run


def names(result):
    """Return (rule, level) of the findings about answers and the soak."""
    found = result["findings"]
    return [(item["rule"], item["level"]) for item in found if item["rule"] in ("known-answer", "soak")]


def test_a_right_answer_gives_no_finding_and_is_kept(start, proof):
    expected = {"prompt": "x", "text": TEXT, "tokens": TOKENS, "logprobs": [-0.1] * 4}
    result = proof(start({}), known_answers=[expected])
    assert names(result) == []
    answer = result["answers"][0]
    assert (answer["tokens"], answer["agreed"], answer["deviation"]) == (TOKENS, 4, 0.025)


def test_a_wrong_answer_is_an_error_with_both_texts(start, proof):
    release = start({})
    wrong = {"prompt": "x", "text": "w136 w94 w514 w0", "tokens": [100, 101, 102, 7]}
    unsure = {"prompt": "y", "tokens": TOKENS, "logprobs": [-3.0] * 4}
    result = proof(release, known_answers=[wrong, unsure])
    assert names(result) == [("known-answer", "error")] * 2
    assert "'w136 w94 w514 w0'" in result["findings"][0]["evidence"] and "w235" in result["findings"][0]["evidence"]
    assert "log-probability" in result["findings"][1]["message"]


def test_an_answer_that_never_comes_is_a_finding_and_ends_it(start, proof):
    release = start({"generation": {"mode": "error", "after": 1}})
    expected = {"prompt": "x", "contains": "w"}
    result = proof(release, known_answers=[expected], soak_requests=20)
    assert names(result) == [("known-answer", "error")] and result["soak"] is None


def test_none_known_is_said(start, proof):
    assert names(proof(start({}))) == [("known-answer", "warning")]


def test_a_soak_outlasts_the_warm_up_and_keeps_the_deploy_lock_fresh(start, proof, tmp_path):
    release, lock = start({}), tmp_path / "lock"
    lock.write_text(json.dumps({"schema": 1, "run": {"id": "r"}, "variant": "v", "since": ""}))
    os.utime(lock, (time.time() - 800,) * 2)
    result = proof(release, soak_requests=60)
    assert (result["soak"]["requests"], result["soak"]["answered"]) == (60, 60)
    assert ("soak", "error") not in names(result)
    assert time.time() - lock.stat().st_mtime < 60


def test_serving_some_and_then_hanging_fails_the_soak(start, proof):  # F23
    result = proof(start({"generation": {"mode": "silent", "after": 12}}), soak_requests=40, generation_timeout=2)
    found = next(item for item in result["findings"] if item["rule"] == "soak")
    assert found["level"] == "error" and "no answer within 2 s" in found["evidence"]
    assert result["soak"]["answered"] == 11  # one went to the wait for readiness
    assert "answered 11 of 40" in found["message"]


def test_a_server_that_says_nonsense_after_the_soak_is_not_healthy(start, proof):
    result = proof(start({"generation": {"mode": "degenerate", "after": 21}}), soak_requests=20)
    assert result["soak"]["answered"] == 20
    assert "foss foss" in next(item for item in result["findings"] if item["rule"] == "soak")["evidence"]


def test_a_worker_that_dies_ends_the_soak(start, proof):
    release = start({"token_seconds": 0.05})

    def kill():
        while pathlib.Path(release.launch["log"]).read_text().count('"POST /generate') < 20:
            time.sleep(0.05)
        worker = next(item for item in sglang_proc.scan(str(release.path)) if item["role"] == "scheduler")
        os.kill(worker["pid"], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    result = proof(release, soak_requests=10000, generation_timeout=60)
    found = next(item for item in result["findings"] if item["rule"] == "soak")
    assert "died, the server process" in found["evidence"]


def test_a_dry_run_asks_and_does_not_soak(start, proof):
    result = proof(start({}), check=True, known_answers=[{"prompt": "x", "contains": "nothing"}], soak_requests=20)
    assert names(result) == [("known-answer", "error")] and result["soak"] is None


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"known_answers": [{"prompt": "x"}]}, "known_answers[0]"),
        ({"match": 2}, "match"),
        ({"soak_concurrency": 0}, "soak_concurrency"),
    ],
)
def test_a_bad_input_is_named(start, run_module, args, named):
    result = run_module("sglang_proof", {"release": str(start(None).path), **args})
    assert result["failed"] and result["msg"].startswith(named)


def test_the_end_of_the_soak_asks_no_slow_health(start, proof):
    release = start({})
    log = pathlib.Path(release.launch["log"])
    result = proof(release, soak_requests=20)
    # The wait for readiness asks it as often as it must; the soak and what follows never do.
    asked = [line for line in log.read_text().splitlines() if '"GET /' in line or '"POST /' in line]
    assert len(asked) > 20 and not any('"GET /health' in line for line in asked[-20:])
    assert result["soak"]["answered"] == 20
    assert 0 < result["soak"]["elapsed"] <= result["elapsed"]


def test_one_start_is_recorded_once_and_without_keys(start, proof, run_module):
    release = start({}, flags=["--api-key", "a-key-of-the-test"])
    args = {"api_key": "a-key-of-the-test", "evidence": {"seen": 1}, "soak_requests": 20}
    args["known_answers"] = [{"prompt": "x", "text": TEXT}]
    dry = proof(release, check=True, **args)
    assert dry["changed"] and dry["soak"] is None
    assert not (release.path / "results").exists()
    first = proof(release, **args)
    again = proof(release, **args)
    assert (first["changed"], again["changed"], again["record"]) == (True, False, first["record"])
    text = pathlib.Path(first["record"]).read_text()
    assert "a-key-of-the-test" not in text
    record = json.loads(text)
    assert record["seen"] == 1
    assert record["findings"] == first["findings"]
    assert (record["answers"]["answers"], record["answers"]["soak"]) == (first["answers"], first["soak"])


def test_an_error_refuses_the_release_with_every_finding_on_record(start, proof):
    release = start({"server_info": {"tp_size": 1}})
    earlier = {
        "rung": "verify",
        "rule": "env",
        "level": "error",
        "message": "NCCL_PROTO is missing.",
        "evidence": "",
        "advice": "",
    }
    result = proof(release, findings=[earlier], known_answers=[{"prompt": "x", "contains": "Paris"}])
    assert result["failed"]
    errors = [item["rule"] for item in result["findings"] if item["level"] == "error"]
    assert errors == ["env", "known-answer", "tp-size"]
    for words in ("NCCL_PROTO is missing.", "[verify/known-answer]", "[verify/tp-size]"):
        assert words in result["msg"]
    assert json.loads(pathlib.Path(result["record"]).read_text())["findings"] == result["findings"]


def test_it_waits_for_the_server_first_and_keeps_how_that_went(start, run_module):
    release = start({"phases": {"weights": 1}})
    given = {
        "release": str(release.path),
        "device": "cpu",
        "soak_requests": 0,
        "wait": {"timeout": 20, "generations": 2},
    }
    result = run_module("sglang_proof", given)
    assert result["health"]["ready"] and len(result["health"]["generations"]) == 2 and not result.get("failed")
    record = json.loads(pathlib.Path(result["record"]).read_text())
    assert record["health"]["pid"] == release.pid and record["findings"] == result["findings"]


def test_a_server_that_is_never_ready_is_not_proven(start, run_module):
    release = start({"crash": {"phase": "weights", "log": "missing_shard"}})
    result = run_module("sglang_proof", {"release": str(release.path), "wait": {"timeout": 20}})
    assert result["failed"] and result["health"]["cause"]["signature"] == "missing_shard"
    assert "[missing_shard]" in result["msg"] and result["record"] is None and result["findings"] == []


def test_a_dry_run_looks_once_and_says_what_is_missing(start, run_module):
    loading = start({"hang": {"phase": "weights"}})
    empty = start(None)
    os.unlink(empty.path / "launch.json")
    for release in (loading, empty):
        result = run_module("sglang_proof", {"release": str(release.path), "wait": {}}, check=True)
        assert not result.get("failed") and not result["changed"] and result["health"]["ready"] is False
    assert "launch.json" in result["health"]["last_error"]


def test_a_wait_that_cannot_be_meant_is_refused(start, run_module):
    result = run_module("sglang_proof", {"release": str(start(None).path), "wait": {"generations": 0}})
    assert result["failed"] and result["msg"].startswith("generations must be at least 1")
