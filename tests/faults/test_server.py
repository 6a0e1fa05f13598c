"""What can happen to the real server and its host in the middle of a deploy, one fault after the other on one root.

After each fault: the deploy ended with one reason and the release from before serves, or it is what is deployed; one
more deploy converges; no orphan stays.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest
from broken import broken
from deployment import marked, variables_of, wait_for

KINDS = {"server": b"sglang.launch_server", "scheduler": b"sglang::scheduler", "detokenizer": b"sglang::detokenizer"}
PHASES = ("imports", "warmup", "serving")
# What takes a tiny model no time is held open in the patched copy, so that a kill meets it.
_HOLD = "__import__('time').sleep(6)"
_RUNNER = "model_executor/model_runner.py"
HELD = {
    "distributed": (_RUNNER, '        logger.info("Init torch distributed begin.")\n'),
    "weights": (_RUNNER, "        # This can reduce thread conflicts and speed up weight loading.\n"),
    "kv_cache": (
        "model_executor/model_runner_kv_cache_mixin.py",
        '        logger.info(\n            f"Memory pool end. "\n',
    ),
}
QUICK = {"distributed": 20, "weights": 20, "kv_cache": 20, "warmup": 20}


def pid_of(node, release, kind):
    """Return the pid of a process of a release, None where there is none yet; of the schedulers the last."""
    found = []
    for pid in marked(node.root):
        try:
            ours = variables_of(pid)["SGLANG_DEPLOY_RELEASE"].endswith("/" + release)
            title = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, KeyError):
            continue
        if ours and KINDS[kind] in title:
            found.append(pid)
    return max(found, default=None)


def phase_of(node, release):
    """Return the phase that the wait for a release has come to, or an empty text."""
    try:
        return json.loads((node.root / "releases" / release / "run" / "progress.json").read_text())["phase"]
    except (OSError, ValueError, KeyError):
        return ""


def other(node):
    """Return a variant that does not serve now."""
    return "baseline" if node.manifest(node.current)["variant"] != "baseline" else "fewchan"


def begun(node, run, count):
    """Return the release that a deploy has activated."""
    wait_for(lambda: len(node.ledger("activated")) > count or run.process.poll() is not None, "the switch", 180)
    return node.ledger("activated")[-1]["release"]


def converges(node, wanted):
    """Check that one more deploy ends well, with one server and nothing of another release."""
    node.deploy(wanted).succeeded()
    release = node.current
    pid = node.serves(release)
    assert (node.manifest(release)["variant"], node.state(release)) == (wanted, "promoted")
    assert node.servers() == [pid]
    assert {variables_of(one)["SGLANG_DEPLOY_RELEASE"] for one in marked(node.root)} == {
        str(node.root / "releases" / release)
    }
    assert not (node.root / "lock").exists()


def strike(node, kind, phase, number):
    """Start a deploy, signal a process of it in a phase, and return ``(before, wanted, outcome)``."""
    before, wanted, count = node.current, other(node), len(node.ledger("activated"))
    run = node.start("deploy", variant=wanted, sglang_verify_phase_silence=QUICK, sglang_verify_generation_timeout=15)
    release = begun(node, run, count)
    reached = (phase, "serving") if phase != "imports" else (phase,)
    wait_for(lambda: phase_of(node, release) in reached or run.process.poll() is not None, f"phase {phase}", 240)
    pid = wait_for(lambda: pid_of(node, release, kind) or run.process.poll() is not None, kind, 120)
    if pid is not True:
        os.kill(pid, number)
    return before, wanted, run.wait(400)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_process(kind, phase, node, told):
    """SIGKILL to each kind of process in each phase: the release from before is back, one more deploy converges."""
    before, wanted, outcome = strike(node, kind, phase, signal.SIGKILL)
    if outcome.rc:
        outcome.refused("is rejected", before, "serves again")
        node.serves(before)
        assert node.state(before) == "promoted"
    converges(node, wanted)
    told(
        f"kill -9 of the {kind} in phase {phase}", "refused, old release back" if outcome.rc else "came after the proof"
    )


@pytest.mark.parametrize("phase", HELD)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_process_in_a_short_phase(kind, phase, node, told):
    """The same in the phases that pass at once here; the next deploy does not take the release that was held open."""
    file, line = HELD[phase]
    held = f"{line}        {_HOLD}\n" if phase == "distributed" else f"        {_HOLD}\n{line}"
    before, built, count = node.current, len(node.ledger("built")), len(node.ledger("activated"))
    # A channel count that no other case has gives each a release of its own.
    number = 8 + list(HELD).index(phase) + len(HELD) * list(KINDS).index(kind)
    overrides = {"nccl": {"NCCL_MAX_NCHANNELS": str(number)}}
    run = node.start(
        "deploy",
        variant="fewchan_fusion",
        sglang_variant_overrides=overrides,
        sglang_verify_phase_silence=QUICK,
    )
    wait_for(lambda: len(node.ledger("built")) > built or run.process.poll() is not None, "the release", 120)
    broken(file, line, held)(pathlib.Path(node.root, "releases", node.ledger("built")[-1]["release"], "site"))
    release = begun(node, run, count)
    wait_for(lambda: phase_of(node, release) == phase, f"phase {phase}", 240)
    os.kill(wait_for(lambda: pid_of(node, release, kind), kind, 5), signal.SIGKILL)
    assert phase_of(node, release) == phase
    run.wait(400).refused("is rejected", before, "serves again")
    node.serves(before)
    assert node.state(before) == "promoted"
    node.deploy("fewchan_fusion", sglang_variant_overrides=overrides).succeeded()
    assert node.current != release
    assert node.servers() == [node.serves(node.current)]
    told(f"kill -9 of the {kind} in phase {phase}", "refused, old release back")


def test_killed_watch(node, told):
    """SIGKILL of watch.py alone, which takes the server along: the promoted release is restarted, and it is told."""
    before, server, count = node.current, node.server, len(node.ledger("restart"))
    begin = time.monotonic()
    os.kill(int(pathlib.Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_for(lambda: len(node.ledger("restart")) > count, "the restart", 30)
    seen = time.monotonic() - begin
    event = node.ledger("restart")[-1]
    assert event["process"] == "watch.py" and "was killed by SIGKILL, and the server with it" in event["reason"]
    health = node.root / "releases" / before / "run" / "health.json"
    wait_for(lambda: json.loads(health.read_text())["state"] == "watching", "the server serves", 120)
    assert node.serves(before) == event["pid"] != server
    said = node.run("status").succeeded().said
    assert "restarted at" in said and "watch.py" in said and "alarm" not in said
    converges(node, node.manifest(before)["variant"])
    assert node.server == event["pid"]
    told("kill -9 of watch.py", f"restarted after {seen:.0f} s")


def test_stopped_process(node, told):
    """SIGSTOP to a scheduler: alive and silent is a stall or a dead generation, never a hang of the deploy."""
    begin = time.monotonic()
    before, wanted, outcome = strike(node, "scheduler", "imports", signal.SIGSTOP)
    outcome.refused("is rejected", before, "serves again")
    node.serves(before)
    told("SIGSTOP of a scheduler", f"refused after {time.monotonic() - begin:.0f} s, old release back")
    converges(node, wanted)


def test_full_disk_under_the_log(node, told):
    """The log's own file system has 16 KiB: the deploy ends, and one more converges once there is room."""
    before, wanted, count = node.current, other(node), len(node.ledger("built"))
    # A release of its own, so that its log directory is made in this run.
    overrides = {"nccl": {"NCCL_MAX_NCHANNELS": "7"}}
    run = node.start("deploy", variant=wanted, sglang_variant_overrides=overrides, sglang_verify_timeout=90)
    wait_for(lambda: len(node.ledger("built")) > count or run.process.poll() is not None, "the release", 180)
    logs = node.root / "releases" / node.ledger("built")[-1]["release"] / "logs"
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", logs]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        run.wait(400)
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        outcome = run.wait(400)
        full = os.statvfs(logs).f_bavail == 0
    finally:
        subprocess.run(["umount", "--lazy", logs], check=True)
    assert full, "the log never filled its file system"
    if outcome.rc:
        outcome.refused("is rejected", before, "serves again")
        node.serves(before)
    converges(node, wanted)
    told("full disk under the log", "refused, old release back" if outcome.rc else "served on without its log")


