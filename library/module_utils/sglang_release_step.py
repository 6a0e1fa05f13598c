"""One step of a release from a state to the next, and the one that moves the link ``current``.

The module sglang_release takes all of them; sglang_service moves the link in the call that starts the server. Each step
takes ``(params, check)`` with ``{root, release, run, reason}`` and returns the keys of :func:`make_result`.
"""

from __future__ import annotations

import os

from ansible.module_utils import sglang_ledger, sglang_lock
from ansible.module_utils import sglang_release_plan as choose
from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.sglang_release_archive import remove_release_directory
from ansible.module_utils.sglang_release_store import ReleaseError
from ansible.module_utils.sglang_release_text import validate_text, write_new

# Files without which a release cannot be started.
REQUIRED_FILES = ("site/sitecustomize.py", "launch.json")


def make_result(**keys):
    """Return the keys of every result, with these set; ``before`` to ``diffs`` are for the diff."""
    result = {"changed": False, "msg": "", "plan": None, "info": None, "release": None, "removed": [], "warnings": []}
    result.update(checks=None, patches=[], seconds=None, unlocked=False, before="", after="", texts={}, diffs=[])
    result.update(keys)
    return result


def record_event(params, event, release=None, variant=None, **fields):
    """Append an event of this run to the ledger."""
    line = dict(fields, event=event, run=params["run"], release=release, variant=variant or None)
    sglang_ledger.append(params["root"], line)


def record_decision(params, check):
    """Append the decision that a verdict follows from, unless a call of this run that stopped half-way has done so."""
    decision = params.get("decision")
    if not decision or check:
        return
    same = {"event": "decision", "run": params["run"]["id"], **{key: decision.get(key) for key in ("release", "look")}}
    events, _problems = sglang_ledger.read(params["root"])
    if not any(same.items() <= {key: event.get(key) for key in same}.items() for event in events[-10:]):
        sglang_ledger.append(params["root"], {**decision, "event": "decision", "run": params["run"]})


def brief_of(root, manifest):
    """Return the short form of a manifest, or null for none."""
    return store.brief(root, manifest) if manifest else None


def current_of(root, problems):
    """Return the current id; a link that is none of ours is a problem, which the next activation mends or names."""
    try:
        return store.read_current(root)
    except ReleaseError as error:
        problems.append(str(error))
        return None


def entry(params, state):
    """Return the line of a manifest's history that says who brought the release into a state."""
    run = params["run"]
    return {
        "state": state,
        "time": store.utc_now(),
        "run": run["id"],
        "user": run.get("user", ""),
        "reason": params["reason"],
    }


def new_manifest(params, record):
    """Return the manifest of a release that is being built, without history."""
    _, variant, text = store.parse_id(params["release"])
    return {
        "schema": store.SCHEMA,
        "id": params["release"],
        "variant": variant,
        "digest": text,
        "state": "building",
        "created": store.utc_now(),
        "run": params["run"]["id"],
        "record": record,
        "files": None,
        "history": [],
    }


def load(params, check):
    """Return the manifest of the release of the task.

    In check mode a release may be missing, since the task that creates it did nothing: it is taken as it would be then.
    """
    root, release = params["root"], params["release"]
    path = store.release_path(root, release)
    try:
        return store.read_manifest(path)
    except FileNotFoundError:
        if not check:
            raise ReleaseError(
                f"release: {release} does not exist below {store.releases_directory(root)} or has no manifest.json. "
                "Way out: take an id that status.yml lists."
            ) from None
    return dict(new_manifest(params, {}), imagined=True)


def advance(params, check, manifest, state, event, files=None):
    """Write a manifest in its new state, tell the ledger, and return the result."""
    root, release = params["root"], manifest["id"]
    imagined = manifest.pop("imagined", False)
    before = "" if imagined else store.manifest_text(manifest)
    after = dict(manifest, state=state, history=manifest["history"] + [entry(params, state)])
    if files:
        after["files"] = files
    if not check:
        store.write_manifest(store.release_path(root, release), after)
        if event:
            fields = {"files": files} if files else {}
            if event == "rejected":
                fields["rung"] = params.get("rung") or None
            record_event(params, event, release, manifest["variant"], reason=params["reason"], **fields)
    return make_result(
        changed=True,
        release=brief_of(root, after),
        before=before,
        after=store.manifest_text(after),
        msg=f"{release}: {manifest['state']} -> {state}",
    )


