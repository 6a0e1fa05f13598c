"""The real SGLang on CPU in a root of its own, and a table of what was done to it: `make faults`.

SGLANG_TEST_ENGINES names a directory of engines that were built before; without it the engine is built here.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from deployment import Node  # noqa: E402

BUILD_LIMIT = 1500
ROWS = pytest.StashKey[list]()


def pytest_addoption(parser):
    """Add the number of instants at which a controller is killed."""
    parser.addoption("--instants", type=int, default=30, help="instants at which a controller is killed (30)")


def pytest_configure(config):
    """Begin an empty table."""
    config.stash[ROWS] = []


def pytest_generate_tests(metafunc):
    """Make one case for each instant."""
    if "instant" in metafunc.fixturenames:
        metafunc.parametrize("instant", range(metafunc.config.getoption("--instants")))


@pytest.fixture
def told(request):
    """Return ``told(what, result)``, which adds a line to the table."""
    return lambda what, result: request.config.stash[ROWS].append((request.node.module.__name__, what, result))


def pytest_terminal_summary(terminalreporter, config):
    """Print the table, and how many faults were survived."""
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.section("faults")
    for _module, what, result in rows:
        terminalreporter.write_line(f"{what:70} {result}")
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error")}
    total = sum(counts.values())
    terminalreporter.write_line(f"faults survived with nothing lost: {counts['passed']} of {total}")


@pytest.fixture(scope="session")
def base():
    """Return the folder and the variables that all roots share."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sg-"))
    variables = {"sglang_verify_soak_requests": 4, "sglang_benchmark_requests": 4}
    engines = os.environ.get("SGLANG_TEST_ENGINES")
    if engines:
        variables["sglang_engine_root"] = os.path.realpath(engines)
    yield folder, variables
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def node(base, request):
    """Return a root with a promoted release that serves."""
    folder, variables = base
    node = Node(folder / request.module.__name__.rpartition("_")[2][:4], **variables)
    node.run("deploy", variant="fewchan_fusion", timeout=BUILD_LIMIT).succeeded()
    yield node
    node.destroy()
