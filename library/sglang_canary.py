#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Try a release with dummy weights and few layers beside the live server."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_canary
short_description: Try a release with dummy weights and few layers, beside the live server
description:
  - Starts the server of a release by its own launch line with C(--load-format dummy), few layers, a small KV cache and
    ports of its own, watches it as M(sglang_health) does, proves as M(sglang_proof) does that what was asked is what
    runs, asks for a few generations, and stops it.
  - It finds in a minute what would else be found after the weights are loaded; an unknown flag, a patch that breaks, a
    crash in graph capture or warm-up, a stall, a feature that is not active. What only the real weights can show
    (answers, accept length, memory) it does not judge.
  - It lives in C(<root>/canary) with a marker of its own, so that neither stop knows the other server. Nothing is
    written into a release, and nothing is left. The log of a canary that failed is kept as C(<root>/canary/failed.log).
  - It starts only where it fits into what is free. The live server is asked for a few tokens all the time; a canary
    that hurts it is stopped, and none is started beside one whose answers take too long to be measured.
  - It ends with the module, however that ends. Each verdict is appended to the ledger.
author:
  - the sglang deploy authors
requirements:
  - requests
options:
  root:
    description: The deployment's root.
    type: path
    required: true
  release:
    description: Absolute path of the release to try; it has to be built, not active.
    type: path
    required: true
  variant:
    description: Name of the variant, for the ledger.
    type: str
    default: ""
  device:
    description: What the host is declared to be.
    type: str
    choices: [cuda, cpu]
    default: cuda
  no_room:
    description: With V(fail) a canary that does not fit fails the task; with V(report) it is a verdict.
    type: str
    choices: [fail, report]
    default: fail
  layers:
    description:
      - Layers of the model. More are taken where a feature needs them (EAGLE-3 eight, experts one more than the dense).
    type: int
    default: 4
  max_total_tokens:
    description: Tokens of the KV cache.
    type: int
    default: 2048
  args:
    description: Further flags that replace those of the release, without dashes; V(true) is a bare flag.
    type: dict
    default: {}
  overhead_mb:
    description: MiB that a rank takes beside its weights (context, communication, graphs, KV cache; Python on a CPU).
    type: int
    default: 6000
  keep_mb:
    description: MiB that must stay free for the live server, on each GPU or on the host.
    type: int
    default: 1024
  nice:
    description: How far the canary steps back from the live server on the CPU, 0 to 19.
    type: int
    default: 5
  timeout:
    description: Seconds for the canary's start.
    type: float
    default: 600
  phase_silence:
    description:
      - Seconds without a sign of life, for each phase, after which the canary has stalled.
      - A phase that is left out keeps its default, the half of what M(sglang_health) allows.
    type: dict
    default: {}
    suboptions:
      spawned:
        description: The process exists and its log is empty. 30 by default.
        type: float
      imports:
        description: Python imports and the parsing of arguments. 150 by default.
        type: float
      distributed:
        description: The ranks find each other. 90 by default.
        type: float
      weights:
        description: Dummy weights are made. 150 by default.
        type: float
      kv_cache:
        description: The KV cache is allocated. 90 by default.
        type: float
      graph:
        description: CUDA graphs are captured; the longest time for one batch size. 300 by default.
        type: float
      warmup:
        description: The server's own first request. 300 by default.
        type: float
  idle_silence:
    description:
      - Seconds of silence after which the canary has stalled where none of its processes uses CPU time or waits for a
        disk meanwhile, from the phase distributed to the warm-up. Dummy weights leave nothing to wait for.
      - V(0) leaves it to O(phase_silence).
    type: float
    default: 10
  generations:
    description: How many generations in a row must succeed.
    type: int
    default: 3
  max_tokens:
    description: Tokens of each generation, at least 2.
    type: int
    default: 8
  generation_timeout:
    description: Seconds for one generation.
    type: float
    default: 120
  request_timeout:
    description: Seconds for a request that generates nothing.
    type: float
    default: 30
  live_factor:
    description: The canary is stopped where the live server's answers take this many times as long as before it.
    type: float
    default: 3
  live_floor:
    description: Seconds that an answer of four tokens of the live server may take in any case.
    type: float
    default: 1
  live_interval:
    description: Seconds between two requests to the live server while the canary runs.
    type: float
    default: 0.3
  python:
    description: An interpreter that has C(requests), used where the one that runs the module has not.
    type: path
  api_key:
    description: API key of both servers. Without it the file that each C(launch.json) names is read.
    type: str
  run:
    description: The run that the ledger names, as returned by the action C(sglang_variant).
    type: dict
    default: {}
