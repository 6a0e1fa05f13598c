"""Whether what was asked is what runs: the rules."""

from __future__ import annotations

import pytest
from ansible.module_utils import sglang_activation_rules as rules

INFO = {
    "tp_size": 8,
    "attention_backend": "flashinfer",
    "disable_custom_all_reduce": True,
    "disable_cuda_graph": False,
    "enable_flashinfer_allreduce_fusion": False,
    "flashinfer_allreduce_fusion_backend": None,
    "mem_fraction_static": 0.88,
    "speculative_algorithm": "EAGLE3",
    "internal_states": [{"avg_spec_accept_length": 2.4}],
}


def launch(**args):
    """Return a launch description that asks for these flags."""
    return {
        "tp_size": 8,
        "expect": {"env": {"NCCL_ALGO": "Ring"}, "args": {k.replace("_", "-"): v for k, v in args.items()}},
    }


def names(found):
    """Return (rule, level) of findings."""
    return [(item["rule"], item["level"]) for item in found]


def test_what_is_in_force_gives_no_finding_however_it_is_written():
    asked = launch(tp="8", mem_fraction_static="0.88", disable_custom_all_reduce=True, attention_backend="flashinfer")
    assert rules.judge(asked, INFO, ["Capture cuda graph end."], "cuda") == []
    newer = "[2026-11-30 03:13:58 TP0] Capture target decode CUDA graph end. elapsed=2.42 s, mem usage=0.04 GB"
    assert rules.judge(asked, INFO, [newer], "cuda") == []
    assert names(rules.judge(asked, INFO, [newer.replace("decode", "prefill")], "cuda")) == [
        ("graph-capture", "warning")
    ]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"tp_size": 4}, ("tp-size", "error")),
        ({"attention_backend": "triton"}, ("attention-backend", "error")),
        ({"enable_flashinfer_allreduce_fusion": True}, ("allreduce-fusion", "error")),
        ({"flashinfer_allreduce_fusion_backend": "auto"}, ("allreduce-fusion", "error")),
        ({"mem_fraction_static": 0.9}, ("argument-changed", "warning")),
    ],
)
def test_a_feature_that_is_not_active_fails_by_its_own_name(args, expected):
    assert names(rules.arguments(launch(**args), INFO)) == [expected]


@pytest.mark.parametrize("chosen", ["auto", "trtllm"])
def test_whatever_the_engine_chooses_is_auto(chosen):
    info = dict(INFO, flashinfer_allreduce_fusion_backend=chosen)
    assert rules.arguments(launch(flashinfer_allreduce_fusion_backend="auto"), info) == []


def test_what_the_server_does_not_report_is_never_taken_for_active():
    asked = launch(prefill_attention_backend="triton", schedule_policy="fcfs")
    assert names(rules.arguments(asked, INFO)) == [("argument-unseen", "warning"), ("argument-unseen", "info")]


def test_speculation_is_proven_by_its_accept_length_only():
    asked = launch(speculative_algorithm="EAGLE3")
    assert rules.speculation(asked, INFO) == []
    assert names(rules.speculation(asked, dict(INFO, internal_states=[{"avg_spec_accept_length": 1.0}]))) == [
        ("speculation", "error")
    ]
    assert names(rules.speculation(asked, dict(INFO, internal_states=[]))) == [("speculation", "error")]


def test_a_flag_left_out_is_not_compared():
    assert rules.arguments(launch(disable_custom_all_reduce=False, attention_backend=None), INFO) == []


def test_a_cpu_never_passes_what_it_cannot_run():
    found = rules.judge(launch(), INFO, [], "cpu")
    assert names(found) == [("not-exercised", "info")] * 3
    assert "NCCL_ALGO" in found[0]["evidence"]


def test_the_log_shows_what_the_arguments_do_not():
    line = "Setup Custom allreduce failed with CUDART error: peer access is not supported"
    found = rules.from_log(launch(), dict(INFO, disable_custom_all_reduce=False), [line])
    assert names(found) == [("graph-capture", "warning"), ("custom-all-reduce", "warning")]


FUSED = "[2026-11-29 10:00:00 TP0] FlashInfer workspace initialized for rank 0, world_size 8"
FUSED_LATER = (
    "[2026-11-29 10:00:00 TP0] FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, "
    "world_size=8, max_token_num=2048, hidden_dim=7168"
)
# What SGLang 0.5.9 to 0.5.23 say where they go on without fusion; in brackets the reason, which is ours here.
UNFUSED = [
    "flashinfer.comm is not available, falling back to standard implementation",
    "flashinfer.comm unified allreduce_fusion API is not available, falling back to standard implementation",
    "flashinfer.comm allreduce_fusion API is not available (No module named 'cuda.tile'), falling back to standard "
    "implementation",
    "FlashInfer comm not available, skipping workspace initialization",
    "Failed to initialize FlashInfer workspace: No supported CUDA architectures found for major versions [9, 10]. "
    "Disabling flashinfer allreduce fusion permanently.",
    "Failed to initialize FlashInfer workspace (backend=trtllm): out of memory. "
    "Disabling flashinfer allreduce fusion permanently.",
    "FlashInfer workspace preflight: cuMemCreate probe failed on at least one rank. Skipping allreduce fusion to avoid "
    "cross-rank divergence.",
    "FlashInfer allreduce fusion is forcibly disabled via --enforce-disable-flashinfer-allreduce-fusion.",
    "Disable --enable-flashinfer-allreduce-fusion because deterministic inference is enabled.",
    "FlashInfer workspace preflight probe failed (CUDA_ERROR_NOT_SUPPORTED). Skipping allreduce fusion.",
    "FlashInfer allreduce fusion disabled globally because workspace initialization failed on at least one rank.",
    "FlashInfer AllReduce fusion disabled: the 8 ranks of this group are not confirmed to share one NVLink clique",
]


