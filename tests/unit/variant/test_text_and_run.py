"""The text for a person, and the name of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime, timezone

from ansible.module_utils.sglang_variant_run import identify_run
from ansible.module_utils.sglang_variant_text import arguments, explain


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
