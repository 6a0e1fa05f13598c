"""A canary with the real SGLang beside a real live server, from which a client streams without a pause."""

from __future__ import annotations

import os
import pathlib

import pytest
from ansible.module_utils.sglang_canary_room import mem_available_mb
from broken import broken
from deployment import marked, wait_for
from streaming import Client

SLEEP = "__import__('time').sleep(3600)"
LOAD = "    def load_model(self):\n"
REQUEST = "        # Create a new request\n"


CASES = {
    "an undefined name after a patch": (
        broken("layers/communicator.py", "= _is_cuda and is_sm120_supported()", "= is_sm120_suported()"),
        ["[canary/undefined_name]", "is_sm120_suported"],
    ),
    "a crash in warm-up": (
        broken("managers/scheduler.py", REQUEST, f"        raise RuntimeError('broken patch')\n{REQUEST}"),
        ["[canary/", "broken patch"],
    ),
    "a stall while weights are made": (
        broken("model_executor/model_runner.py", LOAD, f"{LOAD}        {SLEEP}\n"),
        ["[canary/stalled]", "silent for"],
    ),
}


def undisturbed(node, pid, client):
    """Check that no request failed, the same process serves, and no canary is left but its log."""
    assert not client.failed
    assert client.answered > 5
    assert node.serves(node.current) == pid
    assert not marked(node.root / "canary")


def seconds(node):
    """Return the seconds of the last canary as text, beside what the machine was doing."""
    event = node.ledger("canary")[-1]
    return f"{event['elapsed']:5.1f} s, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"


def limit():
    """Return the 30 s that a verdict may take, stretched where others use the machine."""
    return 30 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_healthy_variant_passes(node, told):
    """The live server is measured and not slowed beyond its limit; nothing is left."""
    pid = node.server
    with Client(node.port, "tiny-llama") as client:
        outcome = node.run("canary", variant="baseline").succeeded()
    undisturbed(node, pid, client)
    live = node.ledger("canary")[-1]["live"]
    assert not (node.root / "canary").exists()
    assert "passed" in outcome.said
    told("canary: healthy", f"passed in {seconds(node)}; {client.answered} streams, slowest {client.slowest:.2f} s")
    told(
        "canary: latency of the live server",
        "median " + ", ".join(f"{phase} {live[phase]['median']} s" for phase in ("before", "during", "after")),
    )


def test_in_the_live_servers_place(node, told):
    """What does not fit beside the live server is tried without it where the operator allows that; it serves again."""
    before, keep = node.server, 1024
    texts = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in marked(node.root)]
    held = sum(int(text.partition("RssAnon:")[2].split()[0]) for text in texts) >> 10
    # Half of what the stop gives back is missing, for each of two ranks.
    overhead = int(mem_available_mb() - keep + held / 2) // 2
    more = {"canary_downtime": True, "sglang_canary_overhead_mb": overhead, "sglang_canary_keep_mb": keep}
    outcome = node.run("canary", variant="baseline", **more).succeeded()
    verdicts = [event["verdict"] for event in node.ledger("canary")[-2:]]
    assert verdicts == ["no_room", "passed"], outcome.out
    assert node.serves(node.current) != before
    assert not marked(node.root / "canary")
    told("canary: in the live server's place", f"passed; {held} MiB were given back, and the live server serves again")


def test_unknown_flag(node, told):
    """Forced past lint, the real parser names it."""
    pid = node.server
    with Client(node.port, "tiny-llama") as client:
        overrides = {"args": {"no-such-flag": True}}
        outcome = node.deploy("baseline", canary=True, sglang_variant_overrides=overrides, sglang_force=True)
    outcome.refused("[canary/bad_flag]", "no-such-flag", "nothing was switched")
    undisturbed(node, pid, client)
    told("canary: an unknown flag", f"named in {seconds(node)}; {client.answered} streams, none failed")
    assert node.ledger("canary")[-1]["elapsed"] < limit()


@pytest.mark.parametrize("case", CASES)
def test_broken_patch(case, node, told):
    """The patched copy is broken after the release is sealed, which no check of the release sees in time."""
    change, words = CASES[case]
    pid, built = node.server, len(node.ledger("built"))
    # A channel count that no other case has gives each a release of its own.
    number = str(8 + list(CASES).index(case))
    with Client(node.port, "tiny-llama") as client:
        overrides = {"nccl": {"NCCL_MAX_NCHANNELS": number}}
        run = node.start("deploy", variant="fewchan_fusion", canary=True, sglang_variant_overrides=overrides)
        wait_for(lambda: len(node.ledger("built")) > built or run.process.poll() is not None, "the release", 120)
        change(pathlib.Path(node.root, "releases", node.ledger("built")[-1]["release"], "site"))
        outcome = run.wait(240)
    outcome.refused("nothing was switched", *words)
    undisturbed(node, pid, client)
    told(f"canary: {case}", f"named in {seconds(node)}; {client.answered} streams, none failed")
    assert node.ledger("canary")[-1]["elapsed"] < limit()
