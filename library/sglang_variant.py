#!/usr/bin/python
"""Argument specification and documentation of the action C(sglang_variant)."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_variant
short_description: Resolve and lint a variant on the controller
description:
  - Turns a variant of the catalogue, the host's base and the operator's single values into one dict, and checks it
    with every rule of C(docs/lint-rules.md).
  - Runs on the controller only and contacts no host. It fails with one message that lists every error.
  - Later wins. First O(base), then O(host), then the parents of the variant, then the variant, then O(overrides).
    Two parents with different values for one path are an error unless the variant sets the path itself. A null takes
    a value away.
  - A variable of the play with a dot after the name of a dict, as C(-e sglang_variant_overrides.nccl.NCCL_ALGO=Ring)
    makes it, is refused, because nothing reads it.
options:
  name:
    description: The variant, as the operator wrote it. Another name fails with the nearest one and the list.
    type: raw
    required: true
  catalogue:
    description: All variants, by name. C(docs/variants.md) has the keys of an entry; an unknown key fails.
    type: dict
    required: true
  base:
    description: Values of the host's group, C({nccl, env, args, patches}).
    type: dict
    default: {}
  host:
    description: Values of this host alone, of the same shape.
    type: dict
    default: {}
  overrides:
    description:
      - Single values of the same shape, from C(-e). Strings are cast to the type that the engine's release declares for
        the flag.
    type: dict
    default: {}
  patch_dir:
    description: Folder of the patch catalogue on the controller. Needed where the variant has patches.
    type: path
  engine_version:
    description: Declared SGLang version of the engine, for example V(0.5.9).
    type: str
    required: true
  device:
    description: What the host computes on. On V(cpu) the rules about GPUs are silent.
    type: str
    choices: [cuda, cpu]
    default: cuda
  tp_size:
    description: Tensor parallel size, the number of ranks.
    type: int
    required: true
  launch:
    description: What rules need to know about the launch and the host, as far as it is declared.
    type: dict
    default: {}
    suboptions:
      host:
        description: Address that the server listens at.
        type: str
      port:
        description: HTTP port.
        type: raw
      model_path:
        description: Path or name of the model. Whether it is Kimi-K2.5 is read from it.
        type: str
      has_api_key:
        description: Whether clients must send a key.
        type: bool
      api_key_problem:
        description: Why the key cannot be used, without anything of the key; empty where it can.
        type: str
      gpu_count:
        description: GPUs of the host; 0 is not declared.
        type: int
      compute_capability:
        description: Of the GPUs, such as V(12.0); empty is not declared.
        type: str
      interconnect:
        description: What connects the GPUs. Not declared counts as V(pcie).
        type: str
        choices: [pcie, nvlink]
      gpu_memory_gib:
        description: Memory of one GPU in GiB; 0 is not declared and counts as 96.
        type: float
      nccl_version:
        description: NCCL that the engine loads where it is not the one that it pins; empty for that one.
        type: str
      server_env:
        description: Names of what C(sglang_server_env) sets before Python starts; values have no place here.
        type: list
        elements: str
      allow_experimental:
        description: Whether experimental patches may be applied.
        type: bool
  force:
    description: Turn lint errors into warnings. A variant that cannot be resolved fails all the same.
    type: bool
    default: false
  against:
    description: Another variant to show the difference to.
    type: str
  explain:
    description: Return the whole result also as text for a person.
    type: bool
    default: false
attributes:
  check_mode:
    description: Changes nothing in any mode.
    support: full
  diff_mode:
    description: Writes nothing.
    support: none
seealso:
  - module: sglang_run
author: the sglang deploy authors
"""

EXAMPLES = r"""
- name: Resolve and lint the variant
  sglang_variant:
    name: "{{ variant | default('') }}"
    catalogue: "{{ sglang_variants }}"
    base:
      args:
        mem-fraction-static: 0.88
    overrides:
      nccl:
        NCCL_MAX_NCHANNELS: "4"
    patch_dir: "{{ playbook_dir }}/../roles/sglang_patches/files"
    engine_version: 0.5.20
    tp_size: 8
    launch:
      host: 127.0.0.1
      model_path: /models/Kimi-K2.5
      has_api_key: false
  register: resolved
"""

RETURN = r"""
variant:
  description:
    - The resolved variant. C(nccl) and C(env) hold texts, C(args) values cast to the flag's type, V(true) for a bare
      flag, C(engines) the ranges of all parts, C(origins) for each path such as C(nccl.NCCL_ALGO) the
      variant, V(base) (the group's), V(host) or V(override).
  returned: when it could be resolved
  type: dict
  sample:
    name: fewchan
    summary: At most two channels, small buffers, 64 threads
    nccl: {NCCL_ALGO: Ring}
    env: {}
    args: {}
    patches: []
    engines: ">=0.5.8"
    origins: {nccl.NCCL_ALGO: baseline}
unset:
  description: For each path that a null took away, or a flag that V(false) leaves out, where that came from.
  returned: when it could be resolved
  type: dict
  sample: {nccl.NCCL_PROTO: proto_auto}
patches:
  description: The entries of the patch catalogue that the variant needs, in full, each with its C(digest).
  returned: when it could be resolved
  type: list
  elements: dict
findings:
  description: What the rules found, errors first, each with rung, rule, level, message, evidence and advice.
  returned: always
  type: list
  elements: dict
run:
  description: Names this run of the playbook in the lock and in the ledger; see C(sglang_run).
  returned: on success
  type: dict
  sample:
    id: 20260101T120000Z-1a2b3c
    time: "2026-01-01T12:00:00Z"
    controller: deploy01
    machine_id: "00000000000000000000000000000000"
    boot_id: 6f0c2e2e-0000-4000-8000-000000000000
    pid_ns: "pid:[4026531836]"
    pid: 4711
    pid_start: 123456
    user: deploy
    alive: [[4711, 123456]]
difference:
  description: For each path that differs, the value of both variants; null stands for "not set".
  returned: when O(against) is given
  type: dict
  sample: {nccl.NCCL_PROTO: {fewchan: LL, proto_auto: null}}
explanation:
  description: Every value with its origin, launch flags, patches, findings and the difference, as text.
  returned: when O(explain) is true
  type: str
  sample: "fewchan: At most two channels, small buffers, 64 threads"
"""


from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_variant_schema import ARGUMENTS


def main():
    """Refuse to run as a module: what it resolves lies on the controller."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    module.fail_json(msg="sglang_variant is an action: it needs plugins/action on action_plugins (see ansible.cfg)")


if __name__ == "__main__":
    main()
