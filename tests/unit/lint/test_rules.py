"""Every rule, with what it refuses and what it lets pass."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_findings import LEVELS
from ansible.module_utils.sglang_lint import RULES
from lint_cases import CASES, SM120


@pytest.fixture
def graphs(tmp_path, monkeypatch):
    """Put a graph file for eight ranks, and a broken one, into the working directory."""
    gpus = "".join(f'<gpu dev="{number}"/>' for number in range(8))
    channels = f"<channel>{gpus}</channel>" * 2
    (tmp_path / "eight.xml").write_text(f'<graphs version="1"><graph id="0">{channels}</graph></graphs>')
    (tmp_path / "broken.xml").write_text("<graphs>")
    monkeypatch.chdir(tmp_path)


def cases(index):
    """Return (rule, case) pairs of the refused (0) or the passed (1) ones."""
    return [
        pytest.param(rule, case, id=f"{rule}-{n}") for rule, row in CASES.items() for n, case in enumerate(row[index])
    ]


def test_every_rule_has_both_outcomes():
    assert set(CASES) == set(RULES)
    assert all(refused and passed for refused, passed, _named in CASES.values())


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("rule", "case"), cases(0))
def test_it_is_found(lint, rule, case):
    hits = [item for item in lint(**case) if item["rule"] == rule]
    assert len(hits) == 1
    hit = hits[0]
    assert hit["rung"] == "lint"
    assert hit["level"] == RULES[rule].level
    assert CASES[rule][2] in f"{hit['message']} {hit['advice']}"
    assert hit["evidence"]
    assert hit["advice"]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("rule", "case"), cases(1))
def test_it_passes(lint, rule, case):
    assert [item for item in lint(**case) if item["rule"] == rule] == []


def test_bare_tree_is_answered_with_the_list_form(lint):
    hit = next(item for item in lint(nccl={"NCCL_ALGO": "Tree"}) if item["rule"] == "nccl-algo-collective")
    assert "AllGather" in hit["message"]
    assert "AllReduce" not in hit["message"]
    assert "ring;allreduce:tree" in hit["advice"]


def test_fusion_refusal_has_three_facts_and_three_ways_out(lint):
    hit = next(item for item in lint(patches=SM120, engine="0.5.9") if item["rule"] == "fusion-gate")
    assert [
        "1. " in hit["evidence"],
        "2. SGLang 0.5.9 pins FlashInfer 0.6.3" in hit["evidence"],
        "3. " in hit["evidence"],
    ] == [True] * 3
    assert "0.5.20" in hit["advice"]
    assert "flashinfer_sm120_gate" in hit["advice"]
    assert "pcie_ipc" in hit["advice"]


def test_a_secret_is_not_repeated(lint):
    assert "hunter2" not in str(lint(args={"api-key": "hunter2"}))
    assert "hunter2" not in str(lint(env={"HF_TOKEN": "hunter2"}))


def test_a_missing_graph_file_is_answered_with_its_input(lint):
    hit = next(item for item in lint(nccl={"NCCL_GRAPH_FILE": ""}) if item["rule"] == "nccl-value")
    assert "sglang_nccl_graph_file" in hit["advice"]


def test_a_number_in_hex_is_shown_with_its_decimal(lint):
    hits = {text: lint(nccl={"NCCL_NTHREADS": text}) for text in ("0x40", "0x60", "0100")}
    hits = {text: [item for item in found if item["rule"] == "nccl-nthreads"] for text, found in hits.items()}
    assert hits["0x40"] == []
    assert hits["0x60"][0]["evidence"] == "'0x60' (decimal 96) from v"
    assert "is no integer" in hits["0100"][0]["message"]


def test_errors_come_first(lint):
    levels = [
        item["level"] for item in lint(nccl={"NCCL_ALGO": "Tree", "NCCL_MIN_NCHANNELS": "1", "NCCL_P2P_LEVEL": "1"})
    ]
    assert levels == sorted(levels, key=LEVELS.index)
    assert set(levels) == set(LEVELS)


def test_every_rule_is_documented_in_its_own_words(repository):
    text = (repository / "docs/lint-rules.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{item.id}` | {item.level} | {item.text} |" for item in RULES.values()]
