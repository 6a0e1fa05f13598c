"""Lint one small variant with the real tables."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
from ansible.module_utils import sglang_lint

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def tables(repository):
    """Return the two tables that lint reads."""
    folder = repository / "plugins/data"
    return {
        "flags": json.loads((folder / "sglang_flags.json").read_text()),
        "nccl": json.loads((folder / "nccl_variables.json").read_text()),
    }


@pytest.fixture
def lint(tables):
    """Return ``lint(nccl=..., env=..., args=..., engine="0.5.20", device="cuda", tp=8, launch=...)``, the findings."""

    def run(engine="0.5.20", device="cuda", tp=8, launch=None, patches=(), entries=(), engines="", **sections):
        variant = {
            "name": "v",
            "summary": "s",
            "nccl": sections.get("nccl", {}),
            "env": sections.get("env", {}),
            "args": sections.get("args", {}),
            "patches": list(patches),
            "engines": engines,
            "origins": {f"{name}.{key}": "v" for name, values in sections.items() for key in values},
        }
        context = sglang_lint.Context(engine, device, tp, launch or {}, **tables)
        return sglang_lint.lint(variant, list(entries), context)[1]

    return run
