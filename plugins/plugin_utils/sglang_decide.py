"""From what the ledger holds to the event that goes into it: judge, attribute, assess, say it in lines."""

from __future__ import annotations

import statistics

import sglang_verdict as verdicts
from sglang_attribution import CELLS, attribute
from sglang_comparison_text import comparison_lines
from sglang_speculation import assess

NOTHING = "no other promoted release to compare with"


def decide(args, data):
    """Return the ledger event ``decision`` without its run (docs/ledger.md).

    :param args: checked arguments of sglang_decision. :param data: ``{runs, scores, looks, spent}`` of its read.
    :raises SettingsError: the arguments cannot be judged by.
    """
    thresholds = args["thresholds"]
    verdicts.check(thresholds, args["false_alarm"])
    if args["start_spread"] < 0:
        raise verdicts.SettingsError(f"start_spread is a share of 0 or more, not {args['start_spread']!r}.")
    release, against = args["release"], args["against"]
    interleaved = args["design"] == "interleaved"
    runs = data["runs"]
    candidate, baseline = ([run for run in runs if run["release"] == name] for name in (release, against))
    if interleaved:
        # Only what was started in turn: an older run has the luck of another day.
        candidate, baseline = (
            [run for run in side if run["run"] == args["run"]["id"]] for side in (candidate, baseline)
        )
    look = 1 + data["looks"].get(release, 0)
    common = {"look": look, "design": args["design"], "between": args["start_spread"]}
    if against:
        scores = [[score for score in data["scores"] if score["release"] == name] for name in (release, against)]
        if interleaved:
            scores = [[score for score in side if score["run"] == args["run"]["id"]] for side in scores]
        found = verdicts.judge(
            candidate, baseline, thresholds, scores=scores, false_alarm=args["false_alarm"], **common
        )
    else:
        found = {
            "verdict": verdicts.FIRST,
            "reason": NOTHING,
            "fingerprint_differences": [],
            "notes": [],
            "metrics": [],
        }
        found.update(confidence=None, runs={"candidate": [run["result"] for run in candidate], "baseline": []})
    newest = candidate[-1] if candidate else None
    more = look < verdicts.MOST_LOOKS and data["spent"].get(release, 0.0) < args["budget"]
    event = {
        **found,
        "release": release,
        "variant": newest["variant"] if newest else variant_of(release),
        "against": {"release": against, "variant": variant_of(against)} if against else None,
        "outcome": verdicts.outcome(found["verdict"], args["promote"], args["on_inconclusive"], more),
        "design": args["design"],
        "look": look,
        "workload_digest": newest["workload_digest"] if newest else None,
        "workload": newest["workload"] if newest else None,
        "fingerprint": newest["fingerprint"] if newest else None,
        "attribution": attribution(runs, newest, thresholds, args["start_spread"]),
        "speculation": speculation(candidate, baseline, newest, args["allreduce_us"]),
    }
    return {**event, "lines": comparison_lines(event)}


def variant_of(release):
    """Return the name of the variant in the id of a release, ``<UTC time>-<variant>-<digest>``."""
    return release.partition("-")[2].rpartition("-")[0] or release


def attribution(runs, newest, thresholds, between):
    """Return the 2x2 of fewchan and fusion where the candidate is one of its cells; otherwise None."""
    if newest is None or newest["variant"] not in CELLS:
        return None
    names = [name for name in thresholds if name != verdicts.SCORE]
    return attribute(runs, newest, names, between)


def speculation(candidate, baseline, newest, allreduce_us):
    """Return what the runs say of speculation; None without speculation, or where the load was not one stream."""
    if newest is None or newest["workload"].get("concurrency") != 1:
        return None
    pairs = [(run["accept_length"], run["metrics"].get("decode_tok_s_p50")) for run in verdicts.usable(candidate)]
    pairs = [(length, speed) for length, speed in pairs if length and length > 1 and speed]
    plain = [
        run["metrics"]["decode_tok_s_p50"]
        for run in verdicts.usable(baseline)
        if not verdicts.why_not(newest, run)
        and run["metrics"].get("decode_tok_s_p50")
        and not (run["accept_length"] and run["accept_length"] > 1)
    ]
    if not pairs or not plain:
        return None
    lengths, speeds = zip(*pairs)
    return assess(statistics.fmean(lengths), statistics.median(speeds), statistics.median(plain), allreduce_us or None)
