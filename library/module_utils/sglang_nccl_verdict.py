"""What a trial means: findings, predicted time of a step, ranking."""

from __future__ import annotations

import re

from ansible.module_utils import sglang_nccl_log
from ansible.module_utils.sglang_findings import finding
from ansible.module_utils.sglang_nccl_plan import bus_bandwidth

RUNG = "probe"
# How much slower than the base a collective may be before it is said, as a factor.
THRESHOLD = 1.25
MODES = {"eager": "called directly", "graph": "captured in a CUDA graph"}
# Outcome: its rule, and what a variant does.
OUTCOMES = {
    "failed": ("probe-fails", "fails"),
    "wrong": ("probe-wrong", "gives wrong values"),
    "hung": ("probe-hangs", "hangs"),
    "slow": ("probe-too-slow", "is too slow for its limit"),
    "crashed": ("probe-crashes", "crashes"),
}


def describe(step):
    """Return a step in words."""
    tokens = f"{step['tokens']} token{'s' if step['tokens'] != 1 else ''}"
    return f"{step['collective']} for {step['phase']} of {tokens} ({step['bytes']} bytes)"


def place(where, plan):
    """Return in words where a trial stopped."""
    if not where or where["phase"] is None:
        return "before the first message"
    if where["step"] is None:
        return {"environment": "while the environment was set", "init": "while the communicator was made"}.get(
            where["phase"], "after the last collective"
        )
    return f"at {describe(plan['steps'][where['step']])}, {MODES[where['mode']]}"


