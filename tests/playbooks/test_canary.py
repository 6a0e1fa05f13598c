"""canary.yml, and rung 4 of a deploy, beside a scripted live server. The faults one by one are the unit tests' part."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_canary_room import mem_available_mb
from deployment import marked, wait_for
from engines import fault
from streaming import Client

# Of each rank of the live server, so much that what other tests allocate meanwhile does not matter.
BALLAST_MB = 1600
NO_ROOM = {"sglang_canary_keep_mb": 10**9}


@pytest.fixture(scope="module")
def node(make_ready):
    """Return a root whose server goes on through all tests."""
    node = make_ready(sglang_canary_overhead_mb=100, sglang_canary_keep_mb=100)
    node.deploy("baseline").succeeded()
    return node


def untouched(node, pid):
    """Check that the live server is the one from before and that no canary is left, the log of a failed one aside."""
    assert node.serves(node.current) == pid
    assert not marked(node.root / "canary")
    folder = node.root / "canary"
    assert not folder.exists() or [path.name for path in folder.iterdir()] == ["failed.log"]


def test_canary_passes_beside_the_live_server(node):
    """The live server's answers are measured in all three phases; the release is built and stays so."""
    pid = node.server
    with Client(node.port, node.launch()["served_model_name"]) as client:
        outcome = node.run("canary", variant="fewchan").succeeded()
    assert not client.failed and client.answered > 3
    for text in ("canary of fewchan: passed", "room: fits", "live server, median of", "[canary/not-exercised]"):
        assert text in outcome.said
    event = node.ledger("canary")[-1]
    assert (event["verdict"], event["rules"], event["layers"], event["variant"]) == ("passed", [], 1, "fewchan")
    assert event["live"]["failures"] == []
    assert node.state(event["release"]) == "built"
    untouched(node, pid)


def test_deploy_refuses_before_the_switch(node):
    """Rung 4: the live server, its release and the link stay; the ledger names the rung."""
    pid, before = node.server, node.current
    script = fault(crash={"phase": "distributed", "log": "undefined_name"})
    outcome = node.deploy("fewchan", canary="true", **script)
    outcome.refused("[canary/undefined_name]", "nothing was switched", "failed.log")
    assert node.current == before
    assert (node.ledger("canary")[-1]["verdict"], node.ledger("refused")[-1]["rung"]) == ("refused", "canary")
    untouched(node, pid)


def test_in_the_live_servers_place(node):
    """Allowed downtime stops the live server for the canary and brings it back, here where there is still no room."""
    before, pid = node.current, node.server
    outcome = node.run("canary", variant="fewchan", canary_downtime=True, **NO_ROOM)
    outcome.refused("[canary/no-room]", "MiB", "canary_downtime=true")
    assert node.serves(before) != pid
    untouched(node, node.server)


def test_what_is_stopped_on_purpose_stays_so(node):
    """A canary that finds no room does not start what an operator stopped, and does not take over the stop."""
    node.run("stop").succeeded()
    (health,) = (line for line in node.run("status").succeeded().said.splitlines() if line.startswith("health: "))
    node.run("canary", variant="fewchan", canary_downtime=True, **NO_ROOM).refused("[canary/no-room]")
    assert not node.servers()
    assert "stopped on purpose" in health and health in node.run("status").succeeded().said
    node.deploy("baseline").succeeded()


def test_killed_in_the_live_servers_place(node):
    """Who looks is told, and the next run brings the live server back before it tries anything."""
    before = node.current
    run = node.start("canary", variant="fewchan", canary_downtime=True, **NO_ROOM)
    wait_for(lambda: not node.servers() or run.process.poll() is not None, "the stop", 60)
    run.kill(group=True)
    run.process.wait()
    assert not node.servers()
    said = node.run("status").succeeded().said
    assert "for a canary in its place, which ended before it brought it back" in said and "on purpose" not in said
    node.run("rollback", release=before).refused("is the current release already", "for a canary in its place")
    node.run("canary", variant="fewchan").succeeded()
    assert node.serves(before) and node.ledger("canary")[-1]["live"]["before"]
    assert "place" not in node.run("status").succeeded().said


@pytest.fixture(scope="module")
def heavy(node):
    """Return the root with a live server that holds memory."""
    node.deploy("baseline", **fault(ballast_mb=BALLAST_MB)).succeeded()
    return node


@pytest.mark.parametrize("verdict", ["passed", "refused"])
def test_the_live_server_comes_back(verdict, heavy):
    """What fits only in its place is tried there; the live server serves again, whatever the canary has shown."""
    node, before, pid, ranks = heavy, heavy.current, heavy.server, heavy.launch()["tp_size"]
    overhead = int(mem_available_mb() / ranks + BALLAST_MB / 2)
    room = {"sglang_canary_keep_mb": 0, "sglang_canary_overhead_mb": overhead}
    script = fault(crash={"phase": "distributed", "log": "undefined_name"}) if verdict == "refused" else {}
    outcome = node.run("canary", variant="fewchan", canary_downtime=True, **room, **script)
    if verdict == "passed":
        outcome.succeeded()
    else:
        outcome.refused("[canary/undefined_name]")
    assert [event["verdict"] for event in node.ledger("canary")[-2:]] == ["no_room", verdict]
    assert node.serves(before) != pid
    untouched(node, node.server)


def test_killed_controller_leaves_no_canary(node):
    """It ends with its module, the live server goes on, and the next run, a whole deploy, cleans up."""
    pid = node.server
    run = node.start("canary", variant="fewchan", **fault(phases={"weights": 30}))
    wait_for(lambda: marked(node.root / "canary"), "the canary", 60)
    run.kill(group=True)
    run.process.wait()
    wait_for(lambda: not marked(node.root / "canary"), "the end of the canary", 20)
    assert node.serves(node.current) == pid
    node.deploy("proto_auto", canary=True).succeeded()
    assert node.ledger("canary")[-1]["verdict"] == "passed"
    untouched(node, node.server)
