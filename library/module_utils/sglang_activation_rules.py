"""Whether what was asked of the server is what runs, judged from ``/server_info`` and the log."""

from __future__ import annotations

import re

from ansible.module_utils.sglang_findings import finding

RUNG = "verify"
# Flags whose field in ServerArgs has another name than the flag itself.
ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor-parallel-size": "tp_size",
    "pp": "pp_size",
    "pipeline-parallel-size": "pp_size",
    "dp": "dp_size",
    "data-parallel-size": "dp_size",
    "ep": "ep_size",
    "expert-parallel-size": "ep_size",
}
# Features that fail a variant by their own name. Any other argument may be adjusted by the engine, which is a warning.
FEATURES = {
    "tp_size": "tp-size",
    "attention_backend": "attention-backend",
    "prefill_attention_backend": "attention-backend",
    "decode_attention_backend": "attention-backend",
    "disable_custom_all_reduce": "custom-all-reduce",
    "enable_flashinfer_allreduce_fusion": "allreduce-fusion",
    "flashinfer_allreduce_fusion_backend": "allreduce-fusion",
    "speculative_algorithm": "speculation",
    "served_model_name": "served-model-name",
    "quantization": "quantization",
    "disable_cuda_graph": "graph-capture",
}

FUSION = ("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend")
# SGLang's words (0.5.9 to 0.5.23) for fusion that was asked and does not run; /server_info shows it as on all the same.
FUSION_OFF = re.compile(
    r"flashinfer\.comm .*falling back to standard implementation|allreduce_fusion API is not available"
    r"|FlashInfer comm not available, skipping workspace|Failed to initialize FlashInfer workspace"
    r"|Skipping allreduce fusion|FlashInfer all-?reduce fusion disabled|allreduce fusion is forcibly disabled"
    r"|Disable --(?:enable-flashinfer-allreduce-fusion|flashinfer-allreduce-fusion-backend) because",
    re.IGNORECASE,
)
# Its only proof: the workspace that the fused kernel works in.
FUSION_ON = re.compile(r"FlashInfer (?:AllReduce Fusion enabled and )?workspace initialized")

PCIE_IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
# The words of SGLang 0.5.21 to 0.5.23: the server goes on with NCCL, and no field of /server_info tells it.
PCIE_IPC_OFF = re.compile(
    r"this FlashInfer build has no pcie_ipc_comm|Setup FlashInfer PCIe-IPC allreduce failed"
    r"|FlashInfer PCIe-IPC workspace .*failed|leaving PCIe-IPC all-reduce off|PCIe-IPC all-reduce serves bf16 only"
    r"|PCIe-IPC all-reduce skipped"
)
# "all-reduce enabled" comes before the workspace and proves nothing.
PCIE_IPC_ON = re.compile(r"FlashInfer PCIe-IPC workspace built")
# It runs, but not with what was measured on this host.
PCIE_IPC_SEED = re.compile(
    r"FlashInfer PCIe-IPC.*(?:keep\w* (?:the|FlashInfer's) seed policy|seed policy instead|fallback)"
)
# In the words of 0.5.8 and of 0.5.15; other captures, of drafts or prefills, are no proof for decoding.
CAPTURED = re.compile(r"Capture (?:target decode )?cuda graph end", re.IGNORECASE)
CUSTOM_OFF = re.compile(r"Setup Custom allreduce failed|Custom allreduce is disabled because")


def field_of(flag):
    """Return the name in ``/server_info`` of a flag written with or without its dashes."""
    flag = flag.lstrip("-")
    return ALIASES.get(flag, flag.replace("-", "_"))


def equal(asked, actual):
    """Return whether a value of a launch line and one of ``/server_info`` are the same; numbers compare as numbers."""
    if isinstance(asked, (list, tuple)):
        listed = actual if isinstance(actual, (list, tuple)) else [actual]
        return len(asked) == len(listed) and all(equal(one, two) for one, two in zip(asked, listed))
    if isinstance(asked, bool) or isinstance(actual, bool):
        return str(asked).lower() == str(actual).lower()
    try:
        return float(asked) == float(actual)
    except (TypeError, ValueError):
        return str(asked) == str(actual)


def arguments(launch, info):
    """Return findings on arguments that are not in force as asked.

    :param launch: content of ``launch.json``; ``expect.args`` maps flags to values.
    :param info: answer of ``/server_info``.
    """
    asked = dict((launch.get("expect") or {}).get("args") or {})
    if launch.get("tp_size"):
        asked.setdefault("tp-size", launch["tp_size"])
    found = []
    for flag, value in sorted(asked.items()):
        name = field_of(flag)
        if value is None or value is False or (name in info and equal(value, info[name])):
            continue
        rule = FEATURES.get(name)
        if name not in info:
            message = f"{flag} was asked as {value!r} and the server does not say whether it is in force."
            level = "warning" if rule else "info"
            found.append(finding(RUNG, "argument-unseen", level, message, f"/server_info has no {name}"))
            continue
        # Whatever the engine chooses is what was asked, unless it chooses nothing.
        if value == "auto" and str(info[name]).lower() not in ("none", "false", ""):
            continue
        found.append(
            finding(
                RUNG,
                rule or "argument-changed",
                "error" if rule else "warning",
                f"{flag} was asked as {value!r} and the server runs with {info[name]!r}.",
                f"/server_info: {name}={info[name]!r}",
                "read the log for the line that says why the engine changed it" if rule else "",
            )
        )
    return found


