"""Name this run on the controller; no host is contacted. Documented in library/sglang_run.py."""

from __future__ import annotations

import os
import pathlib

import ansible.module_utils
from ansible.plugins.action import ActionBase

MODULE_UTILS = str(pathlib.Path(__file__).resolve().parents[2] / "library" / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.sglang_variant_run import identify_run  # noqa: E402


class ActionModule(ActionBase):
    """Thin: identifies the ansible-playbook process that this action was forked from."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Return run."""
        result = super().run(tmp, task_vars)
        self.validate_argument_spec({})
        result.update(changed=False, run=identify_run(os.getppid()))
        return result
