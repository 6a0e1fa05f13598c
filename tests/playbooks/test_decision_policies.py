"""Every policy of a decision, with whole deploys. It takes minutes: `make decisions` runs it, `make test` does not."""

from __future__ import annotations

import os

import pytest
from engines import fault

pytestmark = pytest.mark.skipif(
    not os.environ.get("SGLANG_TEST_DECISIONS"), reason="make decisions runs this; it takes minutes"
)

# Seconds of a token; the server sleeps them, so that a busy machine adds little.
NORMAL, SLOW, FAST = 0.012, 0.036, 0.004


def paced(seconds):
    """Return the variables of a deploy whose server takes so long for a token."""
    return fault(token_seconds=seconds)


@pytest.fixture(scope="module")
def node(make_ready):
    """Return a root with a promoted baseline of normal speed, measured three times."""
    node = make_ready(
        repeats=3,
        sglang_decision_start_spread=0.01,
        sglang_decision_thresholds={"decode_tok_s_p50": -0.4, "known_answers": -0.02},
        on_inconclusive="rollback",
    )
    node.deploy("baseline", **paced(NORMAL)).succeeded()
    return node


def decision(node):
    """Return the last decision of the ledger."""
    return node.ledger("decision")[-1]


def states(node):
    """Return ``(release, state)`` of every release."""
    return {(path.name, node.state(path.name)) for path in (node.root / "releases").iterdir()}


def test_promote_false_only_records(node):
    """It serves unpromoted, is judged again where it is to be promoted, and the way back is a deploy."""
    baseline = node.current
    node.deploy("fewchan", promote="false", **paced(SLOW)).succeeded()
    assert decision(node)["verdict"] == "worse" and decision(node)["outcome"] == "record"
    slow = node.current
    assert slow != baseline and node.state(slow) == "active"
    node.deploy("fewchan", **paced(SLOW)).refused("worse", "serves again")
    assert node.state(slow) == "rejected"
    node.deploy("baseline", **paced(NORMAL)).succeeded()
    assert node.current == baseline and node.state(baseline) == "promoted"


def test_open_verdict_is_measured_on_then_keeps_the_old_one(node):
    """One run decides nothing: a second look follows within the budget, then the promoted release comes back."""
    before, looks = node.current, len(node.ledger("decision"))
    changed = {"repeats": 1, "sglang_decision_budget": 0.02}
    node.deploy("fewchan", **changed, **paced(NORMAL)).refused("inconclusive", "a verdict needs 3", "serves again")
    assert decision(node)["outcome"] == "rollback" and len(node.ledger("decision")) == looks + 1
    node.serves(before)
    # The budget allows a second and a third run.
    node.deploy("fewchan", **dict(changed, sglang_decision_budget=60), **paced(NORMAL)).succeeded()
    outcomes = [item["outcome"] for item in node.ledger("decision")[looks + 1 :]]
    assert outcomes[-1] == "promote" and set(outcomes[:-1]) <= {"measure"} and len(outcomes) >= 2


def test_open_verdict_keeps_the_new_one_where_told(node):
    """`-e on_inconclusive=keep` promotes what one run could not judge."""
    node.deploy("proto_all", repeats=1, sglang_decision_budget=0, on_inconclusive="keep", **paced(NORMAL)).succeeded()
    assert decision(node)["verdict"] == "inconclusive" and decision(node)["outcome"] == "promote"
    assert node.state(node.current) == "promoted"


def test_another_load_does_not_compare(node):
    """The difference is the first line, before any figure; the promoted release stays."""
    before = node.current
    outcome = node.deploy("baseline", sglang_benchmark_output_tokens=16, **paced(NORMAL))
    message = outcome.refused("not comparable", "serves again")
    assert message.startswith("not the same conditions: workload: ")
    node.serves(before)
    assert decision(node)["metrics"] == []


def test_comparison_in_turn_ends_as_it_began(node):
    """Both are started twice and more; the verdict is on the starts, and the promoted release serves as before."""
    before, starts = node.current, len(node.ledger("start"))
    promoted = {item for item in states(node) if item[1] == "promoted"}
    outcome = node.run("compare", variant="fewchan", against="baseline", rounds=2, repeats=2, **paced(FAST)).succeeded()
    found = decision(node)
    assert found["design"] == "interleaved" and found["outcome"] == "record"
    assert found["metrics"][0]["candidate"]["starts"] == 2 and found["metrics"][0]["baseline"]["starts"] == 3
    assert "fewchan" in outcome.said and "drift from the first to the last start" in outcome.said
    assert len(node.ledger("start")) == starts + 6
    node.serves(before)
    assert {item for item in states(node) if item[1] == "promoted"} == promoted
    assert {node.state(found["release"]), node.state(found["against"]["release"])} == {"retired"}
    assert not (node.root / "lock").exists()


def test_fast_and_wrong_release_goes_back(node):
    """Three times as fast, and one of two questions is answered wrongly."""
    before = node.current
    questions = [{"prompt": "hello", "contains": "Paris"}, {"prompt": "w1", "contains": "it is"}]
    settings = {"sglang_decision_questions": questions, "sglang_benchmark_output_tokens": 16, "on_inconclusive": "keep"}
    right = {"token_seconds": NORMAL, "generation": {"text": "it is Paris and it is warm in the summer"}}
    wrong = {"token_seconds": FAST, "generation": {"text": "it is London and it is wet in the winter"}}
    node.deploy("baseline", **settings, **fault(**right)).succeeded()
    right_one = node.current
    assert right_one != before and node.state(right_one) == "promoted"
    outcome = node.deploy("fewchan", **settings, **fault(**wrong))
    outcome.refused("worse in known_answers", "right answers: 50.0%", "against 100.0%", "serves again")
    assert {item["name"]: item["verdict"] for item in decision(node)["metrics"]} == {
        "decode_tok_s_p50": "better",
        "known_answers": "worse",
    }
    node.serves(right_one)
