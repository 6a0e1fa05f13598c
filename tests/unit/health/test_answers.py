"""Known answers: the comparison itself."""

from __future__ import annotations

import importlib.util

import pytest
from ansible.module_utils import sglang_answer_rules as rules
from ansible.module_utils import sglang_tiny_model

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
