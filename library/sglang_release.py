#!/usr/bin/python
"""Ansible module: the states of a release, the link ``current``, the deploy lock and the ledger of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_release
short_description: Compare, create, seal, activate, promote, reject and prune releases of a host
description:
  - A release is a directory that holds everything a variant changes; C(<root>/current) links to the one that serves.
  - Every write is made beside its target, synced and renamed, so a kill or a power cut leaves the old or the new state,
    and the next run converges.
  - Only one run at a time changes a root. O(state=compared), O(state=locked) and O(state=target) take the lock for the
    run, O(state=unlocked) gives it back; the other states hold it for their own duration where the run has none.
  - Every transition is appended to C(<root>/ledger.jsonl).
options:
  state:
    description:
      - C(compared) takes the lock and returns the plan of a deploy; C(locked) takes it for a run that compares nothing.
      - C(created) makes the directory of a release; C(built) lists and hashes its files and seals it. With O(launch)
        C(built) does all of it in one call - directory, patched copies, what starts the server, seal - and makes an
        unfinished release of that id anew.
      - C(active) moves the link; C(promoted), C(rejected) and C(retired) record a verdict.
      - C(target) takes the lock and resolves the release that a rollback goes to; one that was killed is gone on with.
      - C(pruned) deletes old and unfinished releases; C(unlocked) gives the lock back; C(reported) reads.
    type: str
    required: true
    choices: [compared, locked, created, built, active, promoted, rejected, retired, target, pruned, unlocked, reported]
  root:
    description: Directory of the deployment on the host, an absolute path. It is made where a state writes.
    type: path
    required: true
  release:
    description:
      - Id of a release, never a path. For O(state=target) empty means the release promoted last before the current one;
        for O(state=pruned) it is one more release to keep.
    type: str
    default: ""
  variant:
    description: Name of the variant; part of the id of a new release, and shown to whoever meets the lock.
    type: str
    default: ""
  inputs:
    description: Everything the controller knows that determines behaviour. Its canonical JSON goes into the digest.
    type: dict
    default: {}
  engine:
    description: The declared engine, as the role sglang_engine takes it. Its fingerprint goes into the digest.
    type: dict
    default: {}
  model:
    description: The declared model, as the role model_files takes it. Its fingerprint goes into the digest.
    type: dict
    default: {}
  run:
    description: The run, as the action sglang_variant or sglang_run returns it. Needed by every state but C(reported).
    type: dict
    default: {}
  break_lock:
    description:
      - Take the lock from a run on another controller that has shown no sign of life for 15 minutes. A run whose
        process is known to be gone, on this host or on the controller of O(run), loses the lock without it, a living
        one keeps it in spite of it.
    type: bool
    default: false
  owner:
    description: User that the service runs as and that owns logs, run and results; empty for the user of this task.
    type: str
    default: ""
  keep:
    description: Number of complete releases that O(state=pruned) leaves, the newest.
    type: int
    default: 5
  reason:
    description: Why; kept in the manifest and in the ledger. No secrets.
    type: str
    default: ""
  rung:
    description:
      - The step that refused, for example C(precheck) or C(verify). O(state=rejected) keeps it in the ledger;
        O(state=unlocked) records a C(refused) event with it, for a run that ended before anything could be rejected.
    type: str
    default: ""
  files:
    description:
      - Texts that a created release begins with, relative path to text. They appear together with the release, and
        Python among them must compile.
    type: dict
    default: {}
  record:
    description:
      - What to keep in the manifest of a created release, for readers. Values of keys that name a secret are left out.
    type: dict
    default: {}
  decision:
    description:
      - Event C(decision) that nobody has written yet, C(pending) of the result of C(sglang_decision).
        O(state=promoted) and O(state=rejected) append it to the ledger before their own event. Empty for none.
    type: dict
    default: {}
  allow_rejected:
    description: Let O(state=target) take a release that was rejected.
    type: bool
    default: false
  checks:
    description:
      - Read the host in the same call, but only where the plan says that something has to change, and return what was
        found as RV(checks). Only O(state=compared) takes them. Empty for none.
      - These are the options of M(sglang_precheck) without C(found) and C(enforce). C(built) is taken from the plan.
    type: dict
    default: {}
  patches:
    description:
      - Patches that O(state=built) applies to copies in the release; the options of M(sglang_patch) without C(python),
        C(chdir), C(site) and C(state), which follow from engine and release. Empty for none.
    type: dict
    default: {}
  launch:
    description:
      - What starts the server, with which O(state=built) builds the release whole; the options of M(sglang_launch)
        without C(root), C(release), C(id), C(python) and C(expect_packages), which follow from release, engine and
        patches. Needs O(engine) and O(model), which go into the manifest.
      - With it O(state=compared) builds the release in passing, where none is there, engine and model are, and no check
        of O(checks) refuses the host. Where it cannot, the plan says that nothing is built; O(state=built) says why.
    type: dict
    default: {}
  unlock:
    description:
      - Give the run's lock back once the state is reached, so that the last step of a run needs no other one for it.
      - With O(state=compared) only where nothing has to change, since then nothing follows.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Takes no lock, writes no ledger, and takes a release that does not exist yet for created.
  diff_mode:
    support: full
    description: Manifest and link before and after, files of a created release, what O(state=pruned) removes.
author:
  - the sglang deploy authors
"""

