"""One text file inside a release: where it may lie, whether it is valid, and how it is written."""

from __future__ import annotations

import json
import os
import stat

from ansible.module_utils.sglang_release_store import ReleaseError, atomic_write, owner_ids, read_manifest

_RESERVED = ("manifest.json", "files.json")


def place(release, path):
    """Return the absolute path of a file of a release.

    :raises ReleaseError: it would lie outside, by its name or through a link, or is one of the store's own files.
    """
    target = os.path.normpath(os.path.join(release, path))
    inside = os.path.realpath(os.path.dirname(target)) + os.sep
    if (
        not path
        or not os.path.isabs(release)
        or os.path.isabs(path)
        or ".." in path.split("/")
        or target == os.path.normpath(release)
        or not inside.startswith(os.path.realpath(release) + os.sep)
    ):
        raise ReleaseError(
            f"path: {path!r} is not a file below {release}. Rule: a relative path without '..' and without a link that "
            "leads outside. Way out: name a file such as site/sitecustomize.py."
        )
    if os.path.relpath(target, release) in _RESERVED:
        raise ReleaseError(f"path: {path} is written by the module sglang_release only.")
    return target


def validate_text(name, text, kind):
    """Check a text before it is written.

    :param kind: none, json or python. :raises ReleaseError: it does not parse; the message has the position.
    """
    try:
        text.encode("utf-8")
        if kind == "json":
            json.loads(text)
        elif kind == "python":
            compile(text, name, "exec", dont_inherit=True)
    except (ValueError, SyntaxError) as error:
        what = "UTF-8 text" if kind == "none" else kind
        raise ReleaseError(f"content: {name} is no valid {what}: {error}") from error


def _sealed(release):
    """Return the state of the release where it may not be written to, else an empty text; missing is empty."""
    try:
        manifest = read_manifest(release)
    except FileNotFoundError:
        return ""
    return "" if manifest["state"] == "building" else manifest["state"]


def write_text(release, target, text, mode, owner, check):
    """Bring a file to this text, mode and owner; return ``{changed, msg, before}``.

    :param mode: octal text. :param owner: user name or empty. :param check: write nothing.
    :raises ReleaseError: the release is sealed or, unless ``check``, missing.
    """
    try:
        bits = int(str(mode), 8)
    except ValueError:
        raise ReleaseError(f"mode: {mode!r} is no octal number such as '0644'.") from None
    uid, gid = owner_ids(owner)
    before, same = "", False
    try:
        with open(target, "rb") as handle:
            data, info = handle.read(), os.fstat(handle.fileno())
    except FileNotFoundError:
        data = None
    else:
        before = data.decode("utf-8", "replace")
        same = data == text.encode("utf-8")
    state = _sealed(release)
    if state and not same:
        raise ReleaseError(
            f"release: {release} is {state}, and a sealed release does not change. Way out: deploy the variant again; "
            "other content makes another release."
        )
    name = os.path.relpath(target, release)
    if state or (same and stat.S_IMODE(info.st_mode) == bits and uid in (-1, info.st_uid)):
        return {"changed": False, "msg": f"{name} is as wanted", "before": before}
    if not check:
        if not os.path.isdir(release):
            raise ReleaseError(f"release: {release} does not exist. Way out: create it first (state=created).")
        _make_directories(release, os.path.dirname(target))
        atomic_write(target, text.encode("utf-8"), bits, uid, gid)
    return {"changed": True, "msg": f"wrote {name}", "before": before}


def write_new(directory, texts):
    """Write the texts that a new release begins with; each path is checked as in :func:`place`.

    :param texts: ``{relative path: text}``.
    """
    for path, text in texts.items():
        target = place(directory, path)
        _make_directories(directory, os.path.dirname(target))
        atomic_write(target, text.encode("utf-8"), 0o644)


def _make_directories(release, directory):
    """Make the directories between release and file, readable by the service whatever the umask."""
    if os.path.isdir(directory):
        return
    _make_directories(release, os.path.dirname(directory))
    os.mkdir(directory)
    os.chmod(directory, 0o755)
