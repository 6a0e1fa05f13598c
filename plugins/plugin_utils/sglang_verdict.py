"""Is a release better, equal or worse than another one? Runs and scores in, one verdict with its numbers out.

A run is what ``sglang_decision`` reads from the ledger: ``{release, variant, time, run, start, result, valid, flags,
workload, workload_digest, fingerprint, metrics, derived}``; ``start`` counts the starts of the server on the host. A
score is ``{release, run, start, asked, right, questions_digest}``.
"""

from __future__ import annotations

import math
import statistics

import sglang_effect as effects
from ansible.module_utils.sglang_decision_spec import ARGUMENTS
from ansible.module_utils.sglang_fingerprint import differences, unknown

# The change that counts as a loss; its sign is the direction of the loss. Relative, for SCORE a difference of shares.
SCORE = "known_answers"
UNASKED = f"{SCORE}: not asked before: nothing to compare"
THRESHOLDS = ARGUMENTS["thresholds"]["default"]
FALSE_ALARM = ARGUMENTS["false_alarm"]["default"]
# Flag of a run whose figures may be the client's and not the server's.
CLIENT = "client_bottleneck"
# Flag of a run in which the client read tokens too late to tell the time between them.
UNRESOLVED = "unresolved"
# Looks at the figures while they are measured: the first gets three quarters of the chance of a false alarm, each
# further one a quarter of the one before, so that any number of looks stays below it.
FIRST_LOOK, NEXT_LOOK = 0.75, 0.25
# Further looks would ask for intervals so sure that they say nothing.
MOST_LOOKS = 6
# A loss as large as the threshold is excluded with this confidence, one-sided. It is less than that of a rollback:
# an equal release that cannot be told from a slightly worse one would otherwise be measured for ever.
EXCLUDED = 0.95
BETTER, EQUAL, WORSE = "better", "equal", "worse"
INCONCLUSIVE, NOT_COMPARABLE, FIRST = "inconclusive", "not comparable", "first"
PROMOTE, ROLLBACK, MEASURE, RECORD = "promote", "rollback", "measure", "record"


class SettingsError(ValueError):
    """A setting that cannot be judged by; the text names it, the rule and the way out."""


def check(thresholds, false_alarm):
    """Raise :class:`SettingsError` where a threshold or the chance of a false alarm makes no sense."""
    for name, value in thresholds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < abs(value) < 1:
            raise SettingsError(
                f"thresholds: {name} must be a share between -1 and 1 and not 0, not {value!r}: -0.02 calls a fall "
                "of 2 % a loss, 0.1 a rise of 10 %."
            )
    if not thresholds:
        raise SettingsError("thresholds: nothing to judge by. Name a metric, for example {decode_tok_s_p50: -0.02}.")
    if not 0 < false_alarm <= 0.2:
        raise SettingsError(f"false_alarm must be a chance above 0 and up to 0.2, not {false_alarm!r}.")


def confidence_of(look, metrics, false_alarm=FALSE_ALARM):
    """Return the confidence of each interval so that all metrics and looks together stay below ``false_alarm``.

    :param look: number of the judgement, from 1. :param metrics: how many metrics are judged.
    """
    return 1.0 - 2.0 * false_alarm / max(metrics, 1) * FIRST_LOOK * NEXT_LOOK ** (look - 1)


def usable(runs):
    """Return the runs whose figures may be used."""
    return [run for run in runs if run.get("valid", True) and not run.get("failure")]


def undisturbed(runs):
    """Return ``(runs, note)``: those in which the client kept up, or all with a note where these are too few."""
    held = [run for run in runs if CLIENT not in (run.get("flags") or [])]
    if len(held) == len(runs) or len(held) >= effects.FEWEST:
        return held, ""
    return runs, f"in {len(runs) - len(held)} of {len(runs)} runs the client was the limit"


def why_not(candidate, baseline):
    """Return what keeps two runs from being compared, as texts."""
    found = differences(candidate.get("fingerprint"), baseline.get("fingerprint"))
    if candidate.get("workload_digest") != baseline.get("workload_digest"):
        found.append(f"workload: {candidate.get('workload_digest')} against {baseline.get('workload_digest')}")
    return found


def comparable(candidate, baseline):
    """Return ``(candidate's runs, baseline's runs, texts)``.

    Kept is what compares with the candidate's newest run; the texts say why nothing does.
    """
    candidate, baseline = usable(candidate), usable(baseline)
    if not candidate:
        return [], [], ["runs: none of the candidate can be used"]
    newest = candidate[-1]
    kept = [run for run in baseline if not why_not(newest, run)]
    if not kept:
        return [], [], why_not(newest, baseline[-1]) if baseline else ["runs: none of the promoted release can be used"]
    return [run for run in candidate if not why_not(newest, run)], kept, []


