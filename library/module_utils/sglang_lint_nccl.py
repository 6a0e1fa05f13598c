"""Lint rules about NCCL's variables, after NCCL's own parser and tuning tables (2.27 to 2.31)."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree as ET

from ansible.module_utils.sglang_lint_rules import rule
from ansible.module_utils.sglang_variant_schema import near
from ansible.module_utils.sglang_variant_text import decimal
from packaging.version import Version

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
# What SGLang issues in tensor parallel serving, and the algorithms that NCCL has for each.
USED = {
    "AllReduce": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"),
    "AllGather": ("Ring", "CollNetDirect", "NVLS", "PAT"),
    "ReduceScatter": ("Ring", "CollNetDirect", "NVLS", "PAT"),
    "Broadcast": ("Ring",),
}
# NVLS and CollNet need switches, PAT needs one rank a node.
PCIE = ("Tree", "Ring")
LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
LEVEL_VARIABLES = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")
THREADS = (64, 128, 256, 512)
ON_OFF = ("P2P_DISABLE", "SHM_DISABLE", "IB_DISABLE", "GRAPH_REGISTER", "LOCAL_REGISTER", "GRAPH_MIXING_SUPPORT")
# Other numbers are read as "on" in silence; -1 and -2 stand for NCCL's own choice.
SWITCHES = {
    **{f"NCCL_{name}": ("0", "1") for name in ON_OFF},
    "NCCL_CUMEM_ENABLE": ("0", "1", "-2"),
    "NCCL_CUMEM_HOST_ENABLE": ("0", "1", "-1"),
    "NCCL_NVLS_ENABLE": ("0", "1", "2"),
    "NCCL_LAUNCH_MODE": ("PARALLEL", "GROUP"),
}
DEBUG = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
CHANNELS = {"NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS"}
MAX_CHANNELS = 64
USUAL_CHANNELS = 32
GIB = 1024**3
GPU_MEMORY_GIB = 96.0
MEMORY_FRACTION = 0.88
GRAPH_FRACTION = 0.93
# What C and Python read alike as one integer; each alone takes more, such as 1_0 or digits of other scripts.
INTEGER = re.compile(r"[ \t]*[+-]?(0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)[ \t]*\Z")


def parse_list(text, elements):
    """Return ``({collective: enabled elements}, collectives mentioned)`` as NCCL reads ALGO and PROTO.

    The first entry may lack a collective and then counts for all; ``^`` excludes. What is not mentioned stays enabled.

    :raises ValueError: NCCL would stop with "invalid usage".
    """
    known = {item.lower(): item for item in elements}
    collectives = {item.lower(): item for item in COLLECTIVES}
    table = {item: set(elements) for item in COLLECTIVES}
    named = set()
    for index, entry in enumerate(part for part in text.split(";") if part):
        prefix, colon, words = entry.partition(":")
        if not colon:
            prefix, words = "", entry
            if index:
                raise ValueError(f"all entries but the first must name a collective, {entry!r} does not")
        exclude = words.startswith("^")
        items = [item for item in words[exclude:].split(",") if item]
        for item in items:
            if item.lower() not in known:
                raise ValueError(f"{item!r} is none of {', '.join(elements)}")
        if prefix and prefix.lower() not in collectives:
            raise ValueError(f"{prefix!r} is none of {', '.join(COLLECTIVES)}")
        chosen = {known[item.lower()] for item in items}
        for name in [collectives[prefix.lower()]] if prefix else COLLECTIVES:
            table[name] = set(elements) - chosen if exclude else set(chosen)
            named.add(name)
    return table, named


def number(variant, name):
    """Return an NCCL variable as integer, in tens or as NCCL reads it in hex, or None where it is unset or neither."""
    text = variant["nccl"].get(name, "")
    return int(text, 0) if INTEGER.match(text) else None


def where(variant, name):
    """Return the value of a variable and where it came from, as evidence; a number in hex with its decimal."""
    text, origin = variant["nccl"].get(name), variant["origins"].get(f"nccl.{name}", "unknown")
    return f"{text!r}{decimal(text)} from {origin}"


@rule("nccl-unknown", "error", "The NCCL that the engine loads reads no such variable.")
def unknown(variant, _patches, context):
    """A name that this NCCL release never looks up."""
    for name in variant["nccl"]:
        if name not in context.variables:
            message = f"nccl.{name} is unknown to NCCL {context.nccl}, which SGLang {context.engine} loads"
            yield message, where(variant, name), near(name, context.variables) or "remove it"


@rule(
    "nccl-value", "error", "The value is empty, no number where NCCL reads one, or none of the names that NCCL knows."
)
def value(variant, _patches, context):
    """Values that NCCL refuses, or silently reads as something else."""
    for name, text in variant["nccl"].items():
        advice = ""
        if not text.strip():
            advice = "give a value, or null to leave it unset"
            if name == "NCCL_GRAPH_FILE":
                advice = "set sglang_nccl_graph_file to the file's path on the host"
        elif context.variables.get(name) == "int" and number(variant, name) is None and name != "NCCL_NTHREADS":
            advice = "give an integer"
        elif name in SWITCHES and text not in SWITCHES[name]:
            advice = f"give one of {', '.join(SWITCHES[name])}"
        elif name == "NCCL_DEBUG" and text.upper() not in DEBUG:
            advice = f"give one of {', '.join(DEBUG)}"
        elif name == "NCCL_BUFFSIZE" and not 0 < (number(variant, name) or 0) < 1 << 31:
            advice = "give a size in bytes, below 2 GiB, or null to leave it unset"
        if advice:
            yield f"nccl.{name} has no usable value", where(variant, name), advice
    for name, elements in (("NCCL_ALGO", ALGORITHMS), ("NCCL_PROTO", PROTOCOLS)):
        try:
            parse_list(variant["nccl"].get(name, ""), elements)
        except ValueError as error:
            yield (
                f"nccl.{name} cannot be read by NCCL: {error}",
                where(variant, name),
                "write for example 'ring;allreduce:tree'",
            )


@rule("nccl-level-case", "error", "Level names are case-sensitive; NCCL ignores an unknown one in silence.")
def level(variant, _patches, _context):
    """Level names that NCCL would not recognise."""
    for name in LEVEL_VARIABLES:
        text = variant["nccl"].get(name, "")
        if text.strip() and text not in LEVELS and not re.match("[0-9]", text):
            advice = f"write {text.upper()}" if text.upper() in LEVELS else f"one of {', '.join(LEVELS)}"
            yield f"nccl.{name} is ignored by NCCL in silence: no such level", where(variant, name), advice


@rule("nccl-level-number", "warning", "Numbers for levels are NCCL's old style and mean other things than they seem.")
def level_number(variant, _patches, _context):
    """Old style numbers: 0 LOC, 1 PIX, 2 PXB, 3 PHB, 4 and above SYS."""
    for name in LEVEL_VARIABLES:
        text = variant["nccl"].get(name, "")
        if re.match("[0-9]", text):
            meaning = ("LOC", "PIX", "PXB", "PHB", "SYS")[min(int(text), 4)] if text.isdecimal() else "unclear"
            yield f"nccl.{name} is an old style number meaning {meaning}", where(variant, name), "write the name"


@rule(
    "nccl-algo-collective",
    "error",
    "The forced algorithms or protocols leave a collective that SGLang uses without any.",
)
def algorithm(variant, _patches, context):
    """NCCL then fails with "no algorithm/protocol available", in SGLang's case during the capture of CUDA graphs."""
    try:
        algorithms, named = parse_list(variant["nccl"].get("NCCL_ALGO", ""), ALGORITHMS)
        protocols, _named = parse_list(variant["nccl"].get("NCCL_PROTO", ""), PROTOCOLS)
    except ValueError:
        return  # nccl-value says so
    strict = Version(context.nccl) >= Version("2.31") and {"NCCL_ALGO", "NCCL_PROTO"} <= set(variant["nccl"])
    without, unnamed = [], []
    bare = [name for name in USED if not protocols[name]]
    for name, supported in USED.items():
        usable = algorithms[name] & set(supported)
        if context.pcie:
            usable &= set(PCIE)
        if "Simple" not in protocols[name]:
            usable &= set(PCIE)  # the others exist with the protocol Simple only
        if not usable:
            without.append(name)
        elif strict and name not in named:
            unnamed.append(name)
    if bare:
        message = f"nccl.NCCL_PROTO leaves {', '.join(bare)} without a protocol"
        yield message, f"NCCL_PROTO={where(variant, 'NCCL_PROTO')}", "name one that stays, or leave it unset (null)"
    seen = f"NCCL_ALGO={where(variant, 'NCCL_ALGO')}, NCCL {context.nccl}"
    if without:
        has = "; ".join(f"{name} has {', '.join(item for item in USED[name] if item in PCIE)} here" for name in without)
        message = f"nccl.NCCL_ALGO leaves {', '.join(without)} without an algorithm"
        yield message, f"{seen}; {has}", "write 'ring;allreduce:tree', or leave NCCL_ALGO unset (null)"
    if unnamed:
        message = (
            f"nccl.NCCL_ALGO does not name {', '.join(unnamed)}, which NCCL 2.31 disables under a forced NCCL_PROTO"
        )
        yield message, seen, "write 'ring,tree;allreduce:tree', or leave NCCL_PROTO unset (null)"


