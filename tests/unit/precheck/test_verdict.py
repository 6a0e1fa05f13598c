"""The verdict over all hosts, for machines, and the lines for people."""

from __future__ import annotations

import importlib.util

import pytest
from ansible.module_utils.sglang_findings import summary


@pytest.fixture
def text(repository):
    """Return the filters of plugins/filter/sglang_text.py."""
    spec = importlib.util.spec_from_file_location("sglang_text", repository / "plugins/filter/sglang_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FilterModule().filters()


@pytest.fixture
def verdict(text):
    """Return the filter sglang_verdict."""
    return text["sglang_verdict"]


def finding(rule, level):
    return {"rung": "precheck", "rule": rule, "level": level, "message": "x.", "evidence": "", "advice": ""}


def test_one_error_on_one_host_refuses_all(verdict):
    fine = [finding("gpu", "info"), finding("iommu", "warning")]
    hosts = {
        "gpu01": {"__host_preflight_reported": fine},
        "gpu02": {"__host_preflight_reported": [finding("port-taken", "error"), finding("port-taken", "error")]},
    }
    answer = verdict(hosts, ["gpu01", "gpu02"])
    assert not answer["ok"] and answer["failures"] == ["port-taken"]
    assert answer["hosts"]["gpu01"] == {"ok": True, "failures": [], "findings": fine}
    assert answer["hosts"]["gpu02"]["failures"] == ["port-taken"]
    assert verdict(hosts, ["gpu01"])["ok"]


def test_a_host_that_was_not_asked_is_no_good_host(verdict):
    answer = verdict({"gpu01": {"__host_preflight_reported": []}, "gpu02": {}}, ["gpu01", "gpu02"])
    assert answer["failures"] == ["not-checked"] and answer["hosts"]["gpu01"]["ok"]


@pytest.mark.parametrize("level", ["error", "info"])
def test_lines_are_those_of_the_modules_with_the_level_in_front(text, level):
    found = [dict(finding("gpu", level), evidence="2 GPUs", advice="declare them"), finding("iommu", level)]
    lines = text["sglang_finding_lines"](found)
    assert lines[0] == f"{level} [precheck/gpu] x. Seen: 2 GPUs. Way out: declare them."
    assert lines == [f"{level} {line}" for line in summary(found).splitlines()]
