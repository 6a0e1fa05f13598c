"""Every workload of sglang_bench against the real server, and a sweep as an operator types it.

Comes before test_real_server.py, which stops the server in the end.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {"requests": 4, "concurrency": 2, "input_tokens": 40, "output_tokens": 8, "raw": True}
RUNS = {
    "chat": {**SMALL, "output_tokens": 24},
    "completions": {**SMALL, "api": "completions"},
    "generate": {**SMALL, "api": "generate", "flush_cache": True},
    "rate": {**SMALL, "workload": "rate", "rate": 20, "concurrency": 8, "seed": 3},
    "sweep": {**SMALL, "workload": "sweep", "concurrency": 0, "levels": [1, 3]},
    "decode": {"workload": "decode", "requests": 2, "output_tokens": 48},
    "prefill": {"workload": "prefill", "requests": 2, "input_tokens": 600},
    "long_context": {"workload": "long_context", "requests": 1, "output_tokens": 8},
    "file": {**SMALL, "prompts_file": True},
}


@pytest.fixture(scope="module")
def documents(node, tmp_path_factory):
    """Return ``{name of a run: its result document}``, all measured in one process with the engine's interpreter."""
    prompts = tmp_path_factory.mktemp("prompts") / "sharegpt.json"
    turns = [[{"from": "human", "value": f"hello world {n}"}, {"from": "gpt", "value": "x"}] for n in range(3)]
    prompts.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    launch = node.launch()
    release = str(node.root / "releases" / node.current)
    model = launch["argv"][launch["argv"].index("--model-path") + 1]
    wanted = []
    for run in RUNS.values():
        common = {"url": launch["endpoint"], "model": launch["served_model_name"], "tokenizer": model}
        wanted.append({**common, "release": release, **run})
        if "prompts_file" in run:
            wanted[-1]["prompts_file"] = str(prompts)
    command = [launch["argv"][0], str(ROOT / "tests" / "support" / "measure.py"), json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(RUNS, map(json.loads, done.stdout.splitlines())))


@pytest.mark.parametrize("name", RUNS)
def test_every_workload_measures_the_real_server(documents, name):
    document = documents[name]
    assert document["failure"] is None
    assert document["valid"] is True
    tally, numbers = document["counts"], document["metrics"]
    assert tally["completed"] == tally["requested"] > 0
    assert tally["usage_missing"] == 0
    wanted = document["workload"]
    assert numbers["output_tokens_mean"] == wanted["output_tokens"]
    if wanted["prompts"]["source"] == "synthetic":
        assert wanted["prompts"]["length"].startswith("tokenizer")
        assert numbers["input_tokens_mean"] == wanted["input_tokens"]
    assert numbers["ttft_ms_p50"] > 0
    assert numbers["output_tok_s"] > 0


def test_the_server_counts_the_same_tokens(documents):
    """Its own counters over the measured time; probes and warm-up are outside of it."""
    for name in ("chat", "completions", "generate"):
        counters, numbers = documents[name]["server"]["counters"], documents[name]["metrics"]
        assert counters["generation_tokens_total"] == numbers["output_tokens_total"]
        assert counters["prompt_tokens_total"] == numbers["input_tokens_mean"] * documents[name]["counts"]["completed"]
        assert documents[name]["server"]["info"]["version"] == "0.5.9"


def test_each_prompt_is_new_and_a_flush_is_answered(documents):
    document = documents["generate"]
    assert document["levels"][0]["cache_flush"]["status"] == 200
    # one token is common to all, the one that begins a text
    assert all(item["cached_tokens"] <= 2 for item in document["raw_records"])


def test_a_rate_keeps_its_times(documents):
    sent = [item["sent_ms"] - item["due_ms"] for item in documents["rate"]["raw_records"]]
    assert min(sent) >= 0
    assert documents["rate"]["workload"]["arrivals"] == "Poisson"


def test_a_single_stream_decodes_beside_its_prefill(documents):
    decode, prefill = documents["decode"]["metrics"], documents["prefill"]["metrics"]
    assert decode["decode_tok_s_p50"] > decode["output_tok_s"], "the first token's time is not in the rate of decoding"
    assert decode["concurrency_effective"] == pytest.approx(1, abs=0.05)
    assert prefill["decode_tok_s_p50"] is None
    assert prefill["prefill_tok_s_p50"] == pytest.approx(600 / prefill["ttft_ms_p50"] * 1e3, rel=0.5)


def test_long_context_is_as_long_as_the_server_says(documents):
    assert 1500 < documents["long_context"]["metrics"]["input_tokens_mean"] < 2048


def test_the_fingerprint_names_engine_model_and_release(node, documents):
    found, record = documents["chat"]["fingerprint"], node.manifest(node.current)["record"]
    assert found["unknown"] == []
    assert found["engine_digest"] == record["engine"]["fingerprint"]
    assert found["model_digest"] == record["model"]["fingerprint"]
    assert found["launch_digest"] == node.manifest(node.current)["digest"]
    assert found["gpu_count"] == 0 and found["nccl_version"] is None
    assert {document["fingerprint"]["digest"] for document in documents.values()} == {found["digest"]}
    assert documents["chat"]["gpu"]["exercised"] is False
    assert "not exercised" in documents["chat"]["gpu"]["missing"][0]


def test_a_sweep_from_the_command_line_is_in_the_ledger(node):
    before = len(node.ledger("run"))
    levels = {"sglang_benchmark_levels": "1,2", "sglang_benchmark_requests": 2, "sglang_benchmark_output_tokens": 8}
    node.run("benchmark", sglang_benchmark_workload="sweep", **levels).succeeded()
    line = node.ledger("run")[-1]
    assert len(node.ledger("run")) == before + 1
    assert [level["concurrency"] for level in line["levels"]] == [1, 2]
    assert line["variant"] == node.manifest(node.current)["variant"]
    document = json.loads(pathlib.Path(line["result"]).read_text())
    packed = pathlib.Path(line["result"]).parent / document["records"]["file"]
    assert len(gzip.decompress(packed.read_bytes()).splitlines()) == document["records"]["count"] == 2 + 4
