"""A release stays by its measured runs: slower ones go back with their numbers, open verdicts follow the operator."""

from __future__ import annotations

import pytest
from engines import fault

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
        sglang_decision_thresholds={"decode_tok_s_p50": -0.4},
        on_inconclusive="rollback",
    )
    outcome = node.deploy("baseline", **paced(NORMAL)).succeeded()
    assert "first: no other promoted release to compare with" in outcome.said
    assert node.state(node.current) == "promoted"
    assert len(node.ledger("run")) == 3
    return node


def decision(node):
    """Return the last decision of the ledger."""
    return node.ledger("decision")[-1]


def test_slower_release_goes_back_with_its_numbers(node):
    """Three times the time for a token: the play fails, the promoted release serves again, and both records agree."""
    before = node.current
    outcome = node.deploy("fewchan", **paced(SLOW))
    message = outcome.refused(
        "same conditions on both sides",
        "worse: fewchan",
        "tok/s (3 runs, 1 start)",
        "is rejected",
        before,
        "serves again",
    )
    assert len(message) < 3000
    node.serves(before)
    found = decision(node)
    assert found["verdict"] == "worse" and found["outcome"] == "rollback"
    assert found["against"] == {"release": before, "variant": "baseline"}
    (metric,) = found["metrics"]
    assert metric["effect"] == pytest.approx(NORMAL / SLOW - 1, abs=0.1)
    assert metric["high"] < -0.4 and str(metric["candidate"]["runs"]) == "3"
    assert all(line in message for line in found["lines"][:3])
    refused = node.ledger("rejected")[-1]
    assert refused["release"] == found["release"] and refused["rung"] == "decision"
    # Written by the call that rejects, before it.
    events = node.ledger()
    assert events.count(found) == 1 and events[events.index(found) + 1] == refused


def test_equal_release_is_promoted(node):
    """Another variant of the same speed; the promoted one was started twice and measured once."""
    outcome = node.deploy("manychan", **paced(NORMAL)).succeeded()
    found = decision(node)
    assert found["verdict"] == "equal" and found["outcome"] == "promote", found["lines"]
    assert found["metrics"][0]["baseline"]["runs"] == 3
    assert node.state(node.current) == "promoted" and found["release"] == node.current
    assert "equal: manychan" in outcome.said
    names = [event["event"] for event in node.ledger()]
    assert names[-3:] == ["decision", "promoted", "unlocked"]


def test_comparison_needs_two_variants_and_a_release(node, make_ready):
    """Refused before anything is touched."""
    node.run("compare", variant="fewchan").refused("against=<another name>")
    node.run("compare", variant="fewchan", against="fewchan").refused("another name")
    off = {"sglang_benchmark_enabled": "false", "repeats": "0", "on_inconclusive": "kep"}
    words = ("sglang_benchmark_enabled=false", "not 0", "keep or rollback, not kep")
    for (name, value), said in zip(off.items(), words):
        node.run("compare", variant="fewchan", against="baseline", **{name: value}).refused(name, said)
    make_ready().run("compare", variant="fewchan", against="baseline").refused("deploy a variant first")