@rule("nccl-deprecated", "info", "MIN/MAX_NCHANNELS are the old names of MIN/MAX_CTAS; both are read.")
def old_name(variant, _patches, _context):
    """The old name alone: it works."""
    for old, new in CHANNELS.items():
        if old in variant["nccl"] and new not in variant["nccl"]:
            yield (
                f"nccl.{old} is the deprecated name of {new} and still read",
                where(variant, old),
                f"write {new} in new variants",
            )


@rule("nccl-deprecated-both", "warning", "Both the old and the new name are set; the stricter value wins.")
def both_names(variant, _patches, _context):
    """Higher minimum, lower maximum."""
    for old, new in CHANNELS.items():
        pair = number(variant, old), number(variant, new)
        if None not in pair:
            wins = max(pair) if "MIN" in old else min(pair)
            yield (
                f"nccl.{old} and nccl.{new} are both set: the stricter wins, {wins}",
                f"{pair[0]} and {pair[1]}",
                f"keep {new}",
            )


def channels(variant):
    """Return (minimum, maximum) of channels after both names; None where unset."""
    lower = [
        item for item in (number(variant, "NCCL_MIN_NCHANNELS"), number(variant, "NCCL_MIN_CTAS")) if item is not None
    ]
    upper = [
        item for item in (number(variant, "NCCL_MAX_NCHANNELS"), number(variant, "NCCL_MAX_CTAS")) if item is not None
    ]
    return max(lower, default=None), min(upper, default=None)


