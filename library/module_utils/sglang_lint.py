"""Lint: the first rung of the ladder. No host, no file but an NCCL graph that lies on the controller."""

from __future__ import annotations

from ansible.module_utils import (  # noqa: F401  (they register)
    sglang_lint_engine,
    sglang_lint_flags,
    sglang_lint_fusion,
    sglang_lint_nccl,
)
from ansible.module_utils.sglang_findings import LEVELS, finding
from ansible.module_utils.sglang_lint_flags import cast_flags
from ansible.module_utils.sglang_lint_rules import RULES, Context

__all__ = ["RULES", "Context", "lint"]


def lint(variant, patches, context):
    """Return ``(variant, findings)``: the variant with its flags cast to their types, and what the rules found.

    :param variant: as :func:`sglang_variant_resolve.resolve` returns it. A flag that is left out stays, as ``False``.
    :param patches: the catalogue entries of its patches.
    :param context: :class:`Context`.
    """
    variant = {**variant, "args": cast_flags(variant["args"], context.flags)}
    findings = [
        finding("lint", item.id, item.level, message, evidence, advice)
        for item in RULES.values()
        for message, evidence, advice in item.check(variant, patches, context)
    ]
    return variant, sorted(findings, key=lambda item: LEVELS.index(item["level"]))
