"""The schema for machines is itself valid, says what docs/ledger.md says, and refuses what is no event."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest
from ansible.module_utils import sglang_ledger, sglang_verify_record

TESTS = pathlib.Path(__file__).resolve().parents[2]
pytest.importorskip("jsonschema", reason="only the tests' own environment has jsonschema")
sys.path.insert(0, str(TESTS / "support"))
import jsonschema  # noqa: E402
import ledger_schema  # noqa: E402

RUN = {"id": "r1", "user": "operator", "controller": "c"}
RELEASE = "20260131T030000Z-baseline-0123456789ab"


def test_schema_is_valid():
    jsonschema.Draft202012Validator.check_schema(ledger_schema.SCHEMA)
    assert ledger_schema.SCHEMA["properties"]["schema"]["const"] == sglang_ledger.SCHEMA


def test_every_documented_event_is_in_the_schema():
    text = (TESTS.parent / "docs/ledger.md").read_text()
    table = text.partition("## Events")[2].partition("###")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(ledger_schema.EVENTS)


def test_events_of_a_proof_are_of_the_schema(tmp_path):
    finding = {"rung": "verify", "rule": "worker-env", "level": "error", "message": "m", "evidence": "", "advice": ""}
    release = str(tmp_path / "releases" / RELEASE)
    sglang_verify_record.tell_ready(tmp_path, release, RUN, {"pid": 4, "elapsed": 12.5, "phases": []})
    found = [finding, dict(finding, level="warning", rule="w")]
    result = {"findings": found, "record": None, "soak": None, "elapsed": 3.5}
    sglang_verify_record.tell_verdict(tmp_path, release, RUN, result)
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert ledger_schema.complaints(lines) == []
    ready, verdict = map(json.loads, lines)
    assert (ready["release"], ready["variant"], ready["elapsed"]) == (RELEASE, "baseline", 12.5)
    assert (verdict["passed"], verdict["errors"], verdict["warnings"]) == (False, ["worker-env"], ["w"])


@pytest.mark.parametrize(
    ("event", "word"),
    [
        ({"event": "exploded"}, "exploded"),
        ({"event": "refused", "release": RELEASE, "variant": "v", "rung": "mood", "reason": ""}, "mood"),
        ({"event": "verify", "release": RELEASE, "passed": "yes"}, "yes"),
        ({"event": "pruned"}, "removed"),
    ],
)
def test_what_is_no_event_is_refused(event, word, tmp_path):
    sglang_ledger.append(tmp_path, {"run": RUN, **event})
    found = ledger_schema.complaints((tmp_path / "ledger.jsonl").read_text().splitlines())
    assert found and any(word in text for text in found)
