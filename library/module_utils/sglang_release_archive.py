"""How a release goes away: its directory is deleted, its record moves to ``<root>/archive/<id>/``.

The ledger names the result files, and a report compares the manifests of releases long gone.
"""

from __future__ import annotations

import os
import shutil
import stat

from ansible.module_utils import sglang_release_store as store

ARCHIVED = ("results", "launch.json", "manifest.json")


def archive_path(root, release):
    """Return ``<root>/archive/<id>``: the record of a release that was deleted."""
    return os.path.join(root, "archive", release)


def result_path(root, path):
    """Return where a result file is that the ledger names: there, or in the archive of its release; else None."""
    directory, name = os.path.split(str(path))
    moved = os.path.join(archive_path(root, os.path.basename(os.path.dirname(directory))), "results", name)
    return next((item for item in (str(path), moved) if os.path.isfile(item)), None)


def _archive(root, path, release):
    """Move the record of a release that is being deleted to the archive; one that a kill left half-way goes on.

    A release that was never sealed and holds no result leaves nothing.
    """
    target = archive_path(root, release)
    try:
        sealed = store.complete(store.read_manifest_of(path))
    except (OSError, store.ReleaseError):
        sealed = False
    results = os.path.join(path, "results")
    if not (sealed or os.path.isdir(target) or (os.path.isdir(results) and os.listdir(results))):
        return
    os.makedirs(target, mode=0o755, exist_ok=True)
    for name in ARCHIVED:
        source = os.path.join(path, name)
        if os.path.lexists(source) and not os.path.lexists(os.path.join(target, name)):
            os.rename(source, os.path.join(target, name))
    store.fsync_directory(target)
    store.fsync_directory(os.path.dirname(target))


def remove_release_directory(root, name):
    """Delete a directory of releases/: renamed first, so that a kill half-way never leaves a thinned-out release.

    Its manifest, launch line and results are kept in archive/, because the ledger names them.
    """
    path = os.path.join(store.releases_directory(root), name)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise store.ReleaseError(f"{path} is not a directory; it is left alone.")
    if not name.startswith((store.NEW, store.TRASH)):
        trash = os.path.join(store.releases_directory(root), store.TRASH + name)
        os.rename(path, trash)
        path = trash
    release = os.path.basename(path)[len(store.TRASH) :] if os.path.basename(path).startswith(store.TRASH) else ""
    if store.ID_PATTERN.match(release):
        _archive(root, path, release)
    shutil.rmtree(path)
