"""The controller is killed at a random instant of a deploy of the real server: one more deploy converges.

After each: the release that was promoted before was never lost, one server runs, no orphan stays, the lock is free.
"""

from __future__ import annotations

import random
import time

from deployment import marked, variables_of

SEED = 20260131
# A little longer than a deploy takes on two idle cores, so that some instants lie after its end.
SPAN = 30.0


def test_one_more_deploy_converges(instant, node, told):
    """With its forks, or without: then the task that runs comes to its end by itself."""
    draw = random.Random(f"{SEED}/{instant}")
    group, after = draw.choice([True, False]), draw.uniform(0.5, SPAN)
    before = node.current
    variant = node.manifest(before)["variant"]
    wanted = "baseline" if variant != "baseline" else "fewchan_fusion"
    run = node.start("deploy", variant=wanted)
    end = time.monotonic() + after
    while time.monotonic() < end and run.process.poll() is None:
        time.sleep(0.02)
    finished = run.process.poll() is not None
    step = next((event["task"] for event in reversed(run.events()) if event["status"] == "start"), "its begin")
    if not finished:
        run.kill(group)
    run.process.wait()
    # Nothing that served before is lost: it still is a release that may be gone back to.
    assert node.state(before) in ("promoted", "active")
    assert (node.root / "releases" / before / "manifest.json").is_file()
    outcome = node.deploy(wanted)
    assert outcome.rc == 0, outcome.out
    release = node.current
    pid = node.serves(release)
    assert (node.manifest(release)["variant"], node.state(release)) == (wanted, "promoted")
    assert node.state(before) == "promoted"
    assert not (node.root / "lock").exists()
    # Nothing that the killed run left behind turns up later.
    time.sleep(0.5)
    assert node.servers() == [pid]
    running = {variables_of(one)["SGLANG_DEPLOY_RELEASE"] for one in marked(node.root)}
    assert running == {str(node.root / "releases" / release)}
    assert not [path.name for path in (node.root / "releases").iterdir() if path.name.startswith(".")]
    where = f"{after:.1f} s, {'with its forks, ' if group else ''}in: {step.rpartition(' : ')[2]}"
    killed = "ended by then" if finished else where
    told(f"controller killed, instant {instant}", killed)
    if instant % 10 == 9:
        node.run("prune").succeeded()
