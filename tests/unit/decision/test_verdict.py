"""What is said of one pair of releases, case by case."""

from __future__ import annotations

import pytest
import sglang_verdict as verdicts
from samples import FINGERPRINT, run, runs, scores

STEADY = [80.0, 80.3, 79.8, 80.1, 79.9]


def judged(candidate, baseline, thresholds=None, **settings):
    """Return the judgement with the default thresholds."""
    return verdicts.judge(candidate, baseline, thresholds or verdicts.THRESHOLDS, **settings)


def metric(found, name="decode_tok_s_p50"):
    """Return one metric of a judgement."""
    return next(entry for entry in found["metrics"] if entry["name"] == name)


@pytest.mark.parametrize(
    ("factor", "ttft", "word"),
    [
        (1.0, 1.0, "equal"),
        (0.95, 1.0, "worse"),
        (1.05, 1.0, "better"),
        (0.99, 1.0, "equal"),
        (1.0, 1.3, "worse"),
        (1.2, 1.3, "worse"),
        (1.0, 0.7, "better"),
        (1.0, 1.05, "equal"),
    ],
)
def test_verdict_follows_the_thresholds(factor, ttft, word):
    """-2 % decode speed and +10 % time to first token; one loss outweighs any gain."""
    baseline = runs("a", STEADY, [100.0, 100.5, 99.6, 100.2, 99.9])
    candidate = runs(
        "b", [value * factor for value in STEADY], [value * ttft for value in (100.1, 99.7, 100.4, 100, 99.8)]
    )
    found = judged(candidate, baseline)
    assert found["verdict"] == word, found
    assert metric(found)["effect"] == pytest.approx(factor - 1, abs=0.002)
    assert metric(found)["low"] < metric(found)["effect"] < metric(found)["high"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_one_sample_never_triggers(count):
    """A single run at half the speed, and two of them, decide nothing."""
    found = judged(runs("b", [40.0] * 5)[: max(count, 1)], runs("a", STEADY)[: count + 3])
    assert found["verdict"] == "inconclusive"
    assert "a verdict needs 3" in metric(found)["notes"][0]
    assert judged(runs("b", [40.0] * 5), runs("a", STEADY[:1]))["verdict"] == "inconclusive"


def test_zero_variance_decides_what_is_far_apart_and_nothing_finer():
    """Identical runs: a loss of 5 % is one, a difference of 0.1 % is none."""
    assert judged(runs("b", [76.0] * 5), runs("a", [80.0] * 5))["verdict"] == "worse"
    assert judged(runs("b", [80.0] * 5), runs("a", [80.0] * 5))["verdict"] == "equal"
    assert judged(runs("b", [79.92] * 5), runs("a", [80.0] * 5))["verdict"] == "equal"


@pytest.mark.parametrize("odd", [20.0, 60.0, 160.0])
def test_one_outlier_neither_rolls_back_nor_hides(odd):
    """It is named; the verdict is that of the other runs."""
    baseline = runs("a", STEADY)
    found = judged(runs("b", [80.2, 79.9, odd, 80.0, 80.1]), baseline)
    assert found["verdict"] == "equal"
    assert f"run 3 of the candidate ({odd:.4g})" in metric(found)["notes"][0]
    slow = [value * 0.9 for value in STEADY]
    slow[1] = odd
    assert judged(runs("b", slow), baseline)["verdict"] == "worse"


def test_two_odd_runs_of_five_are_no_outliers():
    """What happens twice belongs to the release."""
    found = judged(runs("b", [80.0, 50.0, 80.1, 49.0, 79.9]), runs("a", STEADY))
    assert found["verdict"] == "inconclusive"
    assert not metric(found)["notes"]


def test_drift_stops_a_verdict():
    """A candidate that loses 3 % with every run is not called worse but measured on."""
    found = judged(runs("b", [80.0, 77.6, 75.2, 72.9, 70.7]), runs("a", [80.0] * 5), {"decode_tok_s_p50": -0.02})
    assert found["verdict"] == "inconclusive"
    assert "drift by -11" in metric(found)["notes"][0]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"driver": "580.95.05"}, "driver: 590.10 against 580.95.05"),
        ({"nccl_path": "/usr/lib/libnccl.so.2"}, "nccl_path: /opt/engine/libnccl.so.2 against /usr/lib/libnccl.so.2"),
        ({"power_limit_w": [300.0] * 8}, "power_limit_w: 8 x 600.0 against 8 x 300.0"),
        ({"model_digest": "other"}, "model_digest"),
        ({"engine_digest": "other"}, "engine_digest"),
        ({"gpu_names": ["NVIDIA L4"] * 8}, "8 x NVIDIA L4"),
    ],
)
def test_other_conditions_are_not_comparable(changed, text):
    """However slow: another driver, libnccl, limit, model, engine or card is another experiment."""
    found = judged(runs("b", [40.0] * 5), runs("a", STEADY, fingerprint=changed))
    assert found["verdict"] == "not comparable"
    assert text in found["fingerprint_differences"][0]
    assert not found["metrics"]


