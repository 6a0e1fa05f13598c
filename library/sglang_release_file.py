#!/usr/bin/python
"""Ansible module: one text file of a release that is being built."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_release_file
short_description: Write a text file into a release that is being built
description:
  - The file appears whole or not at all. A sealed release is refused, unless the file has this content already.
  - Works in check mode before the release exists. Where the content holds a secret, use C(no_log) on the task.
options:
  release:
    description: Directory of the release, an absolute path.
    type: path
    required: true
  path:
    description: Path of the file below the release, without C(..). Directories are made with mode 0755.
    type: str
    required: true
  content:
    description: Text of the file, written as UTF-8.
    type: str
    required: true
  mode:
    description: Permissions, octal as text.
    type: str
    default: "0644"
  owner:
    description: User that owns the file; empty leaves the user of this task.
    type: str
    default: ""
  validate:
    description: Check the content before anything is written; C(json) parses it, C(python) compiles it.
    type: str
    default: none
    choices: [none, json, python]
attributes:
  check_mode:
    support: full
    description: Refuses what a real run would refuse, as far as it exists.
  diff_mode:
    support: full
    description: The text before and after.
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Write the launch file
  sglang_release_file:
    release: /opt/sglang/releases/20260131T030000Z-baseline-0123456789ab
    path: launch.json
    content: "{{ launch | ansible.builtin.to_nice_json }}"
    validate: json
"""

RETURN = r"""
file:
  description: Absolute path of the file.
  returned: success
  type: str
  sample: /opt/sglang/releases/20260131T030000Z-baseline-0123456789ab/launch.json
msg:
  description: What happened, or what was refused, by which rule, and the way out.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_release_store import ReleaseError
from ansible.module_utils.sglang_release_text import place, validate_text, write_text


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec=dict(
            release=dict(type="path", required=True),
            path=dict(type="str", required=True),
            content=dict(type="str", required=True),
            mode=dict(type="str", default="0644"),
            owner=dict(type="str", default=""),
            validate=dict(type="str", default="none", choices=["none", "json", "python"]),
        ),
        supports_check_mode=True,
    )
    params = module.params
    try:
        validate_text(params["path"], params["content"], params["validate"])
        path = place(params["release"], params["path"])
        result = write_text(
            params["release"], path, params["content"], params["mode"], params["owner"], module.check_mode
        )
    except ReleaseError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"path: {params['path']} cannot be written: {error}")
    before = result.pop("before")
    if module._diff and before != params["content"]:
        result["diff"] = {
            "before": before,
            "after": params["content"],
            "before_header": path,
            "after_header": path,
        }
    module.exit_json(file=path, **result)


if __name__ == "__main__":
    main()