def verdict_of(found, worst, threshold):
    """Return the verdict on one effect ``{effect, low, high}`` in the unit of ``threshold``, whose sign is a loss.

    :param worst: the effect that is as bad as it may be at the confidence :data:`EXCLUDED`.

    ``worse``: the interval excludes "no change" and the effect reaches the threshold. ``better`` likewise on the other
    side. ``equal``: a loss as large as the threshold is excluded. Everything else is ``inconclusive``.
    """
    sign = -1.0 if threshold > 0 else 1.0
    gain = sign * found["effect"]
    low, high = sorted((sign * found["low"], sign * found["high"]))
    margin = abs(threshold)
    if high < 0 and gain <= -margin:
        return WORSE
    if low > 0 and gain >= margin:
        return BETTER
    return EQUAL if sign * worst > -margin else INCONCLUSIVE


def _side(values, starts, center):
    return {"runs": len(values), "starts": starts, "center": center, "values": [round(value, 6) for value in values]}


def _entry(name, threshold, sides, ratio):
    unit = "share" if name == SCORE else "tok/s" if "tok_s" in name else "ms" if "_ms" in name else ""
    center = statistics.geometric_mean if ratio else statistics.fmean
    candidate, baseline = (_side(values, starts, center(values) if values else None) for values, starts in sides)
    return {
        "name": name,
        "unit": unit,
        "higher_is_better": threshold < 0,
        "threshold": threshold,
        "verdict": INCONCLUSIVE,
        "effect": None,
        "low": None,
        "high": None,
        "worst": None,
        "candidate": candidate,
        "baseline": baseline,
        "notes": [],
    }


def _conclude(entry, estimate, confidence, ratio):
    """Fill in the numbers and the verdict of one metric, and return the effect at ``confidence``.

    :param estimate: function of a confidence that returns ``{effect, low, high}``.
    """
    threshold = entry["threshold"]
    found = estimate(confidence)
    wide = estimate(2 * EXCLUDED - 1)
    numbers = {**found, "worst": wide["high"] if threshold > 0 else wide["low"]}
    entry["verdict"] = verdict_of(found, numbers["worst"], math.log1p(threshold) if ratio else threshold)
    for key in ("effect", "low", "high", "worst"):
        # An interval of three runs may be too wide for a float.
        entry[key] = round(math.expm1(min(numbers[key], 300.0)) if ratio else numbers[key], 6)
    return found


def _values(runs, name):
    """Return ``(values, starts of the server)`` of a metric; a ratio needs positive values."""
    with_value = [(run, run["metrics"].get(name)) for run in runs]
    kept = [(run, float(value)) for run, value in with_value if value is not None and value > 0]
    return [value for _run, value in kept], [run["start"] for run, _value in kept]


def judge_stored(name, threshold, candidate, baseline, confidence, between):
    """Judge one metric of independent runs; ``between`` is the relative spread from start to start."""
    (new, new_starts), (old, old_starts) = _values(candidate, name), _values(baseline, name)
    entry = _entry(name, threshold, [(new, len(set(new_starts))), (old, len(set(old_starts)))], True)
    if min(len(new), len(old)) < effects.FEWEST:
        entry["notes"].append(
            f"{len(new)} and {len(old)} runs have the figure; a verdict needs {effects.FEWEST} of each release"
        )
        return entry
    logs = [[math.log(value) for value in values] for values in (new, old)]
    starts = (new_starts, old_starts)
    found = _conclude(entry, lambda level: effects.independent(*logs, level, between, starts), confidence, True)
    for word, values, odd in zip(("candidate", "baseline"), (new, old), found["set_aside"]):
        if odd is not None:
            entry["notes"].append(
                f"run {odd + 1} of the {word} ({values[odd]:.4g}) is far from the others and set aside"
            )
    for word, values, marks, odd in zip(("candidate", "baseline"), logs, (new_starts, old_starts), found["set_aside"]):
        last = [value for number, value in enumerate(values) if marks[number] == marks[-1] and number != odd]
        moved = effects.drift(last)
        if moved is not None and abs(moved) > abs(math.log1p(threshold)):
            entry["notes"].append(
                f"the runs of the {word} drift by {math.expm1(moved):+.1%} from the first to the last"
            )
            if entry["verdict"] in (WORSE, BETTER):
                entry["verdict"] = INCONCLUSIVE
    return entry


def judge_interleaved(name, threshold, candidate, baseline, confidence):
    """Judge one metric of releases that were started in turn; one value a start, the median of its runs."""
    (new, new_starts), (old, old_starts) = _values(candidate, name), _values(baseline, name)
    entry = _entry(name, threshold, [(new, len(set(new_starts))), (old, len(set(old_starts)))], True)
    by_start = {}
    for values, marks, label in ((new, new_starts, True), (old, old_starts, False)):
        for value, mark in zip(values, marks):
            by_start.setdefault(mark, (label, []))[1].append(math.log(value))
    order = sorted(by_start)
    centers = [statistics.median(by_start[mark][1]) for mark in order]
    labels = [by_start[mark][0] for mark in order]
    try:
        found = _conclude(entry, lambda level: effects.interleaved(centers, labels, level), confidence, True)
    except ValueError as error:
        entry["notes"].append(str(error))
        return entry
    entry["notes"].append(f"drift from the first to the last start {math.expm1(found['drift']):+.1%}, taken out")
    return entry


