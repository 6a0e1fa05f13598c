"""The action decides on the controller, in a real playbook run."""

from __future__ import annotations

import json
import sys

import pytest
from ansible.module_utils.sglang_decision_runs import history
from deployment import extra, play
from samples import BASELINE, CANDIDATE, RUN, ledger, measured


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


def test_history_of_the_benchmark_is_enough(tmp_path, decided):
    """With it the host is not asked: the verdict comes from what is given, not from its ledger."""
    speeds = [measured("baseline", 80.0 + n / 10) for n in range(5)]
    ledger(tmp_path, speeds + [measured("fewchan", 70.0 + n / 10, "r1") for n in range(5)])
    known = history(str(tmp_path), "r1", [CANDIDATE, BASELINE], [])
    (tmp_path / "ledger.jsonl").write_text("")
    _done, result = decided(deferred=True, read=known)
    assert (result["verdict"], result["read"]) == ("worse", None)
    assert (tmp_path / "ledger.jsonl").read_text() == ""


def test_deferred_event_is_left_to_the_verdict(tmp_path, decided):
    """One call of the module where promotion or rollback follows; what nothing follows is written all the same."""
    speeds = [measured("baseline", 80.0 + n / 10) for n in range(5)]
    ledger(tmp_path, speeds + [measured("fewchan", 70.0 + n / 10, "r1") for n in range(5)])
    before = (tmp_path / "ledger.jsonl").read_text()
    done, result = decided(deferred=True)
    assert done.rc != 0 and result["pending"] == result["decision"] and result["pending"]["verdict"] == "worse"
    done, result = decided(deferred=True, against="")
    assert done.rc == 0 and result["pending"]["outcome"] == "promote" and result["pending"]["verdict"] == "first"
    assert (tmp_path / "ledger.jsonl").read_text() == before
    done, result = decided(deferred=True, promote=False)
    assert done.rc == 0 and result["pending"] is None and result["outcome"] == "record"
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])["verdict"] == "worse"
