"""How much two sets of repeated runs differ, with an interval: numbers in, numbers out.

A ratio (tok/s, ms) is compared by its logarithm, so that "5 % slower" and "5 % faster" are equally far from nothing and
the noise of a server, which grows with its speed, is the same on both sides. The caller takes logarithms; here a value
is a plain number and an effect is candidate minus baseline.

Why Student's t and not a rank test: with five runs a side the ranks cannot give an interval of more than 99.2 %. Why
one run may be set aside: a single disturbed run (another job, a throttled GPU) would otherwise hide a loss of 20 %.
"""

from __future__ import annotations

import collections
import math
import statistics

# A run further from the median of its side than so many robust standard deviations is set aside, at most one a side.
# Chosen by simulation: of ten runs with normal noise one is set aside in under 1 % of the cases.
OUTLIER = 8.0
# With fewer runs a side nobody can tell which one is the odd one out.
FEWEST_FOR_OUTLIER = 4
# A side needs so many runs for a verdict.
FEWEST = 3
# Two equal figures are equal to within this much; it keeps identical runs from proving anything beyond it.
RESOLUTION = 0.001
# Chance with which a steady server is called drifting.
DRIFT_CHANCE = 0.01
FEWEST_FOR_DRIFT = 5


def quantile(confidence, df):
    """Return Student's two-sided quantile; ``confidence`` from 0 to 1, ``df`` the degrees of freedom, inf allowed."""
    # Loading scipy takes 0.4 s, which only a comparison with enough runs shall pay.
    from scipy.special import stdtrit

    return float(stdtrit(min(df, 1e9), 0.5 + confidence / 2.0))


def odd_ones(sides, resolution=RESOLUTION):
    """Return the index of the run to set aside for each side, or None.

    The scale is the median distance from the side's own median over all sides, so that five runs need not judge
    themselves alone.
    """
    centers = [statistics.median(values) for values in sides]
    distances = [[abs(value - center) for value in values] for values, center in zip(sides, centers)]
    pooled = sorted(distance for side in distances for distance in side)
    # One run of each odd side is its own median and says nothing of the scale.
    informative = pooled[sum(len(values) % 2 for values in sides) :]
    scale = max(1.4826 * statistics.median(informative), resolution) if informative else resolution
    found = []
    for values, side in zip(sides, distances):
        far = [number for number, distance in enumerate(side) if distance > OUTLIER * scale]
        # What happens twice belongs to the release.
        found.append(far[0] if len(far) == 1 and len(values) >= FEWEST_FOR_OUTLIER else None)
    return found


def without(items, odd):
    """Return the items without the one of index ``odd``; None leaves all."""
    return [item for number, item in enumerate(items) if number != odd]


def luck(starts, odd=None):
    """Return which share of the variance from start to start is in the mean of runs, 1 for runs of one start.

    :param starts: the start of each run; or how many there are, which takes them to have equally many runs.
    :param odd: index of a run that is set aside.
    """
    if isinstance(starts, int):
        return 1.0 / starts
    counts = collections.Counter(without(starts, odd)).values()
    return sum(count**2 for count in counts) / sum(counts) ** 2


def independent(candidate, baseline, confidence, between=0.0, starts=(1, 1), resolution=RESOLUTION):
    """Compare two sets of runs by Welch's t.

    :param candidate, baseline: values, at least :data:`FEWEST` each.
    :param confidence: of the interval, from 0 to 1.
    :param between: standard deviation from one start of the same release to the next, in the unit of the values. Runs
        of one start share its luck, which repeating them does not average out.
    :param starts: of each side what :func:`luck` takes.
    :param resolution: what a single run can tell apart, in the unit of the values.
    :returns: ``{effect, low, high, set_aside: [index or None, index or None]}``.
    :raises ValueError: too few runs.
    """
    if min(len(candidate), len(baseline)) < FEWEST:
        raise ValueError(f"at least {FEWEST} runs of each side are needed, not {len(candidate)} and {len(baseline)}")
    aside = odd_ones([candidate, baseline], resolution)
    kept = [without(values, odd) for values, odd in zip((candidate, baseline), aside)]
    shares = [max(statistics.variance(values), resolution**2) / len(values) for values in kept]
    known = between**2 * sum(map(luck, starts, aside))
    total = sum(shares) + known
    df = total**2 / sum(share**2 / (len(values) - 1) for share, values in zip(shares, kept))
    effect = statistics.fmean(kept[0]) - statistics.fmean(kept[1])
    half = quantile(confidence, df) * math.sqrt(total)
    return {"effect": effect, "low": effect - half, "high": effect + half, "set_aside": aside}


def interleaved(values, labels, confidence):
    """Compare starts that were made in turn, such as A B A B A: a steady drift is part of the model and cancels out.

    Least squares of ``value = level + effect * is_candidate + drift * time``. One value a start: runs of one start are
    no independent evidence of what the next one does.

    :param values: one centre a start, in the order of time.
    :param labels: True where the start was one of the candidate.
    :returns: ``{effect, low, high, drift}``, ``drift`` from the first to the last start.
    :raises ValueError: fewer than two starts of a side, or no degree of freedom left.
    """
    count = len(values)
    if min(sum(labels), count - sum(labels)) < 2 or count < 4:
        raise ValueError(f"at least two starts of each side are needed, not {sum(labels)} and {count - sum(labels)}")
    times = [number - (count - 1) / 2.0 for number in range(count)]
    share = sum(labels) / count
    marks = [bool(label) - share for label in labels]
    center = statistics.fmean(values)
    moves = [value - center for value in values]
    tt, mm = sum(time * time for time in times), sum(mark * mark for mark in marks)
    tm = sum(time * mark for time, mark in zip(times, marks))
    ty, my = (sum(a * b for a, b in zip(side, moves)) for side in (times, marks))
    det = tt * mm - tm * tm
    effect, drift = (tt * my - tm * ty) / det, (mm * ty - tm * my) / det
    left = sum((move - effect * mark - drift * time) ** 2 for move, mark, time in zip(moves, marks, times))
    df = count - 3
    half = quantile(confidence, df) * math.sqrt(max(left / df, RESOLUTION**2) * tt / det)
    return {"effect": effect, "low": effect - half, "high": effect + half, "drift": drift * (count - 1)}


def drift(values):
    """Return how much the runs of one start move from the first to the last one, or None where nothing shows.

    A straight line by least squares whose slope chance explains in under :data:`DRIFT_CHANCE` of the cases.
    """
    count = len(values)
    if count < FEWEST_FOR_DRIFT:
        return None
    from scipy.special import stdtr

    times = [number - (count - 1) / 2.0 for number in range(count)]
    tt = sum(time * time for time in times)
    slope = sum(time * value for time, value in zip(times, values)) / tt
    center = statistics.fmean(values)
    left = sum((value - center - slope * time) ** 2 for time, value in zip(times, values))
    error = math.sqrt(max(left / (count - 2), RESOLUTION**2) / tt)
    chance = 2.0 * float(stdtr(count - 2, -abs(slope) / error))
    return slope * (count - 1) if chance < DRIFT_CHANCE else None
