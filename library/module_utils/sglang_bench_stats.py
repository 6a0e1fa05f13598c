"""Figures of a run from its request records. Definitions are in :data:`DEFINITIONS` and go into every result file."""

from __future__ import annotations

import difflib
import math
import os
import statistics

from ansible.module_utils import sglang_bench_resolve as resolve
from ansible.module_utils.sglang_bench_stream import FAILURES, OK

SCHEMA = 2
# Of the way of measuring: raised when a figure would come out otherwise for the same behaviour of a server.
CLIENT_VERSION = "2"

DEFINITIONS = {
    "ttft_ms": "request sent to the first output in any channel (content, reasoning_content, reasoning, tool call)",
    "tpot_ms": "(last token - first token) / (tokens - 1), one figure a request",
    "itl_ms": "gap between two tokens, pooled over requests; a gap before several tokens is shared by them",
    "e2e_ms": "request sent to the last byte of its answer",
    "decode_tok_s": "(tokens - 1) / (last token - first token), one figure a request",
    "prefill_tok_s": "prompt tokens that were not cached / ttft, one figure a request; waiting in the queue is in it",
    "send_delay_ms": "due time of a request to its first byte written (workload rate)",
    "output_tok_s": "output tokens of completed requests / window",
    "total_tok_s": "prompt and output tokens of completed requests / window",
    "request_s": "completed requests / window",
    "window_s": "first request sent to last token read",
    "concurrency_effective": "sum of e2e times of completed requests / window",
    "tokens": "usage of the server; where it is missing, events with output (counted in usage_missing)",
    "rate_sent": "(requests sent - 1) / (last sent - first sent)",
    "cpu_us_per_token": "CPU time of the client's process during the level / output tokens",
    "unresolved": "answers whose tokens the client read too late to tell the time between them: no tpot, itl, decode",
    "read_lag_ms": "bytes read by the client, later than the kernel had them",
    "percentiles": "linear interpolation between order statistics; std is that of the population",
}
SPREAD = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "decode_tok_s", "prefill_tok_s", "send_delay_ms")
PARTS = ("mean", "p50", "p90", "p95", "p99", "std")
SINGLE = (
    "output_tok_s",
    "total_tok_s",
    "request_s",
    "rate_sent",
    "window_s",
    "concurrency_effective",
    "input_tokens_mean",
    "output_tokens_mean",
    "output_tokens_total",
    "cached_tokens_total",
    "degenerate_share",
)
METRICS = SINGLE + tuple(f"{name}_{part}" for name in SPREAD for part in PARTS)
COUNTS = ("requested", "completed", "failed") + FAILURES + ("usage_missing", "unresolved", "one_event")


def percentile(ordered, share):
    """Return the percentile of a sorted list, ``share`` from 0 to 1."""
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values):
    """Return mean, p50, p90, p95, p99 and std of ``values``; all None when there are none."""
    if not values:
        return dict.fromkeys(PARTS)
    ordered = sorted(values)
    out = {f"p{point}": percentile(ordered, point / 100.0) for point in (50, 90, 95, 99)}
    out["mean"] = statistics.fmean(ordered)
    out["std"] = math.sqrt(statistics.fmean([(value - out["mean"]) ** 2 for value in ordered]))
    return {part: round(out[part], 4) for part in PARTS}


def gaps(item):
    """Return the inter-token gaps of one record in seconds; tokens that came together with the first have no gap."""
    out = []
    credit = 0.0
    arrivals = item["arrivals"]
    for before, now, tokens in zip(arrivals, arrivals[1:], item["shares"][1:]):
        credit += tokens
        count = int(credit + 1e-9)
        credit -= count
        out += [(now - before) / tokens] * count if tokens else []
    return out


def repetitive(text):
    """Tell whether an answer repeats itself: under a fifth of its triples of words differ. None: under 16 words."""
    words = text.split()
    if len(words) < 16:
        return None
    triples = list(zip(words, words[1:], words[2:]))
    return len(set(triples)) < 0.2 * len(triples)


def counts(records):
    """Return how many requests ended as what; ``failed`` is the sum of all kinds that are not ``ok``."""
    out = dict.fromkeys(COUNTS, 0)
    out["requested"] = len(records)
    for item in records:
        if item["kind"] == OK:
            out["completed"] += 1
            out["usage_missing"] += bool(item["usage_missing"])
            alone = resolve.one_event(item)
            out["one_event"] += alone
            out["unresolved"] += bool(item.get("unresolved")) and not alone
        else:
            out["failed"] += 1
            out[item["kind"]] += 1
    return out


