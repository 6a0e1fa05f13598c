#!/usr/bin/python
# Copyright: the sglang deploy authors
# Licensed under the Apache License, Version 2.0
"""Try NCCL settings with the messages that a model makes."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_nccl_probe
short_description: Try NCCL settings with the messages that a model makes, before it is loaded
description:
  - Starts one process for each GPU with the engine's interpreter and the environment of a variant, and runs the
    collectives of tensor parallel serving, called directly and captured in a CUDA graph, from one decoded token to a
    prefill chunk. Values are checked first, then times are measured.
  - Each setting has a limit. All its processes end with it, and with the module, whatever happens to either.
  - A result that worked is kept below O(root) and reused while GPUs, driver, links, kernel command line, engine,
    environment and messages are the same. What failed is tried again.
  - On a host whose device is V(cpu) the same runs over gloo, and the findings say that NCCL was not exercised.
  - The rules are described in C(docs/probe.md).
author: the sglang deploy authors
options:
  root:
    description: Root of the deployment; results and scratch files are in its directory C(probe).
    type: path
    required: true
  python:
    description: Interpreter of the engine, which has torch.
    type: path
    required: true
  model:
    description: Directory of the model. Its C(config.json) gives the sizes of the messages.
    type: path
    required: true
  settings:
    description:
      - Settings to try, each with C(name), C(variables) (names and values), C(args) (flags of the launch without
        dashes, which decide on speculation and chunk) and C(site) (text of the release's sitecustomize, or empty).
    type: list
    elements: dict
    required: true
  device:
    description: What the server computes on.
    type: str
    choices: [cuda, cpu]
    default: cuda
  tp_size:
    description: Number of ranks.
    type: int
    required: true
  env:
    description: Environment of the service, which wins over a variant.
    type: dict
    default: {}
  user:
    description: Account that the server runs as. Empty is the account that deploys.
    type: str
    default: ""
  fingerprint:
    description: What identifies the engine, for the reuse of results.
    type: str
    default: ""
  base:
    description:
      - Name of the setting that the others are compared with, one of O(settings) or one with a kept result.
      - Empty for none.
    type: str
    default: ""
  batches:
    description: Numbers of streams that decode together.
    type: list
    elements: int
    default: [1, 32]
  limit:
    description: Seconds for one setting.
    type: float
    default: 60
  threshold:
    description: How many times slower than the base a collective may be before a warning is given.
    type: float
    default: 1.25
  reuse:
    description: Take kept results.
    type: bool
    default: true
  enforce:
    description: Fail where the verdict is negative, with all errors in one message.
    type: bool
    default: true
  run:
    description: The run as M(sglang_variant) returns it, for the ledger. Empty writes no event.
    type: dict
    default: {}
  variant:
    description: Name of the variant for the ledger, where one is deployed.
    type: str
    default: ""
attributes:
  check_mode:
    description: Kept results are reported; nothing is tried. What the host lacks for it is a finding and no failure.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
"""

EXAMPLES = r"""
- name: Try two settings on eight GPUs
  sglang_nccl_probe:
    root: /opt/sglang
    python: /opt/ml-env/bin/python3
    model: /shared/kimi-k2.5-int4
    tp_size: 8
    base: baseline
    settings:
      - name: baseline
        variables: {NCCL_ALGO: Ring, NCCL_PROTO: LL}
      - name: own_choice
        variables: {}
"""