@rule("nccl-channels", "error", "The number of channels is outside 1 to 64, or the minimum is above the maximum.")
def channel_range(variant, _patches, _context):
    """Channel limits that contradict each other or NCCL's own."""
    for old, new in CHANNELS.items():
        for name in (old, new):
            count = number(variant, name)
            if count is not None and not 1 <= count <= MAX_CHANNELS:
                yield f"nccl.{name} must be 1 to {MAX_CHANNELS}", where(variant, name), "give a number in the range"
    lower, upper = channels(variant)
    if lower is not None and upper is not None and lower > upper:
        name = next(item for pair in CHANNELS.items() for item in pair if "MIN" in item and item in variant["nccl"])
        yield f"nccl.{name}: the minimum of channels is above the maximum", f"{lower} and {upper}", "lower the minimum"


@rule("nccl-nthreads", "error", "NCCL_NTHREADS must be 64, 128, 256 or 512.")
def threads(variant, _patches, _context):
    """NCCL replaces other values by its limit, with a warning in a log that nobody reads."""
    count = number(variant, "NCCL_NTHREADS")
    if variant["nccl"].get("NCCL_NTHREADS", "").strip() and count not in THREADS:
        yield (
            f"nccl.NCCL_NTHREADS {'is no integer' if count is None else 'has a value that NCCL replaces'}",
            where(variant, "NCCL_NTHREADS"),
            f"one of {', '.join(map(str, THREADS))}",
        )


