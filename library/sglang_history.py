#!/usr/bin/python
"""Ansible module: read the past of a deployment for a report."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_history
short_description: Read ledger, releases and raw results of a deployment
description:
  - Reads C(ledger.jsonl), the manifests of all releases, deleted ones included, and of raw benchmark results the times
    of single requests.
  - Writes nothing, takes no lock and starts nothing. A torn line of the ledger is reported and skipped.
  - What it reads holds no secret; of raw results only numbers are taken.
options:
  root:
    description: Directory of the deployment on the host, an absolute path. One that does not exist has no past.
    type: path
    required: true
  raw:
    description:
      - Number of raw result files to read, at least 0. The newest of each variant come first. Ledger lines are always
        all read; raw results only serve for distributions.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reads as it always does.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Read what happened on this host
  sglang_history:
    root: /opt/sglang
  register: past
"""

RETURN = r"""
history:
  description: The past as compressed text, for the action M(sglang_report).
  returned: success
  type: str
counts:
  description: What was read.
  returned: success
  type: dict
  contains:
    events:
      description: Lines of the ledger that could be read.
      type: int
    runs:
      description: Benchmark runs among them.
      type: int
    releases:
      description: Releases with a manifest, deleted ones included.
      type: int
    raw_read:
      description: Raw result files that were read.
      type: int
    raw_missing:
      description: Raw result files that the ledger names and that do not exist.
      type: int
problems:
  description: Torn lines, torn manifests, raw results that cannot be used, as texts.
  returned: success
  type: list
  elements: str
elapsed:
  description: Seconds that the module took.
  returned: success
  type: float
msg:
  description: What was read, or why nothing could be.
  returned: always
  type: str
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_history_read import pack, read


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec=dict(root=dict(type="path", required=True), raw=dict(type="int", default=300)),
        supports_check_mode=True,
    )
    root, raw, begin = module.params["root"], module.params["raw"], time.monotonic()
    if not os.path.isabs(root):
        module.fail_json(msg=f"root: {root!r} is not an absolute path.")
    if raw < 0:
        module.fail_json(msg=f"raw: {raw} result files cannot be read; give 0 or more.")
    try:
        past = read(root, raw)
    except OSError as error:
        module.fail_json(msg=f"root: {error}. Way out: let the account of this task read {root}, or use become.")
    runs = sum(event["event"] == "run" for event in past["events"])
    counts = {
        "events": len(past["events"]),
        "runs": runs,
        "releases": len(past["releases"]),
        "raw_read": past["raw"]["read"],
        "raw_missing": past["raw"]["missing"],
    }
    module.exit_json(
        changed=False,
        history=pack(past),
        counts=counts,
        problems=past["problems"],
        elapsed=round(time.monotonic() - begin, 3),
        msg=f"{counts['events']} events, {runs} runs, {counts['releases']} releases",
    )


if __name__ == "__main__":
    main()