attributes:
  check_mode:
    description: What the module does where nothing may be changed.
    support: full
    details: Says whether the canary fits, where the release exists; starts, asks and writes nothing.
  diff_mode:
    description: No file of the operator is changed.
    support: none
"""

EXAMPLES = r"""
- name: Try the release before it is loaded
  sglang_canary:
    root: /opt/sglang
    release: /opt/sglang/releases/20260101T000000Z-fewchan-0a1b2c3d
    variant: fewchan
    args: {cuda-graph-max-bs-decode: 8}
  register: __canary
"""

RETURN = r"""
verdict:
  description:
    - V(passed), V(refused), V(disturbed) (it was stopped because it hurt the live server), V(no_room),
      V(not_exercised) (this host alone cannot try the release), or V(planned) in check mode.
  returned: always
  type: str
  sample: passed
findings:
  description: What was found, in the shape of the project; those of level error refuse the release.
  returned: always
  type: list
  elements: dict
room:
  description: C({device, free_mb, needed_mb, keep_mb, fits, share}); null where it was not looked at.
  returned: always
  type: dict
layers:
  description: Layers that the canary had; null where it was not started.
  returned: always
  type: int
port:
  description: Port of the canary; null where it was not started.
  returned: always
  type: int
phases:
  description: Phases seen, in order, as C({phase, elapsed}); seconds.
  returned: always
  type: list
  elements: dict
cause:
  description: Why it failed, as M(sglang_health) returns it; null where it did not.
  returned: always
  type: dict
generations:
  description: Each generation as C({text, tokens, elapsed}); seconds. The text is noise.
  returned: always
  type: list
  elements: dict
live:
  description:
    - C({allowed, failures, before, during, after}) of the live server, each phase C({requests, median, worst}) in
      seconds. Null where none serves.
  returned: always
  type: dict
log:
  description: The kept log of a canary that failed, else empty.
  returned: always
  type: str
log_tail:
  description: Last lines of the canary's log, each cut to 300 characters; empty where it passed.
  returned: always
  type: list
  elements: str
elapsed:
  description: Seconds that the module took, also on failure.
  returned: always
  type: float
