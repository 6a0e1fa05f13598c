"""The script of faults: one JSON object, from the variable FAKE_SGLANG_SCRIPT (the text itself, or a file's path)."""

from __future__ import annotations

import json
import os
import random

PHASES = ("imports", "distributed", "weights", "kv_cache", "graph", "warmup")

# Seconds of each phase unless the script says otherwise: a whole start in about half a second.
DEFAULTS = {
    "seed": None,
    "phases": dict.fromkeys(PHASES, 0.05),
    "shards": 4,
    "graphs": 4,
    "crash": None,
    "hang": None,
    "die": None,
    "compile": None,
    "generation": {"mode": "answer", "after": 0, "text": None},
    "health": {"status": None, "from": 0, "seconds": None, "busy": False},
    "health_seconds": 0.1,
    "health_dead_seconds": 20.0,
    "token_seconds": 0.004,
    "accept_only": False,
    "ipv6_only": False,
    "served_model_name": None,
    "stop_seconds": 0.2,
    "ignore_term": False,
    "setsid": False,
    "orphans": False,
    "child_env": {},
    "accept_length": 0.0,
    "server_info": {},
    "ballast_mb": 0,
}


def load(environ=os.environ):
    """Return the script with every key of DEFAULTS present.

    :raises SystemExit: unknown key or phase, so that a misspelt fault is never a silent healthy start.
    """
    text = environ.get("FAKE_SGLANG_SCRIPT", "")
    if text and not text.lstrip().startswith("{"):
        with open(text, encoding="utf-8") as handle:
            text = handle.read()
    given = json.loads(text) if text else {}
    unknown = set(given) - set(DEFAULTS)
    unknown |= set(given.get("phases", {})) - set(PHASES)
    if unknown:
        raise SystemExit(f"fake sglang: unknown keys in FAKE_SGLANG_SCRIPT: {', '.join(sorted(unknown))}")
    script = dict(DEFAULTS, **given)
    for key in ("phases", "generation", "health"):
        script[key] = dict(DEFAULTS[key], **given.get(key, {}))
    return script


def seconds(script, phase, salt=0):
    """Return the length of a phase in seconds; a pair [low, high] is drawn from the seed, the same for one salt."""
    value = script["phases"][phase]
    if isinstance(value, list):
        return random.Random(f"{script['seed']}/{phase}/{salt}").uniform(*value)
    return value


def fault_lines(crash):
    """Return the lines that a crash writes: its own ``lines``, or the recorded log named by ``log``."""
    if crash.get("log"):
        path = crash["log"]
        if not os.path.isabs(path):
            path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "faults", path + ".log")
        with open(path, encoding="utf-8") as handle:
            return handle.read().splitlines()
    default = ["Scheduler hit an exception: Traceback (most recent call last):", "RuntimeError: scripted"]
    return crash.get("lines") or default
