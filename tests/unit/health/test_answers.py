"""Known answers and the soak: the comparison itself, and the module against a scripted server."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import threading
import time

import pytest
from ansible.module_utils import sglang_answer_rules as rules
from ansible.module_utils import sglang_proc, sglang_tiny_model

# What the scripted server says to everything.
TEXT = "w136 w94 w514 w235"
TOKENS = [100, 101, 102, 103]
ANSWER = {"text": "a b c d", "ids": [1, 2, 3, 4], "logprobs": [-0.1, -0.2, -0.3, -0.4]}


def known(**expected):
    """Return one known answer with every key."""
    empty = dict.fromkeys(("tokens", "text", "contains", "logprobs", "min_logprob"))
    return {"prompt": "question", **empty, **expected}


@pytest.mark.parametrize(
    ("expected", "match", "wrong"),
    [
        ({"tokens": [1, 2, 3, 4]}, 1, ""),
        ({"tokens": [1, 2, 3, 5]}, 1, "3 of 4 tokens agree, 100% must"),
        ({"tokens": [1, 2, 3, 5]}, 0.75, ""),
        ({"tokens": [9, 2, 3, 4]}, 0.25, "0 of 4 tokens agree, 25% must"),
        ({"text": "a b c d e f"}, 1, "4 of 6 words agree, 100% must"),
        ({"text": " a  b\nc d"}, 1, ""),
        ({"contains": "B C"}, 1, ""),
        ({"contains": "paris"}, 1, "it does not contain 'paris'"),
        ({"tokens": [1, 2], "logprobs": [-0.1, -0.25]}, 1, ""),
        ({"tokens": [1, 2], "logprobs": [-0.1, -0.9]}, 1, "a log-probability differs by 0.700, at most 0.1 may be"),
        ({"tokens": [1, 2], "min_logprob": -0.15}, 1, "a log-probability is -0.200, at least -0.15 must be"),
        # After the first other token the two answers are different texts, whose probabilities say nothing.
        ({"tokens": [1, 2, 9, 9], "logprobs": [-0.1, -0.2, -9, -9]}, 0.5, ""),
    ],
)
def test_an_answer_is_compared_by_tokens_words_and_probability(expected, match, wrong):
    assert rules.compare(known(**expected), ANSWER, match, 0.1)[0] == wrong


def test_without_probabilities_of_the_server_the_tokens_decide():
    answer = dict(ANSWER, logprobs=[])
    expected = known(tokens=[1, 2, 3, 4], logprobs=[-9, -9, -9, -9], min_logprob=-0.001)
    assert rules.compare(expected, answer, 1, 0.1) == ("", 4, None)


def test_what_the_tiny_model_says_follows_from_its_recipe(repository):
    path = repository / "plugins/filter/sglang_known_answers.py"
    spec = importlib.util.spec_from_file_location("sglang_known_answers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = module.FilterModule().filters()["sglang_tiny_answers"](["The capital of france is"], "1024", "1", 4)
    words = sglang_tiny_model.continuation("is", 4, 1024, 1)
    assert answers[0]["text"] == " ".join(words) and words[0] == "paris"
    vocabulary = sglang_tiny_model.vocabulary(1024)
    assert [vocabulary[number] for number in answers[0]["tokens"]] == words


@pytest.fixture
def answers(health, run_module):
    """Return ``answers(release, check=False, **args)``: the module's result once the release is ready."""

    def run(release, check=False, **args):
        assert health(release, generations=1)["ready"]
        given = {"release": str(release.path), "soak_requests": 0, "generation_timeout": 5, **args}
        return run_module("sglang_answers", given, check=check)

    return run


def names(result):
    """Return (rule, level) of the findings."""
    return [(item["rule"], item["level"]) for item in result["findings"]]


def test_a_right_answer_gives_no_finding_and_is_kept(start, answers):
    expected = {"prompt": "x", "text": TEXT, "tokens": TOKENS, "logprobs": [-0.1] * 4}
    result = answers(start({}), known_answers=[expected])
    assert names(result) == []
    answer = result["answers"][0]
    assert (answer["tokens"], answer["agreed"], answer["deviation"]) == (TOKENS, 4, 0.025)


def test_a_wrong_answer_is_an_error_with_both_texts(start, answers):
    release = start({})
    wrong = {"prompt": "x", "text": "w136 w94 w514 w0", "tokens": [100, 101, 102, 7]}
    unsure = {"prompt": "y", "tokens": TOKENS, "logprobs": [-3.0] * 4}
    result = answers(release, known_answers=[wrong, unsure])
    assert names(result) == [("known-answer", "error")] * 2
    assert "'w136 w94 w514 w0'" in result["findings"][0]["evidence"] and "w235" in result["findings"][0]["evidence"]
    assert "log-probability" in result["findings"][1]["message"]


def test_an_answer_that_never_comes_is_a_finding_and_ends_it(start, answers):
    release = start({"generation": {"mode": "error", "after": 1}})
    expected = {"prompt": "x", "contains": "w"}
    result = answers(release, known_answers=[expected], soak_requests=20)
    assert names(result) == [("known-answer", "error")] and result["soak"] is None


def test_none_known_is_said(start, answers):
    assert names(answers(start({}))) == [("known-answer", "warning")]


def test_a_soak_outlasts_the_warm_up_and_keeps_the_deploy_lock_fresh(start, answers, tmp_path):
    release, lock = start({}), tmp_path / "lock"
    lock.write_text(json.dumps({"schema": 1, "run": {"id": "r"}, "variant": "v", "since": ""}))
    os.utime(lock, (time.time() - 800,) * 2)
    result = answers(release, soak_requests=60)
    assert (result["soak"]["requests"], result["soak"]["answered"]) == (60, 60)
    assert ("soak", "error") not in names(result)
    assert time.time() - lock.stat().st_mtime < 60


def test_serving_some_and_then_hanging_fails_the_soak(start, answers):  # F23
    result = answers(start({"generation": {"mode": "silent", "after": 12}}), soak_requests=40, generation_timeout=2)
    found = next(item for item in result["findings"] if item["rule"] == "soak")
    assert found["level"] == "error" and "no answer within 2 s" in found["evidence"]
    assert result["soak"]["answered"] == 11  # one went to the wait for readiness
    assert "answered 11 of 40" in found["message"]


def test_a_server_that_says_nonsense_after_the_soak_is_not_healthy(start, answers):
    result = answers(start({"generation": {"mode": "degenerate", "after": 21}}), soak_requests=20)
    assert result["soak"]["answered"] == 20
    assert "foss foss" in next(item for item in result["findings"] if item["rule"] == "soak")["evidence"]


def test_a_worker_that_dies_ends_the_soak(start, answers):
    release = start({"token_seconds": 0.05})

    def kill():
        while pathlib.Path(release.launch["log"]).read_text().count('"POST /generate') < 20:
            time.sleep(0.05)
        worker = next(item for item in sglang_proc.scan(str(release.path)) if item["role"] == "scheduler")
        os.kill(worker["pid"], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    result = answers(release, soak_requests=10000, generation_timeout=60)
    found = next(item for item in result["findings"] if item["rule"] == "soak")
    assert "died, the server process" in found["evidence"]


def test_a_dry_run_asks_and_does_not_soak(start, answers):
    result = answers(start({}), check=True, known_answers=[{"prompt": "x", "contains": "nothing"}], soak_requests=20)
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
    result = run_module("sglang_answers", {"release": str(start(None).path), **args})
    assert result["failed"] and result["msg"].startswith(named)
