#!/usr/bin/python
# Copyright: the sglang deploy authors
# Licensed under the Apache License, Version 2.0
"""Check a host before anything is built on it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_precheck
short_description: Check a host before an SGLang release is built on it
description:
  - Reads, and changes nothing. Each check gives findings; those of level C(error) make the verdict negative.
  - Findings that M(sglang_release) has made in its own call are given back as if they had been made here, see O(found).
  - On a host whose device is V(cpu) the GPU checks are reported as not exercised.
  - The rules are described in C(docs/prechecks.md).
author: the sglang deploy authors
options:
  root:
    description: Root of the deployment, absolute and at most 80 bytes long.
    type: str
    required: true
  engine:
    description: The declared engine, as M(sglang_engine_env) takes it.
    type: dict
    required: true
  model:
    description: The declared model, as M(sglang_model_files) takes it. Empty leaves the model files unchecked.
    type: dict
    default: {}
  user:
    description: Service user. Empty asks nothing.
    type: str
    default: ""
  port:
    description: HTTP port of the server.
    type: int
    required: true
  device:
    description: What the server computes on.
    type: str
    choices: [cuda, cpu]
    default: cuda
  gpu_count:
    description: Number of GPUs that must answer. V(0) wants at least one.
    type: int
    default: 0
  compute_capability:
    description: Compute capability that the inventory declares for the GPUs, such as V(12.0). Empty compares nothing.
    type: str
    default: ""
  args:
    description: Flags of the variant without their dashes. They tell which ports SGLang takes besides O(port).
    type: dict
    default: {}
  env:
    description: Environment of the service, in which the engine's interpreter is asked.
    type: dict
    default: {}
  patches:
    description: The variant's patches as full entries, as M(sglang_patch) takes them. They are judged, not applied.
    type: list
    elements: dict
    default: []
  built:
    description:
      - Whether a complete release of the variant is there. Its patches are in it, sealed and compared file by file, so
        they are not judged a second time.
    type: bool
    default: false
  allow_experimental:
    description: Whether patches marked experimental may be applied.
    type: bool
    default: false
  model_sha256:
    description:
      - SHA-256 of model files by name. Each file named here is read in full, about one second for each GB, so give it
        to a check that may take that long.
    type: dict
    default: {}
  python_range:
    description: Versions that the interpreter may have.
    type: str
    default: ">=3.10,<3.14"
  engine_mb:
    description: Disk space of an engine that is still to be built, in MB.
    type: int
    default: 2500
  release_mb:
    description: Disk space of a release with its logs and results, in MB.
    type: int
    default: 100
  margin_mb:
    description: Disk space that must stay free, in MB.
    type: int
    default: 500
  found:
    description:
      - What another call of this run has found, C(checks) of the result of M(sglang_release). The host is then not
        read again, and the task costs no call of a module. Empty for nothing.
    type: dict
    default: {}
  enforce:
    description: Fail where the verdict is negative, with all errors in one message.
    type: bool
    default: true
attributes:
  check_mode:
    description: The same, since it never writes.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
"""

EXAMPLES = r"""
- name: Check the host
  sglang_precheck:
    root: /opt/sglang
    engine:
      mode: adopt
      version: 0.5.20
      python: /opt/ml-env/bin/python3
    port: 8000
    gpu_count: 8
"""

RETURN = r"""
findings:
  description: What was found.
  returned: always
  type: list
  elements: dict
  sample:
    - rung: precheck
      rule: port-taken
      level: error
      message: port 8000 is taken by another model server.
      evidence: pid 4711 (uid 0) python3 -m sglang.launch_server, serves kimi
      advice: stop it, or give another sglang_server_port
verdict:
  description: Whether a release may be built here, and the rules that say no.
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
      sample: [port-taken]
elapsed:
  description: Seconds that the checks took.
  returned: always
  type: float
  sample: 0.3
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import hide_secrets
from ansible.module_utils.sglang_precheck_run import precheck
from ansible.module_utils.sglang_precheck_spec import ARGUMENTS, outcome


def main():
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    env = hide_secrets(module)
    found = module.params["found"] or precheck({**module.params, "env": env})
    result = outcome(found, module.params["enforce"])
    if result.pop("failed", False):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
