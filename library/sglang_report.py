#!/usr/bin/python
"""Argument specification and documentation of the action C(sglang_report)."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_report
short_description: Write a report of what hosts have served, measured and decided
description:
  - Writes C(report.html), C(report.json) and C(runs.csv) on the controller. The page needs no network and no other
    file.
  - Runs on the controller; no host is contacted. What hosts know is brought by M(sglang_history).
  - What has not changed since the last report is not written again.
options:
  histories:
    description: By host name, the text C(history) that M(sglang_history) returned.
    type: dict
    required: true
  unread:
    description: Names of hosts that gave no history; the page says that it lacks them.
    type: list
    elements: str
    default: []
  directory:
    description: Where the files are written on the controller, an absolute path. It is made where it is missing.
    type: path
    required: true
  plan:
    description:
      - Path of a plan on the controller. Empty takes C(inventory/plan.yml) of the checkout where there is one.
    type: str
    default: ""
  baseline:
    description: Name of the variant that the others are shown against.
    type: str
    default: baseline
  start_spread:
    description:
      - By host name, the relative spread from one start of a release to the next by which M(sglang_decision) decides
        there, a share of 0 or more. A host that is not named has the default of M(sglang_decision).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Builds everything and writes nothing.
  diff_mode:
    support: none
    description: The files are too long to be read as a difference.
seealso:
  - module: sglang_history
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Write the report
  sglang_report:
    histories:
      gpu01: "{{ past.history }}"
    directory: /srv/reports/sglang
  run_once: true
"""

RETURN = r"""
files:
  description: Paths of page, JSON and CSV.
  returned: success
  type: list
  elements: str
counts:
  description: Numbers of hosts, runs, variants and decisions that the report has, and of bytes of the page.
  returned: success
  type: dict
problems:
  description: By host, what could not be read.
  returned: success
  type: dict
plan:
  description: Path of the plan that was read; empty where there is none.
  returned: success
  type: str
elapsed:
  description: Seconds that it took.
  returned: always
  type: float
msg:
  description: What was written, or why nothing was.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_report_spec import ARGUMENTS


def main():
    """Refuse to run as a module: the plots are drawn on the controller."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    module.fail_json(
        msg="sglang_report is an action: it needs plugins/action on action_plugins (ansible.cfg of the project)",
        elapsed=0.0,
    )


if __name__ == "__main__":
    main()
