"""The report as files: one HTML page that needs nothing else, JSON, and CSV. Controller only."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import pathlib

import sglang_report_charts as charts
from sglang_effect import FEWEST
from sglang_report_data import BETWEEN, CONFIDENCE, METRICS, PREFILL, QUANTILES, SHOWN

# What the page shows at most; report.json has everything.
LIMITS = {
    "groups": 6,
    "variants": 30,
    "curves": 4,
    "distributions": 3,
    "decisions": 40,
    "trials": 60,
    "tables": 6,
    "comparisons": 5,
    "plan_runs": 2,
    "releases": 200,
}
SECTIONS = (
    ("hosts", "Hosts"),
    ("ranking", "Variants"),
    ("attribution", "Attribution"),
    ("decisions", "Decisions"),
    ("trials", "Probes"),
    ("curves", "Concurrency"),
    ("distributions", "TTFT and TPOT"),
    ("plan", "Plan"),
    ("differences", "Differences"),
    ("method", "Method"),
)
# Every figure is the median of a run's requests but the total of output tokens.
NAMES = {
    PREFILL: "prefill tok/s",
    "decode_tok_s_p50": "decode tok/s",
    "output_tok_s": "output tok/s",
    "ttft_ms_p50": "TTFT ms",
    "tpot_ms_p50": "TPOT ms",
}
UNITS = {metric: unit for metric, unit, _more in SHOWN}
COLUMNS = (
    "host", "time", "run", "variant", "release", "workload", "asked", "kind", "concurrency", "fingerprint",
    "fingerprint_text", "usable", "failed_requests", "flags", *METRICS, "result",
)  # fmt: skip


def number(value):
    """Return a figure with four significant digits, or a dash for none."""
    if value is None:
        return "–"
    value = float(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value):
    """Return a relative change with its sign, or a dash for none."""
    return "–" if value is None else f"{100 * value:+.1f} %"


def moment(text):
    """Return the time of an event to the second."""
    return str(text or "")[:19].replace("T", " ")


def span(low, high, show=number):
    """Return an interval, or a dash where one run gives none."""
    return "–" if low is None or high is None else f"{show(low)} to {show(high)}"


def _order(ranked_by):
    """Return the shown metrics, the one that ranks first; the speed of the prefill only where it ranks."""
    shown = [metric for metric, _unit, _more in SHOWN if metric != PREFILL or metric == ranked_by]
    return sorted(shown, key=lambda metric: metric != ranked_by)


def _ranked(item, ranked_by, baseline):
    figures = []
    for metric in _order(ranked_by):
        value = item["metrics"][metric]
        interval = "" if value["low"] is None else f" ({span(value['low'], value['high'])})"
        figures.append(number(value["center"]) + interval)
    change = item["against"] or dict.fromkeys(("effect", "low", "high"))
    against = percent(change["effect"])
    against += "" if change["low"] is None else f" ({span(change['low'], change['high'], percent)})"
    against = "reference" if item["variant"] == baseline else against
    flags = ", ".join(f"{name} ({count})" for name, count in sorted(item["flags"].items())) or "none"
    runs = item["runs"] if item["used"] == item["runs"] else f"{item['used']} of {item['runs']}"
    return [item["rank"], item["variant"], figures[0], against, *figures[1:], runs, flags]


def _columns(ranked_by, baseline):
    figures = [[NAMES[metric], "n"] for metric in _order(ranked_by)]
    against = [f"against {baseline}", "n"]
    return [["rank", ""], ["variant", "v"], figures[0], against, *figures[1:], ["runs", "n"], ["flags", "w"]]


def _quantile(item):
    figures = [number(item[f"p{point}"]) for point in QUANTILES]
    return [item["variant"], f"{item['runs_read']} of {item['runs']}", item["requests"], *figures]


def _concurrencies(curve):
    return sorted({point["concurrency"] for line in curve["variants"] for point in line["points"]})


def _loads(curve):
    return [["variant", "v"], *([f"at {load}", "n"] for load in _concurrencies(curve))]


def _points(curve):
    rows = []
    for line in curve["variants"][: LIMITS["variants"]]:
        cells = {point["concurrency"]: point for point in line["points"]}
        figures = [cells.get(load) for load in _concurrencies(curve)]
        rows.append([line["variant"], *(_point(cell) if cell else "–" for cell in figures)])
    return rows


def _point(point):
    interval = "" if point["low"] is None else f"{span(point['low'], point['high'])}; "
    return f"{number(point['center'])} ({interval}{point['runs']})"


def _newest(entries, count):
    return [
        [
            moment(item["time"])[:16],
            f"{item['event']} {item['variant'] or ''}" + (f": {item['text'][:400]}" if item["text"] else ""),
            item["host"],
            item["run"] or "–",
        ]
        for item in reversed(entries[-count:])
    ]


def _trial(item):
    told = "; ".join(f"{key}: {_short(value)}" for key, value in sorted(item["told"].items()))
    return [moment(item["time"]), item["host"], item["event"], item["variant"] or "–", item["verdict"] or "–", told]


def _settings(trial):
    """Return the settings that a probe tried: name, outcome, predicted milliseconds in collectives, remark."""
    rows = []
    for item in trial["results"][: LIMITS["variants"]]:
        times = "; ".join(f"{name} {number(value)}" for name, value in (item.get("predicted") or {}).items())
        remark = " ".join(text for text in (item.get("message"), item.get("note")) if text)
        rows.append([str(item.get("name") or ""), str(item.get("outcome") or ""), times or "–", _short(remark) or "–"])
    return rows


def _short(value):
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else text[:299] + "…"


def _effects(questions):
    return [
        [name, percent(item["effect"]), span(item["low"], item["high"], percent)] for name, item in questions.items()
    ]


def facts(release):
    """Return what is compared of a release as ``{"<order> <name>": text}``; the fingerprint comes first."""
    fingerprint = release.get("fingerprint") or {}
    out = {
        "0 fingerprint": f"{fingerprint['digest'] or 'none'}: {fingerprint['text']}" if fingerprint else "not measured",
        "1 engine": str(release["engine"].get("version")),
        "1 engine id": str(release["engine"].get("id")),
        "2 model": f"{release['model'].get('path')} ({str(release['model'].get('fingerprint'))[:12]})",
        "3 variant": release["variant"],
        "7 patches": ", ".join(release["patches"]) or "none",
    }
    for order, kind in (("4", "nccl"), ("5", "env"), ("6", "args")):
        for name, value in release[kind].items():
            out[f"{order} {kind} {name}"] = value if isinstance(value, str) else json.dumps(value)
    return out


def difference(one, two):
    """Return the rows of what differs between the facts of two releases."""
    names = sorted(one.keys() | two.keys())
    rows = [
        [name[2:], one.get(name, "not set"), two.get(name, "not set")]
        for name in names
        if one.get(name) != two.get(name)
    ]
    return rows or [["no difference", "", ""]]


def _choices(report):
    """Return ``(keys, pair)``: releases that can be chosen, the newest first, and the two that are shown at first."""
    keys = sorted(report["releases"], key=lambda key: report["releases"][key]["created"], reverse=True)
    keys = keys[: LIMITS["releases"]]
    current = [
        f"{host['name']}: {host['current']}" for host in report["hosts"] if f"{host['name']}: {host['current']}" in keys
    ]
    first = current[0] if current else (keys or [None])[0]
    host = first and report["releases"][first]["host"]
    others = [key for key in keys if key != first]
    second = next((key for key in others if report["releases"][key]["host"] == host), (others or [None])[0])
    return keys, [first, second]


def intervals(report):
    """Return how the intervals came about, in words."""
    hosts = {}
    for host in report["hosts"]:
        hosts.setdefault(f"{100 * host['start_spread']:g}%", []).append(host["name"])
    told = [spread + (f" ({', '.join(names)})" if len(hosts) > 1 else "") for spread, names in hosts.items()]
    return (
        f"geometric means of runs and their intervals of {CONFIDENCE:.0%} by Student's t on logarithms, with a spread "
        f"of {' and '.join(told) or f'{100 * BETWEEN:g}%'} from start to start, as decisions take it; one odd run of "
        "four or more is set aside, as are runs whose client was the limit where enough others remain. One run gives "
        f"no interval, fewer than {FEWEST} runs a side no difference."
    )


def notes(report):
    """Return what a reader must know about how the page came about, as texts."""
    raw = [host["raw"] for host in report["hosts"]]
    read, named, missing = (sum(item[key] for item in raw) for key in ("read", "named", "missing"))
    unusable = sum(not row["usable"] for row in report["runs"])
    out = [
        "Figures are the medians and totals that each run recorded; docs/benchmark.md defines them. Intervals: "
        + intervals(report),
        f"{unusable} of {len(report['runs'])} runs are not usable (failed, or invalid) and are in no ranking.",
        f"TTFT and TPOT of single requests come from {read} of {named} raw results, the newest of each variant, "
        "at most 200 requests of each" + (f"; {missing} raw results no longer exist." if missing else "."),
    ]
    shown = {
        "groups": "groups of comparable runs",
        "curves": "concurrency plots",
        "decisions": "decisions",
        "trials": "probes and canaries",
        "releases": "releases to choose from",
    }
    for name, what in shown.items():
        if len(report[name]) > LIMITS[name]:
            out.append(f"Shown are {LIMITS[name]} of {len(report[name])} {what}; report.json has all of them.")
    if any(len(group["variants"]) > 20 for group in report["groups"][: LIMITS["groups"]]):
        out.append(
            f"Plots show the first 20 variants, tables the first {LIMITS['variants']}; report.json has all of them."
        )
    if any(len(curve["variants"]) > 8 for curve in report["curves"][: LIMITS["curves"]]):
        out.append("Plots against concurrency show the first eight variants; their tables have all.")
    if len(report["decisions"]) > charts.MARKS:
        out.append(f"The time line shows the newest {charts.MARKS} decisions.")
    out.append("The page loads nothing from anywhere. runs.csv has one line for each run, report.json everything.")
    return out


def draw(report):
    """Return ``{name: svg}`` of the plots that the page shows."""
    out = {}
    for number_, group in enumerate(report["groups"][: LIMITS["groups"]]):
        metric = group["ranked_by"]
        out[f"ranking{number_}"] = charts.ranking(group["variants"], metric, UNITS[metric], f"r{number_}")
    drawn = [group for group in report["groups"][: LIMITS["distributions"]] if group["distributions"]["ttft_ms"]]
    for number_, group in enumerate(drawn):
        for metric in ("ttft_ms", "tpot_ms"):
            if group["distributions"][metric]:
                svg = charts.distribution(group["distributions"][metric], metric, f"d{number_}{metric[:4]}")
                out[f"distribution{number_}{metric}"] = svg
    for number_, curve in enumerate(report["curves"][: LIMITS["curves"]]):
        out[f"curve{number_}"] = charts.curve(curve, f"c{number_}")
    if report["decisions"]:
        out["timeline"] = charts.timeline(report["decisions"], "t")
    return out


def html(report, directory):
    """Return the page.

    :param report: result of :func:`sglang_report_data.build`.
    :param directory: where ``report.html.j2`` and ``report.js`` are.
    """
    import jinja2
    from markupsafe import Markup

    directory = pathlib.Path(directory)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(
        num=number, moment=moment, ranked=_ranked, quantile=_quantile, points=_points, loads=_loads, newest=_newest,
        trial=_trial, settings=_settings, effects=_effects, first_part=lambda text: text.split(", ")[0],
    )  # fmt: skip
    script = (directory / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    keys, pair = _choices(report)
    chosen = {key: facts(report["releases"][key]) for key in keys}
    # In a script element only "<" can end it or begin a comment.
    data = json.dumps(chosen, separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")
    template = environment.from_string((directory / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        limits=LIMITS,
        sections=[item for item in SECTIONS if item[0] not in ("plan", "trials") or report[item[0]]],
        charts={name: Markup(svg) for name, svg in draw(report).items()},
        group_columns=_columns,
        quantile_columns=[
            ["variant", "v"],
            ["runs read", "n"],
            ["requests", "n"],
            *([f"p{p}", "n"] for p in QUANTILES),
        ],
        release_choices=keys,
        pair=pair,
        difference=difference(chosen[pair[0]], chosen[pair[1]]) if pair[1] else [],
        interval_text=intervals(report),
        notes=notes(report),
        releases_json=Markup(data),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def table(report):
    """Return the runs as CSV text, one line a run; a cell that a spreadsheet would take for a formula is quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in report["runs"]:
        writer.writerow([_cell(row[name]) for name in COLUMNS])
    return out.getvalue()


def _cell(value):
    text = " ".join(value) if isinstance(value, list) else "" if value is None else str(value)
    return (
        "'" + text if text[:1] in ("=", "+", "@") or (text[:1] == "-" and not isinstance(value, (int, float))) else text
    )


def files(report, directory):
    """Return ``{file name: text}`` of the whole report."""
    return {
        "report.html": html(report, directory),
        "report.json": json.dumps(report, separators=(",", ":"), ensure_ascii=True) + "\n",
        "runs.csv": table(report),
    }
