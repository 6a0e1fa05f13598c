"""Deploy, switch, roll back, crash and recover with the real SGLang on CPU; told in order, on one root.

What a worker holds is read from /proc here, not through the project's own modules.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket

from deployment import marked, variables_of, wait_for
from streaming import Client

FEWCHAN = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_BUFFSIZE": "131072",
    "NCCL_NTHREADS": "64",
}


def release_of(node, variant):
    """Return the id of the newest release of a variant that was promoted."""
    return next(line["release"] for line in reversed(node.ledger("promoted")) if line["variant"] == variant)


def test_first_deploy_serves_and_is_promoted(node):
    """From an empty root to a measured, promoted server."""
    node.first.succeeded()
    node.serves(node.current)
    assert node.state(node.current) == "promoted"
    run = node.ledger("run")[0]
    assert run["counts"]["failed"] == 0
    assert run["metrics"]["output_tok_s"] > 1
    answer = node.chat()
    assert answer["model"] == "tiny-llama"
    assert answer["usage"]["completion_tokens"] > 1


def test_workers_hold_the_variant(node):
    """Both ranks hold each variable of the variant and the marker."""
    workers = node.workers()
    assert len(workers) == 2
    for pid in workers:
        seen = variables_of(pid)
        assert {name: seen.get(name) for name in FEWCHAN} == FEWCHAN
        assert seen["SGLANG_DEPLOY_RELEASE"] == os.path.realpath(node.root / "current")
    # Set by sitecustomize.py, so absent from the parent's own start: whoever asks the parent is misled.
    assert "NCCL_ALGO" not in variables_of(node.server)


def test_patched_copy_is_what_runs(node):
    """The workers found sglang in the release, and that file has the patch; the engine has none of it."""
    site = pathlib.Path(os.path.realpath(node.root / "current" / "site"))
    noted = [json.loads(path.read_text()) for path in (site.parent / "run").glob("imports-*.json")]
    assert noted
    for note in noted:
        assert str(site / "sglang") in json.dumps(note)
    patched = (site / "sglang/srt/layers/communicator.py").read_text()
    assert "_is_sm120_supported = _is_cuda and is_sm120_supported()" in patched
    python = pathlib.Path(node.launch()["argv"][0])
    (original,) = python.parents[1].glob("lib/python*/site-packages/sglang/srt/layers/communicator.py")
    assert "_is_sm120_supported" not in original.read_text()


def test_status_says_it(node):
    """Release, variant, state, health, endpoint and the list of releases."""
    said = node.run("status").succeeded().said
    for text in (node.current, "variant: fewchan_fusion", "state: promoted", "health: ready", f"127.0.0.1:{node.port}"):
        assert text in said


def test_second_deploy_changes_nothing(node):
    """Same process, changed=0."""
    pid = node.server
    outcome = node.deploy("fewchan_fusion").succeeded()
    assert outcome.recap["changed"] == 0
    assert node.server == pid


def test_switch_and_roll_back(node):
    """To baseline, back by rollback, and to the named release."""
    first = node.current
    node.deploy("baseline").succeeded()
    second = node.current
    node.serves(second)
    assert not (node.root / "current/site/sglang").exists(), "a variant without patches copies nothing"
    assert all("NCCL_BUFFSIZE" not in variables_of(pid) for pid in node.workers())
    node.run("rollback").succeeded()
    node.serves(first)
    assert (node.state(first), node.state(second)) == ("promoted", "retired")
    node.run("rollback", release=second).succeeded()
    node.serves(second)


def test_canary_beside_the_live_server(node):
    """With dummy weights, one layer and ports of its own; a client streams throughout, and nothing is left."""
    pid, before = node.server, node.current
    with Client(node.port, "tiny-llama") as client:
        node.run("canary", variant="fewchan").succeeded()
    event = node.ledger("canary")[-1]
    assert (event["verdict"], event["layers"], event["live"]["failures"]) == ("passed", 1, [])
    assert client.answered > 5 and not client.failed
    assert node.serves(before) == pid
    assert not (node.root / "canary").exists()
    assert not marked(node.root / "canary")


def failed_and_restored(node, outcome, before, *words):
    """Check that a deploy failed by name and that the release from before serves."""
    outcome.refused("is rejected", before, "serves again", *words)
    node.serves(before)
    assert node.state(before) == "promoted"
    assert not (node.root / "lock").exists()


def test_unknown_flag_restores(node):
    """Forced past lint, it ends the real parser; the flag is named."""
    before = node.current
    overrides = {"args": {"no-such-flag": True}}
    outcome = node.deploy("baseline", sglang_variant_overrides=overrides, sglang_force=True)
    failed_and_restored(node, outcome, before, "no-such-flag")


def test_weights_cut_short_restore(node):
    """The weights are truncated after the checks: the real loader says what is wrong with them."""
    before = node.current
    model = node.root / "models" / "tiny-llama"
    weights = next(model.glob("*.safetensors"))
    copy = weights.read_bytes()
    starts = len(node.ledger("activated"))
    run = node.start("deploy", variant="fewchan")
    try:
        wait_for(lambda: len(node.ledger("activated")) > starts, "the new release", 60)
        weights.write_bytes(copy[: len(copy) // 2])

        def reported():
            return any(event["status"] == "failed" for event in run.events()) or run.process.poll() is not None

        wait_for(reported, "the failure", 120)
    finally:
        weights.write_bytes(copy)
        outcome = run.wait(300)
    failed_and_restored(node, outcome, before, "A weight file is missing, cut short", "SafetensorError")


def test_port_taken_after_the_checks_restores(node):
    """Another program takes the port in the moment in which the old server has left it."""
    before = node.current
    wanted = "fewchan" if node.manifest(before)["variant"] != "fewchan" else "baseline"
    listener = None
    run = node.start("deploy", variant=wanted)
    try:
        stops = len(node.ledger("stop"))
        wait_for(lambda: len(node.ledger("stop")) > stops, "the stop of the old server", 90)
        listener = wait_for(lambda: take(node.port), "the port", 10)
        wait_for(lambda: any(event["status"] == "failed" for event in run.events()), "the failure", 120)
    finally:
        if listener:
            listener.close()
        outcome = run.wait(300)
    failed_and_restored(node, outcome, before, str(node.port), str(os.getpid()))


def take(port):
    """Return a listener on a port, None where it is still taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def test_killed_scheduler_is_mended(node):
    """The parent of a dead rank stays up in this release of SGLang; a deploy starts it anew."""
    release, variant = node.current, node.manifest(node.current)["variant"]
    old = node.server
    os.kill(node.workers()[0], signal.SIGKILL)
    wait_for(lambda: len(node.workers()) < 2, "the death of one rank")
    assert "drift" in node.run("status").succeeded().said
    outcome = node.deploy(variant).succeeded()
    assert outcome.recap["changed"] > 0
    assert node.serves(release) != old


