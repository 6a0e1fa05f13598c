"""A scripted server for the tests of the benchmark, and one way to run the module against it."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).resolve().parents[2] / "scripted_server" / "scripted_server.py"


def _load():
    spec = importlib.util.spec_from_file_location("scripted_server", PATH)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while the class is made
    importlib.sys.modules["scripted_server"] = module
    spec.loader.exec_module(module)
    return module


scripted_server = _load()


@pytest.fixture
def serve():
    """Return ``serve(**script)`` that starts a scripted server and returns it; all are stopped at the end."""
    running = []

    def start(**script):
        server = scripted_server.ScriptedServer(**{"ttft_ms": 5, "rate": 2000, **script})
        server.__enter__()
        running.append(server)
        return server

    yield start
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture
def bench(run_module, tmp_path):
    """Return ``bench(server, **params)`` that measures a scripted server with a small load."""

    def run(server, *, check=False, **params):
        args = {"url": server.url, "requests": 8, "concurrency": 4, "input_tokens": 64, "warmup": 0}
        args.update(
            {
                "output_tokens": 16,
                "timeout": 20,
                "request_timeout": 10,
                "results_dir": str(tmp_path / "results"),
                "root": str(tmp_path),
                **params,
            }
        )
        return run_module("sglang_bench", args, check=check)

    return run
