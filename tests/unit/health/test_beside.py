"""The program that starts the server and stays beside it: dead workers, hangs, and who is started again when."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import requests
from ansible.module_utils import (
    sglang_launch_policy,
    sglang_launch_watch,
    sglang_ledger,
    sglang_lock,
    sglang_proc,
    sglang_watch_progress,
)

from .beside import alive, events, note, server, serving, until


def test_a_lock_is_silent_for_watch_and_deploy_alike():
    """The program of a release cannot import the other's figure."""
    assert sglang_launch_policy.LOCK_LIMIT == sglang_lock.HEARTBEAT_LIMIT


def test_a_dead_worker_under_a_living_parent_is_reported_and_no_experiment_is_restarted(watched, health):
    release = watched({"health_dead_seconds": 1}, state="active")
    victim = release.kill("detokenizer")
    data = until(lambda: note(release) if note(release)["state"] == "worker_died" else None)
    assert [item["pid"] for item in data["dead"]] == [victim]
    assert f"(pid {victim})" in data["text"] and f"server process {release.pid} lives on" in data["text"]
    (event,) = until(lambda: events(release.root, "worker_died"))
    assert (event["release"], event["pid"]) == ("r1", release.pid)
    assert health(release.release, state="probe", generations=0)["alarm"] == data["text"]
    time.sleep(1)
    assert server(release) == release.pid and not events(release.root, "restart")


def test_a_dead_worker_of_a_promoted_release_is_a_restart(watched, health):
    release = watched({"health_dead_seconds": 1})
    victim = release.kill("scheduler")
    pid = until(lambda: serving(release, after=release.pid))
    (event,) = until(lambda: events(release.root, "restart"))
    assert (
        event["pid"] == pid and event["process"].startswith("sglang::schedul") and f"(pid {victim})" in event["reason"]
    )
    assert event["status"] == "killed by SIGKILL" and event["why"] == "restart 1 of 2 in 120 minutes"
    assert len(alive(release, "scheduler")) == 2
    # The next stop finds the new server's group even when every marked process has died.
    assert json.loads((release.path / "run/service.json").read_text())["pgid"] == pid
    # It is an alarm until it serves; a log of its own tells about it.
    until(lambda: note(release)["state"] == "watching")
    assert note(release)["restarts"][0]["reason"] == event["reason"]
    log = pathlib.Path(release.launch["log"])
    assert log.read_text().count("fired up") == 1 and pathlib.Path(f"{log}.1").read_text().count("fired up") == 1
    release.release.pid = pid
    assert health(release.release, state="probe", generations=1)["ready"]


def test_promotion_counts_at_once_and_without_it_a_crash_stays_a_crash(watched):
    """Without a restart of anything: the state is read when the server dies."""
    release = watched(state="active")
    release.state("promoted")
    release.kill()
    until(lambda: serving(release, after=release.pid))
    release.state("active")
    release.kill()
    data = release.down()
    # By a signal it would be started again: an exit code is its last word.
    assert release.watch.returncode == 128 + signal.SIGKILL
    assert data["state"] == "down" and "the release is active and only a promoted one" in data["text"]
    (event,) = events(release.root, "server_died")
    assert event["status"] == "killed by SIGKILL" and event["process"] == "server"
    assert sglang_watch_progress.alarm(str(release.path)) == data["text"]
    (release.root / "stopped").write_text("")
    assert sglang_watch_progress.alarm(str(release.path)) is None


def test_the_limit_ends_a_restart_loop(watched):  # F27
    """A start that fails each time: so many restarts, then an alarm with the crash's reason and the way out."""
    release = watched()
    release.script(crash={"phase": "imports", "log": "driver_mismatch"})
    begin = time.monotonic()
    release.kill()
    data = release.down()
    assert time.monotonic() - begin < 60
    assert [item["why"] for item in events(release.root, "restart")] == [
        "restart 1 of 2 in 120 minutes",
        "restart 2 of 2 in 120 minutes",
    ]
    (end,) = events(release.root, "server_died")
    assert end["signature"] == "driver_mismatch" and "Error 803" in end["first_error"]
    assert "it was restarted 2 times in 120 minutes" in data["text"] and "driver_mismatch" in data["text"]
    assert "Way out: reboot" in data["text"] and "deploy.yml" in data["text"]
    assert [item["signature"] for item in data["restarts"]] == ["died_silently", "driver_mismatch"]
    assert sglang_watch_progress.alarm(str(release.path)) == data["text"]


