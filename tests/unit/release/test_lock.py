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
        ({"machine_id": sglang_lock.machine_id() or "0" * 32, "boot_id": "an-older-boot"}, "was restarted since"),
    ],
)
def test_dead_holder_of_this_controller_is_taken_over_and_said_so(tmp_path, changes, reason, monkeypatch):
    if "machine_id" in changes:
        monkeypatch.setattr(sglang_lock, "machine_id", lambda: changes["machine_id"])
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
    before = dict(REMOTE, machine_id="a" * 32)
    put(tmp_path, make_run("before", **before))
    run = make_run("after", **dict(before, boot_id="newer-boot"))
    assert "elsewhere was restarted" in sglang_lock.acquire(tmp_path, run)["took_over"]


@pytest.mark.parametrize("name", ["elsewhere", os.uname().nodename])
@pytest.mark.parametrize(("one", "other"), [("a" * 32, "b" * 32), ("", ""), (None, "b" * 32), ("a" * 32, None)])
def test_two_controllers_of_one_name_do_not_take_each_others_lock(tmp_path, name, one, other):
    first = dict(REMOTE, controller=name, machine_id=one)
    put(tmp_path, make_run("first", **first), age=60)
    run = make_run("second", **dict(first, machine_id=other, boot_id="newer-boot", alive=[], pid_ns="pid:[1]"))
    for force in (False, True):
        with pytest.raises(sglang_lock.LockedError, match="break_lock=true breaks a silent one in 840 s"):
            sglang_lock.acquire(tmp_path, run, "", force)
    os.utime(tmp_path / "lock", (time.time() - 1000,) * 2)
    assert "broken by break_lock" in sglang_lock.acquire(tmp_path, run, "", True)["took_over"]


def test_a_machine_without_an_id_has_none(monkeypatch, tmp_path):
    assert len(sglang_lock.machine_id()) in (0, 32)
    for text in ("", "uninitialized\n"):
        (tmp_path / "id").write_text(text)
        monkeypatch.setattr("builtins.open", lambda path, real=open, **more: real(tmp_path / "id", **more))
        assert sglang_lock.machine_id() == ""
        monkeypatch.undo()


@pytest.mark.parametrize(("age", "force", "wins"), [(60, True, False), (1000, False, False), (1000, True, True)])
def test_remote_holder_is_judged_by_its_heartbeat(tmp_path, age, force, wins):
    put(tmp_path, make_run("remote", **REMOTE), age)
    if wins:
        assert "broken by break_lock" in sglang_lock.acquire(tmp_path, make_run("new"), "", force)["took_over"]
    else:
        with pytest.raises(sglang_lock.LockedError, match="break_lock=true"):
            sglang_lock.acquire(tmp_path, make_run("new"), "", force)


# What the actions on one and the same controller say, which is another machine than the managed host.
SISTER = dict(REMOTE, pid=70, pid_start=500, pid_ns="pid:[1]", time="2026-01-31T03:00:00Z")
ASKING = dict(SISTER, pid=90, pid_start=900, time="2026-01-31T03:05:00Z", alive=[[90, 900], [80, 700]])


def test_dead_holder_of_the_same_remote_controller_is_taken_over_at_once_and_said_so(tmp_path):
    put(tmp_path, make_run("killed", **SISTER), age=5)
    outcome = sglang_lock.acquire(tmp_path, make_run("next", **ASKING), "a")
    assert outcome["taken"] and "its process 70 on elsewhere is gone" in outcome["took_over"]
    assert "run killed of user operator on controller elsewhere" in outcome["took_over"]
    assert sglang_lock.read(tmp_path)["run"] == make_run("next", **{k: v for k, v in ASKING.items() if k != "alive"})


def test_its_number_in_a_later_process_does_not_help_the_dead(tmp_path):
    put(tmp_path, make_run("killed", **SISTER))
    run = make_run("next", **dict(ASKING, alive=[[90, 900], [70, 800]]))
    assert "is gone" in sglang_lock.acquire(tmp_path, run)["took_over"]


@pytest.mark.parametrize("age", [5, 10_000])
def test_living_holder_of_the_same_remote_controller_is_named_and_kept_even_from_break_lock(tmp_path, age):
    put(tmp_path, make_run("first", **SISTER), age)
    run = make_run("second", **dict(ASKING, alive=[[90, 900], ["70", "500"]]))
    for force in (False, True):
        with pytest.raises(sglang_lock.LockedError, match="run first .* or end process 70; then this run") as error:
            sglang_lock.acquire(tmp_path, run, "", force)
        assert "break_lock" not in str(error.value)


@pytest.mark.parametrize(
    ("held", "asking"),
    [
        ({}, {"controller": "third"}),
        ({}, {"pid_ns": "pid:[2]"}),
        ({}, {"pid_ns": ""}),
        ({"pid_ns": ""}, {"pid_ns": ""}),
        ({"pid_ns": None}, {}),
        ({"pid": "x"}, {}),
        ({}, {"alive": None}),
        ({}, {"alive": [1]}),
        # A holder that came after the asking run cannot be in its list.
        ({"pid_start": 901}, {}),
        ({"time": ASKING["time"]}, {}),
    ],
)
def test_whom_the_asking_run_cannot_know_is_judged_by_the_heartbeat(tmp_path, held, asking):
    put(tmp_path, make_run("first", **dict(SISTER, **held)), age=60)
    run = make_run("second", **dict(ASKING, **asking))
    for force in (False, True):
        with pytest.raises(sglang_lock.LockedError, match="break_lock=true breaks a silent one in 840 s"):
            sglang_lock.acquire(tmp_path, run, "", force)
    os.utime(tmp_path / "lock", (time.time() - 1000,) * 2)
    with pytest.raises(sglang_lock.LockedError, match="make sure that it is dead"):
        sglang_lock.acquire(tmp_path, run)
    assert "broken by break_lock" in sglang_lock.acquire(tmp_path, run, "", True)["took_over"]


