#!/usr/bin/python
# Copyright: the sglang deploy authors
# Licensed under the Apache License, Version 2.0
"""Make the tiny model, or check the files of an existing one."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_model_files
short_description: Make the tiny model of the embedded node, or check existing model files
description:
  - With O(declared.source=generate) it writes a tiny Llama with seeded weights, without network and the same bytes
    everywhere. A file that differs from its digest is written again.
  - With O(declared.source=existing) it only reads. It refuses files that SGLang would load without a word and serve
    garbage from, such as a missing shard, a shard cut short, or a git-LFS pointer.
  - O(declared.source=config) is a directory without weights, for a server with C(--load-format dummy).
author: the sglang deploy authors
options:
  declared:
    description: Which model. The same dict goes to M(sglang_release).
    type: dict
    required: true
    suboptions:
      source:
        description: V(existing) files are checked, V(config) has no weights, a V(generate) model is made.
        type: str
        choices: [existing, config, generate]
        required: true
      path:
        description: Absolute path of the model directory.
        type: str
        required: true
      generate:
        description: Parameters of a generated model.
        type: dict
        default: {}
        suboptions:
          seed:
            description: Seed of the weights and of the order of words that the model answers in.
            type: int
            default: 1
          vocab_size:
            description: Number of tokens, at least 256.
            type: int
            default: 1024
  sha256:
    description: SHA-256 by file name of existing files. Each file named here is read in full.
    type: dict
    default: {}
  user:
    description: Service user that must be able to read the files. Empty asks nothing.
    type: str
    default: ""
attributes:
  check_mode:
    description: Existing files are checked in full; for a generated model it says what would be written.
    support: full
  diff_mode:
    description: Names what is wrong with a generated model.
    support: full
"""

EXAMPLES = r"""
- name: Make the tiny model
  sglang_model_files:
    declared:
      source: generate
      path: /opt/sglang/models/tiny-llama

- name: Check the files of the large one
  sglang_model_files:
    declared:
      source: existing
      path: /shared/kimi-k2.5-int4
    user: sglang
"""

RETURN = r"""
model:
  description: State of the model, after it was made.
  returned: always
  type: dict
  contains:
    present:
      description: Whether the files are there; for a generated model also whole.
      type: bool
      sample: true
    path:
      description: Directory of the model.
      type: str
      sample: /opt/sglang/models/tiny-llama
    fingerprint:
      description: Changes when the model does; of a generated model it is known before the files exist.
      type: str
      sample: 2d711642b726b044
    problem:
      description: Why RV(model.present) is false.
      type: str
      sample: null
problems:
  description: Everything wrong with existing files, each naming the file.
  returned: always
  type: list
  elements: str
  sample: [model-00002-of-00003.safetensors is missing]
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
  sample: 0.2
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_model import check, describe, generate, unreadable


def provide(module, result):
    """Bring a generated model to the declared state, or collect the problems of an existing one; fills ``result``."""
    declared, user = module.params["declared"], module.params["user"]
    result["model"] = before = describe(declared)
    if declared["source"] != "generate":
        weights = declared["source"] == "existing"
        result["problems"] = check(declared["path"], module.params["sha256"], user or None, weights)
        return
    if not before["present"]:
        result["changed"] = True
        result["diff"] = {"before": before["problem"] + "\n", "after": f"{declared['path']} is whole\n"}
        if not module.check_mode:
            generate(declared)
            result["model"] = describe(declared)
    if user and result["model"]["present"] and unreadable(declared["path"], ["config.json"], user):
        result["problems"] = [f"the service user {user} cannot read config.json"]


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "declared": {
                "type": "dict",
                "required": True,
                "options": {
                    "source": {"type": "str", "choices": ["existing", "config", "generate"], "required": True},
                    "path": {"type": "str", "required": True},
                    "generate": {
                        "type": "dict",
                        "default": {},
                        "options": {
                            "seed": {"type": "int", "default": 1},
                            "vocab_size": {"type": "int", "default": 1024},
                        },
                    },
                },
            },
            "sha256": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    started = time.monotonic()
    path = module.params["declared"]["path"]
    result = {"changed": False, "model": {}, "problems": []}
    message = None
    try:
        provide(module, result)
    except KeyError:
        message = f"the service user {module.params['user']} does not exist on this host"
    except ValueError as error:
        message = f"the model cannot be made: {error}"
    except OSError as error:
        message = f"the model {path} cannot be made or read: {error.strerror} {error.filename or ''}"
    if result["problems"]:
        message = (
            f"The model {path} cannot be served: "
            + "; ".join(result["problems"])
            + ". Copy these files again from where the model came from, or give model_files_path of a whole model."
        )
    result["elapsed"] = round(time.monotonic() - started, 3)
    if message:
        module.fail_json(msg=message, **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
