"""Build a release in one call: its directory, the patched copies, what starts its server, and the seal."""

from __future__ import annotations

import os
import time

from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.sglang_engine import describe as describe_engine
from ansible.module_utils.sglang_launch_write import LaunchError, write_launch
from ansible.module_utils.sglang_model import describe as describe_model
from ansible.module_utils.sglang_patch_run import reconcile
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_patching import EntryError
from ansible.module_utils.sglang_release_archive import remove_release_directory
from ansible.module_utils.sglang_release_step import brief_of, create, make_result, seal
from ansible.module_utils.sglang_release_store import ReleaseError


class PatchError(ReleaseError):
    """The patches of the variant cannot be applied."""

    rung = "patches"


def build_whole(params, check, engine=None, model=None):
    """Build the release of the task, unless it is there; an unfinished one of its id is made anew.

    :param params: the module's, with ``launch`` and ``tools``, which runs commands.
    :param engine, model: what is known of ``params["engine"]`` and ``params["model"]``.
    :raises ReleaseError: refused; what was written is an unfinished release, which the next run removes.
    """
    root, release = params["root"], params["release"]
    path = store.release_path(root, release)
    found = _manifest(path)
    if found and store.complete(found):
        return make_result(release=brief_of(root, found), msg=f"{release} is sealed already")
    engine, model = engine or describe_engine(params["engine"]), model or describe_model(params["model"])
    params = {**params, "record": {"engine": engine, "model": model, **params["record"]}}
    if found and not check:
        remove_release_directory(root, release)
    began = time.monotonic()
    result = create(params, check)
    patching = time.monotonic()
    patched = _patch(params, check, path, engine["python"])
    seconds = {"patches": round(time.monotonic() - patching, 3)}
    try:
        launch = {"root": root, "release": path, "id": release, "python": engine["python"]}
        launch["expect_packages"] = patched["packages"]
        written = write_launch({**params["launch"], **launch}, check, params["tools"])
    except LaunchError as error:
        raise ReleaseError(str(error)) from error
    sealed = seal(params, check)
    return {
        **sealed,
        "removed": result["removed"],
        "texts": result["texts"],
        "patches": patched["results"],
        "seconds": {**seconds, "build": round(time.monotonic() - began, 3)},
        "diffs": patched["diff"] + written["diff"],
        "warnings": patched.get("warn", []),
        "before": result["before"],
        "msg": f"built {release}",
    }


def _manifest(path):
    try:
        return store.read_manifest(path)
    except FileNotFoundError:
        return None


def _patch(params, check, path, python):
    """Apply the patches of the release; return what ``reconcile`` does."""
    if not params["patches"]:
        return {"packages": {}, "results": [], "diff": []}
    site = os.path.join(path, "site")
    wanted = {**params["patches"], "python": python, "chdir": path, "site": site, "state": "present"}
    wanted["env"] = {**wanted["env"], "PYTHONPATH": site}
    try:
        done = reconcile(wanted, check)
    except (EntryError, SiteError) as error:
        raise PatchError(str(error)) from error
    if done.get("failed"):
        raise PatchError(done["failed"])
    return done