def create(params, check):
    """Make the directory of a release; what killed runs left of the same digest goes away."""
    root, release = params["root"], params["release"]
    manifest = new_manifest(params, store.without_secrets(params["record"]))
    manifests, problems = store.list_releases(root)
    found = choose.find(manifests, release)
    if found:
        return make_result(release=brief_of(root, found), msg=f"{release} exists and is {found['state']}")
    if os.path.lexists(store.release_path(root, release)):
        raise ReleaseError(f"release: {release} is taken: {'; '.join(item for item in problems if release in item)}")
    store.owner_ids(params["owner"])
    for path, text in params["files"].items():
        validate_text(path, text, "python" if path.endswith(".py") else "none")
    removed = [item["id"] for item in manifests if item["digest"] == manifest["digest"] and not store.complete(item)]
    removed += store.leftovers(root)
    manifest["history"].append(entry(params, "building"))
    if not check:
        for name in removed:
            remove_release_directory(root, name)
        store.make_release_directory(root, manifest, params["owner"], lambda path: write_new(path, params["files"]))
        record_event(params, "created", release, manifest["variant"], removed=removed)
    return make_result(
        changed=True,
        release=brief_of(root, manifest),
        removed=removed,
        after=store.manifest_text(manifest),
        texts=params["files"],
        msg=f"created {release}",
    )


def seal(params, check):
    """Seal a release: list its files with their hashes; from here on it does not change."""
    manifest = load(params, check)
    root, path = params["root"], store.release_path(params["root"], manifest["id"])
    if store.complete(manifest):
        return make_result(release=brief_of(root, manifest), msg=f"{manifest['id']} is sealed already")
    missing = [name for name in REQUIRED_FILES if not os.path.isfile(os.path.join(path, name))]
    if missing and not check:
        raise ReleaseError(
            f"release: {manifest['id']} lacks {' and '.join(missing)} and could not be started. Way out: run the roles "
            "nccl_env and sglang_server (render) before the release is sealed."
        )
    files = None if check else store.write_files(path, store.hash_files(path))
    return advance(params, check, manifest, "built", "built", files=files)


def activate(params, check):
    """Let the link point to a complete release and mark it as being judged. The one that leaves keeps its state."""
    root = params["root"]
    manifest = load(params, check)
    release = manifest["id"]
    if not check and not store.complete(manifest):
        raise ReleaseError(
            f"release: {release} was never finished and cannot serve. Way out: deploy its variant again, or take a "
            "complete release that status.yml lists."
        )
    before = current_of(root, []) if os.path.islink(os.path.join(root, "current")) else store.read_current(root)
    moved = before != release
    if not moved and manifest["state"] == "active":
        return make_result(release=brief_of(root, manifest), msg=f"{release} is active already")
    # Manifest, link, ledger: killed after the first, the old release is still current and the next run moves the link.
    if manifest["state"] == "active":
        result = make_result(changed=True, release=brief_of(root, manifest))
    else:
        result = advance(params, check, manifest, "active", None)
    if not check:
        if moved:
            store.move_current(root, release)
        record_event(params, "activated", release, manifest["variant"], previous=before, reason=params["reason"])
    result["msg"] = f"current: {before or 'none'} -> {release}"
    result["before"] = f"current -> {before or 'none'}\n" + result["before"]
    result["after"] = f"current -> {release}\n" + result["after"]
    return result


def locked(step, params, check):
    """Take a step under the deploy lock: renewed where the run has it, else taken for as long as the step lasts."""
    if check:
        return step(params, True)
    os.makedirs(params["root"], mode=0o755, exist_ok=True)
    with sglang_lock.held(params["root"], params["run"], params.get("variant", "")):
        return step(params, False)
