"""The module reads and appends a real ledger; the action decides on the controller."""

from __future__ import annotations

import json
import sys

import pytest
import sglang_decision
from ansible.module_utils.sglang_decision_runs import MOST, read
from ansible.module_utils.sglang_decision_spec import ARGUMENTS
from deployment import extra, play
from samples import run

RUN = {"id": "r1", "user": "operator", "controller": "ops1"}
CANDIDATE, BASELINE = ("20260101T000000Z-fewchan-000000000000", "20260101T000000Z-baseline-000000000000")


def ledger(root, events):
    """Write a ledger as the modules do."""
    lines = [json.dumps({"schema": 1, "time": "t", "release": None, "variant": None, **event}) for event in events]
    root.mkdir(exist_ok=True)
    (root / "ledger.jsonl").write_text("\n".join(lines) + "\n")


def measured(variant, speed, run_id="r0", **changes):
    """Return the ledger's line of a run."""
    item = run(variant, speed, **changes)
    server = {"derived": {"accept_length": item.pop("accept", None)}}
    return {**item, "event": "run", "run": run_id, "server": server, "elapsed": 2.5}


def test_the_ledger_is_read_by_release_and_start(tmp_path):
    """Runs of others are left out; starts are counted, seconds and decisions of this run summed."""
    events = [
        {"event": "start", "release": BASELINE},
        measured("baseline", 80.0),
        measured("stranger", 99.0),
        {"event": "start", "release": CANDIDATE},
        measured("fewchan", 70.0, "r1", accept=2.0),
        measured("fewchan", 71.0, "r1", valid=False),
        {"event": "score", "release": CANDIDATE, "run": "r1", "asked": 10, "right": 9, "questions_digest": "q"},
        {"event": "decision", "release": CANDIDATE, "run": "r1"},
        {"event": "decision", "release": CANDIDATE, "run": "r0"},
    ]
    ledger(tmp_path, events)
    with open(tmp_path / "ledger.jsonl", "a") as handle:
        handle.write('{"event": "run", "rel')
    found = read(tmp_path, "r1", [CANDIDATE, BASELINE], [], ["decode_tok_s_p50"])
    assert [(item["variant"], item["start"], item["valid"]) for item in found["runs"]] == [
        ("baseline", 1, True),
        ("fewchan", 2, True),
        ("fewchan", 2, False),
    ]
    assert found["runs"][1]["metrics"] == {"decode_tok_s_p50": 70.0}
    assert found["runs"][1]["accept_length"] == 2.0
    assert found["looks"] == {CANDIDATE: 1} and found["spent"] == {CANDIDATE: 5.0}
    assert found["scores"][0]["right"] == 9 and found["scores"][0]["start"] == 2
    assert len(found["problems"]) == 1


def test_only_the_newest_runs_travel(tmp_path):
    """A release measured for months does not grow the answer."""
    ledger(tmp_path, [measured("baseline", float(number + 1)) for number in range(MOST + 5)])
    found = read(tmp_path, "r1", [BASELINE], [], ["decode_tok_s_p50"])["runs"]
    assert [item["metrics"]["decode_tok_s_p50"] for item in found] == [float(n + 6) for n in range(MOST)]


def test_module_reads_then_writes(tmp_path, run_module):
    """Without an event it reads; with one it appends; in check mode nothing is written."""
    ledger(tmp_path, [measured("baseline", 80.0)])
    args = {"root": str(tmp_path), "release": CANDIDATE, "against": BASELINE, "run": RUN}
    assert len(run_module("sglang_decision", args)["read"]["runs"]) == 1
    event = {"release": CANDIDATE, "variant": "fewchan", "verdict": "equal"}
    run_module("sglang_decision", {**args, "event": event}, check=True)
    assert "decision" not in (tmp_path / "ledger.jsonl").read_text()
    assert run_module("sglang_decision", {**args, "event": event})["changed"] is False
    last = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["verdict"], last["run"], last["user"]) == ("decision", "equal", "r1", "operator")
    assert "run needs the run" in run_module("sglang_decision", {**args, "run": {}})["msg"]


def test_the_spec_is_the_modules():
    """The action takes the same arguments, without the one that it sets itself."""
    assert sglang_decision.ARGUMENTS is ARGUMENTS


@pytest.fixture
def decided(tmp_path):
    """Return ``decided(*arguments, **options)``: runs one task of the action, returns its outcome and result."""

    def run_task(*arguments, **options):
        given = {"root": str(tmp_path), "release": CANDIDATE, "against": BASELINE, "run": RUN, **options}
        book = {"name": "Try", "hosts": "localhost", "connection": "local", "gather_facts": False}
        book["tasks"] = [{"name": "Decide", "sglang_decision": given}]
        (tmp_path / "play.yml").write_text(json.dumps([book]))
        done = play(
            tmp_path / "play.yml", "-i", "localhost,", *extra(ansible_python_interpreter=sys.executable), *arguments
        )
        return done, done.events[-2]["result"]

    return run_task


def test_action_fails_with_the_numbers_of_a_loss(tmp_path, decided):
    """And the ledger has the same numbers."""
    ledger(tmp_path, [measured("baseline", 80.0 + n / 10) for n in range(5)])
    with open(tmp_path / "ledger.jsonl", "a") as handle:
        handle.write("".join(json.dumps(measured("fewchan", 70.0 + n / 10, "r1")) + "\n" for n in range(5)))
    done, result = decided()
    assert done.rc != 0 and result["verdict"] == "worse" and result["outcome"] == "rollback"
    assert result["msg"] == "\n".join(result["lines"]) and "decode speed: 70.2 tok/s" in result["msg"]
    assert "a loss is -2%: worse" in done.out
    last = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "decision" and last["lines"] == result["lines"] and last["run"] == "r1"
    assert last["metrics"][0]["low"] < last["metrics"][0]["effect"] < last["metrics"][0]["high"] < 0


def test_action_decides_nothing_in_check_mode_and_refuses_nonsense(tmp_path, decided):
    """The same keys come back."""
    ledger(tmp_path, [measured("baseline", 80.0)])
    before = (tmp_path / "ledger.jsonl").read_text()
    done, result = decided("--check")
    assert done.rc == 0 and result["verdict"] is None and "check mode" in result["skipped_reason"]
    done, result = decided(thresholds={"decode_tok_s_p50": 0})
    assert done.rc != 0 and "decode_tok_s_p50 must be a share" in result["msg"]
    done, result = decided(on_inconclusive="maybe")
    assert done.rc != 0 and "on_inconclusive" in result["msg"]
    assert (tmp_path / "ledger.jsonl").read_text() == before
