"""Which of two changes did it? Four variants on one host: neither change, each alone, both (2x2)."""

from __future__ import annotations

import math
import statistics

import sglang_effect as effects
import sglang_verdict as verdicts
from ansible.module_utils.sglang_decision_spec import ATTRIBUTED

# The variants with neither change, the first, the second, both.
CELLS = ATTRIBUTED
# Weights of the four cells in each question.
QUESTIONS = {
    "fewchan alone": (-1.0, 1.0, 0.0, 0.0),
    "fusion alone": (-1.0, 0.0, 1.0, 0.0),
    "both together": (-1.0, 0.0, 0.0, 1.0),
    "fewchan, with and without fusion": (-0.5, 0.5, -0.5, 0.5),
    "fusion, with and without fewchan": (-0.5, -0.5, 0.5, 0.5),
    "interaction": (1.0, -1.0, -1.0, 1.0),
}
CONFIDENCE = 0.95


def newest(runs, like):
    """Return the usable runs of each cell that compare with the run ``like``, of the variant's newest release."""
    out = {}
    for cell in CELLS:
        kept = [run for run in verdicts.usable(runs) if run["variant"] == cell and not verdicts.why_not(like, run)]
        out[cell] = [run for run in kept if run["release"] == kept[-1]["release"]] if kept else []
    return out


def attribute(runs, like, metrics, between=0.0, confidence=CONFIDENCE):
    """Return ``{missing: [text], confidence, metrics: {name: {question: {effect, low, high}}}}``.

    Effects are relative changes; the interaction is by how much both together differ from the product of each alone:
    0 means that the two do not meddle with each other.

    :param runs: runs of all variants of the host, in the order of time.
    :param like: the run whose fingerprint and workload the others must have.
    :param metrics: names of the metrics. :param between: relative spread from start to start.
    """
    cells = newest(runs, like)
    missing = [
        f"{cell}: {len(cells[cell])} comparable runs, {effects.FEWEST} are needed"
        for cell in CELLS
        if len(cells[cell]) < effects.FEWEST
    ]
    out = {"missing": missing, "confidence": confidence, "metrics": {}}
    if missing:
        return out
    for name in metrics:
        logs, starts = [], []
        for cell in CELLS:
            kept = [run for run in cells[cell] if (run["metrics"].get(name) or 0) > 0]
            logs.append([math.log(run["metrics"][name]) for run in kept])
            starts.append([run["start"] for run in kept])
        if min(map(len, logs)) < effects.FEWEST:
            missing.append(f"{name}: not in {effects.FEWEST} runs of each variant")
            continue
        out["metrics"][name] = {
            question: contrast(logs, starts, weights, between, confidence) for question, weights in QUESTIONS.items()
        }
    return out


def contrast(logs, starts, weights, between, confidence):
    """Return ``{effect, low, high}`` of a weighted sum of cells, as relative changes (Welch-Satterthwaite).

    :param starts: of each cell what :func:`sglang_effect.luck` takes.
    """
    odd = effects.odd_ones(logs)
    kept = [effects.without(values, away) for values, away in zip(logs, odd)]
    shares = [
        weight**2 * max(statistics.variance(values), effects.RESOLUTION**2) / len(values)
        for weight, values in zip(weights, kept)
    ]
    known = sum(weight**2 * share for weight, share in zip(weights, map(effects.luck, starts, odd)))
    total = sum(shares) + between**2 * known
    df = total**2 / sum(share**2 / (len(values) - 1) for share, values in zip(shares, kept))
    middle = sum(weight * statistics.fmean(values) for weight, values in zip(weights, kept))
    half = effects.quantile(confidence, df) * math.sqrt(total)
    return {
        key: round(math.expm1(value), 6)
        for key, value in (("effect", middle), ("low", middle - half), ("high", middle + half))
    }