@pytest.mark.parametrize("flag", ["enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend"])
def test_fusion_is_proven_by_its_workspace_only(flag):
    value = True if flag.startswith("enable") else "auto"
    info = dict(INFO, **{flag: value})
    captured = "Capture cuda graph end."
    for line in (FUSED, FUSED_LATER):
        assert rules.judge(launch(**{flag: value}), info, [captured, line], "cuda") == []
    found = rules.judge(launch(**{flag: value}), info, [captured, "Decode batch"], "cuda")
    assert names(found) == [("allreduce-fusion", "warning")]
    assert "asked, not proven" in found[0]["message"]


@pytest.mark.parametrize("line", UNFUSED)
def test_fusion_that_the_log_switches_off_is_an_error_whatever_server_info_says(line):
    asked, info = launch(enable_flashinfer_allreduce_fusion=True), dict(INFO, enable_flashinfer_allreduce_fusion=True)
    # One rank that fused does not make up for another one that did not.
    lines = ["Capture cuda graph end.", FUSED, f"[2026-11-29 10:00:00 TP1] {line}"]
    found = rules.judge(asked, info, lines, "cuda")
    assert names(found) == [("allreduce-fusion", "error")]
    assert line[:60] in found[0]["evidence"]
    # Nobody asked for it: no fault.
    assert rules.judge(launch(), info, lines, "cuda") == []
    assert names(rules.judge(asked, info, lines, "cpu")) == [("not-exercised", "info")] * 3


IPC_ENABLED = "FlashInfer PCIe-IPC all-reduce enabled (world=8, workspace sized on first reduction)"
IPC_BUILT = "FlashInfer PCIe-IPC workspace built (world=8, max_numel=458752, hidden=7168)"
# What SGLang 0.5.21 to 0.5.23 say where they go on with NCCL.
IPC_OFF = [
    "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE is set but this FlashInfer build has no pcie_ipc_comm; falling back to NCCL "
    "all-reduce.",
    "Setup FlashInfer PCIe-IPC allreduce failed with CUDA error: peer access is not supported.",
    "FlashInfer PCIe-IPC workspace (max_numel=458752) failed: out of memory; reductions stay on NCCL",
    "Deterministic inference is on; leaving PCIe-IPC all-reduce off. Its kernels pick a tactic per shape, so the "
    "reduction order would follow the batch shape.",
    "FlashInfer PCIe-IPC all-reduce serves bf16 only; torch.float16 reductions stay on NCCL.",
]
IPC_SEED = [
    "FlashInfer PCIe-IPC autotune failed (timeout); keeping the seed policy.",
    "FlashInfer PCIe-IPC autotune covered no shapes for hidden=7168 (requested rows (1, 2)); the kernels keep the seed "
    "policy.",
    "FlashInfer PCIe-IPC all-reduce has no host group to autotune on; running FlashInfer's seed policy instead of "
    "measured tactics.",
    "FlashInfer PCIe-IPC all-reduce: --disable-flashinfer-autotune is set; keeping FlashInfer's seed policy.",
    "FlashInfer PCIe-IPC is sizing its workspace from the fixed fallback width 64, not from this server's decode "
    "config; set SGLANG_PCIE_IPC_MAX_NUMEL to override.",
]


def ipc(value, *lines, device="cuda"):
    """Return (rule, level) for a launch whose variable has a value and whose log has these lines."""
    asked = launch()
    asked["expect"]["env"]["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = value
    found = rules.judge(asked, INFO, ["Capture cuda graph end.", *lines], device)
    return [item for item in names(found) if item[0] != "not-exercised"]


def test_pcie_ipc_is_proven_by_its_workspace_only():
    assert ipc("1", IPC_ENABLED, IPC_BUILT) == []
    assert ipc("true", IPC_ENABLED) == [("pcie-ipc", "warning")]
    assert ipc("1") == [("pcie-ipc", "warning")]
    assert ipc("0") == ipc("1", device="cpu") == []


@pytest.mark.parametrize("line", IPC_OFF)
def test_pcie_ipc_that_the_log_switches_off_is_an_error(line):
    """One rank that built its workspace does not make up for another one that did not."""
    assert ipc("1", IPC_ENABLED, IPC_BUILT, f"[2026-11-29 10:00:00 TP3] {line}") == [("pcie-ipc", "error")]
    assert ipc("0", line) == []


@pytest.mark.parametrize("line", IPC_SEED)
def test_pcie_ipc_without_its_tuning_is_told(line):
    assert ipc("1", IPC_ENABLED, IPC_BUILT, line) == [("pcie-ipc-untuned", "warning")]
    assert ipc("1", IPC_ENABLED, IPC_BUILT, "FlashInfer PCIe-IPC all-reduce autotuned 9 shape(s)") == []


@pytest.mark.parametrize(
    "reason", ["your platform lacks GPU P2P capability", "it's not supported on more than two PCIe-only GPUs"]
)
def test_the_engines_own_all_reduce_that_is_off_is_told(reason):
    line = f"Custom allreduce is disabled because {reason}."
    asked = dict(INFO, disable_custom_all_reduce=False)
    assert ("custom-all-reduce", "warning") in names(rules.from_log(launch(), asked, [line]))
    assert ("custom-all-reduce", "warning") not in names(rules.from_log(launch(), INFO, [line]))
