"""Run the module sglang_canary and show how far its start is meanwhile. Documented in library/sglang_canary.py."""

from __future__ import annotations

import os

from ansible.plugins.loader import action_loader


class ActionModule(action_loader.get("sglang_health", class_only=True)):
    """The action of sglang_health, which reads the progress of the canary in place of that of the release."""

    @staticmethod
    def waits(args):
        """Return true: a canary always waits."""
        return True

    def _progress(self, release):
        name = os.path.basename(release).rpartition("-")[2]
        return super()._progress(os.path.join(self._task.args.get("root", ""), "canary", "releases", name))
