"""The workloads, their prompts and what the server says of itself, against a server of known behaviour."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from ansible.module_utils import sglang_bench_dataset as dataset
from ansible.module_utils import sglang_bench_server, sglang_nvidia
from ansible.module_utils import sglang_bench_workload as workload
from ansible.module_utils.sglang_bench_record import read_records


def test_a_sweep_has_one_result_for_each_level_in_one_file(serve, bench):
    server = serve(rate=400)
    result = bench(server, workload="sweep", levels="1,4,2", requests=3, output_tokens=9, warmup=None)
    assert [entry["concurrency"] for entry in result["levels"]] == [1, 4, 2]
    # at least twice as many as are in flight
    assert [entry["counts"]["completed"] for entry in result["levels"]] == [3, 8, 4]
    assert result["counts"]["completed"] == 15
    best = max(result["levels"], key=lambda entry: entry["metrics"]["output_tok_s"])
    assert result["metrics"] == best["metrics"]
    assert best["concurrency"] == 4
    document = json.loads(open(result["result_path"]).read())
    assert document["levels"][document["headline"]] == best
    records = read_records(result["result_path"])
    assert [item["level"] for item in records] == [0] * 3 + [1] * 8 + [2] * 4
    assert len(set(server.state.prompts)) == len(server.state.prompts) == 2 + 4 + 15


def test_a_failing_level_is_named_and_makes_the_run_invalid(serve, bench):
    # Two probes, then level 1 with 2 requests, then level 2 with 4, of which the eighth overall fails.
    result = bench(serve(fault="503", fault_every=7), workload="sweep", levels=[1, 2], requests=2)
    assert result["failed"] is True
    assert "concurrency 2: 1 of 4 requests failed" in result["msg"]
    assert result["valid"] is False
    assert result["levels"][0]["failure"] is None
    assert set(result["levels"][1]["metrics"].values()) == {None}


def test_requests_of_a_rate_are_sent_when_they_are_due(serve, bench):
    result = bench(serve(), workload="rate", rate=100, requests=40, seed=5, output_tokens=4, concurrency=32)
    due = workload.arrivals(40, 100, 1.0, 5)
    records = read_records(result["result_path"])
    assert [item["due_ms"] - records[0]["due_ms"] for item in records] == pytest.approx(
        [1e3 * when for when in due], abs=0.01
    )
    delays = [item["sent_ms"] - item["due_ms"] for item in records]
    assert min(delays) >= 0
    assert statistics.median(delays) < 10
    assert result["metrics"]["rate_sent"] == pytest.approx(39 / due[-1], rel=0.1)
    assert result["workload"]["arrivals"] == "Poisson"
    assert result["metrics"]["send_delay_ms_p50"] == pytest.approx(statistics.median(delays), abs=0.01)


def test_a_rate_that_the_limit_in_flight_holds_back_says_so(serve, bench):
    result = bench(serve(ttft_ms=60), workload="rate", rate=100, requests=20, concurrency=2, output_tokens=2)
    assert "rate_not_held" in result["flags"]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_arrivals_have_their_rate_and_burstiness(burstiness, variation):
    times = workload.arrivals(20001, 50.0, burstiness, 3)
    gaps = [after - before for before, after in zip(times, times[1:])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.06)
    assert times == workload.arrivals(20001, 50.0, burstiness, 3)
    assert times != workload.arrivals(20001, 50.0, burstiness, 4)


def test_poisson_gaps_are_exponential():
    """Distance of Kolmogorov and Smirnov to the exponential distribution, at the level of one in a thousand."""
    times = workload.arrivals(5001, 20.0, 1.0, 11)
    gaps = sorted(after - before for before, after in zip(times, times[1:]))
    distance = max(abs((n + 1) / 5000 - (1 - math.exp(-20.0 * gap))) for n, gap in enumerate(gaps))
    assert distance < 1.95 / math.sqrt(5000)


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_decode_is_one_stream_whose_first_token_does_not_count(serve, bench, api):
    server = serve(ttft_ms=50, rate=250)
    result = bench(server, api=api, workload="decode", concurrency=0, requests=2, output_tokens=50)
    truth = [(item["tokens"] - 1) / (item["last"] - item["first"]) for item in server.state.done[-2:]]
    assert result["metrics"]["decode_tok_s_mean"] == pytest.approx(statistics.fmean(truth), rel=0.05)
    assert result["metrics"]["ttft_ms_p50"] >= 50
    assert result["workload"]["concurrency"] == 1


def test_prefill_is_one_token_and_gives_a_rate_of_prompt_tokens(serve, bench):
    result = bench(serve(ttft_ms=100), workload="prefill", requests=2, input_tokens=300, output_tokens=0)
    assert result["metrics"]["output_tokens_mean"] == 1
    assert result["metrics"]["input_tokens_mean"] == 300
    assert result["metrics"]["prefill_tok_s_mean"] == pytest.approx(3000, rel=0.1)
    assert result["metrics"]["tpot_ms_mean"] is None


def test_long_context_fills_what_the_server_says_it_holds(serve, bench):
    result = bench(serve(context=1000), workload="long_context", requests=1, input_tokens=0, output_tokens=20)
    assert result["metrics"]["input_tokens_mean"] == 1000 - 20 - workload.SPARE
    assert result["workload"]["input_tokens"] == 1000 - 20 - workload.SPARE


def test_a_length_that_the_context_gives_is_part_of_the_load(serve, bench):
    """A longer prompt has another TTFT; who compares servers of different room says how long it shall be."""
    common = {"workload": "long_context", "requests": 1, "output_tokens": 20}
    one, other = (bench(serve(context=room), input_tokens=0, **common) for room in (1000, 1200))
    assert one["workload"]["input_tokens"] < other["workload"]["input_tokens"]
    assert one["workload_digest"] != other["workload_digest"]
    one, other = (bench(serve(context=room), input_tokens=900, **common) for room in (1000, 1200))
    assert one["workload_digest"] == other["workload_digest"]


def test_the_context_is_the_least_of_what_is_told():
    models, info = {"data": [{"max_model_len": 262144}]}, {"max_total_num_tokens": 9000}
    assert workload.context(models, info, 100) == 9000 - 100 - workload.SPARE
    assert workload.context(models, {}, 100) == workload.LONGEST
    for told in ({}, {"data": None}):
        with pytest.raises(workload.InputError, match="input_tokens must be given"):
            workload.context(told, {}, 100)
    with pytest.raises(workload.InputError, match="leaves no room"):
        workload.context({"data": [{"max_model_len": 100}]}, {}, 100)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"workload": "decode", "concurrency": 4}, "concurrency is 1 in the workload decode"),
        ({"workload": "decode", "ignore_eos": False}, "ignore_eos must be true"),
        ({"workload": "prefill", "output_tokens": 5}, "output_tokens is 1 in the workload prefill"),
        ({"workload": "sweep", "levels": []}, "levels must be"),
        ({"workload": "sweep", "levels": [0, 2]}, "levels must be"),
        ({"workload": "rate", "rate": 0}, "rate must be more than 0"),
        ({"workload": "rate", "burstiness": -1}, "burstiness must be more than 0"),
        ({"prompts_file": "/nonexistent"}, "prompts_file must be a file"),
    ],
)
def test_what_contradicts_a_workload_is_refused(serve, run_module, params, text):
    server = serve()
    result = run_module("sglang_bench", {"url": server.url, **params})
    assert result["failed"] is True
    assert text in result["msg"]
    assert server.state.seen == 0


@pytest.mark.parametrize(
    ("content", "source", "first"),
    [
        (
            '[{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "one"}]}]',
            "sharegpt",
            "one",
        ),
        ('[{"id": 1, "conversation": [{"role": "user", "content": "one"}]}]', "sharegpt", "one"),
        ('[{"messages": [{"role": "user", "content": "one"}]}]', "file", "one"),
        ('["one", "one"]', "file", "one"),
        ('{"prompt": "one"}\n{"prompt": "one"}\n', "file", "one"),
        ("one\n\none\n", "file", "one"),
        ("{one\n", "file", "{one"),
    ],
)
def test_files_of_prompts_are_read(tmp_path, content, source, first):
    path = tmp_path / "prompts"
    path.write_text(content)
    told, texts = dataset.read_prompts(str(path))
    assert told == source
    assert set(texts) == {first}


@pytest.mark.parametrize(
    "content", ["", "[]", '[{"conversations": []}]', '[{"conversations": [{"from": "gpt", "value": "x"}]}]']
)
def test_a_file_without_a_prompt_is_refused_before_anything_is_sent(serve, bench, tmp_path, content):
    path, server = tmp_path / "prompts.json", serve()
    path.write_text(content)
    result = bench(server, prompts_file=str(path))
    assert result["failed"] is True
    assert "holds no prompt" in result["msg"]
    assert server.state.seen == 0


def test_prompts_of_a_file_are_unique_unless_told_otherwise(serve, bench, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("tell me one\ntell me two\ntell me three\n")
    server = serve()
    result = bench(server, prompts_file=str(path), requests=6)
    mine = server.state.prompts[2:]
    assert len({text[:15] for text in mine}) == 6
    assert sorted(text.split("\n")[1] for text in mine) == sorted(path.read_text().splitlines() * 2)
    assert result["workload"]["prompts"]["source"] == "file"
    assert result["workload"]["prompts"]["count"] == 3
    server.state.prompts.clear()
    other = bench(server, prompts_file=str(path), requests=6, unique_prompts=False)
    assert set(server.state.prompts[2:]) == set(path.read_text().splitlines())
    assert other["workload_digest"] != result["workload_digest"]


def test_a_tokenizer_makes_each_prompt_exact_where_words_are_several_tokens():
    def count(text):
        return sum(1 + (len(word) > 3) for word in text.split())

    def told(words):
        return (words, count(made.probe(words)) + 7)

    made = dataset.Prompts(1, count=count)
    made.fit(500, told(12), told(500))
    lengths = [count(made.text(f"request {n}", n)) + 7 for n in range(20)]
    assert set(lengths) == {500}
    fitted = dataset.Prompts(1)
    fitted.fit(500, told(12), told(500))
    assert fitted.describe()["length"].startswith("calibrated")
    assert dataset.load_tokenizer("/nonexistent") is None


def test_what_the_server_says_is_beside_what_the_client_saw(serve, bench, monkeypatch):
    monkeypatch.setattr(sglang_bench_server, "EVERY", 0.05)
    server = serve(queue=3, rate=100, cached_tokens=16, accept_length=2.5)
    result = bench(server, output_tokens=30, flush_cache=True)
    seen = result["server"]
    assert seen["samples"] >= 2
    assert seen["derived"]["queue_max"] == 3
    assert seen["derived"]["gen_throughput"] == 100
    assert seen["derived"]["accept_length"] == 2.5
    assert seen["derived"]["cache_hit_rate"] == 0.25
    assert seen["counters"]["generation_tokens_total"] == 8 * 30
    assert any(text.startswith("queue_ms_mean: the server has no queue times") for text in seen["missing"])
    assert server.state.flushes == 1
    assert result["levels"][0]["cache_flush"] == {"status": 200, "detail": "Cache flushed."}
    assert bench(serve())["levels"][0]["cache_flush"] is None


def test_an_xid_makes_the_run_invalid_and_fails_it_after_the_record(serve, bench, monkeypatch, tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("")
    card = {"index": "0", "name": "A", "uuid": "u", "driver_version": "1", "power_limit_w": 600.0}

    class Failing(sglang_nvidia.Watch):
        def __exit__(self, *exc):
            log.write_text("6,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n")
            super().__exit__(*exc)

    monkeypatch.setattr(sglang_nvidia, "cards", lambda: [card])
    monkeypatch.setattr(sglang_nvidia, "KERNEL_LOG", str(log))
    monkeypatch.setattr(sglang_nvidia, "DMON", [str(tmp_path / "no nvidia-smi")])
    monkeypatch.setattr(sglang_nvidia, "Watch", Failing)
    result = bench(serve())
    assert result["failed"] is True
    assert "Xid" in result["msg"] and "fallen off the bus" in result["msg"]
    assert result["valid"] is False
    assert json.loads(open(result["result_path"]).read())["gpu"]["xid"][0]["xid"] == 79
    assert result["fingerprint"]["gpu_names"] == ["A"]


def test_equal_loads_have_equal_digests(serve, bench):
    server = serve()
    one, same, other = bench(server), bench(server, request_timeout=9), bench(server, concurrency=2)
    assert one["workload_digest"] == same["workload_digest"] != other["workload_digest"]
