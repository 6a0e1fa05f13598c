"""Search NCCL's settings on this host, and write down what was found as a variant."""

from __future__ import annotations

import json
import os
import time

from ansible.module_utils import sglang_nccl_search, sglang_nccl_verdict
from ansible.module_utils.sglang_findings import finding
from ansible.module_utils.sglang_nccl_session import ProbeError, Session, nccl

# A result that is closer to the base than this is no finding, even where repeated trials agree better.
NOISE = 0.03


def weights(profile):
    """Return the weights of a named profile, or of a dict of weights.

    :raises ProbeError: the name is not known, or no weight is above 0.
    """
    named = sglang_nccl_search.PROFILES
    try:
        found = named[profile] if isinstance(profile, str) else {name: float(profile[name]) for name in profile}
    except (KeyError, ValueError) as error:
        raise ProbeError(f"profile: one of {', '.join(named)}, or a dict of weights: {error}") from error
    unknown = set(found) - set(named["mixed"])
    if unknown or not any(value > 0 for value in found.values()) or any(value < 0 for value in found.values()):
        raise ProbeError(f"profile: weights of {', '.join(named['mixed'])}, one of them above 0; got {found}")
    return found


def tune(params):
    """Return the result of the module ``sglang_nccl_tune`` without ``elapsed``."""
    session = Session({**params, "settings": [], "reuse": False, "threshold": sglang_nccl_verdict.THRESHOLD})
    shares = weights(params["profile"])
    base = session.prepare(params["setting"])
    args, seen = params["setting"].get("args") or {}, {}
    with session.scratch() as scratch:
        # As several settings that share a worker: each trial sets its own variables.
        with session.workers([base, base], os.path.join(scratch, "0")) as workers:

            def measure(setting, effort):
                plan, budget = sglang_nccl_search.brief(base["plan"], shares, effort)
                item = session.prepare({**setting, "args": args})
                trial = session.trial(workers, item, plan, budget=budget)
                seen.update(nccl(trial) if trial["outcome"] == "ok" else {})
                return sglang_nccl_verdict.complete(trial, plan)

            search = sglang_nccl_search.Search(
                params["candidates"], params["setting"], shares, measure, params["trials"], time.monotonic,
                params["seconds"],
            )  # fmt: skip
            try:
                rows = search.run()
            except ValueError as error:
                raise ProbeError(f"setting: {error}; probe.yml says why") from error
    if search.stopped:
        advice = "look at prefill with probe.yml, tune from a faster variant, or for a profile without its slow phase"
        session.findings.append(
            finding("probe", "tune-brief", "warning", search.stopped, f"limit {params['limit']:g} s", advice)
        )
    best = next((row for row in rows if row["score"] is not None and row["effort"] == 2), None)
    found = {
        "rows": rows, "trials": search.done, "complete": not (search.over() or search.stopped),
        "findings": session.findings, "nccl": seen,
        "exercised": session.cuda, "beside": session.beside,
        "gpus": (session.machine.get("gpus") or "").strip().splitlines(),
    }  # fmt: skip
    noise = max(NOISE, search.noise())
    better = best is not None and best["score"] < 1 - noise
    found.update(noise=noise, spread=search.spread())
    found.update(best=best, better=better, table=table(rows), variant=entry(params, best, found) if better else {})
    return found


def table(rows, count=12):
    """Return the best rows as text."""
    lines = [f"{'score':>7}  {'verdict':<8} setting (1.0 is the base; 'brief' was measured briefly only)"]
    for row in rows[:count]:
        score = "-" if row["score"] is None else f"{row['score']:.3f}"
        brief = "" if row["effort"] == 2 else "  (brief)"
        lines.append(f"{score:>7}  {row['outcome']:<8} {row['name']}{brief}")
    return "\n".join(lines)


def entry(params, best, found):
    """Return a catalogue entry for the best setting, which claims what was measured and no more."""
    hosts = sorted({line.split(",")[0].strip() for line in found["gpus"]})
    where = f"{params['tp_size']} x {', '.join(hosts)}" if hosts else f"{params['tp_size']} CPU ranks over gloo"
    profile = params["profile"] if isinstance(params["profile"], str) else json.dumps(params["profile"], sort_keys=True)
    parts = []
    for name in ("decode", "decode_many", "verify", "prefill"):
        old, new = best["base"].get(name), best["predicted"].get(name)
        if old and new:
            alike = abs(new / old - 1) <= max(NOISE, found["spread"].get(name, 0.0))
            parts.append(f"{name} {old:.3f} to {new:.3f}" + (" (within the noise)" if alike else ""))
    return {
        f"tuned_{profile}" if isinstance(params["profile"], str) else "tuned_own": {
            "summary": f"Found by tune.yml for the profile {profile}",
            "purpose": "Less time in collectives, as the microbenchmark shows it; whether a server gains is not known.",
            "factor": "several NCCL variables at once",
            "nccl": best["variables"],
            "expect": {
                "effect": f"ms in collectives of a step, {params['setting']['name']} to this: {'; '.join(parts)}",
                "source": (
                    f"tune.yml on {where}, NCCL {found['nccl'].get('version') or 'not exercised'}, "
                    f"{found['trials']} trials, score {best['score']}, noise {found['noise']:.0%}"
                    f"{', beside a live server' if found['beside'] else ''}"
                ),
            },
            "rungs": ["lint", "precheck", "probe", "canary", "load", "verify", "benchmark"],
        }
    }
