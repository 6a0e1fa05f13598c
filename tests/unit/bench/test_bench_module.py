"""The module against a server of known behaviour: figures, faults, records."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest
import sglang_bench
from ansible.module_utils import sglang_bench_client
from ansible.module_utils.sglang_bench_record import read_records
from ansible.module_utils.sglang_bench_stats import COUNTS, METRICS


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_figures_agree_with_the_server(serve, bench):
    server = serve(ttft_ms=30, rate=200)
    result = bench(server, requests=8, output_tokens=32, warmup=4)
    truth = server.state.done[-8:]
    ttft = sum(item["first"] - item["parsed"] for item in truth) / 8 * 1e3
    tpot = sum((item["last"] - item["first"]) / 31 for item in truth) / 8 * 1e3
    window = max(item["last"] for item in truth) - min(item["parsed"] for item in truth)
    numbers = result["metrics"]
    # Wide enough for a busy machine: server and client share this process.
    assert numbers["ttft_ms_mean"] == pytest.approx(ttft, abs=3)
    assert numbers["tpot_ms_mean"] == pytest.approx(tpot, rel=0.03)
    assert numbers["output_tok_s"] == pytest.approx(8 * 32 / window, rel=0.03)
    assert numbers["output_tokens_total"] == 8 * 32
    assert numbers["concurrency_effective"] == pytest.approx(4, rel=0.1)
    assert result["counts"]["completed"] == 8
    assert result["counts"]["failed"] == 0
    assert result["changed"] is False


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_prompts_have_the_wanted_length_and_share_no_prefix(serve, bench, api):
    server = serve(cached_tokens=0)
    result = bench(server, api=api, input_tokens=100)
    assert result["metrics"]["input_tokens_mean"] == 100
    assert result["counts"]["completed"] == 8
    assert len({prompt[:16] for prompt in server.state.prompts}) == len(server.state.prompts) == 8 + 2


def test_a_seed_repeats_the_prompts_and_without_one_they_are_new(serve, bench):
    server = serve()
    seen = []
    for seed in (7, 7, None, None):
        server.state.prompts.clear()
        bench(server, seed=seed)
        seen.append(sorted(server.state.prompts))
    assert seen[0] == seen[1]
    assert len({tuple(prompts) for prompts in seen}) == 3


@pytest.mark.parametrize("channel", ["content", "reasoning_content", "reasoning", "both", "tool_calls"])
def test_tokens_of_every_channel_count(serve, bench, channel):
    result = bench(serve(channel=channel, ttft_ms=40))
    assert result["counts"]["completed"] == 8
    assert result["metrics"]["output_tokens_mean"] == 16
    assert result["metrics"]["ttft_ms_p50"] >= 40


def test_an_empty_role_chunk_is_no_token(serve, bench):
    result = bench(serve(role_at_once=True, ttft_ms=60), concurrency=1, requests=2)
    assert result["metrics"]["ttft_ms_p50"] >= 60


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_several_tokens_in_an_event_share_its_gap(serve, bench, api):
    server = serve(tokens_per_chunk=4, rate=400)
    numbers = bench(server, api=api, output_tokens=33, concurrency=2, requests=4)["metrics"]
    truth = server.state.done[-4:]
    tpot = sum((item["last"] - item["first"]) / 32 for item in truth) / 4 * 1e3
    assert numbers["output_tokens_mean"] == 33
    assert numbers["itl_ms_mean"] == pytest.approx(tpot, rel=0.05)
    assert numbers["tpot_ms_mean"] == pytest.approx(tpot, rel=0.05)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("401", "unauthorized", "API key that was missing"),
        ("503", "http_error", "HTTP 503"),
        ("close", "truncated", "8 of 8"),
        ("error", "stream_error", "out of memory in the decode step"),
        ("no_done", "truncated", "without [DONE]"),
        ("short", "truncated", "8 of 16 tokens"),
        ("empty", "empty", "no token"),
    ],
)
def test_a_server_that_fails_all_requests_fails_the_task(serve, bench, fault, kind, text):
    result = bench(serve(fault=fault))
    assert result["failed"] is True
    assert text in result["msg"]
    assert result["counts"][kind] == result["counts"]["failed"] == 8
    assert set(result["metrics"].values()) == {None}
    assert [item["rule"] for item in result["findings"] if item["level"] == "error"] == ["failed-requests"]


def test_an_answer_that_stops_times_out(serve, bench):
    # Two probes come first, so the third and the sixth request are measured ones.
    result = bench(serve(fault="stall", fault_every=3), request_timeout=0.6, requests=4)
    assert result["failed"] is True
    assert result["counts"]["timed_out"] == 2
    assert result["counts"]["completed"] == 2
    assert result["elapsed"] < 5


def test_a_server_that_answers_nothing_is_given_up_after_the_probes(serve, bench):
    server = serve(fault="silent")
    result = bench(server, request_timeout=0.4, requests=40)
    assert result["failed"] is True
    assert result["counts"]["not_sent"] == 40
    assert "one token did not come either" in result["msg"]
    assert result["elapsed"] < 3
    assert server.state.seen == 2


def test_a_run_with_much_output_is_read_on_the_way(serve, bench, monkeypatch):
    monkeypatch.setattr(sglang_bench_client, "KEEP", 2000)
    result = bench(serve())
    assert result["counts"]["completed"] == 8
    assert result["metrics"]["output_tokens_total"] == 8 * 16


def test_the_whole_run_ends_in_time(serve, bench):
    result = bench(serve(rate=10), requests=40, timeout=1.5)
    assert result["failed"] is True
    assert result["elapsed"] < 3.5
    assert result["counts"]["not_sent"] > 0
    assert result["counts"]["not_sent"] + result["counts"]["timed_out"] == 40


def test_nothing_listens(run_module, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = run_module("sglang_bench", {"url": url, "requests": 3, "results_dir": str(tmp_path)})
    assert result["failed"] is True
    assert result["counts"]["refused"] == 3
    assert "check that the server runs" in result["msg"]


def test_an_allowed_share_may_fail_and_is_not_counted_as_speed(serve, bench):
    server = serve(fault="503", fault_every=5)
    result = bench(server, requests=20, max_failed=0.25)
    assert "failed" not in result or not result["failed"]
    assert result["counts"]["failed"] == result["counts"]["http_error"] > 0
    assert result["metrics"]["output_tokens_total"] == result["counts"]["completed"] * 16
    assert "failed_requests" in result["flags"]
    assert bench(server, requests=20, max_failed=0.01)["failed"] is True


def test_a_missing_usage_is_stated(serve, bench):
    result = bench(serve(usage=False))
    assert result["counts"]["usage_missing"] == result["counts"]["completed"] == 8
    assert {"usage_missing", "prompt_length_not_calibrated"} <= set(result["flags"])
    assert result["metrics"]["output_tokens_mean"] == 16
    assert result["metrics"]["input_tokens_mean"] is None


def test_repeated_words_and_cached_prompts_are_flagged(serve, bench):
    flags = bench(serve(repeat=True, cached_tokens=60), output_tokens=32)["flags"]
    assert "degenerate_output" in flags
    assert "prompts_cached" in flags
    assert "degenerate_output" not in bench(serve(), output_tokens=32)["flags"]


def test_the_run_is_recorded(serve, bench, tmp_path):
    key = "sk-very-secret"
    run = {"id": "r1", "user": "ops", "controller": "c", "alive": [[4711, 123456]]}
    result = bench(serve(), run=run, variant="fewchan", api_key=key)
    path = tmp_path / "results" / result["result_path"].rsplit("/", 1)[1]
    document = json.loads(path.read_text())
    assert path.name.endswith("-r1.json")
    assert document["schema"] == 2
    assert document["valid"] is True
    assert document["run"] == {"id": "r1", "user": "ops", "controller": "c"}
    assert document["workload"]["seed"] == result["seed"]
    records = read_records(str(path))
    assert [len(item["event_ms"]) for item in records] == [16] * 8
    assert document["records"]["count"] == 8
    assert document["fingerprint"]["digest"] == result["fingerprint"]["digest"]
    (line,) = lines(tmp_path / "ledger.jsonl")
    assert line["event"] == "run"
    assert line["run"] == "r1"
    assert line["variant"] == "fewchan"
    assert line["result"] == str(path)
    assert line["metrics"]["output_tok_s"] == result["metrics"]["output_tok_s"]
    assert "definitions" not in line
    written = path.read_text() + (tmp_path / "ledger.jsonl").read_text() + json.dumps([result, records])
    assert key not in written


def test_history_for_the_decision_has_this_run(serve, bench, tmp_path):
    server, run = serve(), {"id": "r1", "user": "ops", "controller": "c"}
    release = tmp_path / "releases" / "20260101T000000Z-fewchan-00"
    release.mkdir(parents=True)
    (release / "launch.json").write_text(json.dumps({"endpoint": server.url, "served_model_name": "scripted"}))
    common = {"url": None, "release": str(release), "run": run, "variant": "fewchan"}
    assert bench(server, **common)["history"] is None
    wanted = {"releases": [release.name, ""], "metrics": ["itl_ms_p99"]}
    found = bench(server, **common, history=wanted)["history"]
    assert [item["variant"] for item in found["runs"]] == ["fewchan"] * 2
    assert found["runs"][1]["metrics"]["itl_ms_p99"] > 0
    assert set(found) == {"runs", "scores", "looks", "spent", "problems"}


@pytest.mark.parametrize("key", ["sglang", "baseline", "32"])
def test_history_that_ansible_would_mask_is_left_to_the_decision(serve, bench, tmp_path, key):
    """A masked release id names no run, and a masked number is a text."""
    run, release = {"id": "r1"}, tmp_path / "sglang" / "releases" / "20260101T000000Z-baseline-00"
    release.mkdir(parents=True)
    (release / "launch.json").write_text("{}")
    where = {"root": None, "results_dir": None, "release": str(release), "output_tokens": 32}
    where["history"] = {"releases": [release.name]}
    assert bench(serve(), run=run, api_key=key, **where)["history"] is None
    found = bench(serve(), run=run, api_key="sk-very-secret", **where)["history"]
    assert [item["release"] for item in found["runs"]] == [release.name] * 2


@pytest.mark.parametrize("error", [PermissionError("no"), ValueError("no")])
def test_a_ledger_that_cannot_be_read_does_not_fail_a_run_that_was_recorded(serve, bench, tmp_path, monkeypatch, error):
    def unreadable(*_args, **_more):
        raise error

    monkeypatch.setattr(sglang_bench, "history", unreadable)
    result = bench(serve(), run={"id": "r1"}, history={"releases": []})
    assert not result.get("failed") and result["history"] is None
    assert result["counts"]["completed"] == 8
    assert len(lines(tmp_path / "ledger.jsonl")) == 1


@pytest.mark.parametrize("named", ["root", "release"])
def test_a_long_run_keeps_the_deploy_lock_fresh(serve, bench, tmp_path, named):
    lock, server = tmp_path / "lock", serve()
    lock.write_text(json.dumps({"schema": 1, "run": {"id": "other"}, "variant": "v", "since": ""}))
    os.utime(lock, (time.time() - 800,) * 2)
    release = tmp_path / "releases" / "r"
    release.mkdir(parents=True)
    (release / "launch.json").write_text("{}")
    where = {"root": str(tmp_path)} if named == "root" else {"root": None, "release": str(release)}
    assert bench(server, **where)["counts"]["completed"] == 8
    assert time.time() - lock.stat().st_mtime < 60


def test_a_release_names_the_server(serve, bench, tmp_path):
    server = serve()
    release = tmp_path / "releases" / "20260101T000000Z-baseline-00"
    release.mkdir(parents=True)
    (release / "launch.json").write_text(json.dumps({"endpoint": server.url, "served_model_name": "scripted"}))
    (tmp_path / "current").symlink_to(release)
    result = bench(server, url=None, release=str(tmp_path / "current"), results_dir=None, root=None)
    assert result["result_path"].startswith(str(release / "results"))
    assert lines(tmp_path / "ledger.jsonl")[0]["release"] == release.name


def test_check_mode_sends_nothing_and_has_the_same_keys(serve, bench):
    server = serve()
    dry = bench(server, check=True)
    assert server.state.seen == 0
    assert dry["skipped_reason"]
    real = bench(server)
    assert real["skipped_reason"] is None
    assert set(dry) == set(real)
    assert set(dry["metrics"]) == set(real["metrics"]) == set(METRICS)
    assert set(dry["counts"]) == set(real["counts"]) == set(COUNTS)
    assert set(dry["metrics"].values()) == {None}


def test_a_missed_limit_fails_after_the_record_was_kept(serve, bench, tmp_path):
    result = bench(serve(), limits={"min_output_tok_s": "1e9", "max_ttft_ms_p50": 10000})
    assert result["failed"] is True
    assert "min-output-tok-s" in result["msg"]
    assert result["metrics"]["output_tok_s"] > 0
    assert lines(tmp_path / "ledger.jsonl")[0]["findings"][0]["rule"] == "min-output-tok-s"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"requests": -1}, "requests must be at least 1"),
        ({"max_failed": 10}, "max_failed is a share"),
        ({"run": {"user": "ops"}, "history": {"releases": []}}, "run must have an id"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"warmup": -1}, "warmup must be 0 or more"),
        ({"limits": {"min_output_toks": 1}}, "did you mean min_output_tok_s"),
        ({"limits": {"min_output_tok_s": "fast"}}, "must be a number"),
        ({"url": None, "release": "/nonexistent/release"}, "Build the release first"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(serve, bench, params, text):
    server = serve()
    result = bench(server, **params)
    assert result["failed"] is True
    assert text in result["msg"]
    assert server.state.seen == 0
