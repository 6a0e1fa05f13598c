"""What a host knows of its past: ledger, releases (deleted ones as well), and the figures of single requests.

:func:`read` returns one dict, :func:`pack` and :func:`unpack` carry it as text. Nothing is written, and what is read
holds no secret: the ledger and manifests were written without any, and of raw results only numbers are taken.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import zlib

from ansible.module_utils import sglang_ledger
from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.sglang_release_archive import result_path

SCHEMA = 1
# Requests that are taken of one run, evenly over its time; a distribution needs no more.
REQUESTS = 200
LEVEL = ("level", "concurrency", "rate", "failure")
LEVEL_METRICS = ("output_tok_s", "decode_tok_s_p50", "ttft_ms_p50", "tpot_ms_p50", "concurrency_effective")
# Of a run's event; what is left out is in the result file.
RUN_LEFT_OUT = ("findings", "client", "server", "gpu", "records")


def pack(history):
    """Return a history as text that survives every transport: JSON, compressed, base64."""
    data = json.dumps(history, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def unpack(text):
    """Return what :func:`pack` was given; :raises ValueError: the text is not a history of this schema."""
    try:
        history = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"this is no history: {error}") from None
    if not isinstance(history, dict) or history.get("schema") != SCHEMA:
        raise ValueError(f"this is no history of schema {SCHEMA}; run the same version of the project on both sides")
    return history


def read(root, raw):
    """Return ``{schema, root, current, events, releases, samples, raw, problems}`` of a deployment.

    :param root: directory of the deployment.
    :param raw: number of raw result files to read, the newest of each variant first; 0 for none.
    ``samples`` maps a run's ``result`` to ``{ttft_ms, tpot_ms}``, one figure a request. ``raw`` is
    ``{named, read, missing}``: result files that the ledger names, that were read, and that do not exist.
    """
    events, problems = sglang_ledger.read(root)
    manifests, troubles = store.list_releases(root)
    problems += troubles
    try:
        current = store.read_current(root)
    except store.ReleaseError as error:
        current = None
        problems.append(str(error))
    releases = {item["id"]: _release(item, False) for item in manifests}
    releases.update(
        {item["id"]: _release(item, True) for item in archived(root, problems) if item["id"] not in releases}
    )
    runs = [event for event in events if event["event"] == "run"]
    samples, counted = _samples(root, runs, raw, problems)
    return {
        "schema": SCHEMA,
        "root": root,
        "current": current,
        "events": [_brief(event) if event["event"] == "run" else event for event in events],
        "releases": releases,
        "samples": samples,
        "raw": counted,
        "problems": problems,
    }


def archived(root, problems):
    """Return the manifests of deleted releases; what cannot be read is appended to ``problems``."""
    directory, found = os.path.join(root, "archive"), []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        try:
            found.append(store.read_manifest(os.path.join(directory, name)))
        except (OSError, store.ReleaseError) as error:
            problems.append(f"archive/{name}: {error}")
    return found


def _release(manifest, deleted):
    """Return what a reader compares of a release."""
    record = manifest.get("record") or {}
    variant, engine, model = (record.get(key) or {} for key in ("variant", "engine", "model"))
    return {
        "variant": manifest["variant"],
        "state": manifest["state"],
        "created": manifest["created"],
        "digest": manifest["digest"],
        "deleted": deleted,
        "summary": variant.get("summary") or "",
        "nccl": variant.get("nccl") or {},
        "env": variant.get("env") or {},
        "args": variant.get("args") or {},
        "patches": variant.get("patches") or [],
        "engine": {key: engine.get(key) for key in ("version", "id", "python")},
        "model": {key: model.get(key) for key in ("path", "fingerprint")},
    }


def _brief(event):
    """Return a run's event without what the report has no use for."""
    brief = {key: value for key, value in event.items() if key not in RUN_LEFT_OUT}
    if isinstance(event.get("levels"), list):
        brief["levels"] = [
            {
                **{key: level.get(key) for key in LEVEL},
                **{key: (level.get("metrics") or {}).get(key) for key in LEVEL_METRICS},
            }
            for level in event["levels"]
        ]
    return brief


def _samples(root, runs, limit, problems):
    """Return ``(samples, counted)``; a variant that was measured long ago is not crowded out by one measured today."""
    turns, seen = [], {}
    for number, event in enumerate(reversed(runs)):
        seen[event.get("variant")] = seen.get(event.get("variant"), 0) + 1
        turns.append((seen[event.get("variant")], number, event))
    samples, missing, looked = {}, 0, 0
    for _turn, _number, event in sorted(turns, key=lambda turn: turn[:2]):
        named = str(event.get("result") or "")
        path = result_path(root, named)
        if path is None:
            missing += 1
        elif looked < limit:
            looked += 1
            try:
                samples[named] = _figures(_below(root, path))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, zlib.error) as error:
                problems.append(f"{path} cannot be used: {error}")
    return samples, {"named": len(runs), "read": len(samples), "missing": missing}


def _below(root, path):
    """Return a path of this root; :raises ValueError: the ledger names a file elsewhere."""
    if not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep):
        raise ValueError(f"it is not below {root}")
    return path


def _figures(path):
    """Return ``{ttft_ms, tpot_ms}`` of the completed requests of a raw result, at most :data:`REQUESTS` of them."""
    with open(path, encoding="utf-8") as handle:
        document = json.load(handle)
    records = document.get("requests")
    if records is None:
        name = os.path.basename(document["records"]["file"])
        with gzip.open(os.path.join(os.path.dirname(path), name), "rt", encoding="utf-8") as handle:
            records = [json.loads(line) for line in handle]
        records = [item for item in records if item.get("level", 0) == document.get("headline", 0)]
    done = [item for item in records if item["kind"] == "ok" and item["event_ms"]]
    step = max(1, -(-len(done) // REQUESTS))
    # Where the client could not tell most of them, the others are no sample.
    told = (document.get("metrics") or {}).get("tpot_ms_p50", 0) is not None
    out = {"ttft_ms": [], "tpot_ms": []}
    for item in done[::step]:
        first, last = item["event_ms"][0], item["event_ms"][-1]
        out["ttft_ms"].append(round(first, 2))
        if told and item["tokens"] > 1 and last > first and not item.get("unresolved"):
            out["tpot_ms"].append(round((last - first) / (item["tokens"] - 1), 3))
    return out
