"""What the inventory declares reaches the rules that need it, and what they say about the real catalogue."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_patching import load_entries

SM120 = ["sm120_allreduce_fusion", "flashinfer_sm120_gate"]


@pytest.fixture(scope="session")
def entries(repository):
    return load_entries(SM120, repository / "roles/sglang_patches/files")


def finding(found, rule):
    return next(item for item in found if item["rule"] == rule)


@pytest.mark.parametrize("engine", ["0.5.10", "0.5.10.post1", "0.5.11"])
@pytest.mark.parametrize("allowed", [True, False])
def test_an_operator_without_multicast_is_told_why_and_not_sent_in_a_circle(lint, entries, engine, allowed):
    launch = {"compute_capability": "12.0", "allow_experimental": allowed}
    hit = finding(lint(patches=SM120, entries=entries, engine=engine, launch=launch), "fusion-gate")
    assert "NVLink multicast, which no SM12x card has" in hit["evidence"]
    assert "would then lack its all-reduces" in hit["evidence"]
    assert "0.5.20" in hit["advice"] and "pcie_ipc" in hit["advice"] and "use SGLang 0.5.9, or 0.5.12" in hit["advice"]
    assert "2. allow" not in hit["advice"]


@pytest.mark.parametrize("engine", ["0.5.9", "0.5.12.post1", "0.5.13.post1", "0.5.16", "0.5.17"])
def test_the_experimental_gate_is_a_way_out_elsewhere(lint, entries, engine):
    launch = {"compute_capability": "12.0", "allow_experimental": True}
    found = lint(patches=SM120, entries=entries, engine=engine, launch=launch)
    assert [item["rule"] for item in found if item["level"] == "error"] == []


def test_values_of_the_servers_environment_are_not_asked_for(lint):
    hit = finding(lint(launch={"server_env": ["NCCL_ALGO", "FOO", "HF_TOKEN"]}, env={"FOO": "1"}), "env-outside")
    assert "sets NCCL_ALGO, FOO, which" in hit["message"]
    assert '{"sglang_variant_overrides": {"nccl": {"NCCL_ALGO": "..."}, "env": {"FOO": "..."}}}' in hit["advice"]


def test_the_declared_memory_decides_about_the_buffers(lint):
    nccl = {"NCCL_BUFFSIZE": "134217728", "NCCL_MAX_CTAS": "32"}
    refused = [
        gib
        for gib in (0, 32.0, 96, 180)
        if "nccl-buffsize-memory" in [item["rule"] for item in lint(nccl=nccl, launch={"gpu_memory_gib": gib})]
    ]
    assert refused == [32.0]


@pytest.mark.parametrize(("declared", "refused"), [("2.31.1", True), ("", False), (None, False)])
def test_a_declared_nccl_takes_the_place_of_the_pinned_one(lint, declared, refused):
    nccl = {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL"}
    rules = [item["rule"] for item in lint(nccl=nccl, launch={"nccl_version": declared})]
    assert ("nccl-algo-collective" in rules) is refused


def test_all_protocols_excluded_is_said_of_the_protocol(lint):
    found = lint(nccl={"NCCL_PROTO": "^LL,LL128,Simple", "NCCL_ALGO": "Ring"})
    hits = [item["message"] for item in found if item["rule"] == "nccl-algo-collective"]
    assert len(hits) == 1
    assert "nccl.NCCL_PROTO leaves AllReduce, AllGather, ReduceScatter, Broadcast without a protocol" in hits[0]