def test_holder_in_another_namespace_of_this_machine_is_not_looked_for_here(tmp_path):
    put(tmp_path, make_run("container", pid=dead_process(), pid_ns="pid:[1]"))
    with pytest.raises(sglang_lock.LockedError, match="break_lock=true"):
        sglang_lock.acquire(tmp_path, make_run("new"))


def test_a_host_that_has_the_controllers_name_by_chance_is_not_taken_for_it(tmp_path):
    namesake = {"controller": os.uname().nodename, "boot_id": "other-boot"}
    put(tmp_path, make_run("first", **dict(SISTER, **namesake)))
    run = make_run("second", **dict(ASKING, **namesake))
    assert "its process 70 on" in sglang_lock.acquire(tmp_path, run)["took_over"]
    put(tmp_path, make_run("first", **dict(SISTER, **namesake)))
    with pytest.raises(sglang_lock.LockedError, match="end process 70"):
        sglang_lock.acquire(tmp_path, dict(run, alive=[[70, 500]]))


def named_run():
    """Start a process that looks like ansible-playbook and names itself; return the process and its run."""
    code = (
        "import json, os, sys, ansible.module_utils as utils; utils.__path__.append(sys.argv[1]);"
        "from ansible.module_utils.sglang_variant_run import identify_run;"
        "print(json.dumps(identify_run(os.getpid())), flush=True); sys.stdin.read()"
    )
    utils = os.path.dirname(sglang_lock.__file__)
    argv = [sys.executable, "-c", code, utils, "ansible-playbook"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return child, json.loads(child.stdout.readline())


def test_real_processes_one_killed_with_kill_9(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_lock.socket, "gethostname", lambda: "the-managed-host")
    first, holder = named_run()
    children = [first]
    try:
        assert sglang_lock.acquire(tmp_path, holder, "fusion")["taken"]
        time.sleep(1.1)  # runs are named to the second
        second, run = named_run()
        children.append(second)
        with pytest.raises(sglang_lock.LockedError, match=f"run {holder['id']} .* end process {first.pid}"):
            sglang_lock.acquire(tmp_path, run)
        first.kill()
        time.sleep(0.1)  # it stays a zombie, as it does below a shell that is busy
        third, run = named_run()
        children.append(third)
        assert f"its process {first.pid} on" in sglang_lock.acquire(tmp_path, run)["took_over"]
        assert "alive" not in (tmp_path / "lock").read_text()
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_any_module_keeps_the_heartbeat_of_the_holder_fresh(tmp_path):
    assert sglang_lock.touch(tmp_path) is False
    (tmp_path / "lock").write_text("of another program")
    os.utime(tmp_path / "lock", (time.time() - 500,) * 2)
    assert sglang_lock.touch(tmp_path) is False and sglang_lock.read(tmp_path)["heartbeat_age"] > 400
    run = make_run("remote", **REMOTE)
    put(tmp_path, run, age=500)
    assert sglang_lock.touch(tmp_path) is True
    holder = sglang_lock.read(tmp_path)
    assert holder["heartbeat_age"] < 100 and holder["run"] == run


def test_a_long_block_beats_all_the_time_and_only_meanwhile(tmp_path):
    put(tmp_path, make_run("remote", **REMOTE), age=500)
    with sglang_lock.kept_fresh(tmp_path, interval=0.05):
        for _ in range(2):
            deadline = time.monotonic() + 10
            while sglang_lock.read(tmp_path)["heartbeat_age"] > 400 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert sglang_lock.read(tmp_path)["heartbeat_age"] < 100
            os.utime(tmp_path / "lock", (time.time() - 500,) * 2)
    os.utime(tmp_path / "lock", (time.time() - 500,) * 2)
    time.sleep(0.2)
    assert sglang_lock.read(tmp_path)["heartbeat_age"] > 400
    with pytest.raises(ZeroDivisionError), sglang_lock.kept_fresh(None):
        raise ZeroDivisionError


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


def test_what_only_the_lock_needs_is_recorded_nowhere(host):
    host.run = make_run(alive=[[123456789, 987654321]])
    release = host.build()
    for path in (
        host.path("").parent / "lock",
        host.path("").parent / "ledger.jsonl",
        host.path(release) / "manifest.json",
    ):
        assert "run-1" in path.read_text() and "123456789" not in path.read_text()


def test_the_last_step_gives_the_lock_back(host):
    host.ok("locked")
    assert host.ok("reported", unlock=False)["unlocked"] is False
    assert host.ok("pruned", unlock=True)["unlocked"] is True
    assert host.ok("reported")["info"]["lock"] is None
