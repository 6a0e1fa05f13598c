"""What is sent: the workloads, their own figures, and the levels of load that one run consists of."""

from __future__ import annotations

import hashlib
import json
import os
import random

from ansible.module_utils import sglang_bench_stats as stats

# Figures of a workload where the operator gives none (null or 0). Input 0 is as much as the server's context holds.
PRESETS = {
    "concurrency": {"requests": 32, "concurrency": 8, "input_tokens": 512, "output_tokens": 128},
    "rate": {"requests": 64, "concurrency": 256, "input_tokens": 512, "output_tokens": 128},
    "sweep": {"requests": 16, "concurrency": None, "input_tokens": 512, "output_tokens": 128},
    "decode": {"requests": 4, "concurrency": 1, "input_tokens": 64, "output_tokens": 256},
    "prefill": {"requests": 8, "concurrency": 1, "input_tokens": 2048, "output_tokens": 1},
    "long_context": {"requests": 2, "concurrency": 1, "input_tokens": 0, "output_tokens": 64},
}
# What these workloads are: another figure would make another one of them.
FIXED = {"decode": {"concurrency": 1}, "prefill": {"output_tokens": 1}}
LONGEST = 32768  # prompt tokens of long_context where the server's context is longer
SPARE = 16  # tokens left free between a prompt that fills the context and its answer
# Time limits, and what is drawn in a run, do not make another load; the length that a context gives does.
NOT_THE_LOAD = ("seed", "timeout", "request_timeout")


class InputError(ValueError):
    """An input that cannot be measured with; the text names the input, the rule and the way out."""


def resolve(params):
    """Return the parameters with the figures of the workload in place of those that are null or 0.

    :raises InputError: a figure contradicts the workload or makes no run.
    """
    kind = params["workload"]
    out = dict(params)
    for name, value in PRESETS[kind].items():
        out[name] = params[name] or value
    for name, value in FIXED.get(kind, {}).items():
        if out[name] != value:
            raise InputError(
                f"{name} is {value} in the workload {kind}, not {out[name]}: leave it out, or measure another workload."
            )
    if kind == "decode" and not out["ignore_eos"]:
        raise InputError("ignore_eos must be true in the workload decode, so that every answer has its full length.")
    if kind == "sweep":
        out["concurrency"] = None  # it has levels instead
    out["levels"] = [int(level) for level in params["levels"] or []] if kind == "sweep" else []
    check(out)
    return out


def check(params):
    """Raise :class:`InputError` for numbers that make no run."""
    kind = params["workload"]
    least = {"requests": 1, "concurrency": 1, "input_tokens": 0 if kind == "long_context" else 1, "output_tokens": 1}
    for name, limit in least.items():
        if params[name] is not None and params[name] < limit:
            raise InputError(f"{name} must be at least {limit}, not {params[name]}.")
    if (params["warmup"] or 0) < 0:
        raise InputError(f"warmup must be 0 or more, not {params['warmup']}.")
    if kind == "sweep" and (not params["levels"] or min(params["levels"]) < 1):
        raise InputError(f"levels must be concurrencies of 1 or more, at least one, not {params['levels']}.")
    for name in ("timeout", "request_timeout") + (("rate", "burstiness") if kind == "rate" else ()):
        if params[name] <= 0:
            raise InputError(f"{name} must be more than 0, not {params[name]}.")
    if not 0 <= params["max_failed"] <= 1:
        raise InputError(f"max_failed is a share from 0 to 1, not {params['max_failed']}: 0.1 allows one of ten.")
    if params["prompts_file"] and not os.path.isfile(params["prompts_file"]):
        raise InputError(
            f"prompts_file must be a file on the measuring host: {params['prompts_file']} is none. Copy it there first."
        )
    try:
        stats.check_limits(params["limits"])
    except ValueError as error:
        raise InputError(str(error)) from None


def levels(params):
    """Return ``[{level, concurrency, rate, requests}]`` of resolved parameters; a sweep has several.

    A level of a sweep sends at least twice as many requests as it keeps in flight: with fewer it would be over before
    it had begun.
    """
    if params["workload"] != "sweep":
        rate = params["rate"] if params["workload"] == "rate" else None
        return [{"level": 0, "concurrency": params["concurrency"], "rate": rate, "requests": params["requests"]}]
    return [
        {"level": number, "concurrency": each, "rate": None, "requests": max(params["requests"], 2 * each)}
        for number, each in enumerate(params["levels"])
    ]


def arrivals(count, rate, burstiness, seed):
    """Return the seconds from the start at which ``count`` requests are due, the first at 0.

    Gaps are drawn from a gamma distribution with mean ``1 / rate`` and shape ``burstiness``: 1 is a Poisson process,
    less comes in bursts, more is steadier. Equal seeds give equal times.
    """
    rng = random.Random(f"{seed}/arrivals")
    out, now = [], 0.0
    for _ in range(count):
        out.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return out


def arrival_name(params):
    """Return what the arrivals of a workload are called in its record."""
    if params["workload"] != "rate":
        return "closed loop: the next request is sent when one is done"
    if params["burstiness"] == 1:
        return "Poisson"
    return f"gamma, burstiness {params['burstiness']:g} (1 is Poisson, less is burstier)"


def describe(params, seed, prompts, warmup):
    """Return ``workload`` of the result file."""
    keys = ("api", "requests", "concurrency", "levels", "input_tokens", "output_tokens", "request_timeout")
    keys += ("timeout", "ignore_eos", "temperature", "flush_cache")
    poisson = params["workload"] == "rate"
    return {
        "kind": params["workload"],
        **{key: params[key] for key in keys},
        "rate": params["rate"] if poisson else None,
        "burstiness": params["burstiness"] if poisson else None,
        "arrivals": arrival_name(params),
        "warmup": warmup,
        "seed": seed,
        "prompts": prompts,
    }


def digest(workload):
    """Return 12 hex digits over everything in a workload that determines the load it puts on a server."""
    load = {key: value for key, value in workload.items() if key not in NOT_THE_LOAD}
    load["prompts"] = {key: workload["prompts"][key] for key in ("source", "sha256", "unique")}
    return hashlib.sha256(json.dumps(load, sort_keys=True).encode()).hexdigest()[:12]


def context(models, info, output_tokens):
    """Return the prompt tokens of long_context: what the server can hold beside the answer, at most :data:`LONGEST`.

    :param models: answer of ``/v1/models``. :param info: answer of ``/get_server_info``; each may be empty.
    """
    limits = [model.get("max_model_len") for model in models.get("data") or [] if isinstance(model, dict)]
    limits.append(info.get("max_total_num_tokens"))
    state = (info.get("internal_states") or [{}])[0]
    limits.append((state.get("memory_usage") or {}).get("token_capacity"))
    known = [int(limit) for limit in limits if limit]
    if not known:
        raise InputError(
            "input_tokens must be given: the server tells neither max_model_len in /v1/models nor its token capacity."
        )
    room = min([*known, LONGEST + output_tokens + SPARE]) - output_tokens - SPARE
    if room < 1:
        raise InputError(
            f"output_tokens {output_tokens} leaves no room for a prompt in {min(known)} tokens of context."
        )
    return room
