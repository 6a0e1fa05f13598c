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
    description: A file on the host that already holds the key, readable by O(user). Excludes O(api_key).
    type: path
  seal:
    description:
      - Whether the release is complete with these files and is sealed in the same call, as C(state=built) of
        M(sglang_release) does it. A release that is sealed already stays as it is.
    type: bool
    default: false
  run:
    description: The run that seals it, as the action C(sglang_variant) or C(sglang_run) returns it.
    type: dict
    default: {}
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

import json
import os
import pwd
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import hide_secrets, key_path, masked, problem_of
from ansible.module_utils.sglang_launch_files import launch_dict, launch_files
from ansible.module_utils.sglang_lock import LockedError
from ansible.module_utils.sglang_provider import ProviderError, Systemd, detect
from ansible.module_utils.sglang_release_step import build, locked
from ansible.module_utils.sglang_release_store import ReleaseError

# launch.json may hold a token of the operator: the server's account reads it, others do not.
MODES = {"launch.json": 0o640}


def account(module):
    """Return ``(uid, gid)`` of the service user, or of this process."""
    user = module.params["user"]
    if not user:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        module.fail_json(msg=f"sglang_server_user: no account {user!r} on this host. Way out: create it first.")
    if os.geteuid() not in (0, entry.pw_uid):
        module.fail_json(msg=f"sglang_server_user: only root can start the server as {user!r}. Way out: become: true.")
    return entry.pw_uid, entry.pw_gid


def directory(module, path, mode, uid, gid):
    """Make a directory where it is missing; return whether it was missing."""
    if os.path.isdir(path):
        return False
    if not module.check_mode:
        os.makedirs(path, mode=mode)
        os.chmod(path, mode)
        os.chown(path, uid, gid)
    return True


def verify_unit(module, name, text, temporary):
    """Let systemd judge a unit before it replaces the one there, where systemd-analyze exists."""
    analyze = module.get_bin_path("systemd-analyze")
    if not analyze:
        return
    # It judges by the file's name.
    named = os.path.join(module.tmpdir, name)
    with open(named, "w", encoding="utf-8") as handle:
        handle.write(text)
    rc, out, err = module.run_command([analyze, "verify", "--man=no", named])
    if rc:
        os.unlink(temporary)
        module.fail_json(msg=f"systemd refuses the unit {name}: {(err or out).strip()}")


