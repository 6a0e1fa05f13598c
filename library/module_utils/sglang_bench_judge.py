"""What a run is worth: remarks on its figures, its failure, missed limits, and all of them as findings."""

from __future__ import annotations

from ansible.module_utils.sglang_bench_resolve import one_event
from ansible.module_utils.sglang_bench_stream import FAILURES, OK
from ansible.module_utils.sglang_findings import finding


def flags(numbers, tally, cost, wanted):
    """Return the list of remarks that a reader of the figures must know.

    :param wanted: ``{concurrency, rate}`` as asked.
    """
    out = []
    if cost["bottleneck"]:
        out.append("client_bottleneck")
    if tally["usage_missing"]:
        out.append("usage_missing")
    out += [name for name in ("unresolved", "one_event") if tally[name]]
    if (numbers["degenerate_share"] or 0) > 0.1:
        out.append("degenerate_output")
    if tally["failed"]:
        out.append("failed_requests")
    effective = numbers["concurrency_effective"]
    if wanted.get("rate"):
        effective = None  # with a request rate the number in flight follows from the server's speed
    if effective is not None and effective < 0.8 * min(wanted["concurrency"], tally["requested"]):
        out.append("concurrency_not_held")
    if wanted.get("rate") and numbers["send_delay_ms_p99"] is not None:
        if numbers["send_delay_ms_p99"] > 50 or numbers["send_delay_ms_mean"] > 100 / wanted["rate"]:
            out.append("rate_not_held")
    if (
        numbers["cached_tokens_total"]
        and numbers["input_tokens_mean"]
        and numbers["cached_tokens_total"] > 0.2 * tally["completed"] * numbers["input_tokens_mean"]
    ):
        out.append("prompts_cached")
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
    "unresolved": (
        "the client read tokens too late to tell the time between them; those answers are not in TPOT, ITL and decode "
        "speed, and over a quarter of them leaves none",
        "measure on a quiet host, or with a lower concurrency",
    ),
    "one_event": (
        "the server sent answers in one event, which have no TPOT, ITL and decode speed",
        "let the server stream each token, or judge it by output_tok_s",
    ),
    "usage_missing": (
        "the server told no usage, so tokens are events with output",
        "let the server send usage in streams",
    ),
    "degenerate_output": ("answers repeat the same few words", "check the model's answers before trusting the speed"),
    "failed_requests": ("requests failed within the allowed share", "read the counts and the result file"),
    "concurrency_not_held": ("fewer requests than asked were in flight", "send more requests a run"),
    "rate_not_held": (
        "requests were sent later than they were due",
        "raise concurrency, which limits the requests in flight, or measure on a quiet host",
    ),
    "prompts_cached": (
        "a part of the prompts came from the server's cache",
        "leave seed unset, so that prompts are new",
    ),
    "prompt_length_not_calibrated": (
        "the prompt length is one token a word, by assumption",
        "let the server send usage",
    ),
}


def notes(records, tally, cost):
    """Return what was seen of a remark, for those that say it: ``{flag: text}``."""
    late = f", reads {cost['read_lag_ms_p99']} ms" if cost["read_lag_ms_p99"] is not None else ""
    out = {"client_bottleneck": f"{cost['cpu_share']:.0%} of a core, p99 lag {cost['lag_ms_p99']} ms{late}"}
    told = [item for item in records if item["kind"] == OK and item["unresolved"]]
    for name, alone in (("unresolved", False), ("one_event", True)):
        text = next((item["unresolved"] for item in told if one_event(item) == alone), "")
        out[name] = f"{tally[name]} of {tally['completed']} answers, first: {text}" if text else ""
    return out


def findings(numbers, remarks, failure, limits, seen_of):
    """Return the findings of rung ``benchmark``: the failure and missed limits as errors, flags as warnings.

    :param seen_of: what was seen of a flag, see :func:`notes`.
    """
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
        text = seen_of.get(flag, "")
        out.append(finding("benchmark", flag.replace("_", "-"), "warning", message, text, advice))
    return out
