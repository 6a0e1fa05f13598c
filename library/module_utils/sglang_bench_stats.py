"""Figures of a run from its request records. Definitions are in :data:`DEFINITIONS` and go into every result file."""

from __future__ import annotations

import difflib
import math
import statistics

from ansible.module_utils.sglang_bench_stream import FAILURES, OK
from ansible.module_utils.sglang_findings import finding

SCHEMA = 1

DEFINITIONS = {
    "ttft_ms": "request sent to the first output in any channel (content, reasoning_content, reasoning, tool call)",
    "tpot_ms": "(last token - first token) / (tokens - 1), one figure a request",
    "itl_ms": "gap between two tokens, pooled over requests; a gap before several tokens is shared by them",
    "e2e_ms": "request sent to the last byte of its answer",
    "decode_tok_s": "(tokens - 1) / (last token - first token), one figure a request",
    "output_tok_s": "output tokens of completed requests / window",
    "total_tok_s": "prompt and output tokens of completed requests / window",
    "request_s": "completed requests / window",
    "window_s": "first request sent to last token read",
    "concurrency_effective": "sum of e2e times of completed requests / window",
    "tokens": "usage of the server; where it is missing, events with output (counted in usage_missing)",
    "percentiles": "linear interpolation between order statistics; std is that of the population",
}
SPREAD = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "decode_tok_s")
PARTS = ("mean", "p50", "p90", "p95", "p99", "std")
SINGLE = (
    "output_tok_s",
    "total_tok_s",
    "request_s",
    "window_s",
    "concurrency_effective",
    "input_tokens_mean",
    "output_tokens_mean",
    "output_tokens_total",
    "cached_tokens_total",
    "degenerate_share",
)
METRICS = SINGLE + tuple(f"{name}_{part}" for name in SPREAD for part in PARTS)
COUNTS = ("requested", "completed", "failed") + FAILURES + ("usage_missing",)


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
    """Tell whether an answer of at least 16 words repeats itself: under a fifth of its triples of words differ."""
    words = text.split()
    if len(words) < 16:
        return False
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
    several = [item for item in done if item["tokens"] > 1 and item["arrivals"][-1] > item["arrivals"][0]]
    decode = [(item["arrivals"][-1] - item["arrivals"][0]) / (item["tokens"] - 1) for item in several]
    series = {
        "ttft_ms": [1e3 * (item["arrivals"][0] - item["sent"]) for item in done],
        "tpot_ms": [1e3 * value for value in decode],
        "itl_ms": [1e3 * gap for item in done for gap in gaps(item)],
        "e2e_ms": [1e3 * (item["end"] - item["sent"]) for item in done],
        "decode_tok_s": [1.0 / value for value in decode],
    }
    out.update(
        output_tok_s=round(tokens / window, 3),
        total_tok_s=round((tokens + sum(inputs)) / window, 3) if len(inputs) == len(done) else None,
        request_s=round(len(done) / window, 4),
        window_s=round(window, 6),
        concurrency_effective=round(sum(item["end"] - item["sent"] for item in done) / window, 3),
        input_tokens_mean=round(statistics.fmean(inputs), 2) if inputs else None,
        output_tokens_mean=round(tokens / len(done), 2),
        output_tokens_total=tokens,
        cached_tokens_total=sum(cached) if cached else None,
        degenerate_share=round(sum(repetitive(item["text"]) for item in done) / len(done), 4),
    )
    for name in SPREAD:
        out.update({f"{name}_{part}": value for part, value in spread(series[name]).items()})
    return out


def client(usage):
    """Return what the client itself cost: ``{cpu_share, lag_ms_p99, lag_ms_max, bottleneck}``.

    :param usage: ``{cpu_s, wall_s, lags}``. ``cpu_share`` 1.0 is one core fully used; one interpreter cannot use more.
    The client was the bottleneck when it used over 80 % of a core or its threads waited over 10 ms (p99) for their
    turn.
    """
    lags = sorted(usage["lags"]) or [0.0]
    share = usage["cpu_s"] / usage["wall_s"] if usage["wall_s"] else 0.0
    late = 1e3 * percentile(lags, 0.99)
    return {
        "cpu_share": round(share, 4),
        "lag_ms_p99": round(late, 3),
        "lag_ms_max": round(1e3 * lags[-1], 3),
        "bottleneck": share > 0.8 or late > 10.0,
    }