def test_what_differs_on_purpose_compares():
    """The digest of the release is what the comparison is about."""
    baseline = runs("a", STEADY, fingerprint={"launch_digest": "1"})
    assert judged(runs("b", STEADY, fingerprint={"launch_digest": "2"}), baseline)["verdict"] == "equal"


def test_other_load_and_missing_fingerprints_are_not_comparable():
    """Both are said."""
    found = judged(runs("b", STEADY), runs("a", STEADY, workload_digest="w2"))
    assert found["fingerprint_differences"] == ["workload: w1 against w2"]
    blind = [dict(item, fingerprint=None) for item in runs("a", STEADY)]
    assert judged(runs("b", STEADY), blind)["verdict"] == "not comparable"


def test_only_runs_of_the_candidates_conditions_count():
    """The promoted release was measured under an older driver as well; those runs stay out."""
    old = runs("a", [200.0] * 5, fingerprint={"driver": "570.0"})
    found = judged(runs("b", STEADY), old + runs("a", STEADY))
    assert found["verdict"] == "equal"
    assert metric(found)["baseline"]["runs"] == 5


def test_failed_and_invalid_runs_do_not_count():
    """A run in which every request failed, or with an Xid, is no slow run."""
    bad = [run("b", 1.0, valid=False), run("b", None, failure="all 16 requests failed")]
    found = judged(bad + runs("b", STEADY), runs("a", STEADY))
    assert found["verdict"] == "equal" and metric(found)["candidate"]["runs"] == 5
    assert judged(bad, runs("a", STEADY))["verdict"] == "not comparable"


def test_runs_that_the_client_limited_count_only_where_there_are_no_others():
    """They are left out where three others are there; otherwise the comparison says so."""
    limited = runs("b", [300.0, 20.0, 250.0], flags=["client_bottleneck"])
    found = judged(limited + runs("b", STEADY), runs("a", STEADY))
    assert found["verdict"] == "equal" and metric(found)["candidate"]["runs"] == 5
    assert not metric(found)["notes"]
    found = judged(limited + runs("b", STEADY[:2]), runs("a", STEADY))
    assert metric(found)["candidate"]["runs"] == 5
    assert "candidate: in 3 of 5 runs the client was the limit" in metric(found)["notes"]


def test_fast_and_wrong_is_worse():
    """15 % faster and 78 right answers of 100 instead of 84 to 86."""
    candidate, baseline = runs("b", [value * 1.15 for value in STEADY]), runs("a", STEADY)
    assert judged(candidate, baseline)["verdict"] == "better"
    right = scores([0.84, 0.85, 0.86, 0.85, 0.84])
    found = judged(candidate, baseline, scores=(scores([0.78] * 5), right))
    assert found["verdict"] == "worse" and found["reason"] == "worse in known_answers"
    entry = metric(found, "known_answers")
    assert entry["effect"] == pytest.approx(-0.068) and entry["high"] < 0
    # One answer of 100 that changed for good is none of a kernel's faults.
    assert judged(candidate, baseline, scores=(scores([0.84] * 5), scores([0.85] * 5)))["verdict"] == "better"
    # One of two, three times over, is no accident.
    few = judged(candidate, baseline, scores=(scores([0.5] * 3, asked=2), scores([1.0] * 3, asked=2)))
    assert metric(few, "known_answers")["verdict"] == "worse"
    assert judged(candidate, baseline, scores=(scores([0.78] * 2), right))["verdict"] == "inconclusive"


@pytest.mark.parametrize("before", [[], scores([0.85] * 5, digest="q1")])
def test_questions_that_the_other_side_was_never_asked_leave_the_verdict_to_the_rest(before):
    """The first use of questions, and their first edit: no run of the candidate could ever close such a comparison."""
    asked = scores([0.78] * 5, digest="q2")
    found = judged(runs("b", STEADY), runs("a", STEADY), scores=(asked, before))
    assert found["verdict"] == "equal"
    assert found["notes"] == ["known_answers: not asked before: nothing to compare"]
    assert [entry["name"] for entry in found["metrics"]] == ["decode_tok_s_p50", "ttft_ms_p50"]
    # Its share of the chance of a false alarm is the others'.
    assert found["confidence"] == verdicts.confidence_of(1, 2)
    assert judged(runs("b", [70.0] * 5), runs("a", STEADY), scores=(asked, before))["verdict"] == "worse"
    # Asked once is asked.
    once = judged(runs("b", STEADY), runs("a", STEADY), scores=(asked, before + asked[:1]))
    assert once["verdict"] == "inconclusive" and once["notes"] == []


