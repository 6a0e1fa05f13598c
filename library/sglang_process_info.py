#!/usr/bin/python
# Copyright: the sglang deploy authors
# SPDX-License-Identifier: Apache-2.0
"""Report the live processes of a release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_process_info
short_description: Report what the live processes of a release are and hold
description:
  - Reads C(/proc) and the release; changes nothing and signals nothing.
  - The environment is read from the workers (schedulers and detokenizer), never from the parent, because what a
    C(sitecustomize.py) sets is only visible in the processes that inherit it.
options:
  root:
    description: The deployment's root; processes of its other releases are reported as findings.
    type: path
    required: true
  release:
    description: Absolute path of the release that should run.
    type: path
    required: true
attributes:
  check_mode:
    description: Works as outside check mode.
    support: full
  diff_mode:
    description: Nothing is written.
    support: none
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Read what the workers hold
  sglang_process_info:
    root: /opt/sglang
    release: /opt/sglang/releases/20260101T000000Z-baseline-0a1b2c3d
  register: __example_processes
"""

RETURN = r"""
processes:
  description:
    - Processes of the root, each with C(pid), C(ppid), C(pgid), C(sid), C(state), C(start) in clock ticks since boot,
      C(ticks) of CPU time used, C(uid), C(comm), C(cmdline), C(release), C(role) and C(tp_rank).
  returned: success
  type: list
  elements: dict
  sample: [{pid: 4711, role: server, state: S}]
workers:
  description:
    - Living schedulers and detokenizers of the release, with the keys of RV(processes) and C(label), C(env_readable),
      C(env) (name to C(status) equal, missing, different or overridden, with C(expected) and C(actual)), C(imports)
      (package to origin) and C(packages) (patched package to C(status) copy, other or unknown, with C(expected) and
      C(origin)).
  returned: success
  type: list
  elements: dict
  sample: [{pid: 4712, role: scheduler, tp_rank: 0, env_readable: true, env: {NCCL_ALGO: {status: equal}}}]
drift:
  description: Why the processes are not those of C(launch.json); empty when they are.
  returned: success
  type: list
  elements: str
  sample: []
findings:
  description: Findings of the rung verify.
  returned: success
  type: list
  elements: dict
  sample: []
ok:
  description: Whether no finding is an error.
  returned: success
  type: bool
  sample: true
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_proc import launch_of
from ansible.module_utils.sglang_process_report import report


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "release": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    launch = launch_of(module.params["release"])
    if not launch:
        module.fail_json(
            msg=f"release: {module.params['release']}/launch.json is missing or damaged, so nothing says what should "
            "run. Way out: build the release again (deploy.yml)."
        )
    module.exit_json(changed=False, **report(launch, module.params["root"]))


if __name__ == "__main__":
    main()
