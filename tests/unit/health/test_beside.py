"""The program beside the server: it finds a dead worker under a living parent, and nothing else."""

from __future__ import annotations

import inspect
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
from ansible.module_utils import sglang_launch_watch, sglang_launcher, sglang_ledger, sglang_proc, sglang_watch_progress

from .conftest import FAKE


def until(condition, seconds=60):
    """Wait until CONDITION returns something true, and return it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def note(release):
    """Return run/health.json of a release; empty where there is none yet."""
    path = release.path / "run/health.json"
    return json.loads(path.read_text()) if path.exists() else {}


def worker(release, role="scheduler"):
    """Return a living worker of a release, or None."""
    found = sglang_proc.scan(str(release.path))
    return next((i for i in found if i["role"] == role and sglang_proc.alive(i["state"])), None)


@pytest.fixture
def watched(start, health, tmp_path):
    """Return ``watched(script)``: a release that is ready and watched in a thread, looked at often."""
    threads = []

    def run(script):
        (tmp_path / "ledger.jsonl").write_text("")
        release = start(script)
        assert health(release, generations=1)["ready"]
        arguments = {"interval": 0.05, "confirm": 1.0}
        target = sglang_launch_watch.watch
        thread = threading.Thread(target=target, args=(release.pid, str(release.path)), kwargs=arguments, daemon=True)
        thread.start()
        threads.append((release, thread))
        until(lambda: note(release).get("state") == "watching")
        return release

    yield run
    for release, thread in threads:
        os.killpg(release.pid, signal.SIGKILL)
        thread.join(30)
        assert not thread.is_alive(), "the watch outlives its server"


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_dead_worker_under_a_living_parent_is_reported(watched, health, tmp_path, role):
    release = watched({"health_dead_seconds": 1})
    victim = worker(release, role)
    os.kill(victim["pid"], signal.SIGKILL)
    data = until(lambda: note(release) if note(release)["state"] == "worker_died" else None)
    assert [item["pid"] for item in data["dead"]] == [victim["pid"]]
    assert f"(pid {victim['pid']})" in data["text"] and f"server process {release.pid} lives on" in data["text"]
    events, problems = sglang_ledger.read(str(tmp_path))
    assert not problems
    assert [(item["event"], item["release"], item["pid"]) for item in events] == [("worker_died", "r1", release.pid)]
    assert health(release, state="probe", generations=0)["alarm"] == data["text"]


def test_a_busy_server_is_left_in_peace(watched):  # F25
    release = watched({"health": {"status": 503, "busy": True}, "token_seconds": 0.05})
    log = pathlib.Path(release.launch["log"])
    before = log.read_text()
    time.sleep(1)
    assert log.read_text() == before  # an idle server is asked nothing
    url = f"http://127.0.0.1:{release.port}"
    body = {"text": "x", "sampling_params": {"max_new_tokens": 60}}
    busy = threading.Thread(target=requests.post, args=(f"{url}/generate",), kwargs={"json": body, "timeout": 60})
    busy.start()
    until(lambda: requests.get(f"{url}/health", timeout=5).status_code == 503)
    busy.join()
    assert note(release)["state"] == "watching"


def test_a_stop_that_ends_the_workers_first_is_no_death(watched, tmp_path):
    release = watched({})
    os.kill(worker(release)["pid"], signal.SIGKILL)
    os.kill(release.pid, signal.SIGKILL)
    until(lambda: not sglang_launch_watch.stat_of(release.pid) or sglang_launch_watch.stat_of(release.pid)[1] == "Z")
    time.sleep(1.5)
    assert note(release)["state"] == "watching" and not sglang_ledger.read(str(tmp_path))[0]


@pytest.mark.parametrize("before", ["", '{"event": "old"}\n', '{"event": "ol'])
def test_a_torn_line_does_not_swallow_the_death(tmp_path, before):
    (tmp_path / "ledger.jsonl").write_text(before)
    sglang_launch_watch.record(str(tmp_path / "releases/r1"), {"event": "worker_died", "pid": 7})
    events, problems = sglang_ledger.read(str(tmp_path))
    assert [item["pid"] for item in events if item["event"] == "worker_died"] == [7]
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


def test_the_launcher_starts_it_and_it_ends_with_the_server(start, health):
    release = start(None)
    (release.path / "launch.py").write_text(sglang_launcher.LAUNCH_PY)
    (release.path / "watch.py").write_text(inspect.getsource(sglang_launch_watch))
    env = {"PYTHONPATH": str(FAKE), "SGLANG_DEPLOY_RELEASE": str(release.path)}
    (release.path / "launch.json").write_text(json.dumps(dict(release.launch, env=env)))
    with open(release.launch["log"], "wb") as log:
        command = [sys.executable, "-I", "-S", str(release.path / "launch.py")]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        release.pid = server.pid
        assert health(release, generations=1)["ready"]
        data = until(lambda: note(release))
        assert data["state"] == "watching" and data["server"]["pid"] == server.pid

        argv = [sys.executable, "-I", "-S", str(release.path / "watch.py"), str(server.pid)]
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        beside = [pid for pid in pids if sglang_proc.cmdline(pid) == argv]
        assert [sglang_launch_watch.stat_of(pid)[2] for pid in beside] == [server.pid]
        # It is none of the processes that a stop counts, waits for or kills.
        assert beside[0] not in [item["pid"] for item in sglang_proc.scan(str(release.path))]
        server.kill()
        server.wait()
        until(lambda: (sglang_launch_watch.stat_of(beside[0]) or "XX")[1] in "ZX")
    finally:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it has ended