@rule("nccl-buffsize", "warning", "NCCL_BUFFSIZE is no power of two of at least 4 KiB.")
def buffer_size(variant, _patches, _context):
    """NCCL's guide asks for powers of two."""
    size = number(variant, "NCCL_BUFFSIZE")
    if size is not None and 0 < size and (size < 4096 or size & (size - 1)):
        yield (
            "nccl.NCCL_BUFFSIZE should be a power of two, in bytes",
            where(variant, "NCCL_BUFFSIZE"),
            "4194304 is the default",
        )


@rule("nccl-buffsize-proto", "info", "NCCL_BUFFSIZE counts for the protocol Simple only, which NCCL_PROTO excludes.")
def buffer_protocol(variant, _patches, _context):
    """A buffer size that cannot be the reason of any measured difference."""
    try:
        protocols, _named = parse_list(variant["nccl"].get("NCCL_PROTO", ""), PROTOCOLS)
    except ValueError:
        return
    if "NCCL_BUFFSIZE" in variant["nccl"] and not any("Simple" in protocols[item] for item in USED):
        seen = f"NCCL_PROTO={where(variant, 'NCCL_PROTO')}"
        yield (
            "nccl.NCCL_BUFFSIZE is used by Simple only, which NCCL_PROTO excludes",
            seen,
            "do not credit it with a difference",
        )


@rule("nccl-buffsize-memory", "error", "The buffers take more than half of the memory that the memory fraction leaves.")
def buffer_memory(variant, _patches, context):
    """Estimate: channels x size, the least that a communicator allocates; it lies outside the memory fraction."""
    size = number(variant, "NCCL_BUFFSIZE")
    if size is None or not context.cuda:
        return
    lower, upper = channels(variant)
    count = upper or max(lower or 0, USUAL_CHANNELS)
    memory = float(context.launch.get("gpu_memory_gib") or GPU_MEMORY_GIB)
    try:
        fraction = float(context.argument(variant, "mem-fraction-static") or MEMORY_FRACTION)
    except (TypeError, ValueError):
        return  # flag-value says so
    room, need = memory * (1 - fraction), count * size / GIB
    if need > room / 2:
        seen = f"{count} channels x {size} bytes = {need:.1f} GiB or more; {room:.1f} GiB are left of {memory:.0f}"
        advice = "lower NCCL_BUFFSIZE, NCCL_MAX_CTAS or mem-fraction-static"
        yield "nccl.NCCL_BUFFSIZE leaves too little memory beside mem-fraction-static", seen, advice


@rule("nccl-ll128-pcie", "error", "LL128 forced alone on PCIe, where its 128-byte stores are not safe.")
def ll128(variant, _patches, context):
    """NCCL by itself uses LL128 over NVLink only; forced, it may corrupt data."""
    yield from ll128_forced(variant, context, alone=True)


@rule(
    "nccl-ll128-list", "warning", "LL128 in a list of protocols on PCIe: NCCL may choose it, unsafe by its own rules."
)
def ll128_list(variant, _patches, context):
    """The list is in use on such hosts; known answers must be checked."""
    yield from ll128_forced(variant, context, alone=False)


