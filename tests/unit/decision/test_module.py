"""The module reads and appends a real ledger; the action has its own tests."""

from __future__ import annotations

import collections
import json

import sglang_decision
from ansible.module_utils.sglang_decision_runs import MOST, history, read, run_of
from ansible.module_utils.sglang_decision_spec import ARGUMENTS
from samples import BASELINE, CANDIDATE, RUN, ledger, measured


def test_the_ledger_is_read_by_release_and_start(tmp_path):
    """Runs of others are left out; starts are counted, seconds and decisions of this run summed."""
    events = [
        {"event": "start", "release": BASELINE},
        measured("baseline", 80.0),
        measured("stranger", 99.0),
        {"event": "restart", "release": BASELINE},
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
        ("fewchan", 3, True),
        ("fewchan", 3, False),
    ]
    assert found["runs"][1]["metrics"] == {"decode_tok_s_p50": 70.0}
    assert found["runs"][1]["accept_length"] == 2.0
    assert found["looks"] == {CANDIDATE: 1} and found["spent"] == {CANDIDATE: 5.0}
    assert found["scores"][0]["right"] == 9 and found["scores"][0]["start"] == 3
    assert len(found["problems"]) == 1


def test_only_the_newest_runs_travel(tmp_path):
    """A release measured for months does not grow the answer."""
    ledger(tmp_path, [measured("baseline", float(number + 1)) for number in range(MOST + 5)])
    found = read(tmp_path, "r1", [BASELINE], [], ["decode_tok_s_p50"])["runs"]
    assert [item["metrics"]["decode_tok_s_p50"] for item in found] == [float(n + 6) for n in range(MOST)]


def test_of_an_attributed_variant_the_newest_release_that_compares_travels(tmp_path):
    """A host that measured these variants for years answers with as much as a new one."""

    def of(number, variant="fusion", **changes):
        release = f"2025010{number}T000000Z-{variant}-000000000000"
        return [measured(variant, 80.0 + n, release=release, **changes) for n in range(MOST + 5)]

    events = of(1) + of(2, workload_digest="w2") + of(3) + of(4, valid=False) + of(5, fingerprint={"digest": "other"})
    events += of(6, failure="all refused") + of(7, workload_digest="w2") + of(1, "stranger")
    ledger(tmp_path, [*events, measured("baseline", 79.0), measured("fewchan", 81.0, "r1")])
    found = history(str(tmp_path), "r1", [CANDIDATE, BASELINE], [])["runs"]
    counts = collections.Counter(item["release"] for item in found)
    assert counts == {"20250103T000000Z-fusion-000000000000": MOST, BASELINE: 1, CANDIDATE: 1}
    # Without a run of the release that is judged there is nothing to attribute.
    assert [item["release"] for item in history(str(tmp_path), "r1", ["absent", BASELINE], [])["runs"]] == [BASELINE]
    assert history(str(tmp_path), "r1", [""], [])["runs"] == []


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


def test_a_sweep_is_judged_at_its_highest_concurrency(tmp_path):
    """The event repeats the fastest level, which differed between two runs of the same sweep."""

    def swept(best, **changes):
        levels = [
            {"level": 0, "concurrency": 64, "metrics": {"decode_tok_s_p50": 20.0}, "flags": ["client_bottleneck"]},
            {"level": 1, "concurrency": 8, "metrics": {"decode_tok_s_p50": 80.0}, "flags": []},
        ]
        return {**measured("baseline", levels[best]["metrics"]["decode_tok_s_p50"]), "levels": levels, **changes}

    workload = {"kind": "sweep", "levels": [64, 8], "concurrency": None}
    ledger(tmp_path, [swept(0), swept(1, workload=workload), measured("baseline", 70.0, levels=[{"concurrency": 1}])])
    found = read(tmp_path, "r1", [BASELINE], [], ["decode_tok_s_p50"])["runs"]
    assert [item["metrics"]["decode_tok_s_p50"] for item in found] == [20.0, 20.0, 70.0]
    assert found[1]["workload"] == workload and found[1]["flags"] == ["client_bottleneck"]
    # As a history carries it to the report.
    brief = swept(
        1, levels=[{"concurrency": 1, "decode_tok_s_p50": 90.0}, {"concurrency": 2, "decode_tok_s_p50": 85.0}]
    )
    assert run_of(brief, 1, ["decode_tok_s_p50"])["metrics"] == {"decode_tok_s_p50": 85.0}
