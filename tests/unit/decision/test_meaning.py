"""Attribution, speculation and the text."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import sglang_speculation as speculation
from samples import FINGERPRINT, run, runs
from sglang_attribution import attribute
from sglang_decide import decide, variant_of
from sglang_verdict import SettingsError

NOISE = (1.0, 1.002, 0.998, 1.001, 0.999)
ARGS = {
    "release": "20260101T000000Z-fewchan_fusion-000000000000",
    "against": "20260101T000000Z-baseline-000000000000",
    "run": {"id": "r1"},
    "thresholds": {"decode_tok_s_p50": -0.02, "ttft_ms_p50": 0.1},
    "false_alarm": 0.01,
    "start_spread": 0.0,
    "design": "stored",
    "budget": 100,
    "on_inconclusive": "rollback",
    "promote": True,
    "allreduce_us": 0,
}


def cell(variant, speed, start):
    """Return five runs of a variant around a speed."""
    return runs(variant, [speed * factor for factor in NOISE], start=start)


def grid(both, without=()):
    """Return the runs of the four variants; fewchan costs 5 %, fusion brings 10 %."""
    speeds = {"baseline": 80.0, "fewchan": 76.0, "fusion": 88.0, "fewchan_fusion": both}
    return [
        item
        for number, (name, speed) in enumerate(speeds.items())
        if name not in without
        for item in cell(name, speed, number)
    ]


def data(found, **changes):
    """Return what the host has read."""
    found = [dict(item, accept_length=item.get("accept_length")) for item in found]
    return {"runs": found, "scores": [], "looks": {}, "spent": {}, **changes}


@pytest.mark.parametrize(("both", "interaction"), [(83.6, 0.0), (70.0, 70.0 / 83.6 - 1)])
def test_two_by_two_names_each_change_and_their_interaction(both, interaction):
    """The launch of both changes alone could tell neither."""
    found = grid(both)
    answers = attribute(found, found[-1], ["decode_tok_s_p50"])["metrics"]["decode_tok_s_p50"]
    expected = {
        "fewchan alone": -0.05,
        "fusion alone": 0.10,
        "both together": both / 80 - 1,
        "interaction": interaction,
    }
    for question, value in expected.items():
        answer = answers[question]
        assert answer["effect"] == pytest.approx(value, abs=0.002), question
        assert answer["low"] < value + 1e-9 < answer["high"] + 2e-9
    assert (answers["interaction"]["high"] < 0) == (interaction < 0)


def test_attribution_says_what_is_missing():
    """A variant that was never measured, or under another driver."""
    found = grid(83.6, without=("fusion",))
    found += runs("fusion", [88.0] * 5, fingerprint={"driver": "570.0"})
    answer = attribute(found, found[0], ["decode_tok_s_p50"])
    assert answer["missing"] == ["fusion: 0 comparable runs, 3 are needed"]
    assert not answer["metrics"]


def test_attribution_takes_the_newest_release_of_a_variant():
    """An older definition of the same name is another experiment."""
    old = [dict(item, release="20250101T000000Z-fusion-111111111111") for item in cell("fusion", 40.0, 0)]
    found = old + grid(83.6)
    answers = attribute(found, found[-1], ["decode_tok_s_p50"])["metrics"]["decode_tok_s_p50"]
    assert answers["fusion alone"]["effect"] == pytest.approx(0.10, abs=0.002)


def test_speculation_explains_the_campaigns_figures():
    """30 ms a verify step, 25 of them all-reduces, about two tokens accepted, 82 tok/s without and about 60 with it."""
    latency = 25.0 / speculation.ALL_REDUCES * 1000
    assert latency == pytest.approx(205, abs=1)
    verify = speculation.verify_ms(latency, 5.0)
    assert verify == pytest.approx(30.0)
    # Two tokens a step are not enough: 2.46 are needed, and 67 tok/s is the most that two can give.
    assert speculation.break_even(verify, 82.0) == pytest.approx(2.46)
    assert speculation.expected_tok_s(2.0, verify) == pytest.approx(66.7, abs=0.1)
    # The 54.8 to 60 tok/s seen lie below by what drafting takes: 3 to 7 ms a step.
    for seen, draft in ((60.0, 3.3), (54.8, 6.5)):
        assert speculation.step_ms_of(2.0, seen) - verify == pytest.approx(draft, abs=0.1)
    # The n-gram's 41 tok/s need no drafting, so it got hardly more than one token a step.
    assert 41.0 * verify / 1000 == pytest.approx(1.23)
    # With 160 us an all-reduce two tokens would break even.
    assert speculation.allreduce_budget_us(2.0, 5.0, 82.0) == pytest.approx(159, abs=1)
    said = speculation.assess(2.0, 60.0, 82.0, allreduce_us=latency)
    assert not said["pays"] and said["break_even_accept_length"] == pytest.approx(2.733, abs=0.001)
    assert said["allreduce_ms"] == pytest.approx(25.0) and said["compute_ms"] == pytest.approx(8.33, abs=0.01)
    assert said["expected_tok_s"]["3"] == pytest.approx(90.0)
    assert speculation.assess(None, 60.0, 82.0) is None


def test_comparison_tells_whether_speculation_pays():
    """Where the candidate's server counted accepted tokens and the baseline's did not."""
    found = [dict(item, accept_length=None) for item in runs("baseline", [82.0 * factor for factor in NOISE])]
    found += [
        dict(item, accept_length=2.0) for item in runs("eagle3_mla", [60.0 * factor for factor in NOISE], start=2)
    ]
    found = [dict(item, workload={"concurrency": 1}) for item in found]
    event = decide(dict(ARGS, release=found[-1]["release"], allreduce_us=205), data(found))
    assert event["verdict"] == "worse" and event["outcome"] == "rollback"
    assert any("breaks even at 2.73 tokens a step: it does not pay" in text for text in event["lines"])
    # A sweep has levels and no concurrency of its own.
    for streams in (8, None):
        many = [dict(item, workload={"concurrency": streams}) for item in found]
        assert decide(dict(ARGS, release=found[-1]["release"]), data(many))["speculation"] is None


def test_lines_hold_the_numbers():
    """Conditions first, then the verdict, then one line a metric with interval and threshold."""
    event = decide(ARGS, data(grid(70.0)))
    first, verdict, decode, ttft, effects, _ttft = event["lines"]
    assert first == "same conditions on both sides, fingerprint None"
    assert verdict.startswith(f"worse: fewchan_fusion ({ARGS['release']}) against baseline (")
    assert "70 tok/s (5 runs, 1 start) against 80 tok/s (5 runs, 1 start), -12.5% [-12." in decode
    assert "at 99.25%; -12.7% at worst at 95%]" in decode and decode.endswith("a loss is -2%: worse")
    assert ttft.startswith("time to first token: 100.2 ms") and ttft.endswith("a loss is +10%: equal")
    assert "interaction -16.3%" in effects
    assert event["attribution"]["missing"] == []


def test_difference_of_conditions_is_the_first_line():
    """Before any figure."""
    found = runs("baseline", [80.0] * 5, fingerprint={"driver": "570.0"}) + runs("fewchan_fusion", [70.0] * 5)
    event = decide(ARGS, data(found))
    assert event["lines"][0] == "not the same conditions: driver: 590.10 against 570.0"
    assert event["verdict"] == "not comparable" and event["outcome"] == "rollback"
    assert event["lines"][-1].startswith("Way out: benchmark.yml")
    assert event["fingerprint"] == FINGERPRINT


def test_what_was_not_compared_follows_the_conditions():
    """Before the verdict: what could not be read, and questions that only one side was asked."""
    blind = {"nccl_version": None, "unknown": ["nccl_version"]}
    found = runs("baseline", [80.0] * 5, fingerprint=blind) + runs("fewchan_fusion", [80.0] * 5, fingerprint=blind)
    asked = [{"release": ARGS["release"], "start": 1, "asked": 10, "right": 9, "questions_digest": "q"}] * 3
    thresholds = {**ARGS["thresholds"], "known_answers": -0.02}
    event = decide(dict(ARGS, thresholds=thresholds), data(found, scores=asked))
    assert event["outcome"] == "promote"
    assert event["lines"][0].startswith("same conditions on both sides")
    assert (
        event["lines"][1:3]
        == event["notes"]
        == [
            "not known on both sides: nccl_version",
            "known_answers: not asked before: nothing to compare",
        ]
    )
    assert event["lines"][3].startswith("equal: ")


def test_first_release_is_promoted_and_budget_ends_measuring():
    """Nothing to compare with; and an inconclusive comparison goes on until its seconds or its looks are spent."""
    found = data(grid(70.0))
    first = decide(dict(ARGS, against=""), found)
    assert first["outcome"] == "promote" and first["lines"] == ["first: no other promoted release to compare with"]
    open_one = data([run("fewchan_fusion", 70.0), *runs("baseline", [80.0] * 5)])
    assert decide(ARGS, open_one)["outcome"] == "measure"
    assert decide(ARGS, dict(open_one, spent={ARGS["release"]: 100.0}))["outcome"] == "rollback"
    assert decide(ARGS, dict(open_one, looks={ARGS["release"]: 5}))["outcome"] == "rollback"
    assert decide(dict(ARGS, on_inconclusive="keep", budget=0), open_one)["outcome"] == "promote"
    assert decide(dict(ARGS, promote=False), found)["outcome"] == "record"


def test_interleaved_takes_the_runs_of_this_playbook_run():
    """Older ones have the luck of another day."""
    found = []
    for start in range(7):
        name, speed = ("fewchan_fusion", 84.0) if start % 2 else ("baseline", 80.0)
        found += cell(name, speed, start)
    old = [dict(item, run="r0") for item in cell("baseline", 200.0, 0)]
    event = decide(dict(ARGS, design="interleaved"), data(old + found))
    assert event["verdict"] == "better"
    assert event["metrics"][0]["effect"] == pytest.approx(0.05, abs=0.001)


def test_negative_spread_is_refused_and_ids_are_read():
    """An id names its variant, which may hold dashes."""
    with pytest.raises(SettingsError, match="start_spread"):
        decide(dict(ARGS, start_spread=-1), data(grid(70.0)))
    assert variant_of("20260101T000000Z-few-chan-0123456789ab") == "few-chan"


def test_scipy_is_loaded_only_where_runs_are_compared():
    """It takes 0.4 s: not for a first release, too few runs, or other conditions."""
    enough = grid(70.0, without=("fewchan", "fusion"))
    few = [item for item in enough if item["variant"] == "baseline"] + enough[-2:]
    other = [dict(item, workload_digest="w2") if item["variant"] == "baseline" else item for item in enough]
    cases = [(dict(ARGS, against=""), enough), (ARGS, few), (ARGS, other), (ARGS, enough)]
    program = """
import json, sys
import ansible.module_utils
sys.path, ansible.module_utils.__path__ = json.loads(sys.argv[1]), json.loads(sys.argv[2])
from sglang_decide import decide
for args, found in json.loads(sys.stdin.read()):
    verdict = decide(args, found)["verdict"]
    print(verdict, "scipy" in sys.modules)
"""
    import ansible.module_utils

    command = [sys.executable, "-c", program, json.dumps(sys.path), json.dumps(list(ansible.module_utils.__path__))]
    text = json.dumps([(args, data(found)) for args, found in cases])
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["first False", "inconclusive False", "not comparable False", "worse True"]