def shown(text):
    """Return the text of a launch.json, which may be none, without the values of the environment that are secrets."""
    try:
        launch = json.loads(text)
        launch["env"] = masked(launch["env"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "(unreadable)\n" if text else ""
    return json.dumps(launch, indent=2, ensure_ascii=False) + "\n"


def write(module, path, text, mode, uid, gid, secret=False):
    """Write a file when content, mode or owner differ; return ``(changed, diff)``; a secret's content is not shown."""
    before, same = "", False
    if os.path.exists(path):
        with open(path, encoding="utf-8") as handle:
            before = handle.read()
        stat = os.stat(path)
        same = before == text and stat.st_mode & 0o777 == mode and (stat.st_uid, stat.st_gid) == (uid, gid)
    if not same and not module.check_mode:
        # Beside its target and not by atomic_move, which would give a new file the umask's mode for a moment.
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
        os.chmod(temporary, mode)
        os.chown(temporary, uid, gid)
        if path.endswith(".service"):
            verify_unit(module, os.path.basename(path), text, temporary)
        os.replace(temporary, path)
    if secret:
        before, text = "(secret)\n" if before else "", "(secret)\n"
    elif path.endswith("launch.json"):
        before, text = shown(before), shown(text)
    return not same, {"before": before, "after": text, "before_header": path, "after_header": path}


def seal(module, params, diff):
    """Seal the release, add the manifest to the diff, and return whether it was open."""
    step = {"root": params["root"], "release": params["id"], "run": params["run"], "reason": ""}
    try:
        done = locked(build, step, module.check_mode)
    except (ReleaseError, LockedError) as error:
        module.fail_json(msg=str(error))
    if done["changed"]:
        name = os.path.join(params["release"], "manifest.json")
        diff.append({"before": done["before"], "after": done["after"], "before_header": name, "after_header": name})
    return done["changed"]


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "release": {"type": "path", "required": True},
            "id": {"type": "str"},
            "provider": {"type": "str", "choices": ["auto", "supervisor", "systemd"], "default": "auto"},
            "unit": {"type": "str", "default": "sglang-server"},
            "install_unit": {"type": "bool", "default": False},
            "python": {"type": "path", "required": True},
            "model_path": {"type": "str", "required": True},
            "served_model_name": {"type": "str", "default": ""},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 30000},
            "tp_size": {"type": "int", "default": 1},
            "args": {"type": "dict", "default": {}},
            "env": {"type": "dict", "default": {}},
            "expect_env": {"type": "dict", "default": {}},
            "expect_packages": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": ""},
            "stop_timeout": {"type": "int", "default": 60},
            "log_keep": {"type": "int", "default": 5},
            "log_max_mb": {"type": "int", "default": 100},
            "restart_limit": {"type": "int", "default": 3},
            "restart_minutes": {"type": "int", "default": 120},
            "restart_on_hang": {"type": "bool", "default": False},
            "probe_interval": {"type": "int", "default": 15},
            "hang_seconds": {"type": "int", "default": 30},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "api_key_file": {"type": "path", "no_log": False},
            "seal": {"type": "bool", "default": False},
            "run": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = dict(module.params)
    if params["seal"] and not params["run"].get("id"):
        module.fail_json(msg="run: seal needs the run that the action sglang_variant or sglang_run returns.")
    release = params["release"]
    params["id"] = params["id"] or os.path.basename(release)
    params["env"] = hide_secrets(module)
    if os.path.dirname(release) != os.path.join(params["root"], "releases"):
        module.fail_json(
            msg=f"sglang_server_release_path: {release} does not lie directly in {params['root']}/releases, so the "
            "stop would not know its processes. Way out: let the role sglang_release name it."
        )
    key_file = None
    if params["api_key"]:
        problem = problem_of(params["api_key"], params["api_key_file"])
        if problem:
            module.fail_json(msg=problem)
        key_file = params["api_key_file"] = key_path(params["root"], params["api_key"])
    uid, gid = account(module)
    provider = detect() if params["provider"] == "auto" else params["provider"]
    try:
        if provider == "systemd":
            # Here already, while the server before still runs.
            host = Systemd(params["root"], params["unit"], module.run_command, params["install_unit"])
            host.permit(release, planned=True)
        launch = launch_dict(params)
        files = launch_files(
            launch, provider, params["unit"], params["stop_timeout"], params["log_keep"], params["log_max_mb"]
        )
    except (ValueError, ProviderError) as error:
        module.fail_json(msg=str(error))

    own = (os.geteuid(), gid)
    missing = directory(module, release, 0o755, *own)
    missing |= directory(module, os.path.join(release, "logs"), 0o750, uid, gid)
    # The server's sitecustomize writes the origin of its packages here.
    missing |= directory(module, os.path.join(release, "run"), 0o750, uid, gid)
    written, diff = [], []
    for name, text in files.items():
        changed, one = write(module, os.path.join(release, name), text, MODES.get(name, 0o644), *own)
        if changed:
            written.append(name)
            diff.append(one)
    if key_file:
        missing |= directory(module, os.path.dirname(key_file), 0o711, *own)
        changed, one = write(module, key_file, params["api_key"] + "\n", 0o600, uid, gid, secret=True)
        if changed:
            missing = True
            diff.append(one)
    sealed = seal(module, params, diff) if params["seal"] else False
    module.exit_json(
        changed=bool(missing or written or sealed),
        provider=provider,
        endpoint=launch["endpoint"],
        argv=launch["argv"],
        log=launch["log"],
        files=list(files),
        written=written,
        diff=diff,
    )


if __name__ == "__main__":
    main()
