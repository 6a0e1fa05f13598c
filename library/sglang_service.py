#!/usr/bin/python
# Copyright: the sglang deploy authors
# SPDX-License-Identifier: Apache-2.0
"""Start and stop the server of a release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_service
short_description: Start or stop the server of a release
description:
  - C(started) returns as soon as the server process runs, long before it is ready. A process that dies in its first
    moments fails the task with the first error of its log.
  - C(stopped) sends SIGTERM to the server, kills what outlives it, and returns when no process of the root is left, the
    port and those that SGLang derives from it are free, and the driver lists none of these processes as a user of GPU
    memory. It fails with the holder's name otherwise. Only processes that carry the marker of a release below O(root)
    are signalled. A canary that runs ends too.
  - Every start and stop is appended to the ledger.
  - With O(activate) the link C(current) moves to the release in the same call, as C(state=active) of M(sglang_release)
    moves it, after it is known that the release may start and before anything is stopped.
options:
  state:
    description: What is wanted.
    type: str
    choices: [started, stopped]
    required: true
  root:
    description: The deployment's root.
    type: path
    required: true
  release:
    description:
      - Absolute path of the release to start.
      - Ignored with O(state=stopped), which stops whatever release of the root runs.
    type: path
  provider:
    description: Service manager; V(auto) is systemd where it is PID 1, else supervisor.
    type: str
    choices: [auto, supervisor, systemd]
    default: auto
  unit:
    description: Name of the unit or program.
    type: str
    default: sglang-server
  install_unit:
    description: Whether the unit may be linked into C(/etc/systemd/system), which is outside O(root).
    type: bool
    default: false
  python:
    description: Interpreter that supervisor's virtual environment is made with.
    type: path
  supervisor_lock:
    description: Text of the requirements file, with hashes, that pins supervisor.
    type: str
    default: ""
  start_timeout:
    description: Seconds within which the server process must exist.
    type: int
    default: 15
  stop_timeout:
    description: Seconds that the server may take after SIGTERM.
    type: int
    default: 60
  log_keep:
    description: Number of older logs that are kept, one for each start.
    type: int
    default: 5
  run:
    description: The run that the ledger names, as returned by the action C(sglang_variant).
    type: dict
    default: {}
  activate:
    description:
      - Whether a start makes the release the current one. It needs O(run), whose deploy lock is taken or renewed.
    type: bool
    default: false
  reason:
    description: Why the release becomes the current one, for manifest and ledger.
    type: str
    default: ""
  temporary:
    description:
      - Whether the run that stops the server starts it again by itself, as for a canary in its place. Where it is
        killed before that, the next run is told so; any other stop counts as one on purpose.
    type: bool
    default: false
attributes:
  check_mode:
    description: The same keys are returned; nothing is started, signalled or written.
    support: full
  diff_mode:
    description: With O(activate), of the link and the release's manifest.
    support: full
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Start the server
  sglang_service:
    state: started
    root: /opt/sglang
    release: /opt/sglang/releases/20260101T000000Z-baseline-0a1b2c3d
    python: /opt/ml-env/bin/python3
    supervisor_lock: "{{ lookup('ansible.builtin.file', 'supervisor.lock') }}"

- name: Stop the server
  sglang_service:
    state: stopped
    root: /opt/sglang
    stop_timeout: 120
"""

RETURN = r"""
state:
  description: State of the service after the task, C(running) or C(stopped); in check mode the one that would result.
  returned: always
  type: str
  sample: running
provider:
  description: Service manager in use.
  returned: always
  type: str
  sample: supervisor
pid:
  description: Process id of the server; null when it is stopped or would only be started.
  returned: always
  type: int
  sample: 4711
started_at:
  description: Time at which the server process started, UTC; null when there is none.
  returned: always
  type: str
  sample: "2026-01-01T00:00:00Z"
log:
  description: Path of the server's log; empty where no release is named.
  returned: always
  type: str
  sample: /opt/sglang/releases/20260101T000000Z-baseline-0a1b2c3d/logs/server.log
endpoint:
  description: URL of the server on this host; empty where no release is named.
  returned: always
  type: str
  sample: http://127.0.0.1:30000
reasons:
  description: Why the running processes were not those of the release; empty where they were.
  returned: always
  type: list
  elements: str
  sample: [no server process runs]
stopped:
  description: Process ids that were stopped, or would be in check mode.
  returned: always
  type: list
  elements: int
  sample: [4242, 4243]
killed:
  description: Processes that SIGTERM did not end, as C(pid), C(role), C(comm), C(release) and C(signal).
  returned: always
  type: list
  elements: dict
  sample: []
activation:
  description:
    - What became of the link, as C(changed), C(msg), and C(before) and C(after) as texts; null where nobody asked.
  returned: always
  type: dict
  sample: {changed: true, msg: "current: none -> 20260101T000000Z-baseline-0a1b2c3d", before: "", after: ""}
elapsed:
  description: Seconds that the task waited, also on failure.
  returned: always
  type: float
  sample: 0.61
log_tail:
  description: Last lines of the log.
  returned: on failure to start
  type: list
  elements: str
  sample: ["OSError: no such model"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_service_core import Service, ServiceError


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "stopped"], "required": True},
            "root": {"type": "path", "required": True},
            "release": {"type": "path"},
            "provider": {"type": "str", "choices": ["auto", "supervisor", "systemd"], "default": "auto"},
            "unit": {"type": "str", "default": "sglang-server"},
            "install_unit": {"type": "bool", "default": False},
            "python": {"type": "path"},
            "supervisor_lock": {"type": "str", "default": ""},
            "start_timeout": {"type": "int", "default": 15},
            "stop_timeout": {"type": "int", "default": 60},
            "log_keep": {"type": "int", "default": 5},
            "run": {"type": "dict", "default": {}},
            "activate": {"type": "bool", "default": False},
            "reason": {"type": "str", "default": ""},
            "temporary": {"type": "bool", "default": False},
        },
        required_if=[("state", "started", ["release"])],
        supports_check_mode=True,
    )
    if module.params["activate"] and not module.params["run"].get("id"):
        module.fail_json(msg="run: activate needs the run that the action sglang_variant or sglang_run returns.")
    service = Service(module.params, module.check_mode, module.run_command)
    try:
        if module.params["state"] == "started":
            service.started()
        else:
            service.stopped()
    except ServiceError as error:
        module.fail_json(msg=str(error), **service.result())
    result = service.result()
    moved = result["activation"]
    if module._diff and moved and moved["before"] != moved["after"]:
        path = module.params["release"]
        result["diff"] = dict(before=moved["before"], after=moved["after"], before_header=path, after_header=path)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
