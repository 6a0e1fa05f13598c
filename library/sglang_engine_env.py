#!/usr/bin/python
# Copyright: the sglang deploy authors
# Licensed under the Apache License, Version 2.0
"""Provide an SGLang engine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_engine_env
short_description: Build an SGLang engine from a lock file, or check one that is adopted
description:
  - An engine is an interpreter with SGLang in it. O(declared.mode=build) makes a virtual environment in a directory
    whose name holds a digest of everything that went into it. O(declared.mode=adopt) checks an existing interpreter
    and never writes to it.
  - A built engine is complete once it holds C(engine.json). A directory without that file is removed and built again.
author: the sglang deploy authors
options:
  declared:
    description: What the engine is. The same dict goes to M(sglang_release).
    type: dict
    required: true
    suboptions:
      mode:
        description: V(build) from a lock file, or V(adopt) an interpreter that is there.
        type: str
        choices: [build, adopt]
        required: true
      version:
        description: Release of SGLang. Needed for a build; empty accepts any release when adopting.
        type: str
        default: ""
      root:
        description: Absolute path of the directory that holds the built engines.
        type: str
        default: ""
      python:
        description: Absolute path of the interpreter to adopt.
        type: str
        default: ""
      base_python:
        description: Interpreter that a built virtual environment stands on, a path or a name to look up in PATH.
        type: str
        default: python3
      lock_digest:
        description: Digest over O(lock), O(standins) and O(pip_args), made where they come from.
        type: str
        default: ""
      cpu_only:
        description: The host is declared to have no GPU. A build then fails where one is found.
        type: bool
        default: false
  lock:
    description:
      - Text of the lock file, one exact pin on each line, installed without dependency resolution.
      - A line C(# python:>=3.11,<3.14) limits O(declared.base_python).
    type: str
    default: ""
  standins:
    description: Source text by path below C(site-packages), for modules that SGLang imports and a CPU never calls.
    type: dict
    default: {}
  pip_args:
    description:
      - Additional arguments of C(pip install), each one item in the form C(--option=value).
      - They reach pip on its standard input, because an index address may hold a password.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds for the whole build.
    type: int
    default: 3600
attributes:
  check_mode:
    description: Inputs and the interpreter are checked, RV(actions) says what would be built, nothing is written.
    support: full
  diff_mode:
    description: Shows the engine that is there and the one that would be.
    support: full
"""

EXAMPLES = r"""
- name: Build the engine
  sglang_engine_env:
    declared:
      mode: build
      version: 0.5.9
      root: /opt/sglang/engines
      base_python: /usr/bin/python3.11
      lock_digest: "{{ lookup('ansible.builtin.file', 'sglang-0.5.9-cpu.lock') | ansible.builtin.hash('sha256') }}"
    lock: "{{ lookup('ansible.builtin.file', 'sglang-0.5.9-cpu.lock') }}"

- name: Adopt the engine of another tool
  sglang_engine_env:
    declared:
      mode: adopt
      version: 0.5.20
      python: /opt/ml-env/bin/python3
"""

RETURN = r"""
engine:
  description: State of the engine, after the build where one was made.
  returned: always
  type: dict
  contains:
    present:
      description: Whether the declared engine is there and complete.
      type: bool
      sample: true
    mode:
      description: V(build) or V(adopt).
      type: str
      sample: build
    id:
      description: Version and digest of a built engine.
      type: str
      sample: 0.5.9-1f0c3b7a9d22
    path:
      description: Directory of the engine.
      type: str
      sample: /opt/sglang/engines/0.5.9-1f0c3b7a9d22
    python:
      description: Interpreter of the engine, known before it is built.
      type: str
      sample: /opt/sglang/engines/0.5.9-1f0c3b7a9d22/bin/python3
    python_version:
      description: Version of that interpreter, null before it is there.
      type: str
      sample: 3.11.2
    version:
      description: Release of SGLang.
      type: str
      sample: 0.5.9
    fingerprint:
      description: >-
        Changes exactly when the installed software does, which is its declaration for a built engine, and versions,
        places and the files of SGLang and FlashInfer for an adopted one.
      type: str
      sample: 9f86d081884c7d65
    packages:
      description: Version of every installed distribution.
      type: dict
      sample: {sglang: 0.5.9, torch: 2.13.0}
    origins:
      description: Directory from which the main packages are imported, null for an absent one.
      type: dict
      sample: {flashinfer: null, sglang: /opt/ml-env/lib/python3.11/site-packages/sglang}
    problem:
      description: Why RV(engine.present) is false.
      type: str
      sample: null
actions:
  description: What was done, or would be in check mode.
  returned: always
  type: list
  elements: str
  sample: [build /opt/sglang/engines/0.5.9-1f0c3b7a9d22 with Python 3.11.2]
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
  sample: 97.4
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_engine import EngineError, describe
from ansible.module_utils.sglang_engine_build import build, check_inputs, refuse_gpu
from ansible.module_utils.sglang_lock import kept_fresh


def provide(module, result):
    """Bring the engine to the declared state, or say in check mode what that takes; fills ``result``.

    :raises EngineError: it cannot be provided.
    """
    params = module.params
    declared = params["declared"]
    result["engine"] = before = describe(declared)
    if declared["mode"] == "adopt":
        if not before["present"]:
            raise EngineError(
                f"{before['problem']}; give sglang_engine_python and sglang_engine_version of an engine that is there, "
                "or set sglang_engine_mode to build"
            )
        return
    if before["present"]:
        refuse_gpu(declared)
        return
    base = check_inputs(declared, params["lock"], params["standins"], params["pip_args"])
    result["changed"] = True
    result["actions"] = [f"build {before['path']} with Python {base['python_version']}, because {before['problem']}"]
    result["diff"] = {
        "before_header": before["path"],
        "after_header": before["path"],
        "before": "",
        "after": f"engine {before['id']} on {base['executable']}, Python {base['python_version']}\n{params['lock']}",
    }
    if not module.check_mode:
        # The playbooks keep the engines directly below the root; elsewhere there is no lock to keep fresh.
        with kept_fresh(os.path.dirname(declared["root"].rstrip("/"))):
            result["engine"] = build(
                declared, params["lock"], params["standins"], params["pip_args"], params["timeout"]
            )


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "declared": {
                "type": "dict",
                "required": True,
                "options": {
                    "mode": {"type": "str", "choices": ["build", "adopt"], "required": True},
                    "version": {"type": "str", "default": ""},
                    "root": {"type": "str", "default": ""},
                    "python": {"type": "str", "default": ""},
                    "base_python": {"type": "str", "default": "python3"},
                    "lock_digest": {"type": "str", "default": ""},
                    "cpu_only": {"type": "bool", "default": False},
                },
            },
            "lock": {"type": "str", "default": ""},
            "standins": {"type": "dict", "default": {}},
            "pip_args": {"type": "list", "elements": "str", "default": [], "no_log": True},
            "timeout": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    started = time.monotonic()
    result = {"changed": False, "engine": {}, "actions": []}
    try:
        provide(module, result)
    except EngineError as error:
        result["changed"] = False
        module.fail_json(msg=str(error), elapsed=round(time.monotonic() - started, 3), **result)
    module.exit_json(elapsed=round(time.monotonic() - started, 3), **result)


if __name__ == "__main__":
    main()