"""

import os
import time

from ansible.module_utils import sglang_canary_plan, sglang_ledger, sglang_proc, sglang_watch
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_canary_live import LiveProbe
from ansible.module_utils.sglang_canary_run import Canary, CanaryError, ended_in_order
from ansible.module_utils.sglang_canary_trial import Trial
from ansible.module_utils.sglang_client import Client, need_requests
from ansible.module_utils.sglang_findings import errors, finding, summary
from ansible.module_utils.sglang_lock import kept_fresh
from ansible.module_utils.sglang_watch_ready import TIMED_PHASES, unheard

REFUSALS = ("refused", "disturbed", "no_room")


def live_server(module):
    """Return ``(launch, probe)`` of the server that serves from this root now; ``({}, None)`` where none does."""
    root = module.params["root"]
    launch = sglang_proc.launch_of(os.path.join(root, "current"))
    living = [item for item in sglang_proc.scan(root) if sglang_proc.alive(item["state"])]
    if not launch or not any(item["role"] == "server" for item in living):
        return {}, None
    client = Client(launch["endpoint"], key_for(module, launch))
    return launch, LiveProbe(client, *(module.params[name] for name in ("live_factor", "live_floor", "live_interval")))


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec=dict(
            root=dict(type="path", required=True),
            release=dict(type="path", required=True),
            variant=dict(type="str", default=""),
            device=dict(type="str", choices=["cuda", "cpu"], default="cuda"),
            no_room=dict(type="str", choices=["fail", "report"], default="fail"),
            layers=dict(type="int", default=4),
            max_total_tokens=dict(type="int", default=2048, no_log=False),
            args=dict(type="dict", default={}),
            overhead_mb=dict(type="int", default=6000),
            keep_mb=dict(type="int", default=1024),
            nice=dict(type="int", default=5),
            timeout=dict(type="float", default=600),
            phase_silence=dict(type="dict", default={}, options={phase: dict(type="float") for phase in TIMED_PHASES}),
            idle_silence=dict(type="float", default=10),
            generations=dict(type="int", default=3),
            max_tokens=dict(type="int", default=8, no_log=False),
            generation_timeout=dict(type="float", default=120),
            request_timeout=dict(type="float", default=30),
            live_factor=dict(type="float", default=3),
            live_floor=dict(type="float", default=1),
            live_interval=dict(type="float", default=0.3),
            python=dict(type="path"),
            api_key=dict(type="str", no_log=True),
            run=dict(type="dict", default={}),
        ),
        supports_check_mode=True,
    )
    params = module.params
    begin = time.monotonic()
    result = {
        "changed": False,
        "verdict": "planned",
        "findings": [],
        "room": None,
        "layers": None,
        "port": None,
        "phases": [],
        "cause": None,
        "generations": [],
        "live": None,
        "log": "",
        "log_tail": [],
    }

    def fail(message):
        module.fail_json(msg=message, elapsed=round(time.monotonic() - begin, 3), **result)

    for name, least in (("layers", 1), ("generations", 1), ("max_tokens", 2), ("max_total_tokens", 64)):
        if params[name] < least:
            fail(f"sglang_canary_{name} must be at least {least}, not {params[name]}.")
    release = os.path.realpath(params["release"])
    launch = sglang_proc.launch_of(release)
    if not launch:
        if module.check_mode:
            module.exit_json(elapsed=round(time.monotonic() - begin, 3), **result)
        fail(f"release: {release}/launch.json is missing or damaged. Way out: build the release again (deploy.yml).")
    problem = "" if module.check_mode else need_requests(params["python"])
    if problem:
        fail(problem)

    silence = {phase: sglang_watch.SILENCE[phase] / 2 for phase in TIMED_PHASES}
    silence.update({name: value for name, value in params["phase_silence"].items() if value is not None})
    elsewhere = sglang_canary_plan.not_possible(launch)
    canary = Canary(params["root"], release)
    try:
        if not module.check_mode:
            # What a killed one left would take the room of this one.
            canary.sweep()
        trial = Trial(params, release, launch, module.run_command, dict(sglang_watch.SILENCE, **silence), result)
        if elsewhere:
            result["verdict"] = "not_exercised"
            result["findings"] = [
                finding("canary", "not-exercised", "info", "The release cannot be tried on this host alone", elsewhere)
            ]
        elif not trial.fits():
            result["verdict"] = "no_room"
        elif not module.check_mode:
            _launch, probe = live_server(module)
            with kept_fresh(params["root"]), ended_in_order():
                trial.go(canary, probe, key_for(module, launch), unheard)
    except (CanaryError, OSError, ValueError) as problem:
        result["verdict"] = "refused"
        result["findings"].append(finding("canary", "not-started", "error", f"The canary did not run: {problem}"))
    if not module.check_mode:
        event = {key: result[key] for key in ("verdict", "room", "live", "layers", "phases")}
        event["rules"] = [item["rule"] for item in errors(result["findings"])]
        event.update(event="canary", release=os.path.basename(release), variant=params["variant"] or None)
        event.update(run=params["run"], elapsed=round(time.monotonic() - begin, 3))
        sglang_ledger.append(params["root"], event)
    if result["verdict"] in REFUSALS and not module.check_mode:
        if result["verdict"] != "no_room" or params["no_room"] == "fail":
            bad = summary(errors(result["findings"]))
            log = f"\nIts log is {result['log']}." if result["log"] else ""
            fail(f"The canary of {os.path.basename(release)} refuses it; nothing was switched.\n{bad}{log}")
    module.exit_json(elapsed=round(time.monotonic() - begin, 3), **result)


if __name__ == "__main__":
    main()
