#!/usr/bin/python
# Copyright: the sglang deploy authors
# Licensed under the Apache License, Version 2.0
"""Search NCCL's settings for a profile of messages."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_nccl_tune
short_description: Search NCCL settings that spend less time in a model's collectives
description:
  - Measures settings as M(sglang_nccl_probe) does and searches by successive halving, algorithm and protocol first,
    then one further change, then a second.
  - Scores a setting with the weighted time of its collectives against the base's. It says nothing about a server.
  - The search ends after O(trials) trials or O(seconds) seconds; the last three settings are measured at full length.
author: the sglang deploy authors
options:
  root:
    description: Root of the deployment; scratch files are in its directory C(probe).
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
  setting:
    description: The base, with C(name), C(variables) and C(args) as in M(sglang_nccl_probe).
    type: dict
    required: true
  candidates:
    description: Settings that may be tried, each with C(name), C(variables) and C(changes), as the filter gives them.
    type: list
    elements: dict
    required: true
  profile:
    description:
      - V(single), V(speculation), V(many) or V(mixed), or a dict of weights for C(decode), C(decode_many), C(verify)
        and C(prefill).
    type: raw
    default: mixed
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
    description: Environment of the service.
    type: dict
    default: {}
  user:
    description: Account that the server runs as. Empty is the account that deploys.
    type: str
    default: ""
  fingerprint:
    description: What identifies the engine.
    type: str
    default: ""
  batches:
    description: Numbers of streams that decode together.
    type: list
    elements: int
    default: [1, 32]
  trials:
    description: Number of trials at most, the base's included.
    type: int
    default: 100
  seconds:
    description: Seconds after which no trial starts.
    type: float
    default: 300
  limit:
    description: Seconds for one trial.
    type: float
    default: 20
  run:
    description: The run as M(sglang_variant) returns it, for the ledger. Empty writes no event.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Nothing is measured; the result is empty.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
"""

EXAMPLES = r"""
- name: Search for one stream
  sglang_nccl_tune:
    root: /opt/sglang
    python: /opt/ml-env/bin/python3
    model: /shared/kimi-k2.5-int4
    tp_size: 8
    profile: single
    setting:
      name: baseline
      variables: {NCCL_ALGO: Ring, NCCL_PROTO: LL}
    candidates:
      - name: own choice
        variables: {}
        changes: 0
"""

RETURN = r"""
rows:
  description: Settings that were tried, best first; C(effort) 2 is full length.
  returned: always
  type: list
  elements: dict
best:
  description: The best setting that was measured at full length, or null.
  returned: always
  type: dict
better:
  description: Whether it is better than the base by more than RV(noise).
  returned: always
  type: bool
noise:
  description: What two scores of one setting may differ by, from trials that were repeated; at least 0.03.
  returned: always
  type: float
  sample: 0.061
spread:
  description: For each predicted figure how far repeated trials of one setting lay apart, as a fraction.
  returned: always
  type: dict
  sample: {decode: 0.086, prefill: 0.004}
variant:
  description: A catalogue entry for it, with its evidence; empty where nothing is better.
  returned: always
  type: dict
table:
  description: The best settings as text.
  returned: always
  type: str
trials:
  description: Number of trials.
  returned: always
  type: int
  sample: 58
complete:
  description: Whether the search ended by itself.
  returned: always
  type: bool
findings:
  description: What the search left on the host, if anything.
  returned: always
  type: list
  elements: dict
nccl:
  description: Version, library and transports of NCCL.
  returned: always
  type: dict
gpus:
  description: The GPUs, a line each.
  returned: always
  type: list
  elements: str
beside:
  description: Whether a live server ran on the GPUs meanwhile, which disturbs the times.
  returned: always
  type: bool
exercised:
  description: Whether this was NCCL.
  returned: always
  type: bool
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
  sample: 181.4
"""

import time

from ansible.module_utils import sglang_ledger
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import hide_secrets
from ansible.module_utils.sglang_findings import errors, summary
from ansible.module_utils.sglang_nccl_session import ProbeError
from ansible.module_utils.sglang_nccl_tuning import tune

EMPTY = {"rows": [], "best": None, "better": False, "noise": 0.0, "spread": {}, "variant": {}, "table": "",
         "trials": 0, "complete": False, "findings": [], "nccl": {}, "gpus": [], "beside": False,
         "exercised": False, "changed": False}  # fmt: skip


def record(params, result):
    """Append one event to the ledger."""
    sglang_ledger.append(
        params["root"],
        {
            "event": "tune", "run": params["run"], "profile": params["profile"], "trials": result["trials"],
            "better": result["better"], "noise": result["noise"], "best": result["best"],
            "exercised": result["exercised"], "elapsed": result["elapsed"],
        },
    )  # fmt: skip


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "model": {"type": "path", "required": True},
            "setting": {"type": "dict", "required": True},
            "candidates": {"type": "list", "elements": "dict", "required": True},
            "profile": {"type": "raw", "default": "mixed"},
            "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
            "tp_size": {"type": "int", "required": True},
            "env": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": ""},
            "fingerprint": {"type": "str", "default": ""},
            "batches": {"type": "list", "elements": "int", "default": [1, 32]},
            "trials": {"type": "int", "default": 100},
            "seconds": {"type": "float", "default": 300},
            "limit": {"type": "float", "default": 20},
            "run": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    env, started = hide_secrets(module), time.monotonic()
    params = {**module.params, "env": {name: str(value) for name, value in env.items()}}
    if module.check_mode:
        module.exit_json(elapsed=0.0, **EMPTY)
    try:
        result = {**tune(params), "changed": False}
    except ProbeError as error:
        module.fail_json(msg=str(error), elapsed=round(time.monotonic() - started, 3), **EMPTY)
    result["elapsed"] = round(time.monotonic() - started, 3)
    if params["run"]:
        record(params, result)
    if errors(result["findings"]):
        module.fail_json(msg=summary(errors(result["findings"])), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
