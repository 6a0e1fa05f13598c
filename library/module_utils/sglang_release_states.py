"""The states of the module sglang_release that change a release, and the table of all states.

Each function takes ``(params, check)`` and returns the result's keys; ``check`` is check mode: the same keys come back
and nothing is written.
"""

from __future__ import annotations

import os

from ansible.module_utils import sglang_lock, sglang_proc
from ansible.module_utils import sglang_release_plan as choose
from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.sglang_api_key import unnamed_keys
from ansible.module_utils.sglang_release_archive import remove_release_directory
from ansible.module_utils.sglang_release_compare import compare, info, lock, target
from ansible.module_utils.sglang_release_step import (
    activate,
    advance,
    brief_of,
    create,
    load,
    locked,
    make_result,
    record_decision,
    record_event,
    seal,
)
from ansible.module_utils.sglang_release_store import ReleaseError


def build(params, check):
    """Seal a release that was made in steps, or build it whole where it is said how its server starts."""
    if not params["launch"]:
        return seal(params, check)
    # Here: the other states do not wait for these to be read.
    from ansible.module_utils.sglang_release_build import build_whole

    return build_whole(params, check)


def promote(params, check):
    """Record that the current release passed, or that one that was only started again keeps its promotion."""
    root = params["root"]
    manifest = load(params, check)
    if manifest["state"] == "promoted":
        record_decision(params, check)
        return make_result(release=brief_of(root, manifest), msg=f"{manifest['id']} is promoted already")
    stands = store.promoted_at(manifest) or store.read_current(root) == manifest["id"]
    if not check and not (manifest["state"] == "active" and stands):
        raise ReleaseError(
            f"release: {manifest['id']} is {manifest['state']} and the current release is {store.read_current(root)}. "
            "Rule: only an active release is promoted, and only where the link points to it or its promotion stands. "
            "Way out: activate it, then verify it."
        )
    record_decision(params, check)
    return advance(params, check, manifest, "promoted", "promoted")


def reject(params, check):
    """Record that a release failed and why; one that was never created is only told to the ledger."""
    root, release = params["root"], params["release"]
    _, variant, _ = store.parse_id(release)
    record_decision(params, check)
    try:
        manifest = store.read_manifest(store.release_path(root, release))
    except FileNotFoundError:
        if not check:
            record_event(params, "rejected", release, variant, reason=params["reason"], rung=params.get("rung") or None)
        return make_result(msg=f"{release} was never created; the ledger has the reason")
    if manifest["state"] == "rejected" and manifest["history"][-1]["reason"] == params["reason"]:
        return make_result(release=brief_of(root, manifest), msg=f"{release} is rejected already")
    return advance(params, check, manifest, "rejected", "rejected")


def retire(params, check):
    """Record that a rollback left a promoted release; one that was refused keeps that state."""
    root = params["root"]
    manifest = load(params, check)
    if manifest["state"] not in ("promoted", "active"):
        message = f"{manifest['id']} is {manifest['state']} and stays so"
        return make_result(release=brief_of(root, manifest), msg=message)
    if not check and store.read_current(root) == manifest["id"]:
        raise ReleaseError(
            f"release: {manifest['id']} is the current release. Rule: a release retires after another one is active."
        )
    return advance(params, check, manifest, "retired", "retired")


def prune(params, check):
    """Delete old and unfinished releases; what serves, runs or may be rolled back to stays.

    A key file that no release names goes too.
    """
    root = params["root"]
    manifests, problems = store.list_releases(root)
    current = store.read_current(root)
    protected = {current, params["release"]} | {os.path.basename(item["release"]) for item in sglang_proc.scan(root)}
    for manifest in (
        choose.last_promoted(manifests),
        choose.last_promoted(manifests, (current,)),
        choose.previous(manifests, current, None),
    ):
        if manifest:
            protected.add(manifest["id"])
    removed = choose.prunable(manifests, params["keep"], protected) + store.leftovers(root)
    keys = unnamed_keys(root, removed)
    if not check:
        for name in removed:
            remove_release_directory(root, name)
        for name in keys:
            os.unlink(os.path.join(root, name))
    removed += keys
    if removed and not check:
        record_event(params, "pruned", removed=removed)
    return make_result(
        changed=bool(removed),
        removed=removed,
        before="".join(f"{name}\n" for name in removed),
        msg=f"{'would remove' if check else 'removed'}: {', '.join(removed) or 'nothing'}",
    )


def unlock(params, check):
    """Give the lock back where it is this run's; anything else is left alone, so that it may stand in ``always``."""
    root = params["root"]
    if check or not sglang_lock.release(root, params["run"]):
        return make_result(msg="this run holds no lock")
    # Beside a state that gives the lock back itself, a rung is that state's own.
    if params["state"] == "unlocked" and params.get("rung"):
        named = {"release": params["release"] or None, "variant": params["variant"]}
        record_event(params, "refused", **named, rung=params["rung"], reason=params["reason"])
    record_event(params, "unlocked", variant=params["variant"])
    return make_result(unlocked=True, msg="the lock is free")


# state: (function, whether it runs under the lock for its own duration when the run does not hold it yet)
STATES = {
    "compared": (compare, False),
    "locked": (lock, False),
    "target": (target, False),
    "created": (create, True),
    "built": (build, True),
    "active": (activate, True),
    "promoted": (promote, True),
    "rejected": (reject, True),
    "retired": (retire, True),
    "pruned": (prune, True),
    "unlocked": (unlock, False),
    "reported": (info, False),
}


def run_state(params, check):
    """Run ``params['state']``; ``params`` are the module's.

    :raises ReleaseError: refused, with the rule and the way out.
    :raises sglang_lock.LockedError: another run works here.
    """
    function, locks = STATES[params["state"]]
    result = locked(function, params, check) if locks else function(params, check)
    # The last step of a run gives the lock back itself: a task of its own would cost as much as the step.
    ends = not result["plan"] or result["plan"]["in_sync"]
    if params.get("unlock") and ends:
        result["unlocked"] = unlock(params, check)["unlocked"]
    return result