def speculation(launch, info):
    """Return a finding where speculation was asked and accepts nothing; its only proof is an accept length above 1."""
    asked = (launch.get("expect") or {}).get("args") or {}
    if not any(field_of(flag) == "speculative_algorithm" and value for flag, value in asked.items()):
        return []
    states = info.get("internal_states") or [{}]
    length = states[0].get("avg_spec_accept_length")
    if length is not None and float(length) > 1:
        return []
    return [
        finding(
            RUNG,
            "speculation",
            "error",
            "Speculative decoding was asked for and accepts no draft token.",
            f"avg_spec_accept_length={length!r}",
            "check that the draft model belongs to this model",
        )
    ]


def fusion(launch, lines):
    """Return a finding where all-reduce fusion was asked and the log shows it switched off, or nothing that proves it.

    :param lines: the log of this start.
    """
    asked = (launch.get("expect") or {}).get("args") or {}
    if not any(field_of(flag) in FUSION and value not in (None, False) for flag, value in asked.items()):
        return []
    off = next((line for line in lines if FUSION_OFF.search(line)), None)
    if off:
        message = "All-reduce fusion was asked for and SGLang switched it off; /server_info does not say so."
        advice = "mend what the line names, or take a variant without fusion"
        return [finding(RUNG, "allreduce-fusion", "error", message, off[:300], advice)]
    if any(FUSION_ON.search(line) for line in lines):
        return []
    message = "All-reduce fusion was asked, not proven: the log shows neither its workspace nor a refusal."
    advice = "check that the log was not cut, and that the patch is for these GPUs"
    return [finding(RUNG, "allreduce-fusion", "warning", message, "no line 'workspace initialized'", advice)]


def pcie_ipc(launch, lines):
    """Return findings where FlashInfer's PCIe-IPC all-reduce was asked and is off, not proven or not tuned.

    :param lines: the log of this start.
    """
    asked = ((launch.get("expect") or {}).get("env") or {}).get(PCIE_IPC, "")
    if str(asked).lower() not in ("true", "1", "yes", "y"):
        return []
    off = next((line for line in lines if PCIE_IPC_OFF.search(line)), None)
    if off:
        message = "The PCIe-IPC all-reduce was asked for and SGLang goes on with NCCL; /server_info does not say so."
        advice = "mend what the line names, or take a variant without it"
        return [finding(RUNG, "pcie-ipc", "error", message, off[:300], advice)]
    if not any(PCIE_IPC_ON.search(line) for line in lines):
        message = "The PCIe-IPC all-reduce was asked, not proven: the log shows neither its workspace nor a refusal."
        advice = "check that the log was not cut, and that this SGLang is 0.5.22 or later"
        return [finding(RUNG, "pcie-ipc", "warning", message, "no line 'PCIe-IPC workspace built'", advice)]
    seed = next((line for line in lines if PCIE_IPC_SEED.search(line)), None)
    if seed is None:
        return []
    message = "The PCIe-IPC all-reduce runs without what would have been measured on this host."
    return [
        finding(RUNG, "pcie-ipc-untuned", "warning", message, seed[:300], "do not take its speed for the feature's")
    ]


def from_log(launch, info, lines):
    """Return findings on features that only the log shows; for a GPU host.

    :param launch: content of ``launch.json``.
    :param info: answer of ``/server_info``.
    :param lines: the log of this start.
    """
    text = "\n".join(lines)
    found = fusion(launch, lines) + pcie_ipc(launch, lines)
    if not info.get("disable_cuda_graph") and not CAPTURED.search(text):
        found.append(
            finding(
                RUNG,
                "graph-capture",
                "warning",
                "CUDA graphs are not switched off and the log shows no finished capture.",
                "no line 'Capture ... CUDA graph end'",
                "check that the log was not cut",
            )
        )
    line = next((line for line in lines if CUSTOM_OFF.search(line)), None)
    if line and not info.get("disable_custom_all_reduce"):
        found.append(
            finding(RUNG, "custom-all-reduce", "warning", "The engine's own all-reduce was not set up.", line[:300])
        )
    return found


def not_exercised(launch):
    """Return what a CPU host cannot show, as findings of level info: never passed, never failed."""
    names = sorted(name for name in (launch.get("expect") or {}).get("env") or {} if name.startswith("NCCL_"))
    return [
        finding(RUNG, "not-exercised", "info", f"{what} cannot be exercised on a CPU.", seen)
        for what, seen in (
            ("NCCL", f"variables set: {', '.join(names) or 'none'}; the ranks talk through gloo"),
            ("Fused kernels (all-reduce fusion, custom all-reduce, PCIe IPC)", "the server runs with device cpu"),
            ("CUDA graph capture", "the server runs with device cpu"),
        )
    ]


def judge(launch, info, lines, device):
    """Return all findings on activation.

    :param device: ``cuda`` or ``cpu``, as declared for the host.
    """
    found = arguments(launch, info) + speculation(launch, info)
    return found + (not_exercised(launch) if device == "cpu" else from_log(launch, info, lines))
