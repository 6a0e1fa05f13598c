#!/usr/bin/python
# Copyright: the sglang deploy authors
# SPDX-License-Identifier: Apache-2.0
"""Patched copies of the engine's packages in a release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_patch
short_description: Keep patched copies of the engine's packages in a release
description:
  - Asks the engine's interpreter, with the service's environment and folder, where each package comes from, copies
    the package into O(site), and applies the declarative edits of the entries to the copy. The engine is
    never modified.
  - O(site) then holds exactly the packages that O(entries) names. Nothing is written unless every entry ends well.
  - An edit finds its scope by name and its text exactly once in it. The result must compile, must have no undefined
    name, and its gates, evaluated for the hosts 9.0, 10.0, 12.0, 8.6, CPU and an AMD card of major 12,
    may change for 12.0 only.
options:
  python:
    description: The engine's interpreter. It may be missing in check mode; the declared texts are then shown.
    type: path
    required: true
  env:
    description: Environment of the service, in which the interpreter is asked.
    type: dict
    default: {}
  chdir:
    description: Working directory of the service. Check mode does without one that does not exist yet.
    type: path
  site:
    description: Folder of the patched copies, C(<release>/site).
    type: path
    required: true
  entries:
    description: Catalogue entries in full, as in the role's C(files/), in the order in which they apply.
    type: list
    elements: dict
    required: true
  engine_version:
    description: Version of the engine that will be installed; used only where O(python) is missing in check mode.
    type: str
    default: ''
  capabilities:
    description:
      - Compute capabilities of this host's GPUs, such as V(12.0). Empty means unknown, V(none) means no GPU.
      - An experimental entry is not exercised on a host that is known to have no GPU of major 12.
    type: list
    elements: str
    default: []
  allow_experimental:
    description: Apply entries marked experimental; without it one that would change something is refused.
    type: bool
    default: false
  state:
    description: V(absent) takes the entries out of O(site); other recorded entries are applied to pristine files again.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    support: full
    description: Judges the engine's real files and writes nothing.
  diff_mode:
    support: full
    description: One unified diff per entry.
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Keep the fused all-reduce patch in the release
  sglang_patch:
    python: /opt/sglang/engines/0.5.9-1a2b/bin/python
    env: {SPT_NOENV: "1"}
    chdir: /opt/sglang/releases/3f2a
    site: /opt/sglang/releases/3f2a/site
    entries: "{{ [lookup('ansible.builtin.file', 'sm120_allreduce_fusion.yml') | from_yaml,
                  lookup('ansible.builtin.file', 'flashinfer_sm120_gate.yml') | from_yaml] }}"
"""

RETURN = r"""
results:
  description: One per entry, also on failure.
  returned: always
  type: list
  elements: dict
  contains:
    name: {description: Name of the entry., type: str}
    edition: {description: Edition of the entry., type: int}
    digest: {description: Content digest of the entry., type: str}
    state:
      description: >-
        applied, already_applied (by this module or by hand), upstream (fixed there in other words), not_applicable
        (version not covered), not_exercised (package not installed, or no GPU that it is for), refused (experimental
        and not allowed, or a release that does not work on SM120 even with the edit), conflict, absent.
      type: str
    ok: {description: Whether the state lets a variant go on., type: bool}
    package: {description: Package that is patched., type: str}
    version: {description: Version of the package., type: str}
    origin: {description: Folder of the pristine package., type: str}
    family: {description: Family of the entry that covers the version., type: str}
    files: {description: Files that differ from the pristine package., type: list, elements: str}
    hunks: {description: Unified diff against the pristine package., type: str}
    admitted: {description: Simulated hosts that every patched gate admits., type: list, elements: str}
    gates: {description: "Each gate as {path, scope, kind, before, after}.", type: list, elements: dict}
    message: {description: What was seen., type: str}
    ways_out: {description: What to do where the state is refused., type: list, elements: str}
    versions_covered: {description: Version ranges of the entry., type: list, elements: str}
    experimental: {description: Whether the entry is experimental., type: bool}
packages:
  description: Patched copies, package to folder in O(site).
  returned: always
  type: dict
record:
  description: Path of the record of what was applied.
  returned: always
  type: str
elapsed:
  description: Seconds the module took.
  returned: always
  type: float
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import hide_secrets
from ansible.module_utils.sglang_build_spec import PATCHES
from ansible.module_utils.sglang_patch_run import reconcile
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_patching import EntryError


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "chdir": {"type": "path"},
            "site": {"type": "path", "required": True},
            **PATCHES,
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    params = {**module.params, "env": hide_secrets(module)}
    started = time.monotonic()
    answer = {"changed": False, "results": [], "packages": {}, "record": ""}
    try:
        answer = reconcile(params, module.check_mode)
        failed = answer.pop("failed", "")
    except (EntryError, SiteError) as error:
        failed = str(error)
    except OSError as error:
        failed = f"site {module.params['site']} cannot be written: {error}"
    for text in answer.pop("warn", []):
        module.warn(text)
    answer["elapsed"] = round(time.monotonic() - started, 3)
    if failed:
        module.fail_json(msg=failed, **answer)
    diff = answer.pop("diff", [])
    if module._diff:
        answer["diff"] = diff
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