def judge_score(threshold, candidate, baseline, confidence):
    """Judge the share of right answers.

    The questions are fixed: are these answered worse than before, beyond what changes from one asking to the next?
    Where other questions were asked the answers do not count.
    """
    digest = candidate[-1]["questions_digest"]
    sides = [[score for score in scores if score["questions_digest"] == digest] for scores in (candidate, baseline)]
    shares = [[score["right"] / score["asked"] for score in scores] for scores in sides]
    starts = [len({score["start"] for score in scores}) for scores in sides]
    entry = _entry(SCORE, threshold, list(zip(shares, starts)), False)
    if min(map(len, shares)) < effects.FEWEST:
        entry["notes"].append(
            f"the questions were asked {len(shares[0])} and {len(shares[1])} times; "
            f"a verdict needs {effects.FEWEST} of each release"
        )
        return entry
    # Greedy answers repeat themselves to the last one, which must not make a tenth of a question certain.
    resolution = 0.1 / candidate[-1]["asked"]
    _conclude(entry, lambda level: effects.independent(*shares, level, resolution=resolution), confidence, False)
    return entry


def overall(entries):
    """Return the verdict on all metrics: one loss decides, then one doubt, then one gain."""
    verdicts = [entry["verdict"] for entry in entries]
    for word in (WORSE, INCONCLUSIVE, BETTER):
        if word in verdicts:
            return word
    return EQUAL if verdicts else INCONCLUSIVE


def judge(
    candidate, baseline, thresholds, *, scores=((), ()), design="stored", look=1, between=0.0, false_alarm=FALSE_ALARM
):
    """Compare the runs of two releases.

    :param candidate, baseline: runs in the order of time. :param scores: scores of the same two, in the same order.
    :param between: relative spread of a metric from one start of the same release to the next.
    :returns: ``{verdict, reason, fingerprint_differences, notes, metrics, confidence, runs}``; see docs/ledger.md.
    """
    out = {"fingerprint_differences": [], "notes": [], "metrics": [], "confidence": None}
    out["runs"] = {"candidate": [], "baseline": []}
    new, old, texts = comparable(candidate, baseline)
    if texts:
        return dict(out, verdict=NOT_COMPARABLE, reason="; ".join(texts), fingerprint_differences=texts)
    out["notes"] = unknown(new[-1]["fingerprint"], old[-1]["fingerprint"])
    (new, new_note), (old, old_note) = undisturbed(new), undisturbed(old)
    out["runs"] = {"candidate": [run["result"] for run in new], "baseline": [run["result"] for run in old]}
    speeds = {name: value for name, value in thresholds.items() if name != SCORE}
    # A figure that no run has, such as the decode rate of a prefill-only load, is no metric of this comparison; one
    # that the client failed to tell is, and leaves it open.
    failed = any(UNRESOLVED in (run.get("flags") or []) for run in new + old)
    speeds = {name: value for name, value in speeds.items() if failed or _values(new, name)[0] or _values(old, name)[0]}
    scored = SCORE in thresholds and bool(scores[0])
    # Measuring the candidate on would never give the other side an answer.
    if scored and scores[0][-1]["questions_digest"] not in {score["questions_digest"] for score in scores[1]}:
        scored = False
        out["notes"].append(UNASKED)
    confidence = confidence_of(look, len(speeds) + scored, false_alarm)
    if design == "interleaved":
        entries = [judge_interleaved(name, value, new, old, confidence) for name, value in speeds.items()]
    else:
        entries = [judge_stored(name, value, new, old, confidence, between) for name, value in speeds.items()]
    for entry in entries:
        notes = (("candidate", new_note), ("baseline", old_note))
        entry["notes"] += [f"{word}: {note}" for word, note in notes if note]
    if scored:
        entries.append(judge_score(thresholds[SCORE], list(scores[0]), list(scores[1]), confidence))
    word = overall(entries)
    deciding = [entry["name"] for entry in entries if entry["verdict"] == word]
    reason = f"{word} in {', '.join(deciding)}" if deciding else "no run has a figure that is judged"
    return dict(out, verdict=word, reason=reason, metrics=entries, confidence=confidence)


def outcome(verdict, promote, on_inconclusive, more):
    """Return what follows from a verdict.

    :param promote: False only records.
    :param on_inconclusive: ``keep`` or ``rollback``, once nothing is left to measure.
    :param more: whether the budget allows to go on measuring.
    """
    if not promote:
        return RECORD
    if verdict in (FIRST, BETTER, EQUAL):
        return PROMOTE
    if verdict == WORSE:
        return ROLLBACK
    if verdict == INCONCLUSIVE and more:
        return MEASURE
    return PROMOTE if on_inconclusive == "keep" else ROLLBACK
