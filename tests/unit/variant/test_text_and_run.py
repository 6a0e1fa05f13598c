"""The text for a person, and the name of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone

import pytest
from ansible.module_utils import sglang_variant_run
from ansible.module_utils.sglang_variant_run import identify_run, playbooks
from ansible.module_utils.sglang_variant_text import arguments, decimal, explain


def test_flags_become_words_as_the_architecture_says():
    args = {"a": True, "b": False, "c": None, "d": ["x", 2], "e": 0.5, "f": 0, "g": "two words"}
    assert arguments(args) == ["--a", "--d", "x", "2", "--e", "0.5", "--f", "0", "--g", "two words"]


def test_an_empty_variant_is_shown_as_none():
    variant = {
        "name": "v",
        "summary": "s",
        "nccl": {},
        "env": {},
        "args": {},
        "patches": [],
        "engines": "",
        "origins": {},
    }
    text = explain("host", {"variant": variant, "unset": {}, "patches": [], "findings": []}, "0.5.9", {})
    assert text.splitlines() == [
        "v: s",
        "for host with SGLang 0.5.9; the variant is for every release",
        "",
        "Values, and where each came from:",
        "  none",
        "",
        "Launch flags:",
        "  none",
        "",
        "Patches:",
        "  none",
        "",
        "Findings:",
        "  none",
        "",
        "Difference:",
        "  none",
    ]


@pytest.mark.parametrize(
    ("value", "note"),
    [("0x40", " (decimal 64)"), (" +0X200", " (decimal 512)"), ("-0x1", " (decimal -1)")]
    + [(value, "") for value in ("64", "0x", "0xyz", "Ring", 64, None)],
)
def test_a_number_in_hex_has_its_decimal(value, note):
    assert decimal(value) == note


def test_an_explanation_shows_the_decimal():
    variant = {"name": "v", "summary": "s", "env": {}, "args": {}, "patches": [], "engines": ""}
    variant |= {"nccl": {"NCCL_NTHREADS": "0x40"}, "origins": {"nccl.NCCL_NTHREADS": "v"}}
    text = explain("host", {"variant": variant, "unset": {}, "patches": [], "findings": []}, "0.5.9")
    assert "  nccl.NCCL_NTHREADS  0x40 (decimal 64)  v" in text.splitlines()


def test_an_explanation_shows_where_a_patch_came_from():
    variant = {"name": "v", "summary": "s", "nccl": {}, "env": {}, "args": {}, "patches": ["p"], "engines": ""}
    variant["origins"] = {"patches.p": "fusion"}
    patches = [{"name": "p", "edition": 2, "summary": "what it does"}]
    text = explain("host", {"variant": variant, "unset": {}, "patches": patches, "findings": []}, "0.5.9")
    assert "  p  edition 2  what it does  fusion" in text.splitlines()


def test_what_a_null_took_away_is_shown():
    variant = {
        "name": "v",
        "summary": "s",
        "nccl": {},
        "env": {},
        "args": {},
        "patches": [],
        "engines": "",
        "origins": {},
    }
    resolved = {"variant": variant, "unset": {"nccl.NCCL_PROTO": "v"}, "patches": [], "findings": []}
    assert "  nccl.NCCL_PROTO  not set  v" in explain("host", resolved, "0.5.9")


def test_a_run_is_named_by_process_and_time():
    run = identify_run(os.getpid())
    taken = datetime.strptime(run["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert abs((datetime.now(timezone.utc) - taken).total_seconds()) < 60
    assert run["pid"] == os.getpid()
    assert run["id"] != identify_run(os.getpid())["id"]
    assert run["controller"]
    assert run["user"]


def test_a_later_process_has_a_later_start_and_one_that_is_gone_has_none():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert identify_run(child.pid)["pid_start"] >= identify_run(os.getpid())["pid_start"] > 0
    child.communicate(b"\n", timeout=20)
    assert identify_run(child.pid)["pid_start"] == 0


def listed(pid):
    """Return the start ticks with which a process is listed, or None."""
    return dict(playbooks()).get(pid)


def test_the_list_has_the_living_playbooks_and_neither_their_forks_nor_the_dead():
    # One write for each line: print may take two, and the two processes share the pipe.
    code = "import os, time; os.write(1, b'%d\\n' % os.fork()); time.sleep(60)"
    argv = [sys.executable, "-c", code, "/usr/bin/ansible-playbook"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        fork = max(int(child.stdout.readline()) for _ in range(2))
        run = identify_run(child.pid)
        assert run["pid_ns"] == os.readlink("/proc/self/ns/pid")
        assert [child.pid, run["pid_start"]] in run["alive"]
        assert os.path.exists(f"/proc/{fork}") and listed(fork) is None
        os.kill(child.pid, signal.SIGSTOP)
        assert listed(child.pid) == run["pid_start"]
        os.kill(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while listed(child.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert listed(child.pid) is None and os.path.exists(f"/proc/{child.pid}")
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def test_who_would_not_be_found_again_cannot_be_judged_by_later_runs():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run = identify_run(child.pid)
        assert run["pid_start"] > 0 and run["pid_ns"] == ""
    finally:
        child.communicate(b"\n", timeout=20)


def test_a_list_that_is_not_whole_is_empty(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()", "ansible"], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 10
        while listed(child.pid) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert listed(child.pid)
        monkeypatch.setattr(sglang_variant_run, "LIMIT", 0)
        assert playbooks() == [] and identify_run(child.pid)["pid_ns"] == ""
        monkeypatch.undo()
        real = sglang_variant_run.stat_of
        # As /proc mounted with hidepid shows it: process 1 is not there.
        monkeypatch.setattr(sglang_variant_run, "stat_of", lambda pid, proc: None if pid == 1 else real(pid, proc))
        assert playbooks() == []
    finally:
        child.communicate(b"\n", timeout=20)
