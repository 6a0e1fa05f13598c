"""The module sglang_health against a scripted server: one test for each way in which a start ends."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import threading
import time

import pytest
import requests
from ansible.module_utils import sglang_client, sglang_proc, sglang_watch, sglang_watch_processes
from ansible.module_utils.sglang_watch_processes import state_of
from ansible.module_utils.sglang_watch_stacks import dump


def signature(result):
    """Return the name of the cause of a failed result."""
    assert result["failed"] and not result["ready"]
    assert result["cause"]["advice"] in result["msg"]
    return result["cause"]["signature"]


def test_a_good_start_is_ready_by_real_generations(start, health):
    release = start({"phases": {"weights": 0.4}})
    result = health(release, generations=2)
    assert result["ready"] and not result["changed"]
    assert result["phase"] == "serving" and result["served_model"] == "tiny"
    assert [item["tokens"] for item in result["generations"]] == [8, 8]
    assert {"weights", "warmup", "ready"} <= {item["phase"] for item in result["phases"]}
    assert result["endpoint"]["health"] == "200"
    progress = json.loads((release.path / "run" / "progress.json").read_text())
    assert (progress["state"], progress["phase"], progress["pid"]) == ("ready", "serving", release.pid)


def test_the_process_is_found_by_its_marker(start, health):
    release = start({})
    assert health(release, pid=None)["pid"] == release.pid


@pytest.mark.parametrize("seed", range(3))
def test_random_speeds_give_no_false_alarm(start, health, seed):
    phases = dict.fromkeys(("imports", "distributed", "weights", "kv_cache", "graph", "warmup"), [0, 0.4])
    assert health(start({"seed": seed, "phases": phases}), generations=1)["ready"]


def test_health_200_with_a_dead_generation_fails_within_the_generation_limit(start, health):  # F23
    result = health(start({"generation": {"mode": "silent"}}), generation_timeout=1)
    assert signature(result) == "generation_dead"  # and not the limit of the whole wait
    assert "Port open, health: 200, generation: " in result["msg"]


def test_one_token_of_another_client_does_not_hide_a_dead_generation(start, health, monkeypatch):
    """It flowed in the first attempt; the second one is as long as the limit and no more."""
    release = start({"generation": {"mode": "silent"}})
    real, asked = sglang_client.Client.generate, []

    def generate(self, *args):
        asked.append(args)
        if len(asked) == 1:
            with open(release.launch["log"], "a", encoding="utf-8") as log:
                log.write("[2026-01-01 00:00:00 TP0] Decode batch, #running-req: 1, #token: 9\n")
        return real(self, *args)

    monkeypatch.setattr(sglang_client.Client, "generate", generate)
    assert signature(health(release, generation_timeout=1)) == "generation_dead"
    assert len(asked) == 2


def test_serving_two_and_then_hanging_is_found_by_the_third(start, health):
    result = health(start({"generation": {"mode": "silent", "after": 2}}), generation_timeout=1)
    assert signature(result) == "generation_dead"
    assert len(result["generations"]) == 2


@pytest.mark.parametrize("mode", ["degenerate", "empty", "one_token"])
def test_an_answer_that_is_none_is_refused_with_its_text(start, health, mode):  # F36
    result = health(start({"generation": {"mode": mode}}))
    assert signature(result) == "degenerate"
    if mode == "degenerate":
        assert "foss foss foss" in result["msg"]


def test_the_threshold_is_an_input(start, health):
    release = start({})
    assert signature(health(release, min_distinct=13, max_tokens=16, generations=1)) == "degenerate"


def test_a_port_that_never_answers_ends_at_the_whole_limit(start, health):  # F40
    result = health(start({"accept_only": True}), timeout=3, request_timeout=1)
    assert signature(result) == "timeout"
    assert result["elapsed"] >= 3


def test_silence_in_a_phase_is_a_stall_and_slowness_is_not(start, health):
    slow = start({"phases": {"weights": 4}, "shards": 20})
    assert health(slow, phase_silence={"weights": 3}, generations=1)["ready"]
    stuck = start({"hang": {"phase": "weights"}}, name="r2")
    result = health(stuck, phase_silence={"weights": 1.0})
    assert (signature(result), result["cause"]["phase"]) == ("stalled", "weights")
    assert result["progress"]["total"] == 4


def test_a_kernel_that_is_compiled_is_no_stall(start, health):
    release = start({"compile": {"phase": "graph", "seconds": 7}})
    result = health(release, phase_silence={"graph": 3}, generations=1)
    assert result["ready"], result["msg"]


PY_SPY = """#!/bin/sh
case "$4" in {stuck}) exec sleep 60;; esac
echo "Process $4: python -m sglang.launch_server"
echo
echo 'Thread 1 (active): "MainThread"'
echo "    all_reduce (torch/distributed/distributed_c10d.py:$4)"
echo "    forward (model.py:1)"
"""


def test_a_stall_keeps_the_stacks_of_parent_and_workers(start, health, tmp_path, monkeypatch):
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text(PY_SPY.format(stuck="none"))
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(spy.parent), prepend=":")
    release = start({"hang": {"phase": "weights"}})
    result = health(release, phase_silence={"weights": 1.0, "imports": 15})
    assert signature(result) == "stalled" and "in phase weights" in result["msg"]
    text = pathlib.Path(result["stacks"]).read_text()
    workers = [item for item in sglang_proc.scan(str(release.path)) if item["role"] in sglang_proc.WORKER_ROLES]
    assert len(workers) == 3
    for pid in [release.pid, *(item["pid"] for item in workers)]:
        assert f"=== pid {pid} " in text and f"distributed_c10d.py:{pid}" in text
        assert f"all_reduce (torch/distributed/distributed_c10d.py:{pid})" in result["msg"]


def test_without_py_spy_the_stall_says_so(start, health, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = health(start({"hang": {"phase": "weights"}}), phase_silence={"weights": 1.0})
    assert signature(result) == "stalled" and result["stacks"] is None
    assert "py-spy is neither on PATH nor beside the engine's interpreter" in result["msg"]


def test_a_py_spy_that_hangs_does_not_hide_the_others(tmp_path):
    spy = tmp_path / "py-spy"
    spy.write_text(PY_SPY.format(stuck="11"))
    spy.chmod(0o755)
    texts = dump(str(spy), [10, 11, 12], limit=2)
    assert "c10d.py:10" in texts[10] and "c10d.py:12" in texts[12]
    assert texts[11] == "py-spy gave no answer within 2 s"


def test_one_root_error_under_forty_tracebacks_is_the_one_shown(start, health):  # F05
    # Long enough for the other rank to reach the phase as well: the slowest one counts.
    result = health(start({"phases": {"graph": 4}, "crash": {"phase": "graph", "rank": 0, "log": "many_ranks"}}))
    assert signature(result) == "cuda_fault"
    assert result["cause"]["phase"] == "graph" and result["cause"]["ranks"] == list(range(8))
    assert "illegal memory access" in result["cause"]["first_error"]
    assert result["msg"].count("unhandled cuda error") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_scheduler_under_a_living_parent_ends_the_wait(start, health, rank):
    result = health(start({"die": {"phase": "serving", "rank": rank}, "token_seconds": 0.1}), generations=3)
    assert signature(result) == "worker_died"  # and not the limit of a generation


def test_a_scheduler_that_died_before_it_was_seen_ends_the_wait(start, health, monkeypatch):
    """No scan ever shows one: between two looks it came, died and was reaped."""
    seen = sglang_watch_processes.sglang_proc.scan
    monkeypatch.setattr(
        sglang_watch_processes.sglang_proc, "scan",
        lambda *args: [item for item in seen(*args) if item["role"] != "scheduler"],
    )  # fmt: skip
    result = health(start({"die": {"phase": "warmup", "rank": 0}, "phases": {"warmup": 60}}))
    assert signature(result) == "worker_died" and result["elapsed"] < 20
    assert "no scheduler process lives" in result["msg"]


def test_an_orphan_of_an_earlier_start_is_no_worker_of_this_one(start, health):
    release = start({"orphans": True})
    assert health(release, generations=1)["ready"]
    first = release.pid
    os.kill(first, signal.SIGKILL)
    release.run({"phases": {"imports": 2}})
    threading.Timer(1.0, os.killpg, (first, signal.SIGKILL)).start()
    assert health(release, generations=1)["ready"]


def test_a_crash_is_seen_by_its_fatal_line_while_the_parent_lives(start, health):
    release = start({"crash": {"phase": "kv_cache", "log": "oom_kv_cache", "parent_linger": 60}})
    assert signature(health(release)) == "oom_kv_cache"
    assert sglang_proc.alive(state_of(release.pid)[0])


def test_a_bad_flag_is_named(start, health):
    result = health(start({}, flags=["--no-such-flag"]))
    assert signature(result) == "bad_flag"
    assert "--no-such-flag" in result["cause"]["detail"]
    assert result["log_tail"]


def test_the_answer_of_another_server_does_not_count(start, health):
    other = start({}, name="other")
    assert health(other, generations=1)["ready"]
    ours = start({}, name="ours", port=other.port)
    result = health(ours)
    assert signature(result) in ("foreign_listener", "port_taken")
    assert str(other.pid) in result["cause"]["detail"]
    assert not result["generations"]


def test_another_model_name_is_not_ours(start, health):
    assert signature(health(start({"served_model_name": "other"}))) == "wrong_model"


def test_localhost_may_be_ipv6(start, health):  # F22
    wildcard = start({"ipv6_only": True}, endpoint="http://[::]:{port}")
    assert health(wildcard, generations=1)["ready"]
    only4 = start({}, name="r2", endpoint="http://localhost:{port}")
    assert health(only4, generations=1)["ready"]
    bracketed = start({"ipv6_only": True}, name="r3", endpoint="http://[::1]:{port}")
    assert health(bracketed, generations=1)["ready"]


def test_an_api_key_is_asked_for_by_name(start, health):
    release = start({}, flags=["--api-key", "a-key-of-the-test"])
    assert signature(health(release)) == "unauthorised"
    (release.path / "key").write_text("a-key-of-the-test\n")
    launch = dict(release.launch, env={"SGLANG_DEPLOY_API_KEY_FILE": str(release.path / "key")})
    (release.path / "launch.json").write_text(json.dumps(launch))
    assert health(release, generations=1)["ready"]
    result = health(release, api_key="a-key-of-the-test", generations=1)
    assert result["ready"]
    assert "a-key-of-the-test" not in json.dumps({k: v for k, v in result.items() if k != "invocation"})


def test_a_busy_server_is_not_called_dead(start, health):  # F25
    release = start({"health": {"status": 503, "busy": True}, "token_seconds": 0.05})
    assert health(release, generations=1)["ready"]
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 400}}
    url = f"http://127.0.0.1:{release.port}"

    def stream():
        with contextlib.suppress(requests.exceptions.RequestException):  # the end of the test ends the server
            for _chunk in requests.post(f"{url}/generate", json=body, stream=True, timeout=30).iter_content(64):
                pass

    threading.Thread(target=stream, daemon=True).start()
    while requests.get(f"{url}/health", timeout=5).status_code != 503:
        time.sleep(0.05)
    result = health(release, state="probe", generations=0)
    assert result["ready"] and result["busy"]


def test_health_that_never_comes_after_the_generations_ends_the_wait(start, health, monkeypatch):
    monkeypatch.setitem(sglang_watch.SILENCE, "ready", 1.0)
    result = health(start({"health": {"status": 503}}))
    assert signature(result) == "health_failed"  # and not the limit of the whole wait
    assert len(result["generations"]) == 3 and "/health: 503, 1 s after 3 generations" in result["msg"]


def test_503_without_any_tokens_is_not_ready(start, health):
    release = start({"health": {"status": 503}})
    result = health(release, state="probe", generations=0)
    # The server's own warm-up is tokens that flow; a probe in its moment says busy.
    deadline = time.monotonic() + 60
    while not (result["cause"] and result["phase"] in ("ready", "serving")) and time.monotonic() < deadline:
        time.sleep(0.2)
        result = health(release, state="probe", generations=0)
    assert not result["ready"] and result["cause"]["signature"] == "health_failed"


@pytest.mark.parametrize("state", ["ready", "probe"])
def test_a_connection_closed_without_an_answer_does_not_wait_for_ever(start, health, monkeypatch, state):
    """The whole limit of a deploy is half an hour; a status asks once."""
    release = start({})
    assert health(release, generations=1)["ready"]

    def closed(*_args, **_more):
        raise sglang_client.ClientError("refused", "/generate cannot be reached: closed without an answer")

    monkeypatch.setattr(sglang_client.Client, "generate", closed)
    limit = 1 if state == "ready" else 10
    result = health(release, state=state, generations=1, generation_timeout=limit)
    assert not result["ready"] and result["cause"]["signature"] == "generation_failed"
    assert result["elapsed"] < 6


def test_check_mode_judges_once_and_writes_nothing(start, health):
    release = start({"phases": {"imports": 30}})
    result = health(release, check=True)
    assert not result["ready"] and not result.get("failed")
    assert result["phase"] in ("spawned", "imports")
    assert not (release.path / "run").exists()


def test_results_have_the_same_keys_however_it_ends(start, health):
    nothing = start(None, name="nothing")
    (nothing.path / "launch.json").unlink()
    absent = health(nothing, check=True)
    ready = health(start({}), generations=1)
    failed = health(start({"generation": {"mode": "empty"}}, name="r2"))
    extra = {"msg", "failed", "invocation", "exception"}
    assert set(absent) - extra == set(ready) - extra == set(failed) - extra


def test_no_process_at_all_is_no_reason_to_wait(start, health):
    assert signature(health(start(None))) == "not_running"


@pytest.mark.parametrize(
    ("args", "named"),
    [({"generations": 0}, "generations"), ({"max_tokens": 1}, "max_tokens"), ({"timeout": 0}, "timeout")],
)
def test_a_bad_input_is_named(start, health, args, named):
    result = health(start(None), **args)
    assert result["failed"] and result["msg"].startswith(named)


def test_a_wait_keeps_the_deploy_lock_fresh_and_a_probe_does_not(start, health, tmp_path):
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"schema": 1, "run": {"id": "r"}, "variant": "v", "since": ""}))
    before = time.time() - 800
    os.utime(lock, (before, before))
    release = start({"hang": {"phase": "weights"}})
    health(release, state="probe", generations=0)
    assert lock.stat().st_mtime == pytest.approx(before, abs=1)
    assert signature(health(release, timeout=1)) == "timeout"
    assert time.time() - lock.stat().st_mtime < 60
