"""Properties of the statistics, by simulation with fixed seeds: coverage, false alarms, power, drift, outliers."""

from __future__ import annotations

import math
import random

import pytest
import sglang_effect as effects
import sglang_verdict as verdicts
from samples import runs
from sglang_attribution import contrast

# Relative standard deviation from run to run. The figures of docs/benchmark.md: a quiet host, and this project's two
# busy cores.
QUIET, BUSY = 0.01, 0.10


def drawn(rng, noise, change=0.0, count=5, variant="a", between=0.0, start=1):
    """Return runs whose decode speed is 80 tok/s and whose first token takes 100 ms, both changed and noisy."""
    luck = rng.gauss(0, between)
    decodes = [80.0 * (1 + change) * math.exp(luck + rng.gauss(0, noise)) for _ in range(count)]
    ttfts = [100.0 * math.exp(-luck + rng.gauss(0, noise)) for _ in range(count)]
    return runs(variant, decodes, ttfts, start)


def share(rng, times, **case):
    """Return how often each verdict is given: ``{verdict: share}``."""
    between = case.pop("between", 0.0)
    looks = case.pop("looks", 1)
    noise, change = case["noise"], case.get("change", 0.0)
    found = {}
    for _ in range(times):
        baseline = drawn(rng, noise, between=between)
        candidate = drawn(rng, noise, change, between=between)
        for look in range(1, looks + 1):
            word = verdicts.judge(candidate, baseline, verdicts.THRESHOLDS, look=look, between=between)["verdict"]
            if word != verdicts.INCONCLUSIVE:
                break
            candidate = candidate + drawn(rng, noise, change)
        found[word] = found.get(word, 0) + 1 / times
    return found


@pytest.mark.parametrize("noise", [0.002, QUIET, BUSY])
@pytest.mark.parametrize("confidence", [0.95, 0.9925])
def test_interval_covers_the_truth_as_often_as_it_says(noise, confidence):
    """Within what 2,000 draws can tell."""
    rng, times, truth = random.Random(5), 2000, -0.05
    hits = 0
    for _ in range(times):
        baseline, candidate = ([rng.gauss(center, noise) for _ in range(5)] for center in (0.0, truth))
        found = effects.independent(candidate, baseline, confidence)
        hits += found["low"] <= truth <= found["high"]
    assert hits / times > confidence - 0.01


def test_interval_covers_with_different_noise_and_numbers():
    """Welch's case: three noisy runs against ten steady ones, where the approximation loses a point."""
    rng, times = random.Random(6), 3000
    hits = 0
    for _ in range(times):
        found = effects.independent(
            [rng.gauss(0.1, 0.04) for _ in range(3)], [rng.gauss(0.0, 0.01) for _ in range(10)], 0.95
        )
        hits += found["low"] <= 0.1 <= found["high"]
    assert hits / times > 0.925


@pytest.mark.parametrize("noise", [QUIET, 0.03, BUSY])
def test_false_rollback_is_rarer_than_one_in_a_hundred(noise):
    """Equal releases, four looks with new runs each time, both metrics judged."""
    assert share(random.Random(7), 1000, noise=noise, looks=4).get(verdicts.WORSE, 0.0) < 0.01


def test_false_rollback_stays_rare_when_a_start_has_its_own_luck():
    """Runs of one start share it; without `between` the same noise makes false alarms by the dozen."""
    rng = random.Random(8)
    assert share(rng, 600, noise=0.005, between=0.03).get(verdicts.WORSE, 0.0) < 0.01
    blind = 0
    for _ in range(200):
        candidate, baseline = (drawn(rng, 0.005, between=0.03) for _ in range(2))
        blind += verdicts.judge(candidate, baseline, verdicts.THRESHOLDS)["verdict"] == verdicts.WORSE
    assert blind / 200 > 0.1


