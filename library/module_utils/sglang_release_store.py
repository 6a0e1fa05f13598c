"""Releases on disk: manifest, list of files, ``current`` link. Every write is temp + fsync + rename.

A manifest is ``{schema, id, variant, digest, state, created, run, record, files, history}``. ``files`` is null until
the release is sealed, then ``{count, bytes, sha256}`` of ``files.json``, which lists every file. ``history`` is a list
of ``{state, time, run, user, reason}``. A release is complete when ``files`` is set. Times are UTC with milliseconds,
so that text order is time order.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re

from ansible.module_utils.sglang_api_key import names_secret

SCHEMA = 1
STATES = ("building", "built", "active", "promoted", "rejected", "retired")
# The service writes here while it runs: not part of what was sealed.
OPEN_DIRECTORIES = ("logs", "run", "results")
# Prefixes in releases/ of directories that are being made or deleted; never a release.
NEW, TRASH = ".new-", ".trash-"
ID_PATTERN = re.compile(r"^(\d{8}T\d{6}Z)-([A-Za-z0-9][A-Za-z0-9_.-]*)-([0-9a-f]{12})$")
VARIANT_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


class ReleaseError(Exception):
    """What was refused, which rule refused it, and the way out; ``rung`` is the step of a deploy that it belongs to."""

    rung = "release"


def utc_now():
    """Return the time as ``2026-01-31T03:00:00.123Z``."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def canonical(value):
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def without_secrets(value):
    """Return a copy in which the value of every key that names a secret is replaced; lists and dicts at any depth."""
    if isinstance(value, dict):
        return {
            key: "(not recorded)" if names_secret(key) and item not in (None, "") else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return value


def fsync_directory(path):
    """Make a rename or a new entry in this directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path, data, mode=0o644, uid=-1, gid=-1):
    """Replace a file with these bytes so that a reader or a crash sees the old or the new content, never a part."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fchmod(handle.fileno(), mode)
        if uid != -1 or gid != -1:
            os.fchown(handle.fileno(), uid, gid)
        os.fsync(handle.fileno())
    os.rename(temporary, path)
    fsync_directory(directory)


def parse_id(release):
    """Return ``(time, variant, digest)`` of a release id; :class:`ReleaseError` where it is none."""
    match = ID_PATTERN.match(release or "")
    if not match:
        raise ReleaseError(
            f"release: {release!r} is no release id. Rule: <UTC time>-<variant>-<12 hex digits>, for example "
            "20260131T030000Z-baseline-0123456789ab, and never a path. Way out: take an id that status.yml lists."
        )
    return match.groups()


def releases_directory(root):
    """Return ``<root>/releases``."""
    return os.path.join(root, "releases")


def release_path(root, release):
    """Return the directory of a release id, which need not exist."""
    parse_id(release)
    return os.path.join(releases_directory(root), release)


def read_manifest(path):
    """Return the manifest in a release directory.

    :raises FileNotFoundError: there is no manifest.
    :raises ReleaseError: the manifest is torn, of another schema, or not of this directory.
    """
    manifest = read_manifest_of(path)
    if manifest.get("id") != os.path.basename(path):
        raise ReleaseError(
            f"{os.path.join(path, 'manifest.json')} belongs to {manifest.get('id')!r}: a copied or renamed directory"
        )
    return manifest


def read_manifest_of(path):
    """Return the manifest in a directory of any name; raises as :func:`read_manifest` does."""
    name = os.path.join(path, "manifest.json")
    try:
        with open(name, encoding="utf-8") as handle:
            manifest = json.load(handle)
    except ValueError as error:
        raise ReleaseError(f"{name} is torn or corrupt: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or manifest.get("state") not in STATES:
        raise ReleaseError(f"{name} is no manifest of schema {SCHEMA} with a state out of {', '.join(STATES)}")
    return manifest


def manifest_text(manifest):
    """Return the text of manifest.json."""
    return json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=True) + "\n"


def write_manifest(path, manifest):
    """Write manifest.json of a release directory."""
    atomic_write(os.path.join(path, "manifest.json"), manifest_text(manifest).encode("ascii"))


def list_releases(root):
    """Return ``(manifests in order of id, problems)``; a torn or foreign directory is a problem and not a release."""
    manifests, problems = [], []
    try:
        names = sorted(os.listdir(releases_directory(root)))
    except FileNotFoundError:
        return [], []
    for name in names:
        if name.startswith((NEW, TRASH)):
            problems.append(f"{name} is left over from a run that was killed; the next deploy or prune removes it")
            continue
        path = os.path.join(releases_directory(root), name)
        try:
            parse_id(name)
            manifests.append(read_manifest(path))
        except FileNotFoundError:
            problems.append(f"{path} has no manifest.json; it is not used and not deleted")
        except (ReleaseError, OSError) as error:
            problems.append(f"{name} is not used and not deleted: {error}")
    return manifests, problems


def complete(manifest):
    """Return whether the release was sealed."""
    return manifest.get("files") is not None


def promoted_at(manifest):
    """Return when the release was promoted last, or null; a later rejection or retirement takes the promotion back.

    A promoted release that is started again is ``active`` while it is judged: it stays a target until it is refused.
    """
    moment = None
    for entry in manifest["history"]:
        if entry["state"] == "promoted":
            moment = entry["time"]
        elif entry["state"] in ("rejected", "retired"):
            moment = None
    return moment


def brief(root, manifest):
    """Return ``{id, path, variant, state, digest, created, promoted, complete, reason, python}`` of a manifest.

    ``python`` is the interpreter of its engine, or null where the manifest does not say.
    """
    return {
        "id": manifest["id"],
        "path": release_path(root, manifest["id"]),
        "variant": manifest["variant"],
        "state": manifest["state"],
        "digest": manifest["digest"],
        "created": manifest["created"],
        "promoted": promoted_at(manifest),
        "complete": complete(manifest),
        "reason": manifest["history"][-1]["reason"] if manifest["history"] else "",
        "python": (manifest["record"].get("engine") or {}).get("python"),
    }


def read_current(root):
    """Return the id that ``<root>/current`` points to, or null; :class:`ReleaseError` where it is no link of ours."""
    link = os.path.join(root, "current")
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReleaseError(f"{link} is not a link: {error}. Way out: move it away and deploy again.") from error
    parent, name = os.path.split(os.path.normpath(os.path.join(root, target)))
    if parent != os.path.normpath(releases_directory(root)) or not ID_PATTERN.match(name):
        raise ReleaseError(f"{link} points to {target}, which is no release. Way out: remove it and deploy again.")
    return name


def move_current(root, release):
    """Let ``<root>/current`` point to a release: a new link beside it, renamed over it."""
    temporary = os.path.join(root, ".current.new")
    try:
        os.unlink(temporary)
    except FileNotFoundError:
        pass
    os.symlink(os.path.join("releases", release), temporary)
    os.rename(temporary, os.path.join(root, "current"))
    fsync_directory(root)


def scan_files(path):
    """Return ``{path: {size, mtime_ns} or {link}}`` of what is sealed: no open directory, no bytecode cache."""
    found = {}

    def walk(directory, prefix):
        with os.scandir(directory) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_symlink():
                    found[name] = {"link": os.readlink(entry.path)}
                elif entry.is_dir():
                    if entry.name != "__pycache__" and name not in OPEN_DIRECTORIES:
                        walk(entry.path, name + "/")
                elif name not in ("manifest.json", "files.json", ".manifest.json.new", ".files.json.new"):
                    info = entry.stat()
                    found[name] = {"size": info.st_size, "mtime_ns": info.st_mtime_ns}

    walk(path, "")
    return found


def hash_files(path):
    """Return :func:`scan_files` with ``sha256`` added to each regular file."""
    found = scan_files(path)
    for name, record in found.items():
        if "link" not in record:
            with open(os.path.join(path, name), "rb") as handle:
                record["sha256"] = hashlib.sha256(handle.read()).hexdigest()
    return found


def write_files(path, records):
    """Write files.json and return what the manifest keeps of it: ``{count, bytes, sha256}``."""
    data = (json.dumps(records, indent=0, sort_keys=True) + "\n").encode("ascii")
    atomic_write(os.path.join(path, "files.json"), data)
    total = sum(record.get("size", 0) for record in records.values())
    return {"count": len(records), "bytes": total, "sha256": hashlib.sha256(data).hexdigest()}


def changed_files(path, manifest):
    """Return what differs in a sealed release from its list of files, as text lines; size and time decide.

    A file whose time moved but whose content is the sealed one is not named.
    """
    try:
        with open(os.path.join(path, "files.json"), "rb") as handle:
            data = handle.read()
    except FileNotFoundError:
        return ["files.json is missing"]
    if hashlib.sha256(data).hexdigest() != manifest["files"]["sha256"]:
        return ["files.json is not the one that was sealed"]
    sealed, lines = json.loads(data), []
    present = scan_files(path)
    for name in sorted(set(sealed) | set(present)):
        if name not in present:
            lines.append(f"{name} is missing")
        elif name not in sealed:
            lines.append(f"{name} was added")
        elif not _same_file(os.path.join(path, name), sealed[name], present[name]):
            lines.append(f"{name} was edited")
    return lines


def _same_file(path, sealed, present):
    if sealed.get("link") != present.get("link") or sealed.get("size") != present.get("size"):
        return False
    if sealed.get("mtime_ns") == present.get("mtime_ns"):
        return True
    with open(path, "rb") as handle:
        return hashlib.sha256(handle.read()).hexdigest() == sealed["sha256"]


def owner_ids(owner):
    """Return ``(uid, gid)`` of a user name, or ``(-1, -1)`` for none."""
    if not owner:
        return -1, -1
    import pwd

    try:
        entry = pwd.getpwnam(owner)
    except KeyError:
        raise ReleaseError(
            f"owner: there is no user {owner!r} on this host. Way out: create it, or leave sglang_server_user empty: "
            "the account that deploys is then taken."
        ) from None
    return entry.pw_uid, entry.pw_gid


def make_release_directory(root, manifest, owner, fill=lambda directory: None):
    """Make the skeleton with its manifest under a hidden name and rename it: it appears whole or not at all.

    :param fill: called with the directory under its hidden name, to write what the release begins with.
    """
    uid, gid = owner_ids(owner)
    parent = releases_directory(root)
    os.makedirs(parent, mode=0o755, exist_ok=True)
    temporary = os.path.join(parent, NEW + manifest["id"])
    os.mkdir(temporary)
    os.chmod(temporary, 0o755)
    for name in ("site",) + OPEN_DIRECTORIES:
        directory = os.path.join(temporary, name)
        os.mkdir(directory)
        os.chmod(directory, 0o755)
        if name != "site":
            os.chown(directory, uid, gid)
    fill(temporary)
    write_manifest(temporary, manifest)
    os.rename(temporary, release_path(root, manifest["id"]))
    fsync_directory(parent)


def leftovers(root):
    """Return the hidden names in releases/ that killed runs left."""
    try:
        return sorted(name for name in os.listdir(releases_directory(root)) if name.startswith((NEW, TRASH)))
    except FileNotFoundError:
        return []
