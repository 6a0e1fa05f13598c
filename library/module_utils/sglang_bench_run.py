"""One benchmark run from start to its result: probe, warm up, measure, summarise, write."""

from __future__ import annotations

import json
import os
import platform
import random
import tempfile
import time

from ansible.module_utils import sglang_bench_prompts as prompts
from ansible.module_utils import sglang_bench_stats as stats
from ansible.module_utils.sglang_bench_client import Client, clock
from ansible.module_utils.sglang_bench_server import difference, snapshot

SHORTEST = (12, 44)  # words of the two prompts that tell how the server counts; the second grows with the wanted length


class InputError(ValueError):
    """An input that cannot be measured with; the text names the input, the rule and the way out."""


def target(release, url, model):
    """Return ``(url, model)`` of the server: from ``launch.json`` of the release where they are not given.

    :raises InputError: neither tells an endpoint, or ``launch.json`` cannot be read.
    """
    launch = {}
    if release:
        path = os.path.join(release, "launch.json")
        try:
            with open(path, encoding="utf-8") as handle:
                launch = json.load(handle)
        except (OSError, ValueError) as error:
            if not url:
                raise InputError(
                    f"release must hold a readable launch.json: {path}: {error}. Build the release first, or give url."
                ) from None
    url = url or launch.get("endpoint")
    if not url:
        raise InputError(
            "release or url must name the server to measure: set release to a release directory, or url and model."
        )
    return url.rstrip("/"), model or launch.get("served_model_name") or "default"


def check(params):
    """Raise :class:`InputError` for numbers that make no run."""
    for name in ("requests", "concurrency", "input_tokens", "output_tokens"):
        if params[name] < 1:
            raise InputError(f"{name} must be at least 1, not {params[name]}.")
    if (params["warmup"] or 0) < 0:
        raise InputError(f"warmup must be 0 or more, not {params['warmup']}.")
    for name in ("timeout", "request_timeout"):
        if params[name] <= 0:
            raise InputError(f"{name} must be more than 0 seconds, not {params[name]}.")
    if not 0 <= params["max_failed"] <= 1:
        raise InputError(f"max_failed is a share from 0 to 1, not {params['max_failed']}: 0.1 allows one of ten.")
    try:
        stats.check_limits(params["limits"])
    except ValueError as error:
        raise InputError(str(error)) from None


def measure(params):
    """Run the benchmark and return the result document (schema :data:`sglang_bench_stats.SCHEMA`).

    :param params: the module's parameters, checked, with ``url`` and ``model`` resolved.
    The document holds ``failure`` (text or None); when it is not None no throughput is given.
    """
    import requests

    began, started = clock(), time.time()
    api, asked, model = params["api"], params["output_tokens"], params["model"]
    seed = params["seed"] if params["seed"] is not None else random.SystemRandom().randrange(1 << 32)
    client = Client(
        params["url"] + prompts.PATHS[api],
        api,
        asked,
        params["ignore_eos"],
        params["request_timeout"],
        began + params["timeout"],
        params["api_key"],
        params["validate_certs"],
    )
    web = requests.Session()
    web.trust_env, web.verify = False, params["validate_certs"]
    if params["api_key"]:
        web.headers["Authorization"] = f"Bearer {params['api_key']}"

    def prepared(words, name, tokens=asked):
        text = prompts.prompt(words, seed, name)
        return client.prepare(prompts.body(api, model, text, tokens, params["temperature"], params["ignore_eos"]))

    try:
        short, long = SHORTEST[0], max(SHORTEST[1], params["input_tokens"])
        client.asked = 1
        probes, _cost = client.run([prepared(words, f"probe {words}", 1) for words in (short, long)], 2)
        client.asked = asked
        if all(item["kind"] == "timed_out" for item in probes):
            client.give_up(f"one token did not come either: {probes[0]['detail']}")
        told = [item["input_tokens"] if item["kind"] == "ok" else None for item in probes]
        words = prompts.fit((short, told[0]), (long, told[1]), params["input_tokens"])
        warmup = params["concurrency"] if params["warmup"] is None else params["warmup"]
        if warmup:
            client.run([prepared(words, f"warmup {n}") for n in range(warmup)], params["concurrency"])
        load = [prepared(words, f"request {n}") for n in range(params["requests"])]
        before = snapshot(web.get, params["url"], min(5.0, client.deadline - clock()))
        records, cost = client.run(load, params["concurrency"])
        server = difference(before, snapshot(web.get, params["url"], min(5.0, client.deadline - clock())))
    finally:
        client.close()
        web.close()
    tally = stats.counts(records)
    failure = stats.failure_text(records, tally, params["max_failed"])
    numbers = stats.metrics(records)
    own = stats.client(cost)
    flags = stats.flags(numbers, tally, own, params)
    if failure:
        numbers = dict.fromkeys(numbers)
    if None in told:
        flags.append("prompt_length_not_calibrated")
    sent = [item["sent"] for item in records if item["sent"] is not None]
    keys = (
        "api",
        "requests",
        "concurrency",
        "input_tokens",
        "output_tokens",
        "request_timeout",
        "timeout",
        "ignore_eos",
        "temperature",
    )
    return {
        "schema": stats.SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "run": params["run"],
        "variant": params["variant"],
        "release": os.path.basename(params["release"].rstrip("/")) if params["release"] else None,
        "endpoint": params["url"],
        "model": model,
        "workload": {**{key: params[key] for key in keys}, "warmup": warmup, "seed": seed, "words": words},
        "prompt_length": "assumed one token a word" if None in told else "calibrated with the server's own count",
        "definitions": stats.DEFINITIONS,
        "metrics": numbers,
        "counts": tally,
        "flags": flags,
        "failure": failure,
        "findings": stats.findings(numbers, flags, failure, stats.check_limits(params["limits"]), own),
        "client": {**own, "python": platform.python_version(), "requests": requests.__version__},
        "server": server,
        "requests": stats.compact(records, min(sent) if sent else 0.0),
        "elapsed": round(clock() - began, 3),
    }


def write(document, directory):
    """Write the document to ``<directory>/bench-<UTC>-<run>.json`` by rename and return the path."""
    os.makedirs(directory, mode=0o755, exist_ok=True)
    stamp = document["time"].replace("-", "").replace(":", "")
    name = str((document["run"] or {}).get("id") or document["workload"]["seed"])
    name = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
    path = os.path.join(directory, f"bench-{stamp}-{name}.json")
    number = 1
    while os.path.exists(path):
        number += 1
        path = os.path.join(directory, f"bench-{stamp}-{name}-{number}.json")
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".bench-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"), allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def event(document, path):
    """Return the ledger's line for a run: everything but the raw records, which stay in the file at ``path``."""
    keys = ("run", "variant", "release", "workload", "metrics", "counts", "flags", "findings", "client", "server")
    return {"event": "run", "result": path, **{key: document[key] for key in keys}}
