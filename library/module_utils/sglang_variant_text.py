"""Show a resolved variant as text: every value with its origin, launch flags, patches, findings, difference."""

from __future__ import annotations

import re
import shlex

from ansible.module_utils.sglang_api_key import HIDDEN, names_secret
from ansible.module_utils.sglang_findings import summary
from ansible.module_utils.sglang_variant_schema import SECTIONS


def hide(variant):
    """Return a copy of a resolved variant to show, without the values that are secrets."""
    shown = {
        section: {
            key: HIDDEN if value not in (None, "", False) and names_secret(key) else value
            for key, value in variant[section].items()
        }
        for section in SECTIONS
    }
    return {**variant, **shown}


def table(rows):
    """Return rows of texts as lines with aligned columns."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def arguments(args):
    """Return the part of the command line that the variant's flags become.

    ``true`` is a bare flag, ``false`` and null are left out, a list is several values after one flag.
    """
    words = []
    for flag, value in args.items():
        if value is False or value is None:
            continue
        words.append(f"--{flag}")
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


def show(value):
    """Return a value for a column: null means "not set", a list its items."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def decimal(value):
    """Return a note with the decimal of a number in hex, which NCCL reads too; empty for every other value."""
    text = str(value).strip()
    return f" (decimal {int(text, 16)})" if re.fullmatch("[+-]?0[xX][0-9a-fA-F]+", text) else ""


def explain(name, resolved, engine, difference=None):
    """Return the text.

    :param name: of the host that the variant was resolved for.
    :param resolved: ``{variant, unset, patches, findings}``.
    :param engine: declared SGLang version.
    :param difference: of :func:`sglang_variant_resolve.difference`, or None.
    """
    variant = hide(resolved["variant"])
    lines = [
        f"{variant['name']}: {variant['summary']}",
        f"for {name} with SGLang {engine}; the variant is for {variant['engines'] or 'every release'}",
        "",
        "Values, and where each came from:",
    ]
    rows = [
        (f"{section}.{key}", show(value) + decimal(value) * (section == "nccl"), variant["origins"][f"{section}.{key}"])
        for section in SECTIONS
        for key, value in variant[section].items()
    ]
    rows += [(path, "not set", origin) for path, origin in resolved["unset"].items()]
    lines += table(sorted(rows)) or ["  none"]
    lines += ["", "Launch flags:", "  " + (shlex.join(arguments(variant["args"])) or "none")]
    lines += ["", "Patches:"]
    rows = [(item["name"], f"edition {item['edition']}", item["summary"]) for item in resolved["patches"]]
    lines += table([(*row, variant["origins"].get(f"patches.{row[0]}", "unknown")) for row in rows]) or ["  none"]
    lines += ["", "Findings:"]
    lines += [
        f"  {item['level']}: {line}" for item in resolved["findings"] for line in summary([item]).splitlines()
    ] or ["  none"]
    if difference is not None:
        lines += ["", "Difference:"]
        lines += [
            line
            for path, pair in difference.items()
            for line in [f"  {path}", *table([("  " + side, show(value)) for side, value in pair.items()])]
        ] or ["  none"]
    return "\n".join(lines)
