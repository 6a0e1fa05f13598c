"""The deploy lock: who gets it, who loses it, and what the loser is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from ansible.module_utils import sglang_lock

from .conftest import make_run

REMOTE = {"controller": "elsewhere", "boot_id": "other-boot", "pid": 1, "pid_start": 1}


def put(root, run, age=0.0):
    """Leave a lock of RUN, last touched AGE seconds ago."""
    path = root / "lock"
    path.write_text(json.dumps({"schema": 1, "run": run, "variant": "fusion", "since": "2026-01-31T03:00:00.000Z"}))
    os.utime(path, (time.time() - age,) * 2)


def test_taken_renewed_and_given_back(tmp_path):
    run = make_run()
    assert sglang_lock.acquire(tmp_path, run, "a") == {"taken": True, "took_over": ""}
    assert sglang_lock.acquire(tmp_path, run, "a") == {"taken": False, "took_over": ""}
    assert sglang_lock.read(tmp_path)["run"] == run
    assert sglang_lock.release(tmp_path, make_run("other")) is False
    assert sglang_lock.release(tmp_path, run) is True
    assert sglang_lock.read(tmp_path) is None
    assert sglang_lock.release(tmp_path, run) is False


def test_living_holder_is_named_and_kept_even_from_break_lock(tmp_path):
    sglang_lock.acquire(tmp_path, make_run("first"), "fusion")
    put(tmp_path, make_run("first"), age=10_000)
    for force in (False, True):
        with pytest.raises(sglang_lock.LockedError) as error:
            sglang_lock.acquire(tmp_path, make_run("second"), "fewchan", force)
        for part in ("first", "operator", os.uname().nodename, str(os.getpid()), "fusion", "2026-01-31", "Way out"):
            assert part in str(error.value)
    assert sglang_lock.read(tmp_path)["run"]["id"] == "first"


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pid": None}, "is gone"),
        ({"pid_start": 1}, "is another one by now"),
        ({"boot_id": "an-older-boot"}, "was restarted since"),
    ],
)
def test_dead_holder_of_this_controller_is_taken_over_and_said_so(tmp_path, changes, reason):
    if changes.get("pid", 0) is None:
        changes = {"pid": dead_process()}
    put(tmp_path, make_run("dead", **changes))
    outcome = sglang_lock.acquire(tmp_path, make_run("new"), "a")
    assert outcome["taken"] and reason in outcome["took_over"] and "run dead of user operator" in outcome["took_over"]
    assert sglang_lock.read(tmp_path)["run"]["id"] == "new"


def test_zombie_holder_is_dead(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        deadline = time.monotonic() + 10
        while sglang_lock._pid_start(child.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert os.path.exists(f"/proc/{child.pid}")
        put(tmp_path, make_run("zombie", pid=child.pid))
        assert "is gone" in sglang_lock.acquire(tmp_path, make_run("new"))["took_over"]
    finally:
        child.wait()


def test_restarted_remote_controller_is_dead_for_its_own_next_run(tmp_path):
    put(tmp_path, make_run("before", **REMOTE))
    run = make_run("after", **dict(REMOTE, boot_id="newer-boot"))
    assert "elsewhere was restarted" in sglang_lock.acquire(tmp_path, run)["took_over"]


@pytest.mark.parametrize(("age", "force", "wins"), [(60, True, False), (1000, False, False), (1000, True, True)])
def test_remote_holder_is_judged_by_its_heartbeat(tmp_path, age, force, wins):
    put(tmp_path, make_run("remote", **REMOTE), age)
    if wins:
        assert "broken by break_lock" in sglang_lock.acquire(tmp_path, make_run("new"), "", force)["took_over"]
    else:
        with pytest.raises(sglang_lock.LockedError, match="break_lock=true"):
            sglang_lock.acquire(tmp_path, make_run("new"), "", force)


def test_heartbeat_touches_only_the_own_lock(tmp_path):
    run = make_run("remote", **REMOTE)
    assert sglang_lock.heartbeat(tmp_path, run) is False
    put(tmp_path, run, age=500)
    assert sglang_lock.heartbeat(tmp_path, make_run("other")) is False
    assert sglang_lock.read(tmp_path)["heartbeat_age"] > 400
    assert sglang_lock.heartbeat(tmp_path, run) is True
    assert sglang_lock.read(tmp_path)["heartbeat_age"] < 100


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}'])
def test_unreadable_lock_is_somebodys(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with pytest.raises(sglang_lock.LockedError, match="unreadable lock file"):
        sglang_lock.acquire(tmp_path, make_run())
    os.utime(tmp_path / "lock", (time.time() - 1000,) * 2)
    assert sglang_lock.acquire(tmp_path, make_run(), "", True)["taken"]


def race(root, count):
    """Let COUNT processes take the lock at the same moment; return the names of those that got it."""
    start_read, start_write = os.pipe()
    result_read, result_write = os.pipe()
    end_read, end_write = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                for unused in (start_write, end_write, result_read):
                    os.close(unused)
                os.read(start_read, 1)
                try:
                    sglang_lock.acquire(root, make_run(f"run-{number}"))
                    os.write(result_write, f"won {number}\n".encode())
                except sglang_lock.LockedError:
                    os.write(result_write, f"lost {number}\n".encode())
                # Stays alive until all are through: a winner that is gone would rightly lose the lock again.
                os.read(end_read, 1)
            finally:
                os._exit(0)
        children.append(child)
    os.close(start_write)
    lines = b""
    while lines.count(b"\n") < count:
        lines += os.read(result_read, 4096)
    os.close(end_write)
    for child in children:
        os.waitpid(child, 0)
    for used in (start_read, result_read, result_write, end_read):
        os.close(used)
    return [line.split()[1] for line in lines.decode().splitlines() if line.startswith("won")]


@pytest.mark.parametrize("before", ["free", "dead"])
def test_exactly_one_of_eight_processes_wins(tmp_path, before):
    for turn in range(5):
        root = tmp_path / str(turn)
        root.mkdir()
        if before == "dead":
            put(root, make_run("dead", pid=dead_process()))
        winners = race(root, 8)
        assert len(winners) == 1
        assert sglang_lock.read(root)["run"]["id"] == f"run-{winners[0]}"


def test_second_deploy_is_refused_by_the_module(host):
    host.compare("fusion")
    second = host.call("compared", variant="fewchan", run=make_run("run-2"))
    assert second["failed"] and second["holder"]["run"]["id"] == "run-1" and "one deploy at a time" in second["msg"]
    assert host.call("active", release="20260101T000000Z-a-0123456789ab", run=make_run("run-2"))["failed"]
    dry = host.ok("compared", check=True, variant="fewchan", run=make_run("run-2"))
    assert any("is held by run run-1" in str(text) for text in dry["warnings"])
    host.ok("unlocked", run=make_run("run-2"))
    assert host.ok("reported")["info"]["lock"]["run"]["id"] == "run-1"


def test_take_over_is_in_the_ledger(host):
    host.compare()
    put(host.path("").parent, make_run("dead", pid=dead_process()))
    result = host.ok("compared", variant="baseline")
    assert any("took the lock over from run dead" in str(text) for text in result["warnings"])
    events = host.ok("reported")["info"]["ledger"]
    assert [item["event"] for item in events[-2:]] == ["lock_taken_over", "compared"]


def test_a_state_without_a_held_lock_holds_it_only_for_itself(host):
    release = host.build()
    host.ok("unlocked")
    host.ok("active", release=release)
    assert host.ok("reported")["info"]["lock"] is None
