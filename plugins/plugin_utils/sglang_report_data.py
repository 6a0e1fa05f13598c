"""What a report shows, as one plain dict: built from the histories of hosts and a plan. Controller only.

Runs are compared within a *group*: same host, same workload, same fingerprint. A run without a fingerprint is in a
group of its own kind, which says so.
"""

from __future__ import annotations

import hashlib
import json
import math

import sglang_effect as effects
from ansible.module_utils.sglang_bench_stats import percentile
from ansible.module_utils.sglang_decision_runs import number, run_of
from ansible.module_utils.sglang_decision_spec import ARGUMENTS
from sglang_attribution import attribute, contrast
from sglang_report_events import decisions, trials
from sglang_report_plan import link, variant_of
from sglang_verdict import undisturbed

SCHEMA = 1
METRICS = (
    "output_tok_s",
    "decode_tok_s_p50",
    "prefill_tok_s_p50",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "request_s",
    "concurrency_effective",
)
# The figure of runs with one output token, which have no decode speed; elsewhere the time in the queue is in it.
PREFILL = "prefill_tok_s_p50"
# Column, metric, unit, and whether more is better.
SHOWN = (
    (PREFILL, "tok/s", True),
    ("decode_tok_s_p50", "tok/s", True),
    ("output_tok_s", "tok/s", True),
    ("ttft_ms_p50", "ms", False),
    ("tpot_ms_p50", "ms", False),
)
QUANTILES = (5, 25, 50, 75, 95, 99)
CONFIDENCE = 0.95
# Relative spread from one start of the same release to the next, as decisions take it where nothing else is set.
BETWEEN = ARGUMENTS["start_spread"]["default"]


def build(hosts, plan=(), unread=(), baseline="baseline", spreads=None):
    """Return the report's content.

    :param hosts: ``{name: history}`` of the hosts that answered; see :mod:`sglang_history_read`.
    :param plan: interventions of :func:`sglang_report_plan.parse`.
    :param unread: names of hosts that gave no history.
    :param baseline: variant that the others are shown against.
    :param spreads: by host, the relative spread from start to start by which its decisions are made.
    """
    spreads = {name: (spreads or {}).get(name, BETWEEN) for name in hosts}
    runs = [row for name, past in sorted(hosts.items()) for row in rows(name, past)]
    runs.sort(key=lambda row: (row["time"], row["host"]))
    groups = grouped(runs)
    return {
        "schema": SCHEMA,
        "as_of": max((str(e.get("time") or "") for past in hosts.values() for e in past["events"]), default=""),
        "baseline": baseline,
        "unread": sorted(unread),
        "hosts": [_host(name, past, spreads[name]) for name, past in sorted(hosts.items())],
        "groups": [_group(key, members, hosts, baseline, spreads[key[0]]) for key, members in groups],
        "curves": curves(runs, spreads),
        "decisions": decisions(hosts),
        "trials": trials(hosts),
        "releases": {
            f"{name}: {release}": dict(item, host=name, fingerprint=_fingerprint_of(runs, name, release))
            for name, past in sorted(hosts.items())
            for release, item in sorted(past["releases"].items())
        },
        "plan": link(list(plan), hosts, runs),
        # What only the comparisons need is in the ledger.
        "runs": [{key: value for key, value in row.items() if key != "whole"} for row in runs],
    }


def rows(host, past):
    """Return one flat dict for each run of a host's ledger."""
    out, starts = [], 0
    for event in past["events"]:
        starts += event["event"] in ("start", "restart")
        if event["event"] != "run":
            continue
        workload, metrics = event.get("workload") or {}, event.get("metrics") or {}
        fingerprint = event.get("fingerprint") or {}
        failed = (event.get("counts") or {}).get("failed") or 0
        usable = event.get("valid") is not False and metrics.get("output_tok_s") is not None
        out.append(
            {
                "host": host,
                "time": str(event.get("time") or ""),
                "run": event.get("run"),
                "variant": variant_of(event),
                "release": event.get("release"),
                "workload": event.get("workload_digest") or _workload_digest(workload),
                "asked": described(workload),
                "kind": workload.get("kind") or "concurrency",
                "concurrency": workload.get("concurrency"),
                "shape": _shape(workload),
                "fingerprint": fingerprint.get("digest") or "",
                "fingerprint_text": _fingerprint_text(fingerprint),
                "usable": usable,
                "failed_requests": failed,
                "flags": list(event.get("flags") or []),
                "failure": event.get("failure"),
                "levels": event.get("levels") or [],
                "result": event.get("result"),
                **{name: number(metrics.get(name)) for name in METRICS},
                "start": starts,
                "whole": run_of(event, starts, METRICS),
            }
        )
    return out


