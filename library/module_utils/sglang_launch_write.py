"""Write the files that start the server of a release: for the module sglang_launch, and for sglang_release, which
builds a release in one call.
"""

from __future__ import annotations

import json
import os
import pwd
import tempfile

from ansible.module_utils.sglang_api_key import key_path, masked, problem_of
from ansible.module_utils.sglang_launch_files import launch_dict, launch_files
from ansible.module_utils.sglang_provider import ProviderError, Systemd, detect

# launch.json may hold a token of the operator: the server's account reads it, others do not.
MODES = {"launch.json": 0o640}


class LaunchError(ValueError):
    """An input cannot be used, or systemd refuses the unit; the text names it and the way out."""


def _account(user):
    """Return ``(uid, gid)`` of the service user, or of this process."""
    if not user:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise LaunchError(f"sglang_server_user: no account {user!r} on this host. Way out: create it first.") from None
    if os.geteuid() not in (0, entry.pw_uid):
        raise LaunchError(f"sglang_server_user: only root can start the server as {user!r}. Way out: become: true.")
    return entry.pw_uid, entry.pw_gid


def _directory(path, mode, uid, gid, check):
    """Make a directory where it is missing; return whether it was missing."""
    if os.path.isdir(path):
        return False
    if not check:
        os.makedirs(path, mode=mode)
        os.chmod(path, mode)
        os.chown(path, uid, gid)
    return True


def _verify_unit(module, name, text, temporary):
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
        raise LaunchError(f"systemd refuses the unit {name}: {(err or out).strip()}")


def _shown(text):
    """Return the text of a launch.json, which may be none, without the values of the environment that are secrets."""
    try:
        launch = json.loads(text)
        launch["env"] = masked(launch["env"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "(unreadable)\n" if text else ""
    return json.dumps(launch, indent=2, ensure_ascii=False) + "\n"


def _write(module, check, path, text, mode, uid, gid, secret=False):
    """Write a file when content, mode or owner differ; return ``(changed, diff)``; a secret's content is not shown."""
    before, same = "", False
    if os.path.exists(path):
        with open(path, encoding="utf-8") as handle:
            before = handle.read()
        stat = os.stat(path)
        same = before == text and stat.st_mode & 0o777 == mode and (stat.st_uid, stat.st_gid) == (uid, gid)
    if not same and not check:
        # Beside its target and not by atomic_move, which would give a new file the umask's mode for a moment.
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
        os.chmod(temporary, mode)
        os.chown(temporary, uid, gid)
        if path.endswith(".service"):
            _verify_unit(module, os.path.basename(path), text, temporary)
        os.replace(temporary, path)
    if secret:
        before, text = "(secret)\n" if before else "", "(secret)\n"
    elif path.endswith("launch.json"):
        before, text = _shown(before), _shown(text)
    return not same, {"before": before, "after": text, "before_header": path, "after_header": path}


def write_launch(params, check, module):
    """Bring the files of a release that start its server to what is asked; return the result of ``sglang_launch``.

    :param params: values of :data:`sglang_build_spec.LAUNCH` and ``{root, release, id, python, expect_packages}``.
    :param check: write nothing.
    :param module: runs commands and has a temporary folder.
    :raises LaunchError: an input cannot be used; nothing was written then, unless it is systemd that refuses the unit.
    """
    params, release = dict(params), params["release"]
    params["id"] = params["id"] or os.path.basename(release)
    if os.path.dirname(release) != os.path.join(params["root"], "releases"):
        raise LaunchError(
            f"sglang_server_release_path: {release} does not lie directly in {params['root']}/releases, so the "
            "stop would not know its processes. Way out: let the role sglang_release name it."
        )
    key_file = None
    if params["api_key"]:
        problem = problem_of(params["api_key"], params["api_key_file"])
        if problem:
            raise LaunchError(problem)
        key_file = params["api_key_file"] = key_path(params["root"], params["api_key"])
    uid, gid = _account(params["user"])
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
        raise LaunchError(str(error)) from error

    own = (os.geteuid(), gid)
    missing = _directory(release, 0o755, *own, check)
    missing |= _directory(os.path.join(release, "logs"), 0o750, uid, gid, check)
    # The server's sitecustomize writes the origin of its packages here.
    missing |= _directory(os.path.join(release, "run"), 0o750, uid, gid, check)
    written, diff = [], []
    for name, text in files.items():
        changed, one = _write(module, check, os.path.join(release, name), text, MODES.get(name, 0o644), *own)
        if changed:
            written.append(name)
            diff.append(one)
    if key_file:
        missing |= _directory(os.path.dirname(key_file), 0o711, *own, check)
        changed, one = _write(module, check, key_file, params["api_key"] + "\n", 0o600, uid, gid, secret=True)
        if changed:
            missing = True
            diff.append(one)
    return {
        "changed": bool(missing or written),
        "provider": provider,
        "endpoint": launch["endpoint"],
        "argv": launch["argv"],
        "log": launch["log"],
        "files": list(files),
        "written": written,
        "diff": diff,
    }