def test_many_runs_of_one_start_outweigh_the_others():
    """Twenty runs of one start and one of each of four: the mean has the luck of the one, and the interval knows it."""
    rng, times, found = random.Random(15), 1500, []
    for _ in range(times):
        sides = [
            [
                item
                for start, count in enumerate((20, 1, 1, 1, 1))
                for item in drawn(rng, 0.003, count=count, start=start, between=0.03)
            ]
            for _ in range(2)
        ]
        found.append(verdicts.judge(*sides, verdicts.THRESHOLDS, between=0.03)["verdict"])
    assert found.count(verdicts.WORSE) / times < verdicts.FALSE_ALARM


def test_a_start_whose_only_run_is_set_aside_does_not_count():
    """What is left is of one start, in a comparison as in an attribution, whose interval is as wide as without it."""
    steady = [0.001 * number for number in range(5)]
    sides, plain = (steady + [1.0], steady), (steady, steady)
    found = effects.independent(*sides, 0.99, 0.03, ([1] * 5 + [2], [3] * 5))
    assert found["set_aside"] == [5, None]
    assert found["high"] == effects.independent(*plain, 0.99, 0.03, (1, 1))["high"]
    both = [
        contrast(list(logs), starts, (-1.0, 1.0), 0.03, 0.95)
        for logs, starts in ((sides, ([1] * 5 + [2], [3] * 5)), (plain, (1, 1)))
    ]
    assert both[0] == both[1]


def test_five_runs_find_a_loss_of_five_percent_on_a_quiet_host():
    """Power above 95 %; in each case the release is not promoted."""
    found = share(random.Random(9), 800, noise=QUIET, change=-0.05)
    assert found[verdicts.WORSE] > 0.95
    assert verdicts.EQUAL not in found and verdicts.BETTER not in found


def test_going_on_measuring_finds_it_with_twice_the_noise():
    """What five runs leave open, more decide; what stays open is not promoted."""
    once = share(random.Random(10), 300, noise=2 * QUIET, change=-0.05)
    found = share(random.Random(10), 300, noise=2 * QUIET, change=-0.05, looks=4)
    assert once[verdicts.WORSE] + 0.05 < found[verdicts.WORSE]
    assert found[verdicts.WORSE] + found[verdicts.INCONCLUSIVE] > 0.99


def test_a_gain_and_no_change_are_found_as_well():
    """The release that is 5 % faster is better, the one that changes nothing is equal."""
    rng = random.Random(11)
    assert share(rng, 200, noise=0.005, change=0.05)[verdicts.BETTER] > 0.95
    assert share(rng, 200, noise=0.005)[verdicts.EQUAL] > 0.9


def test_interleaving_takes_a_drift_out():
    """A host that slows down by 2 % with every start: in turn the effect is found, and covered as often as said."""
    rng, times, hits = random.Random(12), 3000, 0
    labels = [False, True] * 3 + [False]
    for _ in range(times):
        values = [-0.02 * number - 0.05 * label + rng.gauss(0, 0.005) for number, label in enumerate(labels)]
        found = effects.interleaved(values, labels, 0.95)
        hits += found["low"] <= -0.05 <= found["high"]
    assert 0.94 < hits / times < 0.96


def test_a_steady_server_is_seldom_called_drifting():
    """One in a hundred, as said; a fall of 2 % a run with 0.2 % noise is seen."""
    rng = random.Random(13)
    calls = sum(effects.drift([rng.gauss(0, 0.02) for _ in range(5)]) is not None for _ in range(3000))
    assert calls / 3000 < 0.02
    assert effects.drift([-0.02 * number + rng.gauss(0, 0.002) for number in range(5)]) == pytest.approx(
        -0.08, abs=0.02
    )


def test_a_good_run_is_seldom_set_aside():
    """Of ten runs with normal noise none, in 98 cases of 100."""
    rng = random.Random(14)
    calls = sum(
        any(odd is not None for odd in effects.odd_ones([[rng.gauss(0, 1) for _ in range(5)] for _ in "ab"]))
        for _ in range(3000)
    )
    assert calls / 3000 < 0.02
