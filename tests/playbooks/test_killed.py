"""The controller is killed in the middle of a deploy: one more deploy converges, with exactly one server."""

from __future__ import annotations

import random
import time

import pytest
from deployment import wait_for

SEED = 20260131
# Tasks in whose middle the controller dies, and up to how many seconds after each began; a delay drawn with the seed.
MOMENTS = {
    # In its second half it builds the release.
    "compare | Take the lock and compare": 1.2,
    "start | Start the server": 0.4,
    "prove | Wait for real generations, prove what runs, and record it": 0.4,
    "promote | Record that the release passed": 0.4,
}
RANDOM = random.Random(SEED)
CASES = [(moment, RANDOM.choice([True, False]), RANDOM.uniform(0, longest)) for moment, longest in MOMENTS.items()]
# With its forks, so that what the comparison was about stays as it is.
CASES.insert(1, ("compare | Take the lock and compare", True, 0.7))


@pytest.fixture(scope="module")
def node(make_ready):
    """Return a root with a promoted release."""
    node = make_ready()
    node.deploy("baseline").succeeded()
    return node


@pytest.mark.parametrize(("moment", "group", "delay"), CASES, ids=[case[0].partition(" |")[0] for case in CASES])
def test_next_deploy_converges(moment, group, delay, node):
    """GROUP: the forks die as well; else the task that runs comes to its end on its own."""
    wanted = "fewchan" if node.manifest(node.current)["variant"] == "baseline" else "baseline"
    run = node.start("deploy", variant=wanted, sglang_benchmark_requests=4 + RANDOM.randrange(2))

    def begun():
        assert run.process.poll() is None, "the deploy ended before the moment came"
        return any(event["status"] == "start" and moment in event["task"] for event in run.events())

    wait_for(begun, moment, timeout=60)
    time.sleep(delay)
    run.kill(group)
    run.process.wait()
    outcome = node.deploy(wanted)
    assert outcome.rc == 0, outcome.out
    pid = node.serves(node.current)
    assert node.manifest(node.current)["variant"] == wanted
    assert node.state(node.current) == "promoted"
    assert not (node.root / "lock").exists()
    # Nothing that the killed run left behind turns up later.
    time.sleep(0.5)
    assert node.servers() == [pid]
    assert not [name for name in (node.root / "releases").iterdir() if name.name.startswith(".")]


def test_a_killed_rollback_is_gone_on_with(node):
    """Run once more it ends where the first one was to end, not where that came from."""
    good = node.current
    bad = node.deploy("proto_auto").succeeded() and node.current
    assert good != bad
    run = node.start("rollback")
    wait_for(lambda: any("prove |" in event["task"] for event in run.events()), "the proof", timeout=60)
    run.kill(True)
    run.process.wait()
    outcome = node.run("rollback").succeeded()
    assert node.current == good and node.serves(good), outcome.out
    assert (node.state(good), node.state(bad)) == ("promoted", "retired")
    assert not (node.root / "lock").exists()
