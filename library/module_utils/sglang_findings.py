"""The one shape in which every rung of the ladder reports what it found.

A finding is a plain dict, so that it passes through Ansible unchanged:
``{rung, rule, level, message, evidence, advice}``.
"""

from __future__ import annotations

LEVELS = ("error", "warning", "info")


def finding(rung, rule, level, message, evidence="", advice=""):
    """Return one finding.

    :param rung: step of the ladder that speaks: lint, precheck, probe, canary, load, verify or benchmark.
    :param rule: stable identifier of the rule, for example ``port-taken``.
    :param level: ``error`` refuses the variant, ``warning`` and ``info`` do not.
    :param message: what is wrong, naming the input; one sentence or more, whose full stop may be left out.
    :param evidence: what was seen, as text.
    :param advice: the way out.
    :raises ValueError: level is none of :data:`LEVELS`.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    return {
        "rung": rung,
        "rule": rule,
        "level": level,
        "message": message if message.endswith(".") else f"{message}.",
        "evidence": str(evidence),
        "advice": advice,
    }


def errors(findings):
    """Return the findings that refuse a variant."""
    return [item for item in findings if item["level"] == "error"]


def line(item):
    """Return one finding as a line: rung, rule, message, evidence and way out."""
    text = f"[{item['rung']}/{item['rule']}] {item['message']}"
    if item.get("evidence"):
        text += f" Seen: {item['evidence']}."
    if item.get("advice"):
        text += f" Way out: {item['advice']}."
    return text


def summary(findings):
    """Return one readable text for a task's ``msg``, a line for each finding."""
    return "\n".join(line(item) for item in findings)
