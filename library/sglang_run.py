#!/usr/bin/python
"""Argument specification and documentation of the action C(sglang_run)."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_run
short_description: Name this run for the deploy lock and the ledger
description:
  - Identifies the C(ansible-playbook) process, so that a lock left behind by a killed run is recognised as stale.
  - Runs on the controller; no host is contacted.
author: the sglang deploy authors
options: {}
attributes:
  check_mode:
    support: full
    description: Changes nothing.
  diff_mode:
    support: none
    description: Writes nothing.
seealso:
  - module: sglang_variant
"""

EXAMPLES = r"""
- name: Name this run
  sglang_run:
  register: __sglang_resolved
"""

RETURN = r"""
run:
  description: >-
    The run: C(id), C(time) (UTC), C(controller) (host name), C(machine_id) (of C(/etc/machine-id), empty
    where there is none), C(boot_id), C(pid_ns) (its PID namespace, empty where a later run could not look for the
    process), C(pid) and C(pid_start) (ticks since boot) of the C(ansible-playbook)
    process, C(user), and C(alive), the C([pid, ticks]) of the controller's living processes with C(ansible) in an
    argument, by which the lock tells a killed run from a living one. C(alive) is recorded nowhere.
  returned: always
  type: dict
  sample:
    id: 20260102T030405Z-a1b2c3
    time: "2026-01-02T03:04:05Z"
    controller: ops1
    machine_id: "00000000000000000000000000000000"
    boot_id: 00000000-0000-0000-0000-000000000000
    pid_ns: "pid:[4026531836]"
    pid: 4711
    pid_start: 123456
    user: operator
    alive: [[4711, 123456]]
"""

from ansible.module_utils.basic import AnsibleModule


def main():
    """Refuse to run as a module: the process to name is on the controller."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_run is an action: it needs plugins/action on action_plugins (ansible.cfg of the project)"
    )


if __name__ == "__main__":
    main()