def flags(numbers, tally, cost, wanted):
    """Return the list of remarks that a reader of the figures must know.

    :param wanted: ``{concurrency, output_tokens, input_tokens}`` as asked.
    """
    out = []
    if cost["bottleneck"]:
        out.append("client_bottleneck")
    if tally["usage_missing"]:
        out.append("usage_missing")
    if (numbers["degenerate_share"] or 0) > 0.1:
        out.append("degenerate_output")
    if tally["failed"]:
        out.append("failed_requests")
    effective = numbers["concurrency_effective"]
    if effective is not None and effective < 0.8 * min(wanted["concurrency"], tally["requested"]):
        out.append("concurrency_not_held")
    if (
        numbers["cached_tokens_total"]
        and numbers["cached_tokens_total"] > 0.2 * tally["completed"] * wanted["input_tokens"]
    ):
        out.append("prompts_cached")
    return out


def compact(records, began):
    """Return the records for the result file: times in ms, ``sent_ms`` from the first request, text cut short."""
    out = []
    for item in records:
        sent = item["sent"]
        keep = {
            key: item[key] for key in ("index", "kind", "status", "tokens", "input_tokens", "cached_tokens", "channels")
        }
        keep["sent_ms"] = None if sent is None else round(1e3 * (sent - began), 3)
        keep["e2e_ms"] = None if sent is None else round(1e3 * (item["end"] - sent), 3)
        keep["event_ms"] = [round(1e3 * (when - sent), 3) for when in item["arrivals"]]
        if any(share != 1 for share in item["shares"]):
            keep["event_tokens"] = [round(share, 4) for share in item["shares"]]
        if item["detail"]:
            keep["detail"] = item["detail"]
        if item["text"]:
            keep["text"] = item["text"][:200]
        out.append(keep)
    return out


def failure_text(records, tally, max_failed):
    """Return why the run does not count, or None when the share of failed requests is allowed.

    Names each kind with its number and one example, and the missing API key as such.
    """
    if tally["failed"] <= max_failed * tally["requested"] and tally["completed"]:
        return None
    parts = []
    for kind in FAILURES:
        if tally[kind]:
            example = next(item["detail"] for item in records if item["kind"] == kind)
            parts.append(f"{tally[kind]} {kind} (first: {example.strip()})")
    text = f"{tally['failed']} of {tally['requested']} requests failed (max_failed {max_failed:g}): {'; '.join(parts)}."
    if tally["unauthorized"]:
        text += " The server wants an API key that was missing or wrong: set api_key."
    if tally["refused"]:
        text += (
            " Nothing accepted the connection: check that the server runs and that release or url name its endpoint."
        )
    if tally["timed_out"] or tally["not_sent"]:
        text += " Raise request_timeout or timeout, or send less, if the server was merely slow."
    return text


REMARKS = {
    "client_bottleneck": (
        "the client was the limit or was kept from running",
        "measure on a quiet host, or with a lower concurrency",
    ),
    "usage_missing": (
        "the server told no usage, so tokens are events with output",
        "let the server send usage in streams",
    ),
    "degenerate_output": ("answers repeat the same few words", "check the model's answers before trusting the speed"),
    "failed_requests": ("requests failed within the allowed share", "read the counts and the result file"),
    "concurrency_not_held": ("fewer requests than asked were in flight", "send more requests a run"),
    "prompts_cached": (
        "a part of the prompts came from the server's cache",
        "leave seed unset, so that prompts are new",
    ),
    "prompt_length_not_calibrated": (
        "the prompt length is one token a word, by assumption",
        "let the server send usage",
    ),
}


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


def findings(numbers, remarks, failure, limits, cost):
    """Return the findings of rung ``benchmark``: the failure and missed limits as errors, flags as warnings."""
    out = []
    if failure:
        out.append(
            finding("benchmark", "failed-requests", "error", failure, "", "read the result file and the server's log")
        )
    for name, limit in sorted(limits.items()):
        side, _sep, metric = name.partition("_")
        value = numbers[metric]
        if failure or (value is not None and (value >= limit if side == "min" else value <= limit)):
            continue
        seen = "not measured" if value is None else f"{metric} = {value}"
        message = f"{metric} must be at {'least' if side == 'min' else 'most'} {limit:g} (limit {name})"
        out.append(
            finding(
                "benchmark",
                name.replace("_", "-"),
                "error",
                message,
                seen,
                "serve a faster variant or change the limit",
            )
        )
    for flag in remarks:
        message, advice = REMARKS[flag]
        seen = (
            f"{cost['cpu_share']:.0%} of a core, p99 lag {cost['lag_ms_p99']} ms" if flag == "client_bottleneck" else ""
        )
        out.append(finding("benchmark", flag.replace("_", "-"), "warning", message, seen, advice))
    return out
