"""Runs and scores as the ledger gives them."""

from __future__ import annotations

import json

RUN = {"id": "r1", "user": "operator", "controller": "ops1"}
CANDIDATE, BASELINE = ("20260101T000000Z-fewchan-000000000000", "20260101T000000Z-baseline-000000000000")
FINGERPRINT = {
    "gpu_names": ["NVIDIA RTX PRO 6000 Blackwell"] * 8,
    "gpu_count": 8,
    "driver": "590.10",
    "power_limit_w": [600.0] * 8,
    "nccl_version": "2.28.9",
    "nccl_path": "/opt/engine/libnccl.so.2",
    "engine_version": "0.5.9",
    "engine_digest": "e" * 12,
    "model_digest": "m" * 12,
    "cpu": "2 x EPYC",
    "client_version": 2,
}


def run(variant, decode, ttft=100.0, start=1, **changes):
    """Return one run; ``changes`` replace its fields, ``fingerprint`` is merged."""
    fingerprint = {**FINGERPRINT, **changes.pop("fingerprint", {})}
    return {
        "release": f"20260101T000000Z-{variant}-000000000000",
        "variant": variant,
        "time": "2026-01-01T00:00:00.000Z",
        "run": "r1",
        "start": start,
        "result": f"/opt/sglang/{variant}-{decode}.json",
        "valid": True,
        "failure": None,
        "flags": [],
        "workload": {},
        "workload_digest": "w1",
        "fingerprint": fingerprint,
        "metrics": {"decode_tok_s_p50": decode, "ttft_ms_p50": ttft},
        "derived": {},
        **changes,
    }


def runs(variant, decodes, ttfts=None, start=1, **changes):
    """Return one run for each decode speed."""
    ttfts = ttfts or [100.0 + 0.1 * number for number in range(len(decodes))]
    return [run(variant, decode, ttft, start, **changes) for decode, ttft in zip(decodes, ttfts)]


def scores(shares, asked=100, start=1, digest="q1"):
    """Return one score for each share of right answers."""
    return [
        {"start": start, "asked": asked, "right": round(share * asked), "questions_digest": digest} for share in shares
    ]


def ledger(root, events):
    """Write a ledger as the modules do."""
    lines = [json.dumps({"schema": 1, "time": "t", "release": None, "variant": None, **event}) for event in events]
    root.mkdir(exist_ok=True)
    (root / "ledger.jsonl").write_text("\n".join(lines) + "\n")


def measured(variant, speed, run_id="r0", **changes):
    """Return the ledger's line of a run."""
    item = run(variant, speed, **changes)
    server = {"derived": {"accept_length": item.pop("accept", None)}}
    return {**item, "event": "run", "run": run_id, "server": server, "elapsed": 2.5}