def _workload_digest(workload):
    """Return a key for runs that were recorded before the ledger had one."""
    keys = ("api", "requests", "concurrency", "input_tokens", "output_tokens", "ignore_eos", "temperature", "warmup")
    text = json.dumps({key: workload.get(key) for key in keys}, sort_keys=True)
    return "~" + hashlib.sha256(text.encode()).hexdigest()[:11]


def described(workload):
    """Return a workload in words."""
    load = f"rate {workload['rate']}/s" if workload.get("rate") else f"concurrency {workload.get('concurrency')}"
    kind = workload.get("kind")
    return (
        (f"{kind}, " if kind and kind != "concurrency" else "")
        + f"{load}, {workload.get('requests')} requests, {workload.get('input_tokens')} tokens in, "
        f"{workload.get('output_tokens')} out, {workload.get('api')}"
    )


def _shape(workload):
    """Return in words what loads must share beside their concurrency to be points of one curve."""
    prompts = workload.get("prompts") or {}
    source = prompts.get("source") or "synthetic"
    parts = [f"{workload.get('input_tokens')} tokens in"]
    if source != "synthetic":
        parts = [f"{source} prompts {str(prompts.get('sha256'))[:12]}"]
        parts += ["in the cache"] if prompts.get("unique") is False else []
    parts += [f"{workload.get('output_tokens')} out", str(workload.get("api"))]
    parts += ["ended by the model"] if workload.get("ignore_eos") is False else []
    parts += [f"temperature {workload['temperature']}"] if workload.get("temperature") else []
    parts += ["cache flushed"] if workload.get("flush_cache") else []
    return ", ".join(parts)


def _fingerprint_text(fingerprint):
    if not fingerprint:
        return "no fingerprint recorded"
    names = fingerprint.get("gpu_names") or []
    parts = [
        f"{fingerprint.get('gpu_count') or len(names)} x {names[0]}" if names else str(fingerprint.get("cpu") or ""),
        *(f"{key.split('_')[0]} {fingerprint[key]}" for key in ("driver", "nccl_version") if fingerprint.get(key)),
        f"SGLang {fingerprint.get('engine_version')}",
    ]
    return ", ".join(part for part in parts if part)


def _fingerprint_of(runs, host, release):
    found = [row for row in runs if row["host"] == host and row["release"] == release]
    return {"digest": found[-1]["fingerprint"], "text": found[-1]["fingerprint_text"]} if found else None


def grouped(runs):
    """Return ``[(key, rows)]`` of comparable usable runs, the group with the most runs first."""
    groups = {}
    for row in runs:
        if row["usable"]:
            groups.setdefault((row["host"], row["workload"], row["fingerprint"]), []).append(row)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def interval(values, starts, between=BETWEEN):
    """Return ``(center, low, high)``: geometric mean and its interval, None where one run gives none.

    :param values: figures of repeated runs, above 0. :param starts: the start of the server that each is from.
    :param between: relative spread from start to start.
    """
    if len(values) < 2:
        return (values[0] if values else None), None, None
    found = contrast([[math.log(value) for value in values]], [starts], (1.0,), between, CONFIDENCE)
    return tuple(1 + found[key] for key in ("effect", "low", "high"))


def against(rows_of, base, metric, between=BETWEEN):
    """Return ``{effect, low, high}`` of a variant's runs against the baseline's, as relative changes; None: too few."""
    sides = [[row for row in side if (row[metric] or 0) > 0] for side in (rows_of, base)]
    if min(map(len, sides)) < effects.FEWEST:
        return None
    logs = [[math.log(row[metric]) for row in side] for side in sides]
    starts = [[row["start"] for row in side] for side in sides]
    found = effects.independent(*logs, CONFIDENCE, between, starts)
    return {key: math.expm1(found[key]) for key in ("effect", "low", "high")}


def _group(key, members, hosts, baseline, between):
    """Return the ranking, the distributions and the attribution of one group."""
    host, workload, fingerprint = key
    ranked_by = "decode_tok_s_p50" if members[0]["concurrency"] == 1 else "output_tok_s"
    ranked_by = PREFILL if members[0]["kind"] == "prefill" else ranked_by
    by_variant = {}
    for row in members:
        by_variant.setdefault(row["variant"], []).append(row)
    used = {name: undisturbed(own)[0] for name, own in by_variant.items()}
    variants = [_variant(name, own, used[name], between) for name, own in by_variant.items()]
    variants.sort(key=lambda item: -(item["metrics"][ranked_by]["center"] or 0))
    for rank, item in enumerate(variants, 1):
        item["rank"] = rank
        item["against"] = None
        if item["variant"] != baseline and baseline in by_variant:
            item["against"] = against(used[item["variant"]], used[baseline], ranked_by, between)
    effect = attribute([row["whole"] for row in members], members[-1]["whole"], [ranked_by], between, CONFIDENCE)
    return {
        "host": host,
        "workload": workload,
        "asked": members[0]["asked"],
        "fingerprint": fingerprint,
        "fingerprint_text": members[0]["fingerprint_text"],
        "ranked_by": ranked_by,
        "runs": len(members),
        "variants": variants,
        "distributions": _distributions(by_variant, hosts[host]["samples"]),
        "attribution": effect["metrics"].get(ranked_by) or {},
        "attribution_missing": effect["missing"],
    }


