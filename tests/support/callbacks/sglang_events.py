"""Callback for tests and benchmarks: writes what happened, with times, as JSON lines to the file EVENTS_PATH."""

from __future__ import annotations

import json
import os
import time

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: sglang_events
type: aggregate
short_description: Write each task's result with its times as one JSON line
description:
  - One line when a task starts, one for each result, one at the end with the recap of each host.
requirements:
  - the environment variable EVENTS_PATH
"""


class CallbackModule(CallbackBase):
    """Appends to one file; the last line of a finished run has the key ``recap``."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sglang_events"
    CALLBACK_NEEDS_ENABLED = True

    def _write(self, **fields):
        with open(os.environ["EVENTS_PATH"], "a", encoding="utf-8") as handle:
            handle.write(json.dumps(dict(fields, at=time.time()), default=str) + "\n")

    def _result(self, status, result):
        data = {key: value for key, value in result.result.items() if key != "invocation"}
        name, host = result.task.get_name(), result.host.get_name()
        self._write(status=status, host=host, task=name, action=result.task.action, result=data)

    def v2_playbook_on_play_start(self, play):
        self._write(status="play", task=play.get_name())

    def v2_playbook_on_task_start(self, task, is_conditional):
        self._write(status="start", task=task.get_name(), action=task.action)

    def v2_runner_on_ok(self, result):
        self._result("changed" if result.result.get("changed") else "ok", result)

    def v2_runner_on_failed(self, result, ignore_errors=False):
        self._result("failed", result)

    def v2_runner_on_skipped(self, result):
        self._result("skipped", result)

    def v2_runner_on_unreachable(self, result):
        self._result("unreachable", result)

    def v2_playbook_on_stats(self, stats):
        self._write(status="recap", recap={host: stats.summarize(host) for host in stats.processed})