def test_port_taken_before_the_checks(node, told):
    """Precheck refuses another port that is taken; the server is not touched."""
    before, pid = node.current, node.server
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        node.deploy(other(node), sglang_server_port=port).refused(str(port), str(os.getpid()))
    assert node.serves(before) == pid
    told("port taken before the checks", "refused, server untouched")


def test_port_taken_by_another_sglang(node, base, told):
    """A server of another root holds the port: it is named, and neither is touched."""
    before, pid = node.current, node.server
    folder, variables = base
    stranger = type(node)(folder / "two", **variables)
    stranger.port = node.port
    stranger.variables["sglang_server_port"] = node.port
    try:
        stranger.deploy("baseline").refused(str(node.port), str(pid))
    finally:
        stranger.destroy()
    assert node.serves(before) == pid
    told("port taken by another root's SGLang", "refused, server untouched")


def test_two_deploys_at_once(node, told):
    """The second fails at once and names the first, which goes on."""
    wanted = other(node)
    first = node.start("deploy", variant=wanted)
    wait_for(lambda: (node.root / "lock").exists() or first.process.poll() is not None, "the lock", 60)
    node.deploy("custom_all_reduce").refused("is held by run", f"pid {first.process.pid}")
    first.wait(400).succeeded()
    converges(node, wanted)
    told("two deploys at once", "the second refused, the first served")
