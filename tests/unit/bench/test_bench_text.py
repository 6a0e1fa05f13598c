"""What an operator reads of a run."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture
def lines(repository):
    """Return the filter that the verbs show a run with."""
    path = repository / "plugins" / "filter" / "sglang_text.py"
    spec = importlib.util.spec_from_file_location("sglang_text", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FilterModule().filters()["sglang_benchmark_lines"]


def test_each_workload_has_its_own_figures(serve, bench, lines):
    first, second = lines(bench(serve()))
    assert first.startswith("measured: ") and "TPOT p50" in first and "prefill" not in first
    assert second.startswith("raw figures: /")
    (prefill, _path) = lines(bench(serve(), workload="prefill", input_tokens=100, output_tokens=0, requests=2))
    assert "TPOT" not in prefill and "prefill p50" in prefill


def test_a_sweep_has_a_line_for_each_level_and_says_what_failed(serve, bench, lines):
    said = lines(bench(serve(fault="503", fault_every=7), workload="sweep", levels=[1, 2], requests=2))
    assert said[0].startswith("measured 2 levels, the fastest: ")
    assert said[1].startswith("concurrency 1: ") and "output tok/s" in said[1]
    assert said[2].startswith("concurrency 2: ") and "HTTP 503" in said[2]


def test_nothing_measured_has_its_reason(serve, bench, lines):
    assert lines(bench(serve(), check=True)) == ["nothing was measured: check mode: no load is sent"]
    assert lines({}) == []


def test_tokens_that_cannot_be_told_apart_have_no_figure(serve, bench, lines):
    """Nor is the speed of the prefill put in its place."""
    result = bench(serve())
    result["metrics"].update(tpot_ms_p50=None)
    assert lines(result)[0].endswith(", no TPOT")
