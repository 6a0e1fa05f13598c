"""The progress file: its line of text, the forecast by an earlier start, and what another shell sees."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
from ansible.module_utils import sglang_watch_progress as progress
from ansible.module_utils.sglang_watch import StartLog

BEFORE = {"spawned": 2.0, "imports": 8.0, "weights": 60.0, "graph": 30.0}


@pytest.fixture
def log():
    """Return a log in the middle of the weights."""
    log = StartLog()
    log.feed(["[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB"])
    log.feed(["Loading safetensors checkpoint shards:  25% Completed | 16/64 [00:00<00:00, 1.00it/s]"])
    return log


def test_a_start_is_measured_by_the_one_before():
    history = [{"phase": "imports", "elapsed": 9.0}, {"phase": "weights", "elapsed": 20.0}]
    assert progress.forecast(BEFORE, history) == (30, 70.0)
    assert progress.forecast(BEFORE, history, {"percent": 50}) == (40, 60.0)
    assert progress.forecast(BEFORE, [{"phase": "weights", "elapsed": 600.0}]) == (70, 30.0)
    assert progress.forecast(BEFORE, [{"phase": "warmup", "elapsed": 1.0}]) == (100, 0.0)
    assert progress.forecast({}, history) == (None, None)


def test_one_line_has_phase_percentage_elapsed_and_estimate(tmp_path, log):
    first = tmp_path / "releases/first"
    progress.Progress(str(first)).write("waiting", log, 12.3, pid=1, message="", note="nvcc at work")
    text = progress.read(str(first))["text"]
    assert text == "phase weights, 25% of it (16 of 64), 12 s elapsed, no estimate yet; nvcc at work"
    progress.Progress(str(first)).write("ready", log, 12.3, whole=True, pid=1, message="", note="")
    second = progress.Progress(str(tmp_path / "releases/second"))
    assert set(second.before) == {"spawned", "imports", "weights"}
    second.before = BEFORE
    second.write("waiting", log, 12.3, pid=1, message="", note="")
    text = progress.read(str(tmp_path / "releases/second"))["text"]
    assert text.endswith("25% of the start, 12 s elapsed, about 75 s left by the start before")


def test_a_wait_that_saw_only_the_end_keeps_what_was_known(tmp_path, log):
    release = str(tmp_path / "releases/r1")
    progress.Progress(release).write("ready", log, 1, whole=True, pid=1, message="", note="")
    known = progress.read(release)["start"]
    progress.Progress(release).write("ready", StartLog(), 0.1, pid=1, message="", note="")
    assert progress.read(release)["start"] == known == progress.earlier(release)


def test_only_a_wait_that_goes_on_elsewhere_is_shown(tmp_path, log, repository):
    release = str(tmp_path / "releases/r1")
    assert progress.waiting(release) is None
    progress.Progress(release).write("waiting", log, 12, pid=1, message="", note="")
    assert progress.waiting(release) is None  # this very process
    data = dict(progress.read(release), waiter=os.getpid() + 1)
    with open(progress.path_of(release), "w", encoding="utf-8") as handle:
        json.dump(data, handle)
    shown = progress.waiting(release)
    assert shown.startswith("phase weights, 25% of it")
    spec = importlib.util.spec_from_file_location("sglang_text", repository / "plugins/filter/sglang_text.py")
    text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text)
    probe = {"ready": False, "busy": False, "phase": "weights", "waiting": shown, "last_error": "", "cause": None}
    info = {"current": None, "previous": None, "lock": None, "problems": [], "releases": []}
    assert f"health: starting: {shown}" in text.status_lines(info, probe, {}, "http://127.0.0.1:1")
    again = {"time": "2026-01-01T00:00:00.000Z", "reason": "TP1 died", "why": "restart 1 of 3 in 120 minutes"}
    lines = text.status_lines(dict(info, restarts=[again]), dict(probe, alarm="it is down"), {}, "http://127.0.0.1:1")
    assert "alarm: it is down" in lines
    assert "restarted at 2026-01-01T00:00:00.000Z: TP1 died (restart 1 of 3 in 120 minutes)" in lines
    # A stop that was wanted is neither drift nor ill health; where a server lives all the same, it is none.
    stop = {"time": "2026-01-01T00:00:00.000Z", "user": "ops", "temporary": False, "ended": True}
    seen = {"drift": ["no server process runs", "processes of another release run: r2"], "processes": []}
    lines = text.status_lines(dict(info, stopped=stop), probe, seen, "http://127.0.0.1:1")
    assert "health: stopped on purpose at 2026-01-01T00:00:00.000Z by ops; deploy.yml starts it again" in lines
    assert [line for line in lines if line.startswith("drift")] == ["drift: processes of another release run: r2"]
    lines = text.status_lines(dict(info, stopped=stop), probe, dict(seen, processes=[{"role": "server"}]), "")
    assert f"health: starting: {shown}" in lines and "drift: no server process runs" in lines
    for ended in (True, False):
        (line,) = (
            line
            for line in text.status_lines(dict(info, stopped=dict(stop, temporary=True, ended=ended)), probe, {}, "")
            if line.startswith("health: stopped at 2026-01-01T00:00:00.000Z by ops for a canary in its place")
        )
        assert ("canary.yml or deploy.yml does" in line) == ended
    with open(progress.path_of(release), "w", encoding="utf-8") as handle:
        json.dump(dict(data, updated=data["updated"] - 60), handle)
    assert progress.waiting(release) is None


def test_a_full_disk_does_not_end_the_wait(tmp_path, log):
    (tmp_path / "r1").write_text("no directory")
    writer = progress.Progress(str(tmp_path / "r1"))
    writer.write("waiting", log, 1, pid=1, message="", note="")
    assert not writer.due()
