"""A deploy that fails brings the previous release back and says why; without one the server is stopped."""

from __future__ import annotations

import os
import signal
import time

import pytest
from deployment import wait_for
from engines import fault

CASES = {
    "dies at once": (
        {"crash": {"phase": "imports", "log": "bad_flag"}},
        ["no-such-flag"],
    ),
    "dies while it loads": (
        {"crash": {"phase": "weights", "log": "oom_weights"}, "phases": {"imports": 2.5}},
        ["CUDA out of memory"],
    ),
    "a worker dies without a word": (
        {"die": {"phase": "kv_cache", "rank": 0}, "phases": {"imports": 2.5}},
        ["killed with signal 9"],
    ),
    "answers nonsense": (
        {"generation": {"mode": "degenerate"}},
        ["foss foss"],
    ),
    "answers and cuts its streams": (
        {"generation": {"mode": "cut"}},
        ["failed"],
    ),
    "serves another model": (
        {"served_model_name": "other-model"},
        ["other-model"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def node(make_ready):
    """Return a root whose promoted release is the one to bring back."""
    node = make_ready()
    node.deploy("baseline").succeeded()
    return node


@pytest.mark.parametrize("case", CASES)
def test_failure_brings_the_previous_release_back(case, node):
    """The play fails, names the cause, and the release from before serves and is promoted."""
    script, words = CASES[case]
    before = node.current
    outcome = node.deploy("fewchan", **fault(**script))
    message = outcome.refused("is rejected", before, "serves again", *words)
    assert len(message) < 3000, "an operator reads this at night"
    node.serves(before)
    assert node.state(before) == "promoted"
    rejected = node.ledger("rejected")[-1]
    failed = rejected["release"]
    assert failed in message
    assert rejected["rung"] in ("start", "ready", "verify", "benchmark")
    assert rejected["reason"].splitlines()[0] in message
    assert node.ledger("activated")[-1]["reason"] == f"restored: {failed} was rejected"
    assert node.state(failed) == "rejected"
    assert not (node.root / "lock").exists()


def test_variable_that_is_set_elsewhere_is_found_in_the_workers(node):
    """What is set before Python starts wins over the variant, so the workers hold another value than it says.
    Lint refuses it, hence the force."""
    before = node.current
    outcome = node.deploy("fewchan", sglang_server_env={"NCCL_ALGO": "Tree"}, sglang_force=True)
    outcome.refused("NCCL_ALGO", "Tree", "is rejected", "serves again")
    node.serves(before)


def test_rejected_release_is_no_target(node):
    """By itself never; by name only when the operator insists."""
    rejected = node.ledger("rejected")[-1]["release"]
    node.run("rollback", release=rejected).refused("was rejected", "allow_rejected")
    node.serves(node.current)


@pytest.mark.parametrize(("verb", "asked"), [("deploy", {"variant": "manychan"}), ("rollback", {})])
def test_typo_in_the_proof_costs_no_load(verb, asked, node):
    """The same value would refuse the release that is brought back, so it is found before anything is stopped."""
    if verb == "rollback":
        node.deploy("manychan").succeeded()
    before, pid, rejected = node.current, node.server, len(node.ledger("rejected"))
    node.run(verb, sglang_verify_timeout="5m", **asked).refused("sglang_verify_timeout")
    assert node.serves(before) == pid and node.state(before) == "promoted"
    assert len(node.ledger("rejected")) == rejected and not (node.root / "lock").exists()
    if verb == "rollback":
        node.run("rollback").succeeded()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sglang_benchmark_workload", "rat"), ("sglang_decision_budget", "15m"), ("sglang_server_log_keep", "-2")],
)
def test_typo_in_measurement_or_server_costs_no_load(name, value, node):
    """Found where the verdict is due, each of them has stopped the live server and rejected a sound release."""
    before, pid, rejected = node.current, node.server, len(node.ledger("rejected"))
    node.deploy("manychan", **{name: value, "sglang_variant_overrides": {"env": {"X_TYPO": name}}}).refused(name)
    assert node.serves(before) == pid and len(node.ledger("rejected")) == rejected


def test_status_tells_what_was_done_by_hand(node):
    """A server whose link is gone, and releases that were edited."""
    link, current = node.root / "current", node.current
    link.unlink()
    try:
        assert f"processes of {current} run, which is not the current release" in node.run("status").succeeded().said
    finally:
        link.symlink_to(os.path.join("releases", current))
    launch = node.root / "current" / "launch.json"
    text, moment = launch.read_text(), launch.stat().st_mtime_ns
    launch.write_text(text + "\n")
    try:
        said = node.run("status").succeeded().said
        assert f"{current} was edited after it was sealed: launch.json was edited" in said
    finally:
        launch.write_text(text)
        os.utime(launch, ns=(moment, moment))


def test_host_is_as_usual_after_failures(node):
    """The next deploy of the release that came back finds nothing to do."""
    outcome = node.deploy("baseline").succeeded()
    assert outcome.recap["changed"] == 0


def test_dead_worker_is_noticed_and_mended(node):
    """The parent of a dead scheduler stays up; a deploy of the same variant starts it anew."""
    release, old = node.current, node.server
    os.kill(node.workers()[0], signal.SIGKILL)
    wait_for(lambda: not node.workers(), "the scheduler's death")
    outcome = node.deploy("baseline").succeeded()
    assert outcome.recap["changed"] > 0
    assert node.serves(release) != old


def test_failure_without_a_previous_release_stops_the_server(make_ready):
    """Nothing is left running, and the message says so."""
    node = make_ready()
    outcome = node.deploy("baseline", **fault(generation={"mode": "degenerate"}))
    outcome.refused("is rejected", "No promoted release existed", "stopped")
    assert not node.servers()
    assert node.port_is_free()
    assert not (node.root / "lock").exists()
    # The same host takes a good variant afterwards.
    node.deploy("baseline").succeeded()
    node.serves(node.current)


def test_second_deploy_at_the_same_time_fails_at_once(make_ready):
    """It names who holds the lock, and the first one is not disturbed."""
    node = make_ready()
    first = node.start("deploy", variant="baseline", **fault(phases={"weights": 6}))
    try:
        wait_for(node.servers, "the first server")
        began = time.monotonic()
        second = node.deploy("fewchan")
        assert time.monotonic() - began < 20
        second.refused(
            "is held by run", f"pid {first.process.pid}", "variant baseline", "one deploy at a time", "Way out"
        )
        assert len(second.failures) == 1
    finally:
        outcome = first.wait(300)
    outcome.succeeded()
    node.serves(node.current)
    assert node.manifest(node.current)["variant"] == "baseline"
