"""A comparison as an operator reads it, a line a text. The difference of fingerprints comes first."""

from __future__ import annotations

WORDS = {"decode_tok_s_p50": "decode speed", "ttft_ms_p50": "time to first token", "known_answers": "right answers"}
WAY_OUT = {
    "inconclusive": "-e repeats=N or -e sglang_decision_budget=SECONDS measures longer, compare.yml starts both "
    "in turn, -e on_inconclusive=keep takes the new one as it is",
    "not comparable": "benchmark.yml, three times, measures the release that serves under these conditions, "
    "compare.yml starts both in turn, -e on_inconclusive=keep takes the new one as it is",
}
# A ratio whose interval is wider says nothing that digits could.
WIDE = 9.995


def percent(value, digits=1):
    """Return a relative change as text."""
    return f"{value:+.{digits}%}" if value < WIDE else f"more than {WIDE:.0%}"


def _figure(entry, side):
    center = entry[side]["center"]
    if center is None:
        return "no figure"
    text = f"{center:.1%}" if entry["unit"] == "share" else f"{center:.4g} {entry['unit']}".strip()
    runs, starts = entry[side]["runs"], entry[side]["starts"]
    return f"{text} ({runs} run{'s' * (runs != 1)}, {starts} start{'s' * (starts != 1)})"


def metric_line(entry, confidence):
    """Return one metric as a line: both figures, the change with its interval, the threshold and the verdict."""
    text = (
        f"{WORDS.get(entry['name'], entry['name'])}: {_figure(entry, 'candidate')} against {_figure(entry, 'baseline')}"
    )
    if entry["effect"] is not None:
        points = " of all questions" if entry["unit"] == "share" else ""
        interval = f"{percent(entry['low'])} to {percent(entry['high'])} at {confidence:.2%}"
        text += f", {percent(entry['effect'])}{points} [{interval}; {percent(entry['worst'])} at worst at 95%]"
    text += f", a loss is {entry['threshold']:+.0%}: {entry['verdict']}"
    return text + "".join(f"; {note}" for note in entry["notes"])


def attribution_lines(found):
    """Return the effects of both factors and their interaction, or what is missing for them."""
    if found is None:
        return []
    lines = []
    for name, questions in found["metrics"].items():
        effects = "; ".join(
            f"{question} {percent(item['effect'])} [{percent(item['low'])} to {percent(item['high'])}]"
            for question, item in questions.items()
        )
        lines.append(f"attribution, {WORDS.get(name, name)}, at {found['confidence']:.0%}: {effects}")
    if found["missing"]:
        lines.append(f"attribution of fewchan and fusion lacks {'; '.join(found['missing'])}")
    return lines


def speculation_lines(found):
    """Return what the figures say of speculation."""
    if found is None:
        return []
    line = (
        f"speculation: a step takes {found['step_ms']:.1f} ms and yields {found['accept_length']:.2f} tokens; against "
        f"{found['baseline_tok_s']:.1f} tok/s it breaks even at {found['break_even_accept_length']:.2f} tokens a step: "
        f"it {'pays' if found['pays'] else 'does not pay'}"
    )
    if found["allreduce_ms"] is not None:
        line += (
            f"; all-reduces take {found['allreduce_ms']:.1f} ms of it, and one may take "
            f"{found['allreduce_budget_us']:.0f} us for it to break even"
        )
    return [line]


def comparison_lines(decision):
    """Return the lines of a decision (docs/ledger.md)."""
    lines = []
    if decision["fingerprint_differences"]:
        lines.append("not the same conditions: " + "; ".join(decision["fingerprint_differences"]))
    elif decision["against"] and decision["fingerprint"]:
        lines.append(f"same conditions on both sides, fingerprint {decision['fingerprint'].get('digest')}")
    lines += decision["notes"]
    if decision["against"]:
        against = decision["against"]
        lines.append(
            f"{decision['verdict']}: {decision['variant']} ({decision['release']}) against "
            f"{against['variant']} ({against['release']}): {decision['reason']}"
        )
    else:
        lines.append(f"{decision['verdict']}: {decision['reason']}")
    lines += [metric_line(entry, decision["confidence"]) for entry in decision["metrics"]]
    # The first release of a host cannot have been compared with three others.
    lines += attribution_lines(decision["attribution"]) if decision["against"] else []
    lines += speculation_lines(decision["speculation"])
    if decision["outcome"] == "rollback" and decision["verdict"] in WAY_OUT:
        lines.append(f"Way out: {WAY_OUT[decision['verdict']]}.")
    return lines
