"""The record of a run on disk: the result file, the raw records beside it, and the ledger's line."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile


def _place(directory, name, data):
    """Write bytes to a new file by rename."""
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".bench-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.rename(temporary, os.path.join(directory, name))
    except BaseException:
        os.unlink(temporary)
        raise


def write(document, raw, directory):
    """Write ``bench-<UTC>-<run>.json`` and its raw records into a directory and return the path of the first.

    The records come first, so that a result file never names one that is not there. ``document`` gets ``records``.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    stamp = document["time"].replace("-", "").replace(":", "")
    name = str((document["run"] or {}).get("id") or document["workload"]["seed"])
    name = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
    stem, number = f"bench-{stamp}-{name}", 1
    while os.path.exists(os.path.join(directory, f"{stem}.json")):
        number += 1
        stem = f"bench-{stamp}-{name}-{number}"
    lines = "".join(json.dumps(item, separators=(",", ":"), allow_nan=False) + "\n" for item in raw)
    packed = gzip.compress(lines.encode(), 4, mtime=0)
    _place(directory, f"{stem}.requests.jsonl.gz", packed)
    document["records"] = {
        "file": f"{stem}.requests.jsonl.gz",
        "sha256": hashlib.sha256(packed).hexdigest(),
        "count": len(raw),
    }
    _place(directory, f"{stem}.json", (json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n").encode())
    return os.path.join(directory, f"{stem}.json")


def read_records(path):
    """Return the raw records of a result file as a list of dicts.

    :raises ValueError: they are not the ones that the result file names. :raises OSError: they are not there.
    """
    with open(path, encoding="utf-8") as handle:
        named = json.load(handle)["records"]
    name = os.path.join(os.path.dirname(path), named["file"])
    with open(name, "rb") as handle:
        packed = handle.read()
    if hashlib.sha256(packed).hexdigest() != named["sha256"]:
        raise ValueError(f"{name} is not the file whose digest {path} holds")
    return [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]


def event(document, path):
    """Return the ledger's line for a run: everything but the definitions; the raw records stay in their file."""
    # Schema and time of a line are the ledger's own.
    names = {"schema": "result_schema", "time": "began"}
    kept = {names.get(key, key): value for key, value in document.items() if key != "definitions"}
    return {"event": "run", "result": path, **kept}
