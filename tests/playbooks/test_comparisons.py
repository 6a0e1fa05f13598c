"""compare.yml beside releases that were promoted: it ends as it began, whatever happens between."""

from __future__ import annotations

import json

import pytest
from deployment import ROOT
from yaml import safe_load

CATALOGUE = safe_load((ROOT / "group_vars/all/variants.yml").read_text(encoding="utf-8"))["sglang_variants"]
# The variant alone follows the script, not what it is compared with.
BROKEN = {"FAKE_SGLANG_SCRIPT": json.dumps({"generation": {"mode": "degenerate"}})}


@pytest.fixture(scope="module")
def node(make_ready):
    """Return a root with two promoted releases, the first of which serves no more."""
    node = make_ready(rounds=2, canary=False)
    node.deploy("baseline").succeeded()
    node.left = node.current
    node.deploy("fewchan").succeeded()
    return node


def as_before(node, before):
    """Check that the release from before serves, that both are promoted, and that the lock is free."""
    node.serves(before)
    assert {node.state(node.left), node.state(before)} == {"promoted"}
    assert node.ledger("promoted")[-1]["release"] == before
    assert not (node.root / "lock").exists()


def test_promotions_stand(node):
    """Also of the one that was left; a new variant has its canary; an answer is that of the server asked."""
    before = node.current
    asked = {"canary": True, "sglang_canary_overhead_mb": 100, "sglang_canary_keep_mb": 100}
    asked["sglang_decision_questions"] = [{"prompt": "hello", "contains": "Paris"}]
    node.run("compare", variant="manychan", against="baseline", **asked).succeeded()
    as_before(node, before)
    assert node.ledger("canary")[-1]["variant"] == "manychan"
    scores, running = [], None
    for event in node.ledger():
        running = event["release"] if event["event"] == "start" else running
        scores += [(event["release"], running)] if event["event"] == "score" else []
    assert len(scores) == 15 and all(release == server for release, server in scores)


def test_failure_in_the_middle(node):
    """A variant that answers nonsense ends the comparison and is rejected; what served before serves again."""
    before = node.current
    variants = {**CATALOGUE, "broken": {**CATALOGUE["baseline"], "env": BROKEN}}
    node.run("compare", variant="broken", against="baseline", sglang_variants=variants).refused("broken", "degenerate")
    as_before(node, before)
    # It is rejected with its rung, as in a deploy, and is not retired.
    event = node.ledger("rejected")[-1]
    assert (event["variant"], event["rung"], node.state(event["release"])) == ("broken", "ready", "rejected")
    assert "degenerate" in event["reason"] and event["release"] not in [
        one["release"] for one in node.ledger("retired")
    ]
