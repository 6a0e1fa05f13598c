"""The record of a proof, ``results/verify-TIME.json`` of a release: one for each start of a server and each verdict."""

from __future__ import annotations

import glob
import json
import os

from ansible.module_utils import sglang_ledger
from ansible.module_utils.sglang_findings import errors
from ansible.module_utils.sglang_proc import scan
from ansible.module_utils.sglang_release_store import ID_PATTERN


def server_of(release):
    """Return ``{pid, start}`` of the release's server process, or None."""
    found = [item for item in scan(release) if item["role"] == "server"]
    return {"pid": found[0]["pid"], "start": found[0]["start"]} if found else None


def recorded(processes):
    """Return a report of processes without their command lines, which launch.json has and which may hold anything."""
    return {
        key: [{name: item[name] for name in item if name != "cmdline"} for item in processes[key]]
        for key in ("processes", "workers")
    }


def on_file(results, server, findings):
    """Return the path of the record that says the same of the same start, or None.

    :param results: directory of the records.
    :param server: ``{pid, start}`` of :func:`server_of`.
    """
    for path in sorted(glob.glob(os.path.join(results, "verify-*.json"))):
        try:
            with open(path, encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            continue
        if data.get("server") == server and data.get("findings") == findings:
            return path
    return None


def _line(event, release, run):
    name = os.path.basename(release)
    match = ID_PATTERN.match(name)
    return {"event": event, "run": run, "release": name, "variant": match.group(2) if match else None}


def tell_ready(root, release, run, health):
    """Append the event ``ready`` to the ledger: how long the server took to answer, phase by phase.

    :param health: result of sglang_health: ``{pid, elapsed, phases}``; ``elapsed`` in seconds.
    """
    keys = {key: health.get(key) for key in ("pid", "elapsed", "phases")}
    sglang_ledger.append(root, {**_line("ready", release, run), **keys})


def tell_verdict(root, release, run, result):
    """Append the event ``verify`` to the ledger: whether the proof passed, and which rules refused or warned.

    :param result: ``{findings, record, soak, elapsed}`` of the proof; ``elapsed`` in seconds.
    """
    bad = errors(result["findings"])
    warned = sorted({item["rule"] for item in result["findings"] if item["level"] == "warning"})
    verdict = {
        "passed": not bad,
        "errors": sorted({item["rule"] for item in bad}),
        "warnings": warned,
        "record": result["record"],
        "elapsed": result["elapsed"],
    }
    sglang_ledger.append(root, {**_line("verify", release, run), **verdict})
