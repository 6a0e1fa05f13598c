"""The states of the module sglang_release that look and decide: compared, locked, target, info.

Each function takes ``(params, check)`` and returns the result's keys; ``check`` is check mode: the same keys come back
and nothing is written.
"""

from __future__ import annotations

import json
import os

from ansible.module_utils import (
    sglang_launch_policy,
    sglang_ledger,
    sglang_lock,
    sglang_proc,
    sglang_stopped,
    sglang_watch_progress,
)
from ansible.module_utils import sglang_release_plan as choose
from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.sglang_engine import describe as describe_engine
from ansible.module_utils.sglang_model import describe as describe_model
from ansible.module_utils.sglang_release_step import brief_of, current_of, make_result, record_event
from ansible.module_utils.sglang_release_store import ReleaseError


def _take_lock(params, check, warnings):
    """Take the lock unless in check mode; return whether this call took it."""
    root = params["root"]
    if check:
        holder = sglang_lock.read(root)
        if holder and holder["run"].get("id") != params["run"]["id"]:
            warnings.append(f"{sglang_lock.lock_path(root)} is held by {sglang_lock.describe(holder)}")
        return False
    os.makedirs(root, mode=0o755, exist_ok=True)
    outcome = sglang_lock.acquire(root, params["run"], params["variant"], params["break_lock"])
    if outcome["took_over"]:
        warnings.append(outcome["took_over"])
        record_event(params, "lock_taken_over", variant=params["variant"], reason=outcome["took_over"])
    return outcome["taken"]


def _under_new_lock(params, check, work):
    """Take the lock and leave it taken for the run, but give it back where the work fails."""
    warnings = []
    taken = _take_lock(params, check, warnings)
    try:
        result = work()
    except BaseException:
        if taken:
            sglang_lock.release(params["root"], params["run"])
        raise
    # They stop nothing and nobody prints a plan: an operator sees them as warnings or not at all.
    result["warnings"] = warnings + result["warnings"] + result["plan"]["problems"]
    left = sglang_stopped.left(result["plan"]["stopped"])
    if left:
        result["warnings"].append(f"{left}; canary.yml and deploy.yml do, and rollback.yml starts its target")
    return result


def _drift(root, current):
    """Return why what runs is not the current release, as text lines."""
    path = store.release_path(root, current)
    try:
        with open(os.path.join(path, "launch.json"), encoding="utf-8") as handle:
            launch = json.load(handle)
    except (OSError, ValueError) as error:
        return [f"launch.json of {current} cannot be read: {error}"]
    return sglang_proc.drift(launch, root)


def compare(params, check):
    """Return the plan; see docs/architecture.md."""

    def work():
        root, variant = params["root"], params["variant"]
        manifests, problems = store.list_releases(root)
        current = current_of(root, problems)
        engine, model = describe_engine(params["engine"]), describe_model(params["model"])
        text = choose.digest(params["inputs"], engine["fingerprint"], model["fingerprint"])
        reasons, found = [], None
        for item in choose.candidates(manifests, text, current):
            edits = store.changed_files(store.release_path(root, item["id"]), item)
            if not edits:
                found = item
                break
            reasons.append(f"{item['id']} was edited after it was sealed and is not used: {'; '.join(edits[:5])}")
        for name, state in (("engine", engine), ("model", model)):
            if not state["present"]:
                reasons.append(f"the {name} is not there" + (f": {state['problem']}" if state.get("problem") else ""))
        drift = _drift(root, current) if current and found and found["id"] == current else []
        if not found:
            reasons.append(f"no complete release of digest {text} exists")
        elif found["id"] != current:
            reasons.append(f"the current release is {current or 'none'}, not {found['id']}")
        elif found["state"] != "promoted":
            reasons.append(f"{found['id']} is {found['state']}, not promoted")
        reasons += drift
        release = found["id"] if found else choose.new_id(variant, text, [item["id"] for item in manifests])
        serving = choose.find(manifests, current)
        # What loads or hangs is no drift, and yet nobody may say that it serves.
        alarm = sglang_watch_progress.alarm(store.release_path(root, current)) if current and not reasons else None
        if alarm:
            problems.append(f"{current} does not serve now: {alarm}")
        plan = {
            "in_sync": not reasons,
            "reasons": reasons,
            "drift": drift,
            "alarm": alarm,
            "release": {
                "id": release,
                "path": store.release_path(root, release),
                "digest": text,
                "variant": variant,
                "built": found is not None,
                "state": found["state"] if found else None,
                "promoted": store.promoted_at(found) if found else None,
                "python": engine["python"],
            },
            "current": brief_of(root, serving),
            "previous": brief_of(root, choose.previous(manifests, current, release)),
            "engine": engine,
            "model": model,
            "unfinished": choose.unfinished(manifests),
            "stopped": sglang_stopped.read(root),
            "problems": problems,
        }
        if not check:
            record_event(params, "compared", release, variant, in_sync=plan["in_sync"], reasons=reasons)
        message = f"{release} serves and is promoted" if plan["in_sync"] else "; ".join(reasons)
        message = problems[-1] if alarm else message
        checks = _checks(params, plan)
        return {**_build(params, plan, checks, check), "plan": plan, "checks": checks, "msg": message}

    return _under_new_lock(params, check, work)