def test_killed_scheduler_of_a_promoted_release_is_started_again(node):
    """Without anybody's help: a restart with its reason, a server that serves.

    What is seen first may be the rank, or the parent that the other rank's failure has ended.
    """
    release, old, before = node.current, node.server, len(node.ledger("restart"))
    os.kill(node.workers()[1], signal.SIGKILL)
    event = wait_for(lambda: node.ledger("restart")[before:], "the restart", 40)[-1]
    assert event["process"] in ("sglang::scheduler_TP1", "server") and event["reason"]
    health = node.root / "releases" / release / "run/health.json"
    wait_for(lambda: json.loads(health.read_text())["state"] == "watching", "the new server", 150)
    assert node.serves(release) != old
    assert "restarted at" in node.run("status").succeeded().said


def test_killed_server_that_nobody_promoted_stays_down(node):
    """The same release while it is judged: a crash stays a crash, and status says so."""
    manifest = node.root / "releases" / node.current / "manifest.json"
    promoted = manifest.read_text()
    restarts, alarms = len(node.ledger("restart")), len(node.ledger("alarm"))
    manifest.write_text(promoted.replace('"state": "promoted"', '"state": "active"'))
    os.kill(node.server, signal.SIGKILL)
    event = wait_for(lambda: node.ledger("alarm")[alarms:], "the alarm", 20)[-1]
    manifest.write_text(promoted)
    assert event["kind"] == "server_died" and "only a promoted one is restarted" in event["why"]
    assert "alarm: " in node.run("status").succeeded().said
    assert not node.servers() and len(node.ledger("restart")) == restarts


def test_stop_leaves_nothing(node):
    """No process, a free port, and a status that says so."""
    node.run("stop").succeeded()
    assert not node.servers()
    assert not node.workers()
    assert node.port_is_free()
    assert "health: stopped on purpose at" in node.run("status").succeeded().said