def test_what_is_not_known_of_both_is_a_note():
    """No driver on either side is no difference, and no sameness either."""
    blind = {"driver": None, "unknown": ["driver", "launch_digest"]}
    found = judged(runs("b", STEADY, fingerprint=blind), runs("a", STEADY, fingerprint=blind))
    assert found["verdict"] == "equal" and found["notes"] == ["not known on both sides: driver"]
    assert judged(runs("b", STEADY), runs("a", STEADY))["notes"] == []


def test_interleaved_starts_are_judged_by_their_medians():
    """A B A B A B A on a host that slows down; one run in each start is disturbed."""
    candidate, baseline = [], []
    for start in range(7):
        speed = 80.0 * 0.99**start * (0.93 if start % 2 else 1.0) * (1 + 0.001 * (start % 3))
        side, name = (candidate, "b") if start % 2 else (baseline, "a")
        side += runs(name, [speed, speed * 1.002, speed * 0.5], start=start)
    thresholds = {"decode_tok_s_p50": -0.02}
    found = judged(candidate, baseline, thresholds, design="interleaved")
    assert found["verdict"] == "worse"
    assert metric(found)["effect"] == pytest.approx(-0.07, abs=0.005)
    assert "drift from the first to the last start -5" in metric(found)["notes"][0]
    few = judged(candidate[:3], baseline[:6], thresholds, design="interleaved")
    assert few["verdict"] == "inconclusive" and "two starts of each side" in metric(few)["notes"][0]


@pytest.mark.parametrize(
    ("verdict", "promote", "policy", "more", "what"),
    [
        ("first", True, "rollback", False, "promote"),
        ("better", True, "rollback", True, "promote"),
        ("equal", True, "rollback", True, "promote"),
        ("worse", True, "keep", True, "rollback"),
        ("inconclusive", True, "keep", True, "measure"),
        ("inconclusive", True, "keep", False, "promote"),
        ("inconclusive", True, "rollback", False, "rollback"),
        ("not comparable", True, "rollback", True, "rollback"),
        ("not comparable", True, "keep", True, "promote"),
        ("worse", False, "rollback", True, "record"),
    ],
)
def test_what_follows(verdict, promote, policy, more, what):
    """`keep` never keeps what is worse; nothing follows where only the record is wanted."""
    assert verdicts.outcome(verdict, promote, policy, more) == what


def test_all_looks_together_stay_below_the_chance():
    """Bonferroni over metrics and looks, one-sided."""
    spent = sum(2 * (1 - verdicts.confidence_of(look, 2)) / 2 for look in range(1, 40))
    assert spent == pytest.approx(verdicts.FALSE_ALARM)


@pytest.mark.parametrize(
    ("thresholds", "chance", "word"),
    [
        ({"decode_tok_s_p50": 0}, 0.01, "decode_tok_s_p50"),
        ({"decode_tok_s_p50": -2}, 0.01, "between -1 and 1"),
        ({"ttft_ms_p50": "10 %"}, 0.01, "ttft_ms_p50"),
        ({}, 0.01, "nothing to judge by"),
        ({"ttft_ms_p50": 0.1}, 0.0, "false_alarm"),
        ({"ttft_ms_p50": 0.1}, 1.0, "false_alarm"),
    ],
)
def test_settings_that_make_no_sense_are_refused(thresholds, chance, word):
    """The message names the input."""
    with pytest.raises(verdicts.SettingsError, match=word):
        verdicts.check(thresholds, chance)


def test_the_sample_is_a_fingerprint():
    """It has every key that keeps runs apart."""
    from ansible.module_utils.sglang_fingerprint import COMPARED

    assert set(COMPARED) == set(FINGERPRINT)


def test_figures_that_the_client_could_not_tell_leave_it_open():
    """Read too late on either side or both: no verdict by what remains. A load without decoding is another matter."""
    late = runs("b", [None] * 4, flags=["client_bottleneck", "unresolved"])
    for candidate, baseline in ((late, runs("a", STEADY)), (late, [dict(item, release="a") for item in late])):
        found = judged(candidate, baseline)
        assert found["verdict"] == "inconclusive" and "need" in metric(found)["notes"][0]
        assert metric(found)["candidate"]["values"] == [] and metric(found)["effect"] is None
    found = judged(runs("b", [None] * 4), runs("a", [None] * 4))
    assert found["verdict"] == "equal" and [entry["name"] for entry in found["metrics"]] == ["ttft_ms_p50"]
