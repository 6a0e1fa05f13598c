"""The embedded node with the real SGLang, in a root of its own.

SGLANG_TEST_ENGINES names a directory of engines that were built before; without it the engine is built here, which
takes minutes and a package index.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import ledger_schema  # noqa: E402
from deployment import Node  # noqa: E402

BUILD_LIMIT = 1500


@pytest.fixture(scope="session")
def node():
    """Return a root with the variant fewchan_fusion deployed as ``make deploy`` does it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sg-"))
    variables = {}
    engines = os.environ.get("SGLANG_TEST_ENGINES")
    if engines:
        variables["sglang_engine_root"] = os.path.realpath(engines)
    node = Node(folder / "n", **variables)
    node.first = node.run("deploy", variant="fewchan_fusion", timeout=BUILD_LIMIT)
    yield node
    try:
        ledger_schema.check(node.root)
    finally:
        node.destroy()
    shutil.rmtree(folder)
