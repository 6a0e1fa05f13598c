"""The death of the program beside the server: the next one is told, asks the policy, and counts it."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from ansible.module_utils import (
    sglang_launch_newlog,
    sglang_launch_policy,
    sglang_launch_watch,
    sglang_watch_progress,
)

from .beside import alive, events, note, server, serving, until


def test_the_server_ends_with_its_watch_and_the_next_one_counts_it_as_a_restart(watched):
    """Without a service manager that starts it again the reason is seen all the same."""
    release = watched({"orphans": True, "setsid": True})
    old, killed = alive(release, "scheduler"), release.watch.pid
    release.kill_watch()
    text = sglang_watch_progress.alarm(str(release.path))
    assert text.startswith(f"watch.py (pid {killed}) was killed, and the server with it") and "deploy.yml" in text
    assert not events(release.root)

    release.begin()
    pid = until(lambda: serving(release, after=release.pid))
    (event,) = until(lambda: events(release.root, "restart"))
    assert (event["pid"], event["process"], event["why"]) == (pid, "watch.py", "restart 1 of 2 in 120 minutes")
    assert event["reason"].startswith(f"watch.py (pid {killed}) was killed, and the server with it")
    assert not {item["pid"] for item in old} & {item["pid"] for item in alive(release, "scheduler")}
    until(lambda: note(release)["state"] == "watching")
    assert sglang_watch_progress.alarm(str(release.path)) is None
    log = pathlib.Path(release.launch["log"])
    assert log.read_text().count("fired up") == 1 and pathlib.Path(f"{log}.1").read_text().count("fired up") == 1

    # Deaths of server and watch share one limit, which outlives the watch.
    release.kill()
    again = until(lambda: serving(release, after=pid))
    release.kill_watch()
    release.begin()
    data = release.down()
    assert (release.watch.returncode, server(release)) == (137, None)
    assert "was killed" in data["text"] and "it was restarted 2 times in 120 minutes" in data["text"]
    assert [item["pid"] for item in data["restarts"]] == [pid, again]
    (event,) = events(release.root, "server_died")
    assert event["process"] == "watch.py" and "restarted 2 times" in event["why"]

    # That was a last word: whoever starts it now wants it to run, and no restart is counted.
    release.begin()
    until(lambda: serving(release))
    assert note(release)["restarts"] == [] and len(events(release.root, "restart")) == 2


@pytest.mark.parametrize("why", ["active", "norestart", "stopped"])
def test_who_is_not_restarted_after_the_death_of_the_watch(why, watched):
    release = watched()
    if why == "active":
        release.state(why)
    release.kill_watch()
    if why != "active":
        (release.root / why).write_text("")
    release.begin()
    data = release.down()
    assert release.watch.returncode == 137 and not events(release.root, "restart")
    if why == "stopped":
        # Whoever stopped it knows; the wish stays.
        assert not events(release.root) and (release.root / "stopped").exists()
        assert sglang_watch_progress.alarm(str(release.path)) is None
    else:
        assert sglang_watch_progress.alarm(str(release.path)) == data["text"]
        assert "watch.py" in data["text"] and "It stays down" in data["text"] and why in data["text"]
        assert [item["process"] for item in events(release.root, "server_died")] == ["watch.py"]


def test_the_death_of_the_watch_under_the_deploy_lock_waits_for_the_run(watched):
    """A watch that waits may be killed as well: the next one waits on."""
    release = watched()
    lock = release.root / "lock"
    lock.write_text(json.dumps({"run": {"id": "r7", "user": "ops"}}))
    release.kill_watch()
    for _ in range(2):
        release.begin()
        data = until(lambda: note(release) if note(release)["watch"] == release.watch.pid else None)
        assert data["state"] == "down" and "run r7 of ops has the deploy lock and is waited for" in data["text"]
        assert "watch.py" in data["text"] and server(release) is None
        release.watch.kill()
        release.watch.wait()
    release.begin()
    lock.unlink()
    until(lambda: serving(release, after=release.pid))
    assert len(events(release.root, "restart")) == 1


def test_a_watch_that_is_killed_while_it_stops_was_stopped(watched):
    release = watched({"ignore_term": True})
    release.watch.terminate()
    until(lambda: note(release)["state"] == "stopping")
    release.kill_watch()
    assert sglang_watch_progress.alarm(str(release.path)) is None
    release.script()
    release.begin()
    until(lambda: serving(release))
    assert note(release)["state"] == "watching" and not events(release.root)


def test_the_signal_is_named_where_the_service_manager_knows_it(tmp_path, monkeypatch):
    release = tmp_path / "releases/r1"
    (release / "run").mkdir(parents=True)
    (release / "launch.json").write_text(json.dumps({"log": str(tmp_path / "log")}))
    before = {
        "watch": 2**22 + 1,
        "watch_start": 7,
        "boot_id": sglang_launch_policy.boot_id(),
        "ended": False,
        "oom": -1,
    }

    def seen():
        watch = sglang_launch_watch.Watch(str(release))
        return watch.reason["reason"] if watch.follow() else ""

    def tell(code, status, **more):
        (release / "run/health.json").write_text(json.dumps({**before, **more}))
        monkeypatch.setenv("EXIT_CODE", code)
        monkeypatch.setenv("EXIT_STATUS", status)
        sglang_launch_watch.tell(str(release))
        return seen()

    assert "was killed by SIGSEGV, and the server with it" in tell("dumped", "SEGV")
    assert "OOM killer has killed" in seen()
    assert "was killed by SIGKILL" in tell("killed", "KILL", state="hung", text="no token")
    assert seen().endswith("it had reported: no token")
    # An orderly end, another boot, a watch that lives, a file of a version before: no death of a watch.
    assert tell("killed", "KILL", ended=True) == tell("killed", "KILL", boot_id="other") == ""
    mine = sglang_launch_watch.stat_of(os.getpid())[3]
    assert tell("killed", "KILL", watch=os.getpid(), watch_start=mine) == ""
    (release / "run/health.json").write_text(json.dumps({"watch": 7, "state": "watching"}))
    assert seen() == ""

    # Under supervisor its own log knows.
    (release / "run/health.json").write_text(json.dumps(before))
    (tmp_path / "service").mkdir()
    line = "2026-01-01 00:00:00,000 WARN exited: sglang-server (terminated by SIGABRT; not expected)\n"
    (tmp_path / "service/supervisord.log").write_text(line.replace("ABRT", "TERM") + line)
    assert "was killed, and" in seen()
    monkeypatch.setattr(sglang_launch_newlog, "supervised", lambda: True)
    assert "was killed by SIGABRT, and" in seen()
