"""The settings that a search may try: those of the space that the lint lets pass on this host."""

from __future__ import annotations

import json
import pathlib

import ansible.module_utils

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE_UTILS = str(ROOT / "library" / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils import sglang_lint, sglang_nccl_search  # noqa: E402
from ansible.module_utils.sglang_findings import errors  # noqa: E402


def candidates(variant, engine, device, tp_size, launch):
    """Return the settings that a search for a variant's place may try.

    What the variant sets beside the searched variables stays. The lint judges each as a variant of its own.

    :param variant: the base, resolved.
    :param engine: version of SGLang. The rest is what the lint's context takes.
    """
    tables = [
        json.loads((ROOT / "plugins" / "data" / f"{name}.json").read_text())
        for name in ("sglang_flags", "nccl_variables")
    ]
    context = sglang_lint.Context(
        engine=engine, device=device, tp_size=int(tp_size), launch=launch, flags=tables[0], nccl=tables[1]
    )  # fmt: skip
    searched = {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", *sglang_nccl_search.SPACE}
    kept = {name: str(value) for name, value in variant["nccl"].items() if name not in searched}
    found = []
    for item in sglang_nccl_search.candidates():
        values = {**kept, **item["variables"]}
        # A level says nothing where it is not among the variables: what the rules call redundant is not refused.
        judged = {**variant, "nccl": values}
        if not errors(sglang_lint.lint(judged, [], context)[1]):
            found.append({**item, "variables": values})
    return found


class FilterModule:
    """The filters, by name."""

    def filters(self):
        """Return the table that Ansible asks for."""
        return {"sglang_tune_candidates": candidates}
