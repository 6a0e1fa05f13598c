"""Check a host, or give back what another call of this run has found. Documented in library/sglang_precheck.py."""

from __future__ import annotations

import pathlib

import ansible.module_utils
from ansible.plugins.action import ActionBase

MODULE_UTILS = str(pathlib.Path(__file__).resolve().parents[2] / "library" / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.sglang_precheck_spec import ARGUMENTS, outcome  # noqa: E402


class ActionModule(ActionBase):
    """Thin: it only saves the call of the module."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Return findings, verdict and elapsed, and fail where the verdict is negative and enforced."""
        result = super().run(tmp, task_vars)
        if not self._task.args.get("found"):
            return {**result, **self._execute_module(task_vars=task_vars)}
        _spec, args = self.validate_argument_spec(ARGUMENTS)
        return {**result, **outcome(args["found"], args["enforce"])}
