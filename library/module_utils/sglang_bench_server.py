"""What the server itself says about a run: best effort, and what could not be had is named."""

from __future__ import annotations

import re

LINE = re.compile(r"^sglang:(\w+?)(?:\{[^}]*\})? ([-+0-9.eE]+)$", re.M)
COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_retractions_total",
)
GAUGES = ("num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate", "gen_throughput", "spec_accept_length")
INFO = ("last_gen_throughput", "avg_spec_accept_length")


def parse_metrics(text):
    """Return ``{name: sum over all label sets}`` of SGLang's own series in a Prometheus text."""
    out = {}
    for name, value in LINE.findall(text):
        out[name] = out.get(name, 0.0) + float(value)
    return out


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


def difference(before, after):
    """Return the server's figures between two snapshots: counters as differences, gauges and info as they stand."""
    old, new = before["metrics"], after["metrics"]
    return {
        "counters": {key: new[key] - old.get(key, 0.0) for key in COUNTERS if key in new},
        "gauges": {key: new[key] for key in GAUGES if key in new},
        "info": after["info"],
        "missing": after["missing"],
    }