def test_a_worker_that_died_before_the_first_look_is_known_by_its_zombie():
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(15, b"sglang::schedul", 0, 0, 0)  # PR_SET_NAME
        os._exit(0)
    try:
        until(lambda: sglang_launch_watch.stat_of(pid)[1] == "Z")
        key = (pid, sglang_launch_watch.stat_of(pid)[3])
        found = sglang_launch_watch.workers(sglang_launch_watch.below(os.getpid()))
        assert found == {key: "sglang::schedul"} and not sglang_launch_watch.lives(*key)
    finally:
        os.waitpid(pid, 0)


def test_a_workers_fork_that_has_not_become_its_program_is_no_worker():
    """Its end is no death: gcc and ninja come and go below a scheduler."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(15, b"sglang::schedul", 0, 0, 0)  # PR_SET_NAME
        child = os.fork()
        os.write(ready[1], f"{child or os.getpid()}\n".encode())
        os.read(go[0], 1)
        os._exit(0)
    try:
        seen = b""
        while seen.count(b"\n") < 2:
            seen += os.read(ready[0], 64)
        children = sglang_launch_watch.below(os.getpid())
        forks = [key for key, (_name, above) in children.items() if above == pid]
        assert len(forks) == 1 and children[forks[0]][0] == "sglang::schedul"
        assert [key[0] for key in sglang_launch_watch.workers(children)] == [pid]
    finally:
        os.write(go[1], b"..")
        os.waitpid(pid, 0)


def test_a_restart_after_the_supervisor_was_killed_has_a_log(watched):
    """The pipe that it left has no reader: the next server would die of its first line."""
    release = watched(piped=True)
    (release.path / "logs" / "server.log").write_text("before")
    release.reader.close()
    pid = release.kill()
    until(lambda: serving(release, after=pid))
    assert "fired up" in (release.path / "logs" / "server.log").read_text()
    assert (release.path / "logs" / "server.log.1").read_text() == "before"


@pytest.fixture
def verdict(tmp_path):
    """Return ``verdict(*ages, limit=3)``: what is decided now, after restarts so many minutes ago."""
    release = tmp_path / "releases" / "r1"
    release.mkdir(parents=True)
    (release / "manifest.json").write_text('{"state": "promoted"}')
    (tmp_path / "current").symlink_to("releases/r1")

    def ask(*ages, limit=3):
        restarts = [time.monotonic() - 60 * age for age in ages]
        settings = {"restart_limit": limit, "restart_minutes": 120}
        return sglang_launch_policy.verdict(str(release), settings, restarts)

    return ask


def test_who_is_restarted(verdict, tmp_path):
    assert verdict() == ("restart", "restart 1 of 3 in 120 minutes")
    assert verdict(1, 2, 121) == ("restart", "restart 3 of 3 in 120 minutes")
    assert verdict(1, 2, 119)[0] == "leave"
    assert verdict(limit=0) == ("leave", "it was restarted 0 times in 120 minutes (sglang_server_restart_limit: 0)")

    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"run": {"id": "r7", "user": "ops"}}))
    assert verdict() == ("wait", "run r7 of ops has the deploy lock")
    os.utime(lock, (0, 0))  # silent for long: no run any more
    assert verdict()[0] == "restart"
    for file in ("norestart", "stopped"):
        (tmp_path / file).write_text("")
        assert verdict()[0] == "leave"
        (tmp_path / file).unlink()

    for state in ("building", "built", "active", "rejected", "retired"):
        (tmp_path / "releases/r1/manifest.json").write_text(json.dumps({"state": state}))
        assert verdict() == ("leave", f"the release is {state} and only a promoted one is restarted")
    (tmp_path / "releases/r1/manifest.json").write_text('{"state": "promo')
    assert verdict()[0] == "leave"
    (tmp_path / "releases/r1/manifest.json").write_text('{"state": "promoted"}')
    (tmp_path / "current").unlink()
    assert verdict() == ("leave", "it is not the current release")


def test_a_run_that_holds_the_lock_is_not_fought(watched):
    """Neither by a question into its measurement nor by a restart."""
    release = watched()
    lock = release.root / "lock"
    lock.write_text(json.dumps({"run": {"id": "r7", "user": "ops"}}))
    time.sleep(1.5)
    log = pathlib.Path(release.launch["log"])
    before = log.read_text()
    time.sleep(2)
    assert log.read_text() == before
    release.kill()
    data = until(lambda: note(release) if note(release)["state"] == "down" else None)
    assert "run r7 of ops has the deploy lock" in data["text"] and "waited for" in data["text"]
    time.sleep(1)
    assert server(release) is None and release.watch.poll() is None
    lock.unlink()
    until(lambda: serving(release, after=release.pid))


def test_a_stop_ends_the_server_in_order(watched):
    """SIGTERM to the watch is SIGTERM to the server; nothing is restarted, and the service ends without a fault."""
    release = watched()
    release.watch.terminate()
    assert release.watch.wait(20) == 0
    assert server(release) is None and not events(release.root)
    assert "SIGTERM received" in pathlib.Path(release.launch["log"]).read_text()


def test_orphans_are_gone_before_the_restart(watched):  # F26
    release = watched({"orphans": True, "setsid": True})
    old = {item["pid"] for item in alive(release, "scheduler")}
    release.kill()
    until(lambda: serving(release, after=release.pid))
    assert len(old) == 2 and not old & {item["pid"] for item in alive(release, "scheduler")}


def test_a_hang_with_all_processes_alive_is_an_alarm_first(watched, health):  # F23
    """And a restart where the operator allows it; here as soon as a run has given the lock back."""
    release = watched({"generation": {"mode": "silent"}}, restart_on_hang=True)
    release.state("active")
    data = until(lambda: note(release) if note(release)["state"] == "hung" else None, 15)
    assert "all processes live and the server hangs: no token for" in data["text"]
    assert health(release.release, state="probe", generations=0)["alarm"] == data["text"]
    time.sleep(1)
    assert [item["event"] for item in events(release.root)] == ["hung"] and server(release) == release.pid
    release.script()
    release.state("promoted")
    until(lambda: serving(release, after=release.pid))
    (event,) = until(lambda: events(release.root, "restart"))
    assert event["signature"] == "generation_dead" and "hangs" in event["reason"]


def test_errors_instead_of_tokens_are_a_hang_with_their_status(watched):
    release = watched({"generation": {"mode": "error"}})
    data = until(lambda: note(release) if note(release)["state"] == "hung" else None, 20)
    assert "/generate answered HTTP 500" in data["text"]


def test_a_hang_that_ends_is_told(watched):
    release = watched()
    os.kill(release.pid, signal.SIGSTOP)
    until(lambda: note(release)["state"] == "hung", 20)
    time.sleep(1)
    assert server(release) == release.pid and not events(release.root, "restart")  # nobody allowed one
    os.kill(release.pid, signal.SIGCONT)
    until(lambda: [item["event"] for item in events(release.root)] == ["hung", "recovered"], 20)
    assert note(release)["state"] == "watching"


def test_a_busy_server_is_left_in_peace(watched):  # F25
    """503 on /health and slow tokens; it is asked nothing while they flow, and its queue is no hang."""
    release = watched({"health": {"status": 503, "busy": True}, "token_seconds": 0.2})
    url = f"http://127.0.0.1:{release.port}"
    body = {"text": "x", "sampling_params": {"max_new_tokens": 15}, "stream": True}
    busy = threading.Thread(target=requests.post, args=(f"{url}/generate",), kwargs={"json": body, "timeout": 60})
    busy.start()
    until(lambda: requests.get(f"{url}/health", timeout=5).status_code == 503)
    busy.join()
    assert note(release)["state"] == "watching" and not events(release.root)


@pytest.mark.parametrize("before", ["", '{"event": "old"}\n', '{"event": "ol'])
def test_a_torn_line_does_not_swallow_the_death(tmp_path, before):
    (tmp_path / "ledger.jsonl").write_text(before)
    sglang_launch_watch.record(str(tmp_path / "releases/r1"), {"event": "worker_died", "pid": 7})
    found, problems = sglang_ledger.read(str(tmp_path))
    assert [item["pid"] for item in found if item["event"] == "worker_died"] == [7]
    assert len(problems) == (before != "" and not before.endswith("\n"))


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "ledger.jsonl").write_text('{"event": "old"}\n')
    real = os.write
    monkeypatch.setattr(sglang_launch_watch.os, "write", lambda descriptor, data: real(descriptor, data[:9]))
    sglang_launch_watch.record(str(tmp_path / "releases/r1"), {"event": "worker_died", "pid": 7})
    monkeypatch.undo()
    assert (tmp_path / "ledger.jsonl").read_text() == '{"event": "old"}\n'
    assert "is the disk full?" in capsys.readouterr().err


def test_an_alarm_of_an_earlier_start_counts_no_more(tmp_path):
    (tmp_path / "run").mkdir()
    mine = sglang_launch_watch.stat_of(os.getpid())[3]
    for start, shown in ((mine, "dead"), (mine - 1, None)):
        data = {"state": "worker_died", "server": {"pid": os.getpid(), "start": start}, "text": "dead"}
        (tmp_path / "run/health.json").write_text(json.dumps(data))
        assert sglang_watch_progress.alarm(str(tmp_path)) == shown


def test_the_watch_is_no_process_of_the_server(watched):
    """A stop neither counts it nor waits for it nor kills it, and its programs leave no bytecode in the release."""
    release = watched()
    assert sglang_proc.stat_of(release.pid, "/proc")["ppid"] == release.watch.pid
    assert release.watch.pid not in [item["pid"] for item in sglang_proc.scan(str(release.path))]
    assert not (release.path / "__pycache__").exists()


def test_a_kernel_that_killed_for_want_of_memory_is_named(monkeypatch, tmp_path):
    watch = sglang_launch_watch.Watch(str(tmp_path / "releases/r1"))
    watch.launch, watch.first, watch.oom, watch.died = {"log": str(tmp_path / "none.log")}, {}, 3, {}
    monkeypatch.setattr(sglang_launch_policy, "oom_kills", lambda: 4)
    watch.ended(-signal.SIGKILL)
    assert "killed by SIGKILL" in watch.reason["reason"] and "OOM killer has killed" in watch.reason["reason"]
    monkeypatch.setattr(sglang_launch_policy, "oom_kills", lambda: 3)
    watch.ended(3)
    assert "exit status 3" in watch.reason["reason"] and "OOM killer has" not in watch.reason["reason"]
    # A rank that was seen dead before the server ended is what died first.
    watch.known, watch.died = {(7, 1): "sglang::scheduler_TP1"}, {(7, 1): (time.monotonic() - 2, "T")}
    watch.ended(-signal.SIGKILL)
    assert watch.reason["process"] == "sglang::scheduler_TP1"
    assert watch.reason["reason"].startswith("sglang::scheduler_TP1 (pid 7) died at T, and then the server")


def test_a_restart_is_over_although_the_first_token_came_between_two_looks(tmp_path):
    """The probe's own thread hears it; the next look finds a server that serves already."""
    release = tmp_path / "releases/r1"
    (release / "run").mkdir(parents=True)
    (release / "launch.json").write_text(json.dumps({"argv": [sys.executable], "log": str(tmp_path / "log")}))
    watch = sglang_launch_watch.Watch(str(release))
    watch.server = subprocess.Popen(["sleep", "60"])
    try:
        watch.begin = sglang_launch_watch.stat_of(watch.server.pid)[3]
        watch.known, watch.died, watch.told, watch.hung, watch.awaited = {}, {}, set(), 0.0, True

        class Served:
            served, tokens = True, 0.0

            def look(self, compiling, ask):
                return ""

        watch.probe = Served()
        watch.note("restarting", "it does not serve yet")
        watch.look()
        state = sglang_launch_policy.read_json(release / "run/health.json")
        assert (state["state"], state["text"], watch.awaited) == ("watching", "", False)
    finally:
        watch.server.kill()
        watch.server.wait()


def test_a_worker_that_dies_young_and_is_cleared_away_is_missed(watched):
    """With looks as far apart as they are on a host: the first ones follow each other faster."""
    release = watched({"health_dead_seconds": 1}, look_seconds=sglang_launch_watch.INTERVAL)
    time.sleep(sglang_launch_watch.BRISK)
    victim = release.kill("scheduler")
    until(lambda: not pathlib.Path(f"/proc/{victim}").exists() or None)
    until(lambda: events(release.root, "restart"), 20)
