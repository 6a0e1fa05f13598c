"""A fake engine that an inventory adopts, and roots that use it: whole deployments in seconds."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "support"))
import ledger_schema  # noqa: E402
from deployment import ROOT, Node  # noqa: E402
from engines import make_engine  # noqa: E402

LOCK = ROOT / "roles" / "sglang_server" / "files" / "supervisor.lock"


@pytest.fixture(scope="session")
def scratch():
    """Return a short directory for this session: sockets have a limit of 107 bytes."""
    folder = tempfile.mkdtemp(prefix="sg-")
    yield pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def engine(scratch):
    """Return the interpreter of a fake engine of the embedded node's version."""
    return make_engine(scratch / "engine", "0.5.9")


@pytest.fixture(scope="session")
def supervisor(scratch):
    """Return a virtual environment with the pinned supervisor, so that not every root installs its own."""
    folder = scratch / "supervisor"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--require-hashes", "--requirement", LOCK], check=True)
    return folder


@pytest.fixture(scope="module")
def make_node(scratch, engine, supervisor):
    """Return ``make(**variables)``, which gives an empty root that adopts the fake engine."""
    nodes = []

    def make(**variables):
        root = pathlib.Path(tempfile.mkdtemp(dir=scratch, prefix="r")) / "n"
        settings = {
            "sglang_engine_mode": "adopt",
            "sglang_engine_python": engine,
            "sglang_server_tp_size": 1,
            "sglang_verify_timeout": 60,
            # The scripted server knows none.
            "sglang_verify_known_answers": [],
            "sglang_verify_soak_requests": 4,
            "sglang_server_stop_timeout": 10,
            "sglang_benchmark_requests": 4,
            "sglang_benchmark_warmup": 1,
            # One run decides nothing; test_decisions.py asks for more.
            "repeats": 1,
            "sglang_benchmark_output_tokens": 8,
        }
        node = Node(root, **{**settings, **variables})
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        try:
            ledger_schema.check(node.root)
        finally:
            node.destroy()


@pytest.fixture(scope="module")
def make_ready(make_node, supervisor):
    """Return ``make(**variables)``: as make_node, with supervisor in place so that a first start costs nothing."""

    def make(**variables):
        node = make_node(**variables)
        (node.root / "service").mkdir(parents=True)
        (node.root / "service" / "venv").symlink_to(supervisor)
        return node

    return make
