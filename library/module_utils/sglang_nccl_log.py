"""What NCCL writes about itself under ``NCCL_DEBUG=INFO``: what it took from the environment, chose, and warned of.

Written after the logs of NCCL 2.27 to 2.28; a line that is not known is skipped.
"""

from __future__ import annotations

import re

_HEAD = re.compile(r"^\S*?:(?P<pid>\d+):(?P<thread>\d+)\s+(?:\[(?P<device>-?\d+)\]\s+)?(?:[\d.]+\s+)?(?P<rest>.*)$")
# Another form of the head in newer releases, with a time in front: [2026-01-01 00:00:00] host:...
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d[^\]]*\]\s*")
_SET = re.compile(r"NCCL INFO (NCCL_\w+) set by environment to (.*?)\.?$")
_CHANNEL = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[\w+\])? via (\S+)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+\S*)")
_TUNING = re.compile(
    r"NCCL INFO (\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)(?:.*?channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
_TOTAL = re.compile(
    r"NCCL INFO (\d+) coll channels, (?:(\d+) collnet channels, )?(?:\d+ nvls channels, )?(\d+) p2p channels"
)
_WARN = re.compile(r"NCCL WARN\s*(.*)$")
# A value that NCCL replaces, said at INFO: "Invalid NCCL_NTHREADS 100 (...)", "Invalid value x for NCCL_BUFFSIZE, ...".
_INVALID = re.compile(r"NCCL INFO (Invalid (?:value \S+ for )?(NCCL_\w+).*)$")
# The table of tuning, whose first three columns are Tree and whose next three are Ring, by protocol.
_THREADS = re.compile(r"NCCL INFO\s+Max NThreads(?:\s*\|\s*\d+){3}\s*\|\s*(\d+)")
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")
COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
}
# Lines of warning that say nothing about a setting.
_HARMLESS = re.compile(r"Failed to open libibverbs|No plugin found|libnccl-net|Could not find:|plugin")
# Variables whose effect NCCL announces with "set by environment": their silence means that NCCL did not take the value.
ANNOUNCED = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_GRAPH_FILE", "NCCL_SHM_DISABLE",
)  # fmt: skip


def _named(text, names):
    return names[int(text)] if text.isdigit() and int(text) < len(names) else text


def parse(text):
    """Return what one rank's log says.

    :returns: ``{version, environment: {NAME: value}, transports: {"0>1": [via]}, choices: {collective: {bytes: c}},
        channels, threads, invalid: {NAME: text}, warnings: [text]}`` with ``c = {algorithm, protocol, channels}``; the
        outer ``channels`` is the communicator's number of them or None, ``threads`` a block's for Ring with LL or None.
    """
    found = {
        "version": None, "environment": {}, "transports": {}, "choices": {}, "channels": None, "threads": None,
        "invalid": {}, "warnings": [],
    }  # fmt: skip
    for line in (_STAMP.sub("", item) for item in text.splitlines()):
        if "NCCL" not in line:
            continue
        match = _VERSION.search(line)
        if match:
            found["version"] = match.group(1)
        match = _SET.search(line)
        if match:
            found["environment"][match.group(1)] = match.group(2)
        match = _CHANNEL.search(line)
        if match:
            ways = found["transports"].setdefault(f"{match.group(1)}>{match.group(2)}", [])
            if match.group(3) not in ways:
                ways.append(match.group(3))
        match = _TUNING.search(line)
        if match and match.group(1) in COLLECTIVES:
            kind, size, algorithm, protocol, low, high = match.groups()
            found["choices"].setdefault(COLLECTIVES[kind], {})[size] = {
                "algorithm": _named(algorithm, ALGORITHMS),
                "protocol": _named(protocol, PROTOCOLS),
                "channels": None if low is None else int(high) - int(low) + 1,
            }
        match = _TOTAL.search(line)
        if match:
            found["channels"] = int(match.group(1))
        match = _THREADS.search(line)
        if match:
            # Rows for algorithms without the protocol say 0.
            found["threads"] = found["threads"] or int(match.group(1)) or None
        match = _INVALID.search(line)
        if match:
            found["invalid"][match.group(2)] = match.group(1)
        match = _WARN.search(line)
        if match and match.group(1) and not _HARMLESS.search(line) and match.group(1) not in found["warnings"]:
            found["warnings"].append(match.group(1).strip())
    return found


def merge(logs):
    """Return one dict for all ranks' parsed logs: the first's choices, everybody's transports and warnings."""
    logs = [item for item in logs if item]
    whole = parse("")
    for item in logs:
        for key in ("version", "channels", "threads"):
            whole[key] = whole[key] or item[key]
        for key in ("environment", "transports", "choices", "invalid"):
            whole[key] = {**item[key], **whole[key]}
        whole["warnings"] += [text for text in item["warnings"] if text not in whole["warnings"]]
    return whole


def choice(log, collective, sizes):
    """Return what NCCL chose for a collective of one of these sizes in bytes, or None."""
    table = log["choices"].get(collective, {})
    return next((table[str(size)] for size in sizes if str(size) in table), None)


def ignored(variables, log):
    """Return ``{NAME: words}`` of the variables that NCCL did not take as asked, or that had not the asked effect.

    A name of which NCCL says nothing counts only where it announces what it takes (:data:`ANNOUNCED`).
    """
    found = {}
    for name, asked in variables.items():
        taken = log["environment"].get(name)
        if name in log["invalid"]:
            found[name] = f"is not taken: {log['invalid'][name]}"
        elif taken is None:
            if name in ANNOUNCED:
                found[name] = "is ignored by NCCL in silence"
        elif taken.strip().lower() != asked.strip().lower() and not _same_number(taken, asked):
            found[name] = f"is taken as {taken!r}"
        else:
            effect = _without_effect(name, asked, log)
            if effect:
                found[name] = f"has not the effect that was asked for: {effect}"
    return found


def _without_effect(name, asked, log):
    """Return what NCCL's log shows instead of a value that it announced, or None where that is as asked."""
    number = int(asked, 0) if _same_number(asked, asked) else None
    channels, threads = log["channels"], log["threads"]
    if name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS") and channels and number:
        wrong = channels < number if "_MIN_" in name else channels > number
        return f"the communicator has {channels} channels" if wrong else None
    if name == "NCCL_NTHREADS" and threads and number and threads != number:
        return f"a block has {threads} threads"
    if name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") and number:
        ways = sorted({way for found in log["transports"].values() for way in found if way.startswith(name[5:8])})
        return f"ranks are connected by {', '.join(ways)}" if ways else None
    if name in ("NCCL_ALGO", "NCCL_PROTO") and asked and not set(asked) & set(":;^"):
        key = {"NCCL_ALGO": "algorithm", "NCCL_PROTO": "protocol"}[name]
        chosen = {item[key] for table in log["choices"].values() for item in table.values()}
        words = {word.lower() for word in asked.split(",")}
        others = sorted(item for item in chosen if item.replace("_", "").lower() not in words)
        return f"NCCL chose {', '.join(others)}" if others else None
    return None


def _same_number(one, other):
    try:
        return int(one, 0) == int(other, 0)
    except ValueError:
        return False
