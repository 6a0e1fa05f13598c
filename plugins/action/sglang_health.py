"""Run the module sglang_health and show how far the start is meanwhile. Documented in library/sglang_health.py."""

from __future__ import annotations

import contextvars
import json
import os
import shlex
import signal
import threading
import time

from ansible.errors import AnsibleError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()
# A phase that changes is shown at the next look, one that stays every SHOW seconds.
LOOK, SHOW = 3.0, 6.0


class ActionModule(ActionBase):
    """Thin: the module runs as it always does; a thread beside it reads the module's progress file."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    @staticmethod
    def waits(args):
        """Return whether the module waits with these arguments."""
        return args.get("state", "ready") == "ready"

    def run(self, tmp=None, task_vars=None):
        """Return the module's result."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        watched = args.get("release") and self.waits(args) and not boolean(self._task.check_mode)
        over = threading.Event()
        if watched:
            self._host = (task_vars or {}).get("inventory_hostname", "host")
            context = contextvars.copy_context()  # Ansible keeps the present task in it
            watcher = threading.Thread(target=context.run, args=(self._watch, args["release"], over), daemon=True)
            watcher.start()
        try:
            result.update(self._execute_module(task_vars=task_vars))
        finally:
            over.set()
            if watched:
                watcher.join()  # no line may follow the result
        return result

    def _watch(self, release, over):
        """Show the progress until the event OVER; end with the controller.

        The lines go to standard error, so that the output of a callback such as json stays what it is.
        """
        controller, begin = os.getppid(), time.monotonic()
        looked = shown = begin
        phase = None
        while not over.wait(0.5):
            if os.getppid() != controller:
                # Ansible's worker answers this by ending its whole process group, the module with it.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            now = time.monotonic()
            if now - looked < LOOK:
                continue
            looked = now
            data = self._progress(release)
            if data.get("phase") == phase and now - shown < SHOW:
                continue
            phase, shown = data.get("phase"), now
            text = data.get("text") or f"{now - begin:.0f} s elapsed, no word from the host yet"
            display.display(f"{self._host}: {text}", stderr=True)

    def _progress(self, release):
        """Return the progress file; empty where it cannot be read or is of an earlier wait."""
        try:
            answer = self._low_level_execute_command("cat " + shlex.quote(f"{release}/run/progress.json"))
            data = json.loads(answer["stdout"])
        except (AnsibleError, ValueError):
            return {}
        return data if data.get("state") == "waiting" else {}
