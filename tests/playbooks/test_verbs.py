"""The verbs from the first deploy to the last stop, with a scripted server: one story, told in order."""

from __future__ import annotations

import pytest
from deployment import tree


@pytest.fixture(scope="module")
def node(make_ready):
    """Return the root that the tests below share; each leaves it with a server that runs, but for the last."""
    node = make_ready()
    node.deploy("baseline").succeeded()
    return node


def test_first_deploy_is_promoted_and_measured(node):
    """What the operator reads at the end names variant, endpoint, release and the measured figures."""
    node.serves(node.current)
    assert node.state(node.current) == "promoted"
    assert [line["event"] for line in node.ledger()] == [
        "compared", "created", "built", "activated", "start", "ready", "verify", "run", "decision", "promoted",
        "unlocked",
    ]  # fmt: skip
    outcome = node.run("status").succeeded()
    for text in (node.current, "variant: baseline", "state: promoted", "health: ready", f":{node.port}", "lock: free"):
        assert text in outcome.said


def test_second_deploy_changes_nothing(node):
    """Same process, no file touched but the ledger's record that somebody looked."""
    pid, before = node.server, tree(node.root / "releases", skip=["logs"])
    outcome = node.deploy("baseline").succeeded()
    assert outcome.recap["changed"] == 0
    assert node.server == pid
    assert tree(node.root / "releases", skip=["logs"]) == before
    assert f"from release {node.current}" in outcome.said


def test_switch_there_and_back(node):
    """Deploy, rollback, and rollback to a named release; the one that is left retires."""
    first, old = node.current, node.server
    node.deploy("fewchan").succeeded()
    second = node.current
    assert second != first
    assert node.serves(second) != old
    assert (node.state(first), node.state(second)) == ("promoted", "promoted")

    outcome = node.run("rollback").succeeded()
    assert node.current == first
    node.serves(first)
    assert (node.state(first), node.state(second)) == ("promoted", "retired")
    assert first in outcome.said

    node.run("rollback").refused("nothing to roll back to", second, "release=<id>")
    node.serves(first)
    node.run("rollback", release=second).succeeded()
    node.serves(second)
    assert (node.state(first), node.state(second)) == ("retired", "promoted")
    node.run("rollback", release=second).refused("is the current release already")

    # A release that was built before is taken again, not built anew.
    node.deploy("baseline").succeeded()
    node.serves(first)
    assert node.state(first) == "promoted"


def test_benchmark_measures_and_changes_nothing(node):
    """One more line in the ledger, one more raw file, the same process."""
    pid, runs = node.server, len(node.ledger("run"))
    outcome = node.run("benchmark").succeeded()
    assert outcome.recap["changed"] == 0
    assert node.server == pid
    assert len(node.ledger("run")) == runs + 1
    assert "output tok/s" in outcome.said


def test_unpromoted_deploy_serves_and_is_no_target(node):
    """promote=false, as text: measured, serving, and a failure would not bring it back."""
    before = node.current
    node.deploy("proto_auto", "-e", "promote=false").succeeded()
    tried = node.current
    node.serves(tried)
    assert node.state(tried) == "active"
    node.run("rollback").succeeded()
    node.serves(before)
    assert node.state(tried) == "retired"


def test_stop_and_deploy_again(node):
    """A stop leaves no process and a free port; the next deploy starts the same release."""
    release = node.current
    outcome = node.run("stop").succeeded()
    assert "is stopped" in outcome.said
    assert not node.servers()
    assert node.port_is_free()
    said = node.run("status").succeeded().said
    user = node.ledger("stop")[-1]["user"]
    assert user and f" by {user}; deploy.yml starts it again" in said and "health: stopped on purpose at 20" in said
    assert "drift" not in said and "alarm" not in said
    again = node.run("stop").succeeded()
    assert again.recap["changed"] == 0
    assert "did not run" in again.said
    node.deploy("baseline").succeeded()
    node.serves(release)
    node.run("stop").succeeded()
