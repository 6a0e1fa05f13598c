"""docs/prechecks.md has one line for each rule, with the levels that the code gives it."""

from __future__ import annotations

import ast
import re


def reported(repository):
    """Return ``{rule: {level}}`` of every ``report(...)`` in the code."""
    rules = {}
    for path in (repository / "library/module_utils").glob("sglang_precheck*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "report":
                rule, level = node.args[:2]
                if isinstance(rule, ast.Constant):
                    words = {item.value for item in ast.walk(level) if isinstance(item, ast.Constant)}
                    rules.setdefault(rule.value, set()).update(words & {"error", "warning", "info"})
    return rules


def test_every_rule_has_its_line(repository):
    text = (repository / "docs/prechecks.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| ([a-z, ]+) \| .+ \|$", text)
    documented = {rule: set(levels.split(", ")) for rule, levels in rows}
    assert len(rows) == len(documented), "a rule has two lines"
    assert documented == reported(repository)
