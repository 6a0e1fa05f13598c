"""Write the past of a deployment that never was: ledger, manifests, raw results; for tests and timings of reports."""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import random

BEGIN = datetime.datetime(2026, 1, 5, 3, 0, 0)
VARIANTS = {
    "baseline": 82.0,
    "fewchan": 84.5,
    "fusion": 88.0,
    "fewchan_fusion": 91.5,
    "eagle3": 57.0,
    "ngram": 41.0,
    "manychan": 81.0,
    "pcie_ipc": 96.0,
}
FINGERPRINT = {
    "schema": 1,
    "gpu_names": ["NVIDIA RTX PRO 6000 Blackwell"] * 8,
    "gpu_count": 8,
    "driver": "580.95.05",
    "power_limit_w": [600] * 8,
    "nccl_version": "2.28.9",
    "engine_version": "0.5.20",
    "engine_digest": "e1",
    "model_digest": "m1",
    "cpu": "64 x EPYC",
    "client_version": 2,
    "digest": "f00dfeed0123",
}
LOADS = (1, 4, 16, 64)


def release_of(variant, number=0):
    """Return the id of a variant's release."""
    digest = hashlib.sha256(f"{variant} {number}".encode()).hexdigest()[:12]
    stamp = (BEGIN + datetime.timedelta(hours=number)).strftime("%Y%m%dT%H%M%SZ")
    return f"{stamp}-{variant}-{digest}"


def manifest(variant, release, state="retired", summary=None):
    """Return the manifest of a release."""
    nccl = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", **({"NCCL_MAX_NCHANNELS": "2"} if "fewchan" in variant else {})}
    args = {"tp-size": 8, **({"enable-flashinfer-allreduce-fusion": True} if "fusion" in variant else {})}
    record = {
        "variant": {
            "name": variant,
            "summary": summary or f"the variant {variant}",
            "nccl": nccl,
            "env": {},
            "args": args,
            "patches": ["flashinfer_sm120_gate"] if "fusion" in variant else [],
        },
        "engine": {"version": "0.5.20", "id": "0.5.20-abc", "python": "/opt/sglang/engine/bin/python3"},
        "model": {"path": "/models/kimi", "fingerprint": "m" * 64},
        "findings": [],
    }
    return {
        "schema": 1,
        "id": release,
        "variant": variant,
        "digest": release.rsplit("-", 1)[1],
        "state": state,
        "created": "2026-01-05T03:00:00.000Z",
        "run": "r",
        "record": record,
        "files": {"count": 1, "bytes": 1, "sha256": "x"},
        "history": [],
    }


def run_event(root, variant, number, load, moment, chance, fingerprint=FINGERPRINT):
    """Return the ledger's event of one benchmark run."""
    speed = VARIANTS.get(variant, 80.0) * chance.gauss(1, 0.012)
    total = speed * load / (1 + load / 40)
    release, run = release_of(variant), f"{moment:%Y%m%dT%H%M%SZ}-{number:06x}"
    ttft, tpot = 120 * (1 + load / 30) * chance.gauss(1, 0.03), 1000 / speed * (1 + load / 40)
    metrics = {
        "output_tok_s": round(total, 3),
        "decode_tok_s_p50": round(1000 / tpot, 3),
        "decode_tok_s_mean": round(1000 / tpot, 3),
        "ttft_ms_p50": round(ttft, 3),
        "ttft_ms_p99": round(2 * ttft, 3),
        "tpot_ms_p50": round(tpot, 4),
        "tpot_ms_p99": round(1.3 * tpot, 4),
        "request_s": round(total / 256, 4),
        "concurrency_effective": load,
    }
    workload = {
        "api": "chat",
        "requests": 64,
        "concurrency": load,
        "input_tokens": 512,
        "output_tokens": 256,
        "ignore_eos": True,
        "temperature": 0.0,
        "warmup": load,
        "seed": number,
    }
    return {
        "event": "run",
        "run": run,
        "variant": variant,
        "release": release,
        "workload": workload,
        "metrics": metrics,
        "workload_digest": f"load{load:08d}",
        "fingerprint": fingerprint,
        "valid": True,
        "findings": [],
        "flags": [],
        "counts": {"requested": 64, "completed": 64, "failed": 0},
        "result": f"{root}/releases/{release}/results/bench-{moment:%Y%m%dT%H%M%SZ}-{run}.json",
    }


def raw_result(event, chance, requests=64):
    """Return the raw result file of a run, of the format with the records inside."""
    metrics = event["metrics"]
    records = []
    for index in range(requests):
        first = metrics["ttft_ms_p50"] * abs(chance.gauss(1, 0.25))
        step = metrics["tpot_ms_p50"] * abs(chance.gauss(1, 0.05))
        times = [round(first + step * token, 3) for token in range(8)]
        records.append({"index": index, "kind": "ok", "tokens": 8, "event_ms": times})
    return {"schema": 1, "requests": records}


def write_root(root, runs, raw=40, seed=1, summary=None):
    """Write a deployment's past: ``runs`` benchmark runs, the last ``raw`` of them with raw results.

    Return the number of ledger lines.
    """
    root, chance = pathlib.Path(root), random.Random(seed)
    for variant in VARIANTS:
        release = release_of(variant)
        directory = root / "releases" / release
        (directory / "results").mkdir(parents=True)
        state = "promoted" if variant == "fewchan_fusion" else "retired"
        (directory / "manifest.json").write_text(json.dumps(manifest(variant, release, state, summary)))
    (root / "current").symlink_to(f"releases/{release_of('fewchan_fusion')}")
    lines, names = [], list(VARIANTS)
    for number in range(runs):
        moment = BEGIN + datetime.timedelta(minutes=17 * number)
        variant, load = names[number % len(names)], LOADS[number // len(names) % len(LOADS)]
        event = run_event(root, variant, number, load, moment, chance)
        common = {"schema": 1, "user": "operator", "controller": "control", "run": event["run"]}
        named = {"variant": variant, "release": event["release"]}
        stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.000Z"
        if number % 8 < 4:
            lines.append({**common, **named, "time": stamp, "event": "activated", "previous": None, "reason": ""})
        lines.append({**common, "time": stamp, **event})
        if number % 8 == 2:
            lines.append({**common, **named, "time": stamp, "event": "promoted", "reason": ""})
        elif number % 8 == 4:
            reason = "1 finding(s) refuse this release: decode 57 tok/s"
            lines.append({**common, **named, "time": stamp, "event": "rejected", "reason": reason, "rung": "benchmark"})
        if number >= runs - raw:
            pathlib.Path(event["result"]).write_text(json.dumps(raw_result(event, chance)))
    (root / "ledger.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    return len(lines)
