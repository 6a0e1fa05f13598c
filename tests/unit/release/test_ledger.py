"""The ledger survives crashes, concurrent writers and full disks, and keeps no secret."""

from __future__ import annotations

import json
import os
import stat

import pytest
from ansible.module_utils import sglang_ledger

RUN = {"id": "r1", "user": "operator", "controller": "c", "pid": 1}


def test_line_has_the_common_fields(tmp_path):
    sglang_ledger.append(
        tmp_path, {"event": "built", "run": RUN, "release": "x", "variant": "v", "files": {"count": 2}}
    )
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time").endswith("Z")
    assert event == {
        "schema": 1,
        "run": "r1",
        "user": "operator",
        "controller": "c",
        "event": "built",
        "release": "x",
        "variant": "v",
        "files": {"count": 2},
    }
    assert stat.S_IMODE((tmp_path / "ledger.jsonl").stat().st_mode) & 0o137 == 0


def test_missing_ledger_is_empty(tmp_path):
    assert sglang_ledger.read(tmp_path) == ([], [])


def test_schema_and_time_are_those_of_the_line(tmp_path):
    sglang_ledger.append(tmp_path, {"event": "run", "run": RUN, "schema": 2, "time": "2020-01-01T00:00:00Z"})
    (event,) = sglang_ledger.read(tmp_path)[0]
    assert event["schema"] == sglang_ledger.SCHEMA and event["time"] > "2026"


def test_event_without_a_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="event"):
        sglang_ledger.append(tmp_path, {"run": RUN})
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("torn", ['{"event": "bui', '{"event": "built"}\n{"ev', "\x00\x00\x00", '"text"\n'])
def test_torn_line_is_ended_reported_and_skipped(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "first"}\n' + torn)
    sglang_ledger.append(tmp_path, {"event": "after"})
    events, problems = sglang_ledger.read(tmp_path)
    assert [item["event"] for item in events] == ["first"] + (["built"] if '"built"' in torn else []) + ["after"]
    assert len(problems) == 1 and "is torn and is skipped" in problems[0]


def test_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    sglang_ledger.append(tmp_path, {"event": "first"})
    size = (tmp_path / "ledger.jsonl").stat().st_size
    real = os.write
    monkeypatch.setattr(sglang_ledger.os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    with pytest.raises(OSError, match="is the disk full"):
        sglang_ledger.append(tmp_path, {"event": "second"})
    monkeypatch.undo()
    assert (tmp_path / "ledger.jsonl").stat().st_size == size
    assert sglang_ledger.read(tmp_path)[1] == []


def test_concurrent_writers_lose_nothing(tmp_path):
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                for turn in range(25):
                    sglang_ledger.append(tmp_path, {"event": "e", "number": number, "turn": turn, "text": "x" * 5000})
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    events, problems = sglang_ledger.read(tmp_path)
    assert problems == []
    assert {(item["number"], item["turn"]) for item in events} == {(n, t) for n in range(4) for t in range(25)}


def test_secrets_stay_out_and_metrics_stay_in(tmp_path):
    event = {
        "event": "started",
        "env": {"HF_TOKEN": "s3cret", "NCCL_ALGO": "Ring"},
        "args": [{"api-key": "s3cret"}],
        "output_tokens": 17,
        "tokens_per_second": 3.5,
    }
    sglang_ledger.append(tmp_path, event)
    text = (tmp_path / "ledger.jsonl").read_text()
    assert "s3cret" not in text and '"NCCL_ALGO": "Ring"' in text and '"output_tokens": 17' in text
    assert '"tokens_per_second": 3.5' in text
