"""The plots of a report as SVG text for a page: no size of their own, colours of the page, ids that do not meet.

Drawn by matplotlib, which only the controller has. Every plot has a table with the same figures on the page.
"""

from __future__ import annotations

import datetime
import io
import re

# Legible on white and on near-black; also apart for colour-blind readers, together with the markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B4559A", "#A06A00", "#3D8FC4", "#8C5E2A", "#767676")
MARKERS = "osD^vPX*"
# Stands for the page's text colour while matplotlib draws.
INK = "#010203"
WIDTH = 4.6
MARKS = 400
KINDS = {
    "promoted": ("#009E73", "^"),
    "activated": ("#3D8FC4", "o"),
    "decision": ("#B4559A", "D"),
    "rollback": ("#A06A00", "v"),
    "rejected": ("#D55E00", "X"),
    "refused": ("#D55E00", "P"),
    "retired": ("#767676", "v"),
    "stop": ("#767676", "s"),
    "worker_died": ("#CC0000", "*"),
    "restart": ("#CC0000", "o"),
    "alarm": ("#CC0000", "^"),
}


def _figure(height):
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "report",
            "font.family": "sans-serif",
            "font.size": 8,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.2,
            "grid.color": INK,
            "legend.frameon": False,
        }
    )
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure, name, title):
    """Return the SVG of a figure.

    :param name: prefix of all ids, unique on the page. :param title: what a screen reader says.
    """
    from xml.sax.saxutils import escape

    out = io.StringIO()
    figure.savefig(
        out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
    )
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor")
    head = re.search(r"<svg[^>]*>", text)
    box = re.search(r'viewBox="([^"]*)"', head.group(0)).group(1)
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}" role="img" '
        f'aria-labelledby="{name}-title"><title id="{name}-title">{escape(title)}</title>'
    )
    return opening + text[head.end() :]


def _label(text, length=22):
    """Return a name for an axis: matplotlib takes $ for mathematics."""
    text = str(text).replace("$", r"\$")
    return text if len(text) <= length else text[: length - 1] + "…"


def ranking(variants, metric, unit, name):
    """Draw the centre and interval of each variant, the first on top.

    :param variants: entries of a group; at most 20 are drawn, which the page says.
    """
    shown = [item for item in variants[:20] if item["metrics"][metric]["center"] is not None]
    figure, axes = _figure(0.55 + 0.24 * len(shown))
    for place, item in enumerate(reversed(shown)):
        value = item["metrics"][metric]
        axes.plot(value["center"], place, "o", color=COLOURS[0], markersize=5)
        if value["low"] is not None:
            axes.plot([value["low"], value["high"]], [place, place], color=COLOURS[0], linewidth=1.6)
    axes.set_yticks(range(len(shown)), [_label(item["variant"]) for item in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel(f"{metric} ({unit})")
    return _svg(
        figure, name, f"{metric} of {len(shown)} variants with their intervals; the table below has the figures"
    )


def curve(group, name):
    """Draw output tokens a second against concurrency, one line a variant; at most eight are drawn."""
    figure, axes = _figure(2.9)
    highest = 1
    for number, item in enumerate(group["variants"][:8]):
        loads = [point["concurrency"] for point in item["points"]]
        centers = [point["center"] for point in item["points"]]
        axes.plot(
            loads,
            centers,
            marker=MARKERS[number],
            color=COLOURS[number],
            markersize=4,
            linewidth=1.2,
            label=_label(item["variant"]),
        )
        spans = [point for point in item["points"] if point["low"] is not None]
        if spans:
            axes.vlines(
                [p["concurrency"] for p in spans],
                [p["low"] for p in spans],
                [p["high"] for p in spans],
                color=COLOURS[number],
                alpha=0.6,
            )
        highest = max(highest, *loads)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrency")
    axes.set_ylabel("output tok/s")
    axes.legend(fontsize=7)
    return _svg(
        figure, name, f"output tokens a second against concurrency up to {highest}; the table below has the figures"
    )


def distribution(entries, metric, name):
    """Draw boxes (quartiles, whiskers from 5 to 95 %) of single requests; at most 20 variants are drawn."""
    shown = entries[:20]
    figure, axes = _figure(0.55 + 0.26 * len(shown))
    boxes = [
        {
            "label": _label(item["variant"]),
            "whislo": item["p5"],
            "q1": item["p25"],
            "med": item["p50"],
            "q3": item["p75"],
            "whishi": item["p95"],
            "fliers": [],
        }
        for item in reversed(shown)
    ]
    ink = {"color": INK, "linewidth": 0.9}
    axes.bxp(
        boxes,
        orientation="horizontal",
        showfliers=False,
        widths=0.5,
        boxprops=ink,
        whiskerprops=ink,
        capprops=ink,
        medianprops={"color": COLOURS[1], "linewidth": 2},
    )
    axes.set_xlabel(f"{metric.replace('_ms', '').upper()} (ms), 5 to 95 % of requests")
    axes.set_xlim(left=0)
    return _svg(
        figure,
        name,
        f"distribution of {metric} over single requests of {len(shown)} variants; the table below has the quantiles",
    )


def timeline(entries, name):
    """Draw the newest decisions, one lane a variant; at most :data:`MARKS` marks and 14 lanes."""
    from matplotlib import dates

    shown = [item for item in entries if item["time"]][-MARKS:]
    lanes = []
    for item in reversed(shown):
        lane = item["variant"] or "(host)"
        if lane not in lanes and len(lanes) < 14:
            lanes.append(lane)
    lanes.reverse()
    figure, axes = _figure(1.35 + 0.22 * len(lanes))
    for kind, (colour, marker) in KINDS.items():
        places = [
            (
                datetime.datetime.strptime(item["time"][:19], "%Y-%m-%dT%H:%M:%S"),
                lanes.index(item["variant"] or "(host)"),
            )
            for item in shown
            if item["event"] == kind and (item["variant"] or "(host)") in lanes
        ]
        if places:
            axes.plot(*zip(*places), marker, color=colour, markersize=5, label=kind, alpha=0.85)
    axes.set_yticks(range(len(lanes)), [_label(lane) for lane in lanes])
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    locator = dates.AutoDateLocator(minticks=2, maxticks=5)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    axes.set_xlabel("UTC")
    figure.legend(loc="outside upper center", ncols=4, fontsize=7, handletextpad=0.2, columnspacing=1)
    return _svg(
        figure, name, f"the newest {len(shown)} decisions over time, one row a variant; the table below lists them"
    )