EXAMPLES = r"""
- name: Compare what is asked with what runs
  sglang_release:
    state: compared
    root: /opt/sglang
    variant: baseline
    inputs: {args: {tp-size: 8}}
    engine: "{{ engine }}"
    model: "{{ model }}"
    run: "{{ resolved.run }}"
  register: compared

- name: Let it serve
  sglang_release:
    state: active
    root: /opt/sglang
    release: "{{ compared.plan.release.id }}"
    run: "{{ resolved.run }}"

- name: Show what is there
  sglang_release:
    state: reported
    root: /opt/sglang
"""

RETURN = r"""
plan:
  description:
    - For C(compared), C(locked) and C(target); otherwise null. C(reasons) is why the host is not in sync, C(drift) the
      part of it that concerns live processes. C(release) is null for C(locked); C(engine) and C(model) are null but for
      C(compared).
    - C(previous) is what a failure brings back; the current release where it is promoted, else the one promoted last,
      and never the planned release itself. For C(target) the current release comes back promoted or not, unless it was
      rejected.
    - C(alarm) is what C(watch.py) says of a server that is in sync and does not serve, because it loads or hangs; else
      null.
    - C(problems), such as a torn manifest, stop nothing; each is a warning of the task as well.
  returned: always
  type: dict
  sample:
    in_sync: false
    reasons: [no server process runs]
    drift: [no server process runs]
    alarm: null
    release:
      id: 20260131T030000Z-baseline-0123456789ab
      path: /opt/sglang/releases/20260131T030000Z-baseline-0123456789ab
      digest: 0123456789ab
      variant: baseline
      python: /opt/ml-env/bin/python3
      built: true
      state: promoted
      promoted: "2026-01-31T03:09:00.123Z"
    current: null
    previous: null
    engine: {present: true}
    model: {present: true}
    unfinished: []
    stopped: null
    problems: []
checks:
  description:
    - What the host was found to have or to lack, see O(checks); null where it was not read.
    - A negative verdict does not fail the task. Given to M(sglang_precheck) as C(found), it does.
  returned: always
  type: dict
  contains:
    findings:
      description: As M(sglang_precheck) returns them.
      type: list
    verdict:
      description: As M(sglang_precheck) returns it.
      type: dict
    elapsed:
      description: Seconds that the checks took.
      type: float
patches:
  description: For a release that was built whole, C(results) of M(sglang_patch); otherwise empty.
  returned: always
  type: list
  elements: dict
seconds:
  description: How long a whole build took in seconds, C(build), and its patches alone, C(patches); null without one.
  returned: always
  type: dict
  sample: {build: 0.6, patches: 0.5}
rung:
  description: The step of a deploy that refused, C(patches) or C(release).
  returned: on failure by a rule of releases
  type: str
info:
  description: For C(reported); otherwise null.
  returned: always
  type: dict
  contains:
    releases:
      description: All releases, the newest first; as RV(release) with C(current).
      type: list
    current:
      description: The release that the link points to, or null.
      type: dict
    previous:
      description: The release that a rollback without a name goes to, or null.
      type: dict
    unfinished:
      description: Ids of releases that were never sealed.
      type: list
    ledger:
      description: The last ten events.
      type: list
    restarts:
      description: The last five restarts of the current release by its watch.py, as the ledger has them.
      type: list
    lock:
      description: Who holds the lock (run, variant, since, heartbeat_age in seconds), or null.
      type: dict
    stopped:
      description:
        - The stop that somebody wanted (time, user; temporary where its run was to start the server again, as for a
          canary in its place, and ended whether that run is over), or null.
      type: dict
    problems:
      description: Torn manifests, torn ledger lines, foreign directories and links, as texts.
      type: list
release:
  description: The release after the state was reached, or null.
  returned: always
  type: dict
  contains:
    id:
      description: UTC time, variant and digest.
      type: str
    path:
      description: Its directory.
      type: str
    variant:
      description: Name of its variant.
      type: str
    state:
      description: One of building, built, active, promoted, rejected, retired.
      type: str
    digest:
      description: 12 hex digits over everything that determines behaviour.
      type: str
    created:
      description: UTC time.
      type: str
    promoted:
      description: UTC time of the promotion that stands, or null.
      type: str
    complete:
      description: Whether it was sealed.
      type: bool
    reason:
      description: Reason of its last state.
      type: str
    python:
      description: Interpreter of its engine, or null where the manifest does not say.
      type: str
removed:
  description: >-
    Names of directories below releases that C(created) or C(pruned) deleted, and of key files, C(secrets/api_key-...).
  returned: always
  type: list
  elements: str
unlocked:
  description: Whether the run's lock was given back.
  returned: always
  type: bool
holder:
  description: Who holds the lock, where that is why the task failed.
  returned: on failure by the lock
  type: dict
msg:
  description: What happened, or what was refused, by which rule, and the way out.
  returned: always
  type: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.sglang_api_key import HIDDEN, hide_secrets
from ansible.module_utils.sglang_build_spec import LAUNCH, PATCHES
from ansible.module_utils.sglang_lock import LockedError
from ansible.module_utils.sglang_precheck_spec import CHECKS
from ansible.module_utils.sglang_release_states import STATES, run_state
from ansible.module_utils.sglang_release_store import ReleaseError

# Parameters that are options of another module: their spec, the states that take them, and the rule.
OPTIONS = {
    "checks": (CHECKS, ("compared",), "only compared reads the host"),
    "patches": (PATCHES, ("compared", "built"), "only compared and built patch copies"),
    "launch": (LAUNCH, ("compared", "built"), "only compared and built write what starts a server"),
}
# What an operator knows them by.
INPUTS = {
    "checks": "sglang_server_<argument> or host_preflight",
    "patches": "sglang_patches",
    "launch": "sglang_server",
}
NEEDS_RELEASE = ("created", "built", "active", "promoted", "rejected", "retired")


def options(module, name, given, spec, states, rule):
    """Return the parameter ``name`` as ``spec`` describes it, its secrets kept out of the module's output."""
    if not given:
        return {}
    if module.params["state"] not in states:
        module.fail_json(
            msg=f"{name}: it came with state={module.params['state']}. Rule: {rule}. Way out: leave it out."
        )
    answer = ArgumentSpecValidator(spec).validate(given)
    if answer.error_messages:
        way_out = f"the input is called {INPUTS[name]}_<argument>; give a value of its type"
        module.fail_json(msg=f"{name}: {'; '.join(answer.error_messages)}. Way out: {way_out}.")
    module.params[name] = answer.validated_parameters
    values = {**module.params[name], "env": hide_secrets(module, name)}
    # The invocation comes back with the result: the names say as much as the texts of all edits.
    for entries in {"patches", "entries"} & set(values):
        module.params[name][entries] = [entry.get("name") for entry in values[entries]]
    if values.get("api_key"):
        module.no_log_values.add(values["api_key"])
        module.params[name]["api_key"] = HIDDEN
    return values


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec=dict(
            state=dict(type="str", required=True, choices=list(STATES)),
            root=dict(type="path", required=True),
            release=dict(type="str", default=""),
            variant=dict(type="str", default=""),
            inputs=dict(type="dict", default={}),
            engine=dict(type="dict", default={}),
            model=dict(type="dict", default={}),
            run=dict(type="dict", default={}),
            break_lock=dict(type="bool", default=False),
            owner=dict(type="str", default=""),
            keep=dict(type="int", default=5),
            reason=dict(type="str", default=""),
            rung=dict(type="str", default=""),
            files=dict(type="dict", default={}),
            record=dict(type="dict", default={}),
            decision=dict(type="dict", default={}),
            allow_rejected=dict(type="bool", default=False),
            checks=dict(type="dict", default={}),
            patches=dict(type="dict", default={}),
            launch=dict(type="dict", default={}),
            unlock=dict(type="bool", default=False),
        ),
        # The host's log would get the arguments before anything below knows what of them is secret.
        no_log=True,
        supports_check_mode=True,
    )
    asked = {name: module.params[name] for name in OPTIONS}
    # None of them comes back as the invocation before its secrets are known, whichever of them is refused.
    module.params.update(dict.fromkeys(OPTIONS, {}))
    given = {name: options(module, name, asked[name], *rule) for name, rule in OPTIONS.items()}
    params = {**module.params, **given, "tools": module}
    state = params["state"]
    if not os.path.isabs(params["root"]):
        module.fail_json(msg=f"root: {params['root']!r} is not an absolute path.")
    if state != "reported" and not params["run"].get("id"):
        module.fail_json(msg=f"run: state={state} needs the run that the action sglang_variant or sglang_run returns.")
    if state in NEEDS_RELEASE and not params["release"]:
        module.fail_json(msg=f"release: state={state} needs the id of a release.")
    about = params["decision"].get("release", "no release")
    if params["decision"] and (about != params["release"] or state not in ("promoted", "rejected")):
        module.fail_json(
            msg=f"decision: it is about {about} and came with state={state} of {params['release'] or 'no release'}. "
            "Rule: only promoted and rejected carry a decision, that on their own release. Way out: leave decision out."
        )
    if params["patches"] and not params["launch"]:
        module.fail_json(msg="patches: they need launch; a release is built whole or in steps.")
    if params["launch"] and not (params["engine"] and params["model"]):
        module.fail_json(msg="launch: it needs engine and model, which the release is built for.")
    if params["keep"] < 1:
        module.fail_json(msg=f"keep: {params['keep']} releases are too few; at least 1 is kept.")
    try:
        result = run_state(params, module.check_mode)
    except LockedError as error:
        module.fail_json(msg=str(error), holder=error.holder)
    except ReleaseError as error:
        module.fail_json(msg=str(error), rung=error.rung)
    except OSError as error:
        where = "" if error.filename else f" below {params['root']}"
        module.fail_json(
            msg=f"state={state} stopped half-way: {error}{where}. Way out: mend that (a full disk needs a little room "
            "for the lock and the ledger, also for prune.yml and stop.yml) and run the same again."
        )
    for text in result.pop("warnings"):
        module.warn(text)
    before, after, texts, diffs = (result.pop(name) for name in ("before", "after", "texts", "diffs"))
    if module._diff and before != after:
        header = os.path.join(params["root"], "releases", result["release"]["id"] if result["release"] else "")
        pairs = [(header, before, after)] + [(f"{header}/{path}", "", text) for path, text in texts.items()]
        result["diff"] = [
            dict(before=old, after=new, before_header=name, after_header=name) for name, old, new in pairs
        ] + diffs
    module.exit_json(**result)


if __name__ == "__main__":
    main()