def _checks(params, plan):
    """Return what the host was found to have, where something has to change on it: else the look would be in vain."""
    wanted = params.get("checks")
    if not wanted or plan["in_sync"]:
        return None
    # Here: a host that is in sync does not wait for these to be read.
    from ansible.module_utils.sglang_precheck_run import precheck

    known = plan["engine"] if wanted["engine"] == params["engine"] else None
    return precheck({**wanted, "built": plan["release"]["built"]}, known)


def _build(params, plan, checks, check):
    """Build the release in passing, where nothing stands in the way, and say so in the plan; return the result's keys.

    What stands in the way is not told here: the step that builds, which then follows, meets it too.
    """
    ready = plan["engine"]["present"] and plan["model"]["present"] and (checks is None or checks["verdict"]["ok"])
    if check or plan["in_sync"] or plan["release"]["built"] or not params.get("launch") or not ready:
        return make_result()
    from ansible.module_utils.sglang_release_build import build_whole

    try:
        done = build_whole({**params, "release": plan["release"]["id"]}, False, plan["engine"], plan["model"])
    except (ReleaseError, OSError):
        return make_result()
    plan["release"].update(built=True, state=done["release"]["state"])
    return done


def lock(params, check):
    """Take the lock for a run that compares nothing; the plan holds only current and previous."""

    def work():
        manifests, problems = store.list_releases(params["root"])
        current = current_of(params["root"], problems)
        plan = _plain_plan(params["root"], manifests, problems, current, None)
        return make_result(plan=plan, msg=f"the current release is {current or 'none'}")

    return _under_new_lock(params, check, work)


def _plain_plan(root, manifests, problems, current, release):
    found = choose.find(manifests, release)
    return {
        "in_sync": False,
        "reasons": [],
        "drift": [],
        "alarm": None,
        "release": dict(brief_of(root, found), built=True) if found else None,
        "current": brief_of(root, choose.find(manifests, current)),
        "previous": brief_of(root, choose.previous(manifests, current, release)),
        "engine": None,
        "model": None,
        "unfinished": choose.unfinished(manifests),
        "stopped": sglang_stopped.read(root),
        "problems": problems,
    }


def _engine_warnings(found):
    """Return what is to be said of the engine of a release that stands on an adopted one, which may have changed."""
    built = found["record"].get("engine") or {}
    if built.get("mode") != "adopt":
        return []
    now = describe_engine({key: built.get(key) for key in ("mode", "python", "version")})
    if now["fingerprint"] == built.get("fingerprint"):
        return []
    seen = now.get("problem") or "a package, or a file of SGLang or FlashInfer, is not as it was"
    return [
        f"the engine {built.get('python')} changed since {found['id']} was built: {seen}. The release starts on the "
        "engine as it is now. Way out where it does not serve: bring the engine back, or deploy the variant again."
    ]


