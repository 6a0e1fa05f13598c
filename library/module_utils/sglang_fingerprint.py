"""What a measurement depends on beside the variant: two runs are comparable when these are equal.

Every value is read on the host at the time of the run. ``None`` means that it could not be read or does not exist there
(a host without GPUs has no NCCL); ``unknown`` in the fingerprint names those that should exist and could not be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform

from ansible.module_utils import sglang_nvidia
from ansible.module_utils.sglang_nccl_library import mapped, version_of_library

SCHEMA = 1
# Equal in two runs that may be compared; the order is the one in which a difference is told.
COMPARED = (
    "gpu_names",
    "gpu_count",
    "driver",
    "power_limit_w",
    "nccl_version",
    "nccl_path",
    "engine_version",
    "engine_digest",
    "model_digest",
    "cpu",
    "client_version",
)
# What a comparison is about, so it may differ.
OTHERS = ("launch_digest", "python", "requests")
KEYS = COMPARED + OTHERS
UNREAD = "version unknown"


def digest(fingerprint):
    """Return 12 hex digits over :data:`COMPARED`; equal digests are comparable runs."""
    text = json.dumps({key: fingerprint.get(key) for key in COMPARED}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(one, other):
    """Return ``["driver: 580.95.05 against 590.10"]``, one text for each compared key that differs; empty: comparable.

    :param one, other: fingerprints, or None for a run that has none, which compares with nothing.
    """
    if not one or not other:
        return ["fingerprint: one of the runs has none"]
    return [
        f"{key}: {_text(one.get(key))} against {_text(other.get(key))}"
        for key in COMPARED
        if one.get(key) != other.get(key)
    ]


def unknown(one, other):
    """Return ``["not known on both sides: nccl_version"]``: compared keys that could not be read and so tell nothing.

    :param one, other: fingerprints of runs that compare.
    """
    sides = [set((side or {}).get("unknown") or ()) for side in (one, other)]
    named = (("both sides", sides[0] & sides[1]), ("one side", sides[0] ^ sides[1]))
    texts = ((where, ", ".join(key for key in COMPARED if key in names)) for where, names in named)
    return [f"not known on {where}: {text}" for where, text in texts if text]


def _text(value):
    if isinstance(value, list):
        counted = {}
        for item in value:
            counted[str(item)] = counted.get(str(item), 0) + 1
        return ", ".join(f"{count} x {item}" if count > 1 else item for item, count in counted.items())
    return "none" if value is None else str(value)


def _manifest(release):
    try:
        with open(os.path.join(release, "manifest.json"), encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return {}


def processor():
    """Return ``"<count> x <model name>"`` of the CPUs that this process may use."""
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as handle:
            name = next((line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} x {name}"


def _nccl(release):
    """Return ``(version, path)`` of the libnccl that the workers of a release have mapped.

    The file that runs is what counts: the package's metadata may name another one.
    """
    paths = sorted(mapped(os.path.dirname(os.path.dirname(os.path.realpath(release)))))
    versions = [version_of_library(path) or UNREAD for path in paths]
    return ", ".join(dict.fromkeys(versions)) or None, ", ".join(paths) or None


def fingerprint(release=None, client=None, gpus=None, version=None):
    """Return the fingerprint of this host and of the release that is measured.

    :param release: release directory, or None when a bare URL is measured.
    :param client: ``{client_version, requests}`` of the measuring client.
    :param version: SGLang as the server names itself, used where the release does not tell.
    :param gpus: rows of :func:`sglang_nvidia.cards`, asked here when None.
    :returns: ``{schema, digest, unknown: [str]}`` with every name of :data:`KEYS`.
    """
    cards = sglang_nvidia.cards() if gpus is None else gpus
    record = _manifest(release).get("record", {}) if release else {}
    engine, model = record.get("engine") or {}, record.get("model") or {}
    out = dict.fromkeys(KEYS)
    if release:
        out["nccl_version"], out["nccl_path"] = _nccl(release)
    out.update(
        gpu_names=sorted(str(card.get("name")) for card in cards),
        gpu_count=len(cards),
        driver=", ".join(sorted({str(card["driver_version"]) for card in cards if card.get("driver_version")})) or None,
        power_limit_w=[card.get("power_limit_w") for card in cards],
        engine_version=engine.get("version") or version,
        engine_digest=engine.get("fingerprint"),
        model_digest=model.get("fingerprint"),
        cpu=processor(),
        launch_digest=_manifest(release).get("digest") if release else None,
        python=platform.python_version(),
        **(client or {}),
    )
    wanted = ["engine_version", "engine_digest", "model_digest", "launch_digest"]
    wanted += ["driver", "nccl_version"] if cards else []
    return {
        "schema": SCHEMA,
        **out,
        "unknown": [key for key in wanted if out[key] is None or UNREAD in str(out[key])],
        "digest": digest(out),
    }
