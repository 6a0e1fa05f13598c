"""One benchmark run from start to its result document: probe, warm up, measure each level, summarise."""

from __future__ import annotations

import json
import os
import random
import time

from ansible.module_utils import sglang_bench_judge as judge
from ansible.module_utils import sglang_bench_prompts as prompts
from ansible.module_utils import sglang_bench_resolve as resolve
from ansible.module_utils import sglang_bench_server as server
from ansible.module_utils import sglang_bench_stats as stats
from ansible.module_utils import sglang_bench_workload as workload
from ansible.module_utils import sglang_nvidia
from ansible.module_utils.sglang_bench_client import Client, clock
from ansible.module_utils.sglang_bench_dataset import Prompts, load_tokenizer
from ansible.module_utils.sglang_bench_stream import OK
from ansible.module_utils.sglang_bench_workload import InputError
from ansible.module_utils.sglang_findings import finding
from ansible.module_utils.sglang_fingerprint import fingerprint

SHORTEST = (12, 44)  # words of the two prompts that tell how the server counts; the second grows with the wanted length
PATIENCE = 5.0  # seconds for an answer about the server's own figures


def target(release, url, model):
    """Return ``(url, model, model path)`` of the server: from ``launch.json`` of the release where they are not given.

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
    argv = launch.get("argv") or []
    flag = "--model-path"
    files = argv[argv.index(flag) + 1] if flag in argv[:-1] else None
    return url.rstrip("/"), model or launch.get("served_model_name") or "default", files


class Run:
    """The connections, prompts and limits that the levels of one run share.

    :param params: what :func:`sglang_bench_workload.resolve` returns, with ``url``, ``model`` and ``tokenizer``.
    :raises InputError: the file of prompts holds none.
    """

    def __init__(self, params):
        import requests

        self.params, self.began = params, clock()
        drawn = random.SystemRandom().randrange(1 << 32)
        self.seed = params["seed"] if params["seed"] is not None else drawn
        self.asked, self.api = params["output_tokens"], params["api"]
        count = None if params["prompts_file"] else load_tokenizer(params["tokenizer"])
        self.prompts = Prompts(self.seed, params["prompts_file"], params["unique_prompts"], count)
        self.warmup = params["warmup"]
        if self.warmup is None:
            self.warmup = params["concurrency"] if params["workload"] in ("concurrency", "decode") else 1
            if params["workload"] == "sweep":
                self.warmup = max(params["levels"])
        self.web = requests.Session()
        self.web.trust_env, self.web.verify = False, params["validate_certs"]
        if params["api_key"]:
            self.web.headers["Authorization"] = f"Bearer {params['api_key']}"
        self.client = Client(
            params["url"] + prompts.PATHS[self.api],
            self.api,
            self.asked,
            params["ignore_eos"],
            params["request_timeout"],
            self.began + params["timeout"],
            params["api_key"],
            params["validate_certs"],
        )

    def close(self):
        """Close every connection."""
        self.client.close()
        self.web.close()

    def left(self):
        """Return the seconds to wait for an answer about the server."""
        return min(PATIENCE, self.client.deadline - clock())

    def prepared(self, text, tokens):
        """Return one request ready to send."""
        params = self.params
        body = prompts.body(self.api, params["model"], text, tokens, params["temperature"], params["ignore_eos"])
        return self.client.prepare(body)

    def fit(self):
        """Ask the server how it counts and how much it holds; sets the length of the prompts.

        :raises InputError: long_context without a length, and the server does not tell its context.
        """
        params, client = self.params, self.client
        if not params["input_tokens"]:
            url, left = params["url"], max(0.1, self.left())
            models = server.answer(self.web.get, url + "/v1/models", left)
            info = server.answer(self.web.get, url + "/get_server_info", left)
            params["input_tokens"] = workload.context(models, info, self.asked)
        short = SHORTEST[0]
        long = max(SHORTEST[1], min(params["input_tokens"], 2000))
        client.asked = 1
        sent = [self.prepared(self.prompts.probe(words), 1) for words in (short, long)]
        probes, _cost = client.run(sent, 2)
        client.asked = self.asked
        if all(item["kind"] == "timed_out" for item in probes):
            client.give_up(f"one token did not come either: {probes[0]['detail']}")
        told = [item["input_tokens"] if item["kind"] == "ok" else None for item in probes]
        self.prompts.fit(params["input_tokens"], (short, told[0]), (long, told[1]))
        return None in told

    def warm(self):
        """Send the unmeasured requests, which also open the connections."""
        if self.warmup:
            sent = [self.prepared(self.prompts.text(f"warmup {n}", -1 - n), self.asked) for n in range(self.warmup)]
            self.client.run(sent, self.warmup)

    def level(self, load, first):
        """Measure one level of load.

        :param load: entry of :func:`sglang_bench_workload.levels`. :param first: requests of the levels before.
        :returns: ``(entry of levels, records)``.
        """
        params, get, url = self.params, self.web.get, self.params["url"]
        count = load["requests"]
        texts = [self.prompts.text(f"request {first + n}", first + n) for n in range(count)]
        sent = [self.prepared(text, self.asked) for text in texts]
        due = workload.arrivals(count, load["rate"], params["burstiness"], self.seed) if load["rate"] else None
        flushed = server.flush(self.web.post, url) if params["flush_cache"] else None
        before = server.snapshot(get, url, self.left())
        with server.Samples(get, url) as samples:
            records, cost = self.client.run(sent, load["concurrency"], due)
        after = server.snapshot(get, url, self.left())
        tally, numbers = stats.counts(records), stats.metrics(records)
        failure = judge.failure_text(records, tally, params["max_failed"])
        if failure and params["workload"] == "sweep":
            failure = f"concurrency {load['concurrency']}: {failure}"
        unresolved = resolve.share([item for item in records if item["kind"] == OK])
        own = stats.client(cost, sum(item["tokens"] or 0 for item in records), unresolved)
        remarks = judge.flags(numbers, tally, own, {**params, **load})
        entry = {
            **load,
            "metrics": dict.fromkeys(numbers) if failure else numbers,
            "counts": tally,
            "flags": remarks,
            "notes": {flag: text for flag, text in judge.notes(records, tally, own).items() if flag in remarks},
            "failure": failure,
            "client": own,
            "server": server.difference(before, after, samples.seen),
            "cache_flush": flushed,
        }
        return entry, records


def _measured(run, document):
    """Run every level; fills ``levels`` and what all of them share, returns the raw records."""
    uncounted, raw, first = run.fit(), [], 0
    run.warm()
    with sglang_nvidia.Watch(document["gpu"]) as watch:
        for load in workload.levels(run.params):
            entry, records = run.level(load, first)
            first += load["requests"]
            document["levels"].append(entry)
            raw += stats.compact(records, load["level"])
            if run.client.given_up:
                break
    document["gpu"] = watch.result
    document["flags"] = list(dict.fromkeys(flag for entry in document["levels"] for flag in entry["flags"]))
    if uncounted and not run.prompts.texts:
        document["flags"].append("prompt_length_not_calibrated")
    return raw


def measure(params):
    """Run the benchmark and return ``(document, raw records)``; the document is described in docs/benchmark.md.

    :param params: resolved parameters with ``url``, ``model`` and ``tokenizer``.
    The document holds ``failure`` (text or None); when it is not None no throughput is given.
    :raises InputError: what was asked cannot be sent to this server.
    """
    import requests

    started, gpus = time.time(), sglang_nvidia.cards()
    run = Run(params)
    document = {
        "schema": stats.SCHEMA,
        "client_version": stats.CLIENT_VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "run": params["run"],
        "variant": params["variant"],
        "release": os.path.basename(params["release"].rstrip("/")) if params["release"] else None,
        "endpoint": params["url"],
        "model": params["model"],
        "definitions": stats.DEFINITIONS,
        "levels": [],
        "gpu": gpus,
    }
    try:
        raw = _measured(run, document)
    finally:
        run.close()
    levels = document["levels"]
    speeds = [entry["metrics"]["output_tok_s"] or -1.0 for entry in levels]
    best = speeds.index(max(speeds))
    xid, limits = document["gpu"]["xid"], stats.check_limits(params["limits"])
    client = {"client_version": stats.CLIENT_VERSION, "requests": requests.__version__}
    document.update(
        workload=workload.describe(params, run.seed, run.prompts.describe(), run.warmup),
        headline=best,
        metrics=levels[best]["metrics"],
        client=levels[best]["client"],
        server=levels[best]["server"],
        counts={key: sum(entry["counts"][key] for entry in levels) for key in stats.COUNTS},
        failure=next((entry["failure"] for entry in levels if entry["failure"]), None),
        cache_flush=levels[0]["cache_flush"],
        fingerprint=fingerprint(params["release"], client, gpus, levels[best]["server"]["info"].get("version")),
        elapsed=round(clock() - run.began, 3),
    )
    document["workload_digest"] = workload.digest(document["workload"])
    seen = {flag: text for entry in reversed(levels) for flag, text in entry["notes"].items()}
    document["findings"] = judge.findings(document["metrics"], document["flags"], document["failure"], limits, seen)
    if xid:
        text = "; ".join(item["text"] for item in xid[:3])
        advice = "the figures are not used; look at the card, then measure again"
        message = f"the driver reported {len(xid)} Xid errors during the run"
        document["findings"].append(finding("benchmark", "xid", "error", message, text, advice))
    document["valid"] = not (document["failure"] or xid)
    return document, raw
