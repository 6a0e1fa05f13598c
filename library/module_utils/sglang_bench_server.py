"""What the server itself says about a run: best effort, and what could not be had is named."""

from __future__ import annotations

import re
import statistics
import threading

LINE = re.compile(r"^sglang:(\w+?)(?:\{[^}]*\})? ([-+0-9.eE]+)$", re.M)
COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_retractions_total",
    "num_retracted_requests_total",
    "queue_time_seconds_sum",
    "queue_time_seconds_count",
)
GAUGES = ("num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate", "gen_throughput", "spec_accept_length")
# Shares and lengths, of which several label sets (ranks of the server) have a mean; all else adds up.
MEANS = ("token_usage", "cache_hit_rate", "spec_accept_length")
INFO = ("last_gen_throughput", "avg_spec_accept_length")
DERIVED = ("accept_length", "cache_hit_rate", "queue_max", "queue_ms_mean", "running_max", "gen_throughput")
EVERY = 2.0  # seconds between two looks at the gauges during a level


def parse_metrics(text):
    """Return ``{name: sum over all label sets, mean of MEANS}`` of SGLang's own series in a Prometheus text."""
    found = {}
    for name, value in LINE.findall(text):
        found.setdefault(name, []).append(float(value))
    return {name: statistics.fmean(values) if name in MEANS else sum(values) for name, values in found.items()}


def snapshot(get, url, patience=5.0):
    """Return ``{metrics, info, missing}`` of a server at this moment.

    :param get: ``get(url, timeout=...)`` as in ``requests``.
    :param url: base URL.
    :param patience: seconds to wait for each answer; with none left nothing is asked.
    """
    out = {"metrics": {}, "info": {}, "missing": []}
    if patience <= 0:
        out["missing"].append("metrics and server_info: no time was left")
        return out
    try:
        response = get(url + "/metrics", timeout=patience)
        if response.status_code == 200:
            out["metrics"] = parse_metrics(response.text)
        else:
            out["missing"].append(f"metrics: HTTP {response.status_code} (the server needs --enable-metrics)")
    except OSError as error:
        out["missing"].append(f"metrics: {type(error).__name__}")
    try:
        response = get(url + "/get_server_info", timeout=patience)
        if response.status_code == 200:
            info = response.json()
            state = (info.get("internal_states") or [{}])[0]
            out["info"] = {key: state[key] for key in INFO if state.get(key) is not None}
            out["info"]["version"] = info.get("version")
        else:
            out["missing"].append(f"server_info: HTTP {response.status_code}")
    except (OSError, ValueError, AttributeError) as error:
        out["missing"].append(f"server_info: {type(error).__name__}")
    return out


def difference(before, after, samples=()):
    """Return the server's figures between two snapshots: counters as differences, gauges and info as they stand.

    :param samples: gauges seen on the way, one dict each.
    ``derived`` has :data:`DERIVED`; each that could not be had is None and named in ``missing``.
    """
    old, new = before["metrics"], after["metrics"]
    out = {
        "counters": {key: round(new[key] - old.get(key, 0.0), 6) for key in COUNTERS if key in new},
        "gauges": {key: new[key] for key in GAUGES if key in new},
        "info": after["info"],
        "samples": len(samples),
        "missing": list(after["missing"]),
    }
    out["derived"], missing = _derived(out, samples)
    out["missing"] += missing
    return out


def _derived(seen, samples):
    counters, gauges, info = seen["counters"], seen["gauges"], seen["info"]
    out = dict.fromkeys(DERIVED)

    def series(name):
        return [sample[name] for sample in samples if name in sample]

    # A server without speculation reports 0 as gauge, or leaves the length out.
    lengths = [value for value in series("spec_accept_length") if value]
    lengths = lengths or [gauges.get("spec_accept_length") or info.get("avg_spec_accept_length") or 0.0]
    out["accept_length"] = round(statistics.fmean(lengths), 4) or None
    if counters.get("prompt_tokens_total") and "cached_tokens_total" in counters:
        out["cache_hit_rate"] = round(counters["cached_tokens_total"] / counters["prompt_tokens_total"], 4)
    if counters.get("queue_time_seconds_count"):
        mean = counters.get("queue_time_seconds_sum", 0.0) / counters["queue_time_seconds_count"]
        out["queue_ms_mean"] = round(1e3 * mean, 3)
    out["queue_max"] = max(series("num_queue_reqs"), default=None)
    out["running_max"] = max(series("num_running_reqs"), default=None)
    speeds = [value for value in series("gen_throughput") if value]
    out["gen_throughput"] = round(statistics.fmean(speeds), 2) if speeds else info.get("last_gen_throughput")
    why = {
        "accept_length": "the server speculates not, or does not say",
        "cache_hit_rate": "the server counts no prompt and cached tokens in /metrics",
        "queue_ms_mean": "the server has no queue times in /metrics",
        "gen_throughput": "neither /metrics nor server_info tells it",
    }
    short = f"the level was shorter than {EVERY:g} s, after which /metrics is looked at, or it has no such gauge"
    return out, [f"{name}: {why.get(name, short)}" for name in DERIVED if out[name] is None]


class Samples:
    """Looks at the gauges of ``/metrics`` every :data:`EVERY` seconds between enter and exit; then ``seen`` has them.

    The texts are read afterwards: while one is, nothing else in this process runs, and tokens would seem late.
    """

    def __init__(self, get, url):
        self.get, self.url, self.texts, self.seen = get, url, [], []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self.over.wait(EVERY):
            try:
                response = self.get(self.url + "/metrics", timeout=EVERY)
                if response.status_code != 200:
                    return  # without --enable-metrics there is nothing to look at
                self.texts.append(response.content)
            except OSError:
                continue  # a busy server may be late; the number of samples is in the result

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_exc):
        self.over.set()
        self.thread.join(EVERY + 1)
        for text in self.texts:
            values = parse_metrics(text.decode("utf-8", "replace"))
            self.seen.append({key: values[key] for key in GAUGES if key in values})


def answer(get, url, patience=5.0):
    """Return the JSON object at a URL, an empty dict where none comes."""
    try:
        response = get(url, timeout=patience)
        found = response.json() if response.status_code == 200 else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flush(post, url, patience=30.0):
    """Empty the server's prefix cache; returns ``{status, detail}`` for the record, status null without answer."""
    try:
        response = post(url + "/flush_cache", timeout=patience)
        return {"status": response.status_code, "detail": response.text.strip()[:200]}
    except OSError as error:
        return {"status": None, "detail": type(error).__name__}