def ll128_forced(variant, context, alone):
    """Yield the text of both LL128 rules: ``alone`` or beside other protocols."""
    text = variant["nccl"].get("NCCL_PROTO")
    if text is None or not context.cuda or not context.pcie:
        return
    try:
        protocols, named = parse_list(text, PROTOCOLS)
    except ValueError:
        return
    # Any entry takes NCCL's own caution away, one with ^ too: what it does not exclude is enabled.
    forced = [item for item in USED if item in named and "LL128" in protocols[item]]
    forced = [item for item in forced if (protocols[item] == {"LL128"}) is alone]
    if forced:
        advice = "leave NCCL_PROTO unset, or check known answers after the change"
        yield f"nccl.NCCL_PROTO enables LL128 on PCIe for {', '.join(forced)}", where(variant, "NCCL_PROTO"), advice


@rule("nccl-p2p-both", "warning", "NCCL_P2P_DISABLE=1 makes NCCL_P2P_LEVEL meaningless.")
def p2p_both(variant, _patches, _context):
    """Disable wins over the level."""
    if variant["nccl"].get("NCCL_P2P_DISABLE") == "1" and "NCCL_P2P_LEVEL" in variant["nccl"]:
        advice = "set NCCL_P2P_LEVEL to null in this variant"
        yield "nccl.NCCL_P2P_DISABLE=1 overrides nccl.NCCL_P2P_LEVEL", where(variant, "NCCL_P2P_LEVEL"), advice


@rule("nccl-p2p-off-fewchan", "error", "P2P off with at most two channels of small buffers gave no result in 60 s.")
def p2p_off_few(variant, _patches, _context):
    """Measured on two GPUs with NCCL 2.28.9."""
    _lower, upper = channels(variant)
    size = number(variant, "NCCL_BUFFSIZE")
    if variant["nccl"].get("NCCL_P2P_DISABLE") == "1" and upper and upper <= 2 and size and size <= 131072:
        seen = f"{upper} channels, {size} bytes: no result in 60 s on two GPUs"
        yield "nccl.NCCL_P2P_DISABLE=1 with few channels and small buffers stalls", seen, "use p2p_off without fewchan"


@rule("nccl-graph-ranks", "error", "The graph file is for another number of ranks, or is no graph file.")
def graph_ranks(variant, _patches, context):
    """Each channel of the file must hold one GPU for each rank."""
    name = variant["nccl"].get("NCCL_GRAPH_FILE", "")
    if not pathlib.Path(name).is_file():
        return
    try:
        found = {len(item.findall("gpu")) for item in ET.parse(name).getroot().iter("channel")}
    except (OSError, ET.ParseError) as error:
        yield (
            "nccl.NCCL_GRAPH_FILE is no readable graph file",
            f"{name}: {error}",
            "write one with NCCL_GRAPH_DUMP_FILE",
        )
        return
    if found != {context.tp_size}:
        seen = f"{name}: {' and '.join(map(str, sorted(found))) or 'no'} GPUs in a channel, tp_size {context.tp_size}"
        yield "nccl.NCCL_GRAPH_FILE is for another number of ranks", seen, "use a file made for this number of ranks"


@rule("nccl-graph-unseen", "info", "The graph file does not lie on the controller, so its ranks are not checked here.")
def graph_unseen(variant, _patches, _context):
    """The path is the host's."""
    name = variant["nccl"].get("NCCL_GRAPH_FILE", "")
    if name.strip() and not pathlib.Path(name).is_file():
        yield (
            "nccl.NCCL_GRAPH_FILE is not on the controller; its ranks are unchecked",
            name,
            "see that it is on the host",
        )


@rule("nccl-graph-memory", "error", "A graph file needs a memory fraction of 0.93 or less.")
def graph_memory(variant, _patches, context):
    """The graph's channels take about two percent of the memory."""
    fraction = context.argument(variant, "mem-fraction-static")
    if (
        variant["nccl"].get("NCCL_GRAPH_FILE")
        and context.cuda
        and isinstance(fraction, float)
        and fraction > GRAPH_FRACTION
    ):
        advice = f"set args.mem-fraction-static to {GRAPH_FRACTION} or less"
        yield "nccl.NCCL_GRAPH_FILE does not go with args.mem-fraction-static", f"{fraction}", advice
