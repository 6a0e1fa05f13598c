"""Run the module sglang_proof and show how far the start is while it waits. Documented in library/sglang_proof.py."""

from __future__ import annotations

from ansible.plugins.loader import action_loader


class ActionModule(action_loader.get("sglang_health", class_only=True)):
    """The action of sglang_health, for the module that waits and proves in one call."""

    @staticmethod
    def waits(args):
        """Return whether the module waits with these arguments."""
        return bool(args.get("wait"))

    def run(self, tmp=None, task_vars=None):
        """Return the module's result."""
        if self.waits(self._task.args):
            # The server loads: time to pack the module that measures it afterwards, which Ansible keeps for the run.
            self._configure_module("sglang_bench", {}, task_vars)
        return super().run(tmp, task_vars)