def _interrupted(root, manifests, current):
    """Return the ledger's event of the rollback that brought the current release here and was killed on its way.

    On disk it looks like a killed deploy of the same release, from which a rollback leads the other way.
    """
    serving = choose.find(manifests, current)
    if not serving or serving["state"] != "active":
        return None
    own = [item for item in sglang_ledger.read(root)[0] if item.get("run") == serving["history"][-1]["run"]]
    if any(item["event"] == "unlocked" for item in own):
        return None
    return next((item for item in own if item["event"] == "rollback" and item["release"] == current), None)


def _target(root, manifests, current, params):
    try:
        return choose.target(manifests, current, params["release"], params["allow_rejected"])
    except ReleaseError as error:
        left = sglang_stopped.left(sglang_stopped.read(root))
        raise ReleaseError(f"{error} Besides, {left}; canary.yml and deploy.yml do." if left else str(error)) from error


def target(params, check):
    """Take the lock and resolve the release that a rollback goes to; the plan's release is that one.

    A rollback that was killed is gone on with: its release is still the target, and what it left is still to be left.
    """

    def work():
        root = params["root"]
        manifests, problems = store.list_releases(root)
        current = current_of(root, problems)
        if params["release"]:
            store.parse_id(params["release"])
        killed = _interrupted(root, manifests, current) if params["release"] in ("", current) else None
        if killed:
            found, current = choose.find(manifests, current), killed["previous"]
        else:
            found = _target(root, manifests, current, params)
        edits = store.changed_files(store.release_path(root, found["id"]), found)
        if edits:
            raise ReleaseError(
                f"release: {found['id']} was edited after it was sealed: {'; '.join(edits[:5])}. Way out: deploy its "
                "variant again, which builds it afresh."
            )
        plan = _plain_plan(root, manifests, problems, current, found["id"])
        serving = choose.find(manifests, current)
        # What served when the operator asked comes back where the target fails, promoted or not.
        if serving and store.complete(serving) and serving["state"] != "rejected":
            plan["previous"] = brief_of(root, serving)
        more = f", as run {killed['run']} began" if killed else ""
        plan["reasons"] = [f"roll back from {current or 'nothing'} to {found['id']}{more}"]
        if not check:
            record_event(params, "rollback", found["id"], found["variant"], previous=current)
        warnings = _engine_warnings(found)
        return make_result(plan=plan, release=brief_of(root, found), msg=plan["reasons"][0], warnings=warnings)

    return _under_new_lock(params, check, work)


def info(params, check):
    """Return what is on this host, from disk alone; needs no lock and changes nothing."""
    root = params["root"]
    manifests, problems = store.list_releases(root)
    current = current_of(root, problems)
    events, torn = sglang_ledger.read(root)
    releases = [dict(store.brief(root, item), current=item["id"] == current) for item in reversed(manifests)]
    if current and not choose.find(manifests, current):
        problems.append(f"current points to {current}, which does not exist or has no readable manifest")
    running = sorted({os.path.basename(item["release"]) for item in sglang_proc.scan(root)} - {current})
    if running:
        problems.append(
            f"processes of {', '.join(running)} run, which is not the current release. Way out: deploy.yml brings "
            "the current state about; stop.yml ends them."
        )
    for name in {current, (choose.last_promoted(manifests, (current,)) or {}).get("id")} - {None}:
        found = choose.find(manifests, name)
        edits = store.changed_files(store.release_path(root, name), found) if found and store.complete(found) else []
        if edits:
            problems.append(
                f"{name} was edited after it was sealed: {'; '.join(edits[:3])}. Way out: deploy its variant again, "
                "which builds it afresh; a rollback refuses it."
            )
    stopped = sglang_stopped.read(root)
    content = {
        "releases": releases,
        "current": brief_of(root, choose.find(manifests, current)),
        "previous": brief_of(root, choose.last_promoted(manifests, (current,))),
        "unfinished": choose.unfinished(manifests),
        "ledger": events[-10:],
        "restarts": [item for item in events if item["event"] == "restart" and item["release"] == current][-5:],
        "lock": sglang_lock.read(root),
        # Its run may still be about to start the server again.
        "stopped": dict(stopped, ended=not sglang_launch_policy.holder(root)) if stopped else None,
        "problems": problems + torn,
    }
    return make_result(info=content, msg=f"{len(releases)} releases, current: {current or 'none'}")