RETURN = r"""
findings:
  description: What was found.
  returned: always
  type: list
  elements: dict
  sample:
    - rung: probe
      rule: probe-fails
      level: error
      message: "variant tree fails at all_gather for decode of 1 token (327680 bytes), called directly, 2 of 2 ranks."
      evidence: no algorithm/protocol available for function AllGather with datatype ncclInt8.
      advice: "leave AllGather an algorithm: NCCL_ALGO='ring;allreduce:tree', or unset"
verdict:
  description: Whether every setting works, and the rules that say no.
  returned: always
  type: dict
  contains:
    ok:
      description: No finding is an error.
      type: bool
      sample: false
    failures:
      description: Rules of the errors.
      type: list
      elements: str
      sample: [probe-fails]
results:
  description:
    - One dict for each setting that was tried or known, the fastest at decoding first. C(steps) has p50, p99 and mean
      in microseconds, bus bandwidth in GB/s and NCCL's choice for each message, C(predicted) the milliseconds that one
      step of the model spends in collectives, C(measured) the newest benchmark of that variant on this host,
      C(nccl) version, library, transports and warnings.
    - On failure only C(name), C(outcome), C(message), C(predicted), C(reused) and C(note).
  returned: always
  type: list
  elements: dict
table:
  description: The ranking as text.
  returned: always
  type: str
reused:
  description: Names of the settings whose kept result was taken.
  returned: always
  type: list
  elements: str
  sample: [baseline]
exercised:
  description: Whether this was NCCL.
  returned: always
  type: bool
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
  sample: 6.2
"""

import os
import time

from ansible.module_utils import sglang_ledger
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import hide_secrets
from ansible.module_utils.sglang_findings import errors, finding, summary
from ansible.module_utils.sglang_nccl_session import ProbeError, Session

BRIEF = ("name", "outcome", "message", "predicted", "reused", "note")


def brief(result):
    """Return the results without the figures of each message."""
    return [{key: row[key] for key in BRIEF} for row in result["results"]]


def record(params, result):
    """Append one event to the ledger."""
    sglang_ledger.append(
        params["root"],
        {
            "event": "probe", "run": params["run"], "variant": params["variant"] or None,
            "verdict": "passed" if result["verdict"]["ok"] else "refused",
            "failures": result["verdict"]["failures"], "elapsed": result["elapsed"], "exercised": result["exercised"],
            "results": brief(result),
        },
    )  # fmt: skip


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "model": {"type": "path", "required": True},
            "settings": {"type": "list", "elements": "dict", "required": True},
            "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
            "tp_size": {"type": "int", "required": True},
            "env": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": ""},
            "fingerprint": {"type": "str", "default": ""},
            "base": {"type": "str", "default": ""},
            "batches": {"type": "list", "elements": "int", "default": [1, 32]},
            "limit": {"type": "float", "default": 60},
            "threshold": {"type": "float", "default": 1.25},
            "reuse": {"type": "bool", "default": True},
            "enforce": {"type": "bool", "default": True},
            "run": {"type": "dict", "default": {}},
            "variant": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    env, started = hide_secrets(module), time.monotonic()
    params = {**module.params, "env": {name: str(value) for name, value in env.items()}}
    empty = {"findings": [], "verdict": {"ok": False, "failures": []}, "results": [], "table": "", "reused": [],
             "exercised": params["device"] == "cuda", "changed": False}  # fmt: skip
    if params["tp_size"] < 1 or params["limit"] <= 0 or not all(batch > 0 for batch in params["batches"]):
        module.fail_json(msg="tp_size, limit and batches must be above 0", elapsed=0.0, **empty)
    try:
        result = Session(params).run(module.check_mode)
    except ProbeError as error:
        if module.check_mode:
            # An empty host has neither model nor engine yet, and says nothing about what a real run would find.
            found = finding("probe", "not-exercised", "info", "the dry run cannot look at the collectives of this host",
                            str(error), "none; a real run provides what is missing before it probes")  # fmt: skip
            empty.update(exercised=False, findings=[found], verdict={"ok": True, "failures": []})
            module.exit_json(elapsed=round(time.monotonic() - started, 3), **empty)
        module.fail_json(msg=str(error), elapsed=round(time.monotonic() - started, 3), **empty)
    result["elapsed"] = round(time.monotonic() - started, 3)
    if params["run"] and result["results"] and not module.check_mode and os.path.isdir(params["root"]):
        record(params, result)
    if params["enforce"] and not result["verdict"]["ok"]:
        # Ansible prints all that a failed task returns.
        result["results"] = brief(result)
        module.fail_json(msg=summary(errors(result["findings"])), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
