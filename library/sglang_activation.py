#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Judge whether what was asked of the server is what runs, and keep what was seen."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_activation
short_description: Judge whether a release's server runs as asked, and record it
description:
  - Reads what the live workers hold, as M(sglang_process_info) does, and compares the arguments of the release's
    C(launch.json) with the server's own C(/server_info) and with its log.
  - A feature that was asked for and is not active (tensor-parallel size, attention backend, custom all-reduce,
    all-reduce fusion, speculation, quantization, graph capture) is an error under the feature's name. Another argument
    that the engine changed is a warning. One that the server does not report is never taken for active.
  - On a CPU host NCCL, fused kernels and graph capture are reported as not exercised.
  - Adds the findings given in O(findings), writes all to C(results/verify-TIME.json) of the release, and fails where
    one is an error. A start of the server whose findings are already on file is not written again.
author:
  - the sglang deploy authors
requirements:
  - requests
options:
  release:
    description: Absolute path of the release.
    type: path
    required: true
  device:
    description: What the host is declared to be.
    type: str
    choices: [cuda, cpu]
    default: cuda
  findings:
    description: Findings of earlier steps, in the shape of the project.
    type: list
    elements: dict
    default: []
  evidence:
    description: What earlier steps saw, kept in the file as it is; name to anything.
    type: dict
    default: {}
  python:
    description: An interpreter that has C(requests), used where the one that runs the module has not.
    type: path
  request_timeout:
    description: Seconds for one request.
    type: float
    default: 30
  api_key:
    description: API key of the server. Without it the file that the release's C(launch.json) names is read.
    type: str
attributes:
  check_mode:
    description: What the module does where nothing may be changed.
    support: full
    details: Judges, and writes nothing.
  diff_mode:
    description: Whether it shows the difference that it makes.
    support: none
"""

EXAMPLES = r"""
- name: Judge whether the server runs as asked
  sglang_activation:
    release: /opt/sglang/releases/20261129T120000Z-baseline-1a2b3c4d
    device: cuda
"""

RETURN = r"""
findings:
  description: All findings, those about the processes first, then those of O(findings).
  returned: always
  type: list
  elements: dict
record:
  description: The file, the earlier one where this start was on record already; null where nothing could be asked.
  returned: always
  type: str
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
"""

import glob
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_activation_rules import judge
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_client import Call, Client, ClientError, need_requests
from ansible.module_utils.sglang_findings import errors, finding, summary
from ansible.module_utils.sglang_proc import launch_of, scan
from ansible.module_utils.sglang_process_report import report
from ansible.module_utils.sglang_release_store import without_secrets
from ansible.module_utils.sglang_watch import LogFollower


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
    """Return the path of the record that says the same of the same start, or None."""
    for path in sorted(glob.glob(os.path.join(results, "verify-*.json"))):
        try:
            with open(path, encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            continue
        if data.get("server") == server and data.get("findings") == findings:
            return path
    return None


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec=dict(
            release=dict(type="path", required=True),
            device=dict(type="str", choices=["cuda", "cpu"], default="cuda"),
            findings=dict(type="list", elements="dict", default=[]),
            evidence=dict(type="dict", default={}),
            python=dict(type="path"),
            request_timeout=dict(type="float", default=30),
            api_key=dict(type="str", no_log=True),
        ),
        supports_check_mode=True,
    )
    begin = time.monotonic()
    params = module.params

    def result(findings, path):
        return {"findings": findings, "record": path, "elapsed": round(time.monotonic() - begin, 3)}

    problem = need_requests(params["python"])
    if problem:
        module.fail_json(msg=problem, **result(params["findings"], None))
    release = os.path.realpath(params["release"])
    launch = launch_of(release)
    if not launch:
        module.fail_json(
            msg=f"release: {release}/launch.json is missing or damaged. Build the release again.",
            **result(params["findings"], None),
        )
    processes = report(launch, os.path.dirname(os.path.dirname(release)))
    earlier = [*processes["findings"], *params["findings"]]
    limit = params["request_timeout"]
    client = Client(launch["endpoint"], key_for(module, launch))
    try:
        info = Call(client.server_info, limit, limit=limit).wait()
    except ClientError as error:
        asked = finding("verify", "server-info", "error", "The server does not say how it runs.", error, "read its log")
        found = [*earlier, asked]
        module.fail_json(msg=summary(errors(found)), **result(found, None))
    found = [*earlier, *judge(launch, info, LogFollower(launch["log"]).read(), params["device"])]
    server = server_of(release)
    results = os.path.join(release, "results")
    path = on_file(results, server, found)
    changed = path is None
    if changed:
        path = os.path.join(results, time.strftime("verify-%Y%m%dT%H%M%SZ.json", time.gmtime()))
    if changed and not module.check_mode:
        record = dict(
            params["evidence"],
            schema=1,
            processes=recorded(processes),
            release=os.path.basename(release),
            server=server,
            findings=found,
            server_info=without_secrets(info),
        )
        os.makedirs(results, exist_ok=True)
        temporary = os.path.join(module.tmpdir, "verify.json")
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(record, handle, indent=1, sort_keys=True)
        module.atomic_move(temporary, path)
    bad = errors(found)
    if bad:
        module.fail_json(
            msg=f"{len(bad)} finding(s) refuse this release:\n{summary(bad)}", changed=changed, **result(found, path)
        )
    module.exit_json(changed=changed, **result(found, path))


if __name__ == "__main__":
    main()
