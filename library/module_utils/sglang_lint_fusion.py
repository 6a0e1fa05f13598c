"""Lint rules about the fused all-reduce on SM120 and the patches that open it."""

from __future__ import annotations

from ansible.module_utils.sglang_lint_rules import rule
from ansible.module_utils.sglang_patching import family_of
from packaging.version import Version

FUSION_PATCH = "sm120_allreduce_fusion"
GATE_PATCH = "flashinfer_sm120_gate"
# The first FlashInfer whose all-reduce module is built for major 12.
FLASHINFER_SM120 = "0.6.17"
SWITCHES = ("enable-flashinfer-allreduce-fusion", "flashinfer-allreduce-fusion-backend")


def version_of(entry, context):
    """Return the version that the engine pins of the package that a patch edits."""
    return context.engine if entry["package"] == "sglang" else context.flags.pins.get(entry["package"])


def switched_on(variant, context):
    """Return the flags of a variant that ask for fusion."""
    return [flag for flag in SWITCHES if context.argument(variant, flag) is not None]


def refused_by_flashinfer(context):
    """Whether the FlashInfer that the engine pins refuses SM120, and the GPUs are or may be SM120."""
    capability = str(context.launch.get("compute_capability") or "12")
    old = Version(context.flags.pins["flashinfer"]) < Version(FLASHINFER_SM120)
    return context.cuda and capability.split(".")[0] == "12" and old


def beyond_help(patches, context):
    """Return the family of the gate patch that says why the pinned FlashInfer does not work even with it, or None."""
    for entry in patches:
        family = family_of(entry, version_of(entry, context)) if entry["name"] == GATE_PATCH else None
        if family and family.get("refused"):
            return family
    return None


@rule("fusion-gate", "error", "Fusion on SM120 with a FlashInfer that refuses SM120.")
def fusion_gate(variant, patches, context):
    """Three facts and three ways out; the host's own packages are checked again by precheck."""
    family = beyond_help(patches, context)
    allowed = context.experimental and GATE_PATCH in variant["patches"] and not family
    if FUSION_PATCH not in variant["patches"] or allowed or not refused_by_flashinfer(context):
        return
    declared, pinned = context.launch.get("compute_capability"), context.flags.pins["flashinfer"]
    if family:
        third = f"FlashInfer {pinned} {family['refused']}"
    elif context.before("0.5.10"):
        third = "its all-reduce module lists the majors 9 and 10 only, so the server dies at its first forward"
    else:
        third = "its all-reduce module lists the majors 9 and 10 only, so fusion is switched off with a warning"
    seen = (
        f"1. the GPUs are SM120 ({f'declared {declared}' if declared else 'the patch is for nothing else'}); "
        f"2. SGLang {context.engine} pins FlashInfer {pinned}; 3. {third}"
    )
    ways_out = (family or {}).get("ways_out") or [
        "an engine from 0.5.18 on, for example 0.5.20, whose FlashInfer admits SM120",
        f"the experimental patch {GATE_PATCH}, allowed with -e sglang_patches_allow_experimental=true",
        "the variant pcie_ipc with SGLang 0.5.22 or later, which needs no patch",
    ]
    advice = "; ".join(f"{number}. {text}" for number, text in enumerate(ways_out, 1))
    yield f"patch {FUSION_PATCH} cannot work with SGLang {context.engine} on SM120", seen, advice


@rule("fusion-unpatched", "error", "Fusion is asked for on declared SM120 GPUs without the patch that opens it.")
def fusion_unpatched(variant, _patches, context):
    """Before 0.5.14 the flag then changes nothing, from 0.5.14 on the server stops."""
    declared = str(context.launch.get("compute_capability") or "")
    flags = switched_on(variant, context)
    if not flags or FUSION_PATCH in variant["patches"] or not context.cuda or declared.split(".")[0] != "12":
        return
    effect = "changes nothing" if context.before("0.5.14") else "stops the server in its warm-up"
    seen = f"declared {declared}; SGLang {context.engine} fuses on 9.0 and 10.x only, so the flag {effect}"
    yield f"args.{flags[0]} without the patch {FUSION_PATCH} {effect} on SM120", seen, "use the variant fusion"


@rule("fusion-scope", "info", "From SGLang 0.5.18 on the fusion switch moves ordinary all-reduces as well.")
def fusion_scope(variant, _patches, context):
    """Two factors where the variant's name says one."""
    flags = switched_on(variant, context)
    if flags and context.cuda and not context.before("0.5.18"):
        seen = f"SGLang {context.engine} sends ordinary all-reduces to FlashInfer once the workspace is there"
        advice = "credit a difference to both; an engine before 0.5.18 shows the fused kernel alone"
        yield f"args.{flags[0]} changes two things in SGLang {context.engine}", seen, advice


@rule("patch-experimental", "warning", "The patch is marked experimental in the patch catalogue.")
def experimental(_variant, patches, context):
    """Where the pinned release needs no edit, nothing experimental happens."""
    for entry in patches:
        family = family_of(entry, version_of(entry, context) or "0")
        if entry.get("experimental") and family and not family.get("upstream") and context.cuda:
            seen = " ".join(entry.get("evidence") or []).rstrip(".")
            yield f"patch {entry['name']} is experimental", seen, "check known answers and what is really active"


@rule("patch-version", "error", "The patch catalogue has no edit for the release that the engine pins.")
def patch_version(_variant, patches, context):
    """With the releases that are covered."""
    for entry in patches:
        version = version_of(entry, context)
        if version and not family_of(entry, version):
            covered = "; ".join(family["versions"] for family in entry["families"])
            message = f"patch {entry['name']} is not applicable to {entry['package']} {version}"
            yield message, f"covered are {covered}", "declare an engine that is covered, or leave the patch out"
