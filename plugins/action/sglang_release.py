"""Run the module sglang_release; where a switch may follow, its module is packed meanwhile. Documented in
library/sglang_release.py.
"""

from __future__ import annotations

import os

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Thin: the module runs as it always does."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Return the module's result."""
        result = super().run(tmp, task_vars)
        # To pack a module takes 0.2 s the first time, and Ansible keeps it for the run. A comparison that may build may
        # lead to a switch; this host waits for its answer, on another core.
        child = os.fork() if self._task.args.get("launch") else None
        if child == 0:
            try:
                # The interpreter is no part of what is kept; without one the host would be asked for it a second time.
                self._configure_module("sglang_service", {}, {**task_vars, "ansible_python_interpreter": "python3"})
            finally:
                os._exit(0)
        try:
            result.update(self._execute_module(task_vars=task_vars))
        finally:
            if child:
                os.waitpid(child, 0)
        return result