def metrics(records):
    """Return the flat dict of :data:`METRICS`; only completed requests count. All None when none completed."""
    done = [item for item in records if item["kind"] == OK]
    out = dict.fromkeys(METRICS)
    if not done:
        return out
    began = min(item["sent"] for item in records if item["sent"] is not None)
    window = max(item["arrivals"][-1] for item in done) - began
    tokens = sum(item["tokens"] for item in done)
    inputs = [item["input_tokens"] for item in done if item["input_tokens"] is not None]
    cached = [item["cached_tokens"] for item in done if item["cached_tokens"] is not None]
    repeats = [told for told in (repetitive(item["text"]) for item in done) if told is not None]
    several = [item for item in resolve.resolved(done) if item["tokens"] > 1]
    decode = [(item["arrivals"][-1] - item["arrivals"][0]) / (item["tokens"] - 1) for item in several]
    series = {
        "ttft_ms": [1e3 * (item["arrivals"][0] - item["sent"]) for item in done],
        "tpot_ms": [1e3 * value for value in decode],
        "itl_ms": [1e3 * gap for item in several for gap in gaps(item)],
        "e2e_ms": [1e3 * (item["end"] - item["sent"]) for item in done],
        "decode_tok_s": [1.0 / value for value in decode],
        "prefill_tok_s": [
            (item["input_tokens"] - (item["cached_tokens"] or 0)) / (item["arrivals"][0] - item["sent"])
            for item in done
            if item["input_tokens"]
        ],
        "send_delay_ms": [1e3 * (item["sent"] - item["due"]) for item in done if item.get("due") is not None],
    }
    sent = sorted(item["sent"] for item in records if item["sent"] is not None)
    out.update(
        output_tok_s=round(tokens / window, 3),
        total_tok_s=round((tokens + sum(inputs)) / window, 3) if len(inputs) == len(done) else None,
        request_s=round(len(done) / window, 4),
        rate_sent=round((len(sent) - 1) / (sent[-1] - sent[0]), 4) if sent[-1] > sent[0] else None,
        window_s=round(window, 6),
        concurrency_effective=round(sum(item["end"] - item["sent"] for item in done) / window, 3),
        input_tokens_mean=round(statistics.fmean(inputs), 2) if inputs else None,
        output_tokens_mean=round(tokens / len(done), 2),
        output_tokens_total=tokens,
        cached_tokens_total=sum(cached) if cached else None,
        degenerate_share=round(statistics.fmean(repeats), 4) if repeats else 0.0,
    )
    for name in SPREAD:
        out.update({f"{name}_{part}": value for part, value in spread(series[name]).items()})
    return out


CLIENT = (
    "cpu_share",
    "cpu_us_per_token",
    "lag_ms_p99",
    "lag_ms_max",
    "read_lag_ms_p99",
    "read_lag_ms_max",
    "unresolved_share",
    "bottleneck",
    "load_average",
    "cores",
)


def client(usage, tokens=None, unresolved=None):
    """Return what the client itself cost, with the names of :data:`CLIENT`.

    :param usage: ``{cpu_s, wall_s, lags, read_lags}``. ``cpu_share`` 1.0 is one core fully used; one interpreter cannot
        use more.
    :param tokens: output tokens that were read. :param unresolved: share of unresolved answers.
    The client was the bottleneck when it used over 80 % of a core, when its threads waited over 10 ms (p99) for their
    turn or bytes waited as long for it, or when too many answers are unresolved.
    """
    lags = sorted(usage["lags"]) or [0.0]
    share = usage["cpu_s"] / usage["wall_s"] if usage["wall_s"] else 0.0
    late = 1e3 * percentile(lags, 0.99)
    reads = sorted(usage.get("read_lags") or [])
    waited = 1e3 * percentile(reads, 0.99) if reads else None
    return {
        "cpu_share": round(share, 4),
        "cpu_us_per_token": round(1e6 * usage["cpu_s"] / tokens, 2) if tokens else None,
        "lag_ms_p99": round(late, 3),
        "lag_ms_max": round(1e3 * lags[-1], 3),
        "read_lag_ms_p99": round(waited, 3) if reads else None,
        "read_lag_ms_max": round(1e3 * reads[-1], 3) if reads else None,
        "unresolved_share": None if unresolved is None else round(unresolved, 4),
        "bottleneck": share > 0.8 or max(late, waited or 0.0) > 10.0 or (unresolved or 0.0) > resolve.MOST,
        "load_average": round(os.getloadavg()[0], 2),
        "cores": len(os.sched_getaffinity(0)),
    }


def compact(records, level):
    """Return the records for the result file: times in ms, ``sent_ms`` from the first request, text cut short."""
    began = min((item["sent"] for item in records if item["sent"] is not None), default=0.0)
    out = []
    for item in records:
        sent = item["sent"]
        keep = {"level": level}
        keep.update(
            {
                key: item[key]
                for key in ("index", "kind", "status", "tokens", "input_tokens", "cached_tokens", "channels")
            }
        )
        if item.get("due") is not None:
            keep["due_ms"] = round(1e3 * (item["due"] - began), 3)
        keep["sent_ms"] = None if sent is None else round(1e3 * (sent - began), 3)
        keep["e2e_ms"] = None if sent is None else round(1e3 * (item["end"] - sent), 3)
        keep["event_ms"] = [round(1e3 * (when - sent), 3) for when in item["arrivals"]]
        if any(share != 1 for share in item["shares"]):
            keep["event_tokens"] = [round(share, 4) for share in item["shares"]]
        if item["unresolved"]:
            keep["unresolved"] = item["unresolved"]
        if item["detail"]:
            keep["detail"] = item["detail"]
        if item["text"]:
            keep["text"] = item["text"][:200]
        out.append(keep)
    return out


def check_limits(limits):
    """Return the limits as ``{name: float}``.

    :param limits: ``min_<metric>`` and ``max_<metric>`` to numbers.
    :raises ValueError: a name is no metric, or a value no number.
    """
    known = [f"{side}_{name}" for name in METRICS for side in ("min", "max")]
    out = {}
    for name, value in (limits or {}).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}" if near else ""
            raise ValueError(f"limits: {name} is not min_ or max_ with the name of a metric{hint}?")
        try:
            out[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"limits: {name} must be a number, not {value!r}.") from None
    return out
