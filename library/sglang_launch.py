#!/usr/bin/python
# Copyright: the sglang deploy authors
# SPDX-License-Identifier: Apache-2.0
"""Write what starts the server of a release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_launch
short_description: Write launch.json, the launcher and the unit or program of a release
description:
  - Builds the command line of C(sglang.launch_server) and writes every file that starts it into the release.
  - Unit and supervisor program run the same C(watch.py), the parent of the server, which decides about restarts.
    It starts C(launch.py), which reads C(launch.json) and replaces itself by its command with exactly its environment.
    No value passes through the quoting of a unit file.
  - With an API key the release also gets C(serve.py), which hands the key to the server inside the process. The key
    is in no command line, environment, log, nor in any file but the key file.
options:
  root:
    description: The deployment's root.
    type: path
    required: true
  release:
    description: Absolute path of the release, C(<root>/releases/<id>).
    type: path
    required: true
  id:
    description: Identifier of the release; default is the last part of O(release).
    type: str
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
    description:
      - Whether the unit may be linked into C(/etc/systemd/system) by the start. With systemd and without it the module
        fails where the start would.
    type: bool
    default: false
  python:
    description: Interpreter of the engine.
    type: path
    required: true
  model_path:
    description: Path of the model, as given to the server.
    type: str
    required: true
  served_model_name:
    description: Name under which the model is served; empty leaves the flag out, and the server uses the path.
    type: str
    default: ""
  host:
    description: Address to listen on.
    type: str
    default: 127.0.0.1
  port:
    description: TCP port of the HTTP interface.
    type: int
    default: 30000
  tp_size:
    description: Number of tensor-parallel ranks.
    type: int
    default: 1
  args:
    description:
      - The other flags as C(flag without dashes -> value). V(true) is a bare flag, V(false) and null leave it out, a
        list is several values after one flag, a dictionary becomes JSON.
    type: dict
    default: {}
  env:
    description: Variables that must be there before Python starts.
    type: dict
    default: {}
  expect_env:
    description: Variables that every worker must hold; kept in C(launch.json) for the verification.
    type: dict
    default: {}
  expect_packages:
    description: Package name to the path that a worker must import it from, or null where the engine's own is right.
    type: dict
    default: {}
  user:
    description: Account that the server runs as; empty is the account that runs the service manager.
    type: str
    default: ""
  stop_timeout:
    description: Seconds between SIGTERM and SIGKILL.
    type: int
    default: 60
  log_keep:
    description: Number of older logs that are kept.
    type: int
    default: 5
  log_max_mb:
    description: Size in MiB at which supervisor rotates the log of a running server.
    type: int
    default: 100
  restart_limit:
    description:
      - How often a promoted release is started again after a death of the server, in O(restart_minutes); 0 is never. A
        release that is not promoted is never started again, nor one that was stopped, nor while somebody has the
        deploy lock.
    type: int
    default: 3
  restart_minutes:
    description: Minutes in which O(restart_limit) counts.
    type: int
    default: 120
  restart_on_hang:
    description: Whether a server that lives and makes no token counts as dead; else it is only an alarm.
    type: bool
    default: false
  probe_interval:
    description: Seconds without a sign of tokens after which the server is asked for two; 0 never asks.
    type: int
    default: 15
  hang_seconds:
    description: Seconds without any token after that question which make a hang.
    type: int
    default: 30
  api_key:
    description:
      - API key that clients must send; kept in C(<root>/secrets/api_key-<12 hex digits of its SHA-256>), readable by
        O(user) alone. Each release names the file of its own key.
    type: str
    default: ""
  api_key_file:
    description: A file on the host that holds the key already, readable by O(user). Excludes O(api_key).
    type: path
    default: ""
attributes:
  check_mode:
    description: The same keys are returned and nothing is written.
    support: full
  diff_mode:
    description: One difference for each file; values of variables that are named like secrets are masked.
    support: full
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Write what starts the server
  sglang_launch:
    root: /opt/sglang
    release: /opt/sglang/releases/20260101T000000Z-baseline-0a1b2c3d
    python: /opt/ml-env/bin/python3
    model_path: /shared/kimi-k2.5-int4
    host: 0.0.0.0
    port: 8000
    tp_size: 8
    args:
      trust-remote-code: true
      mem-fraction-static: 0.88
      num-continuous-decode-steps: 4
      disable-custom-all-reduce: true
"""

RETURN = r"""
provider:
  description: Service manager that the files are for.
  returned: success
  type: str
  sample: supervisor
endpoint:
  description: URL at which the host itself reaches the server.
  returned: success
  type: str
  sample: http://127.0.0.1:8000
argv:
  description: The whole command line.
  returned: success
  type: list
  elements: str
  sample: [/opt/ml-env/bin/python3, -m, sglang.launch_server, --model-path, /shared/kimi-k2.5-int4]
log:
  description: Path of the server's log.
  returned: success
  type: str
  sample: /opt/sglang/releases/20260101T000000Z-baseline-0a1b2c3d/logs/server.log
files:
  description: Names of all files that start the server, relative to the release.
  returned: success
  type: list
  elements: str
  sample: [launch.json, launch.py, watch.py, policy.py, probe.py, newlog.py, signatures.py, supervisor.conf]
written:
  description: Those of RV(files) that were written, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [launch.json]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import hide_secrets
from ansible.module_utils.sglang_build_spec import LAUNCH
from ansible.module_utils.sglang_launch_write import LaunchError, write_launch


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "release": {"type": "path", "required": True},
            "id": {"type": "str"},
            "python": {"type": "path", "required": True},
            "expect_packages": {"type": "dict", "default": {}},
            **LAUNCH,
        },
        supports_check_mode=True,
    )
    try:
        result = write_launch({**module.params, "env": hide_secrets(module)}, module.check_mode, module)
    except LaunchError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
