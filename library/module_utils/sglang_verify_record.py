"""The record of a proof, ``results/verify-TIME.json`` of a release: one for each start of a server and each verdict."""

from __future__ import annotations

import glob
import json
import os

from ansible.module_utils.sglang_proc import scan


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