def complete(trial, plan):
    """Add to a trial what follows from it: bus bandwidth and NCCL's choice for each step, predicted times."""
    for step in trial["steps"]:
        # NCCL 2.28 names what one rank puts in, or gets out of a reduce-scatter.
        whole = step["bytes"]
        sizes = (whole,) if step["collective"] in ("all_reduce", "broadcast") else (whole // plan["world"], whole)
        step["choice"] = sglang_nccl_log.choice(trial["log"], step["collective"], sizes)
        best = step["graph"] or step["eager"]
        step["busbw_gbs"] = (
            bus_bandwidth(step["collective"], step["bytes"], plan["world"], best["p50_us"]) if best else None
        )
    trial["predicted"] = predict(trial["steps"], plan)
    return trial


def predict(steps, plan):
    """Return the time that one step of the model spends in collectives, in milliseconds: ``{name: ms or None}``.

    ``decode`` and ``verify`` are replayed from a graph where the trial has graphs, ``verify_eager`` and ``prefill`` are
    called directly, as the server does it. ``prefill`` is its largest chunk, ``decode`` one token, ``decode_many`` the
    most streams.
    """

    def total(phase, mode, pick):
        counts, rows = plan["counts"][phase], {}
        for step in steps:
            if step["phase"] == phase:
                rows.setdefault(step["tokens"], {}).setdefault(step["collective"], step)
        if not rows:
            return None
        mine = rows[pick(rows)]
        figures = {kind: (step[mode] or step["eager"]) for kind, step in mine.items()}
        if figures.get("all_reduce") is None:
            return None
        return round(
            sum(count * figures[kind]["p50_us"] for kind, count in counts.items() if figures.get(kind)) / 1e3, 3
        )

    return {
        "decode": total("decode", "graph", min), "decode_many": total("decode", "graph", max),
        "verify": total("verify", "graph", min), "verify_eager": total("verify", "eager", min),
        "prefill": total("prefill", "eager", max),
    }  # fmt: skip


def slower(trial, base, threshold):
    """Return ``[(step, mode, factor)]`` where a trial is slower than its base beyond the threshold, worst first.

    A prefill counts as it is called directly, the rest as it is replayed from a graph where both trials have one: a
    small message that is called directly takes what the CPU needs to launch it, 24 to 48 us for one and the same
    setting.
    """
    found = []
    for step, other in zip(trial["steps"], base["steps"]):
        mode = "graph" if step["phase"] != "prefill" and step["graph"] and other["graph"] else "eager"
        if step[mode] and other[mode] and step[mode]["p50_us"] > threshold * other[mode]["p50_us"]:
            found.append((step, mode, step[mode]["p50_us"] / other[mode]["p50_us"]))
    return sorted(found, key=lambda item: -item[2])


def _advice(trial, variables, host):
    """Return ``(evidence, advice)`` for a trial that failed or hung."""
    message = trial["message"]
    match = re.search(r"no algorithm/protocol available for function (\w+)", message, re.IGNORECASE)
    if match:
        return message, f"leave {match.group(1)} an algorithm: NCCL_ALGO='ring;allreduce:tree', or unset"
    match = re.search(r"Unrecognized element token \"([^\"]*)\"", message)
    if match:
        named = [name for name in ("NCCL_ALGO", "NCCL_PROTO") if match.group(1) in variables.get(name, "")]
        return message, f"correct {' or '.join(named) or 'the list'}: NCCL knows no {match.group(1)!r}"
    if trial["outcome"] == "slow":
        advice = "give NCCL more channels and larger buffers; for figures all the same, raise sglang_probe_limit"
        return f"{message}; all values had been right", advice
    if trial["outcome"] == "hung":
        if variables.get("NCCL_P2P_DISABLE") == "1":
            return message, "peer-to-peer is off here already: give NCCL more channels and larger buffers"
        advice = (
            "GPUs that cannot write to each other do this: turn off the IOMMU (iommu=off, or iommu=pt) or ACS on the "
            "bridges between them, or set NCCL_P2P_DISABLE=1"
        )
        return "; ".join([message, *host]), advice
    if trial["outcome"] == "wrong":
        return message, "LL128 over PCIe does this: leave NCCL_PROTO unset, or without LL128"
    return message, "read the log that the result names"


def judge(trial, setting, plan, base=None, threshold=THRESHOLD, host=(), exercised=True):
    """Return the findings of one trial.

    :param trial: after :func:`complete`.
    :param setting: ``{name, variables}``.
    :param base: the trial to compare with, or None.
    :param host: what the host says about IOMMU and ACS, as texts.
    :param exercised: whether this was NCCL.
    """
    name, found = setting["name"], []
    if trial["outcome"] != "ok":
        seen, advice = _advice(trial, setting["variables"], host)
        rule, verb = OUTCOMES[trial["outcome"]]
        ranks = f", {len(trial['failed_ranks'])} of {plan['world']} ranks" if trial["failed_ranks"] else ""
        message = f"variant {name} {verb} {place(trial['where'], plan)}{ranks}"
        found.append(finding(RUNG, rule, "error", message, seen, advice))
    if trial["stuck"]:
        found.append(
            finding(RUNG, "probe-left", "error", f"{trial['stuck']} processes of the probe could not be killed",
                    f"variant {name}; they wait for the driver",
                    "look for Xid in the kernel log; a reboot may be needed")
        )  # fmt: skip
    # Times of gloo say nothing about NCCL.
    if exercised and base is not None and trial["outcome"] == base["outcome"] == "ok":
        phases = {}
        for step, mode, factor in slower(trial, base, threshold):
            phases.setdefault(step["phase"], (step, mode, factor))
        for step, mode, factor in phases.values():
            found.append(
                finding(RUNG, "probe-slower", "warning",
                        f"variant {name} is {factor:.1f} times as slow as the base at {step['phase']}",
                        f"{describe(step)}, {MODES[mode]}: {step[mode]['p50_us']} us", "know why before it serves")
            )  # fmt: skip
    if exercised and trial["log"]["version"]:
        for variable, what in sorted(sglang_nccl_log.ignored(setting["variables"], trial["log"]).items()):
            asked = setting["variables"][variable]
            found.append(
                finding(RUNG, "probe-ignored", "warning", f"variant {name}: {variable} {what}",
                        f"asked for {asked!r}, NCCL {trial['log']['version']}", "correct the value, or leave it out")
            )  # fmt: skip
    kept = {}
    for event in trial["ranks"].values():
        kept.update(
            (key, event["env"].get(key))
            for key, value in setting["variables"].items()
            if event["env"].get(key) != value
        )
    for variable, value in sorted(kept.items()):
        found.append(
            finding(RUNG, "probe-environment", "warning",
                    f"variant {name}: {variable} had another value already", value,
                    "take it out of sglang_server_env, or out of the variant")
        )  # fmt: skip
    return found


def ranking(rows):
    """Return ``[{name, outcome, predicted, ...}]`` ordered: what works by predicted decode time, then what does not."""

    def key(row):
        value = row["predicted"].get("decode")
        return row["outcome"] != "ok", value is None, value or 0.0, row["name"]

    return sorted(rows, key=key)


def table(rows):
    """Return a ranking as text for a terminal."""
    columns = ("decode", "decode_many", "verify", "verify_eager", "prefill")
    heads = ("decode 1", "many", "verify", "eager", "prefill")
    lines = [
        f"{'variant':<24}{'verdict':<9}" + "".join(f"{head:>10}" for head in heads) + "   ms in collectives, one step"
    ]
    for row in rows:
        cells = "".join(
            f"{row['predicted'][name]:>10.2f}" if row["predicted"].get(name) is not None else f"{'-':>10}"
            for name in columns
        )
        notes, real = [row["note"]] if row.get("note") else [], row.get("measured")
        if real:
            notes.append(f"a server took {real['tpot_ms_p50']:.1f} ms a token with {real['concurrency']} streams")
        lines.append(f"{row['name']:<24}{row['outcome']:<9}{cells}   {'; '.join(notes)}".rstrip())
    return "\n".join(lines)