def _variant(name, own, used, between):
    """Return one line of a ranking; ``used`` are those of the runs whose figures count, as in decisions."""
    metrics = {}
    for metric, _unit, _more in SHOWN:
        measured = [row for row in used if (row[metric] or 0) > 0]
        values = [row[metric] for row in measured]
        center, low, high = interval(values, [row["start"] for row in measured], between)
        metrics[metric] = {"center": center, "low": low, "high": high, "runs": len(values)}
    flags = {}
    for row in own:
        for flag in row["flags"]:
            flags[flag] = flags.get(flag, 0) + 1
    return {
        "variant": name,
        "runs": len(own),
        "used": len(used),
        "releases": sorted({row["release"] for row in own if row["release"]}),
        "first": own[0]["time"],
        "last": own[-1]["time"],
        "metrics": metrics,
        "flags": flags,
    }


def quantiles(values):
    """Return ``{p5: ..., p99: ...}`` of values."""
    ordered = sorted(values)
    return {f"p{point}": round(percentile(ordered, point / 100), 3) for point in QUANTILES}


def _distributions(by_variant, samples):
    """Return ``{ttft_ms: [...], tpot_ms: [...]}``: quantiles over the single requests of a variant's raw results."""
    out = {"ttft_ms": [], "tpot_ms": []}
    for name, own in sorted(by_variant.items(), key=lambda item: str(item[0])):
        raw = [samples[row["result"]] for row in own if row["result"] in samples]
        for metric, entries in out.items():
            values = [value for sample in raw for value in sample[metric]]
            if values:
                entries.append(
                    {
                        "variant": name,
                        "requests": len(values),
                        "runs_read": len(raw),
                        "runs": len(own),
                        **quantiles(values),
                    }
                )
    return out


def curves(runs, spreads=None):
    """Return throughput against concurrency, where a variant was measured at two concurrencies or more.

    A list of ``{host, fingerprint, fingerprint_text, shape, variants: [{variant, points: [{concurrency, runs, center,
    low, high}]}]}``. Levels of a sweep count as runs of their concurrency; ``shape`` is what else of the load is
    shared.
    """
    found = {}
    for row in runs:
        if not row["usable"] or row["kind"] == "rate":
            continue
        levels = row["levels"] if len(row["levels"]) > 1 else [row]
        key = (row["host"], row["fingerprint"], row["fingerprint_text"], row["shape"])
        for level in levels:
            if level.get("concurrency") and level.get("output_tok_s") and not level.get("failure"):
                points = found.setdefault(key, {}).setdefault(row["variant"], {})
                points.setdefault(level["concurrency"], []).append((level["output_tok_s"], row["start"]))
    out = []
    for (host, fingerprint, text, shape), variants in sorted(found.items(), key=lambda item: str(item[0])):
        lines = [
            {
                "variant": name,
                "points": [
                    {"concurrency": load, "runs": len(pairs), **_span(pairs, (spreads or {}).get(host, BETWEEN))}
                    for load, pairs in sorted(points.items())
                ],
            }
            for name, points in sorted(variants.items(), key=lambda item: str(item[0]))
            if len(points) > 1
        ]
        lines.sort(key=lambda line: -line["points"][-1]["center"])
        if lines:
            out.append(
                {"host": host, "fingerprint": fingerprint, "fingerprint_text": text, "shape": shape, "variants": lines}
            )
    return out


def _span(pairs, between):
    values, starts = zip(*pairs)
    return dict(zip(("center", "low", "high"), interval(list(values), list(starts), between)))


def _host(name, past, between):
    current = past["releases"].get(past["current"] or "") or {}
    return {
        "name": name,
        "root": past["root"],
        "current": past["current"],
        "variant": current.get("variant"),
        "state": current.get("state"),
        "events": len(past["events"]),
        "runs": sum(event["event"] == "run" for event in past["events"]),
        "raw": past["raw"],
        "problems": past["problems"],
        "start_spread": between,
    }
