#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Prove in one call that what was asked of a server is what runs and what answers, and keep what was seen."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_proof
short_description: Prove that a release's server runs and answers as asked, and record it
description:
  - With O(wait) it first waits until the server is ready, as M(sglang_health) does and with the same progress on the
    controller, and proves nothing where it is not.
  - Reads what the live workers hold, as M(sglang_process_info) does.
  - Asks the questions of O(known_answers) at temperature 0 and compares the answers by tokens, by words, and by
    log-probability where the server gives it.
  - Then sends O(soak_requests) small requests, O(soak_concurrency) at a time, and generates once more. A server that
    serves a few requests and then hangs is found here.
  - Compares the arguments of the release's C(launch.json) with the server's own C(/server_info) and with its log. A
    feature that was asked for and is not active (tensor-parallel size, attention backend, custom all-reduce,
    all-reduce fusion, speculation, quantization, graph capture) is an error under the feature's name. Another argument
    that the engine changed is a warning. One that the server does not report is never taken for active.
  - On a CPU host NCCL, fused kernels and graph capture are reported as not exercised.
  - Adds the findings given in O(findings), writes all to C(results/verify-TIME.json) of the release, and fails where
    one is an error. A start of the server whose findings are already on file is not written again.
author:
  - the sglang deploy authors
requirements:
  - requests
options:
  release:
    description: Absolute path of the release; its C(launch.json) names the endpoint.
    type: path
    required: true
  wait:
    description:
      - How the wait before the proof is made, with the options of M(sglang_health); left out, the server must be ready.
      - O(request_timeout), O(generation_timeout) and O(min_distinct) count for the wait as well.
    type: dict
    suboptions:
      pid:
        description: Pid of the server process. Without it the process is found by the release's marker.
        type: int
      timeout:
        description: Seconds for the whole wait.
        type: float
        default: 1800
      phase_silence:
        description:
          - Seconds without a sign of life, for each phase, after which the start has stalled.
          - A phase that is left out keeps the default of M(sglang_health).
        type: dict
        default: {}
        suboptions:
          spawned:
            description: The process exists and its log is empty.
            type: float
          imports:
            description: Python imports and the parsing of arguments.
            type: float
          distributed:
            description: The ranks find each other.
            type: float
          weights:
            description: Weights are loaded; the longest time for one shard.
            type: float
          kv_cache:
            description: The KV cache is allocated.
            type: float
          graph:
            description: CUDA graphs are captured; the longest time for one batch size.
            type: float
          warmup:
            description: The server's own first request.
            type: float
      generations:
        description: How many generations in a row must succeed.
        type: int
        default: 3
      max_tokens:
        description: Tokens of each of these generations, at least 2.
        type: int
        default: 8
  device:
    description: What the host is declared to be.
    type: str
    choices: [cuda, cpu]
    default: cuda
  known_answers:
    description:
      - What the model is known to say. Each needs one of O(known_answers[].tokens), O(known_answers[].text) and
        O(known_answers[].contains).
      - RV(answers) of a trusted release is what to write them from.
    type: list
    elements: dict
    default: []
    suboptions:
      prompt:
        description: The question, sent as it is, without a chat template.
        type: str
        required: true
      tokens:
        description: Token ids of the answer; as many are asked for.
        type: list
        elements: int
      text:
        description: Text of the answer; compared word by word where no tokens are given.
        type: str
      contains:
        description: Text that the answer must have somewhere, in any case.
        type: str
      logprobs:
        description: Log-probability of each token of the answer, in nats.
        type: list
        elements: float
      min_logprob:
        description: Least log-probability that each token must have, in nats.
        type: float
  match:
    description: Share of the expected tokens, or words, that must agree from the start; 0 to 1.
    type: float
    default: 1
  logprob_tolerance:
    description: Largest difference of a log-probability, in nats.
    type: float
    default: 0.2
  max_tokens:
    description: Tokens of an answer whose expectation has no token ids.
    type: int
    default: 16
  soak_requests:
    description: Number of requests of the soak; 0 for none.
    type: int
    default: 200
  soak_concurrency:
    description: Requests under way at one time.
    type: int
    default: 8
  soak_tokens:
    description: Tokens of each answer of the soak.
    type: int
    default: 8
  min_distinct:
    description: Different tokens and words that the answer after the soak must have.
    type: int
    default: 2
  generation_timeout:
    description: Seconds for one generation.
    type: float
    default: 120
  request_timeout:
    description: Seconds for a request that generates nothing.
    type: float
    default: 30
  evidence:
    description: What earlier steps saw, kept in the file as it is; name to anything.
    type: dict
    default: {}
  findings:
    description: Findings of earlier steps, in the shape of the project.
    type: list
    elements: dict
    default: []
  python:
    description: An interpreter that has C(requests), used where the one that runs the module has not.
    type: path
  run:
    description:
      - The run, as the action sglang_variant or sglang_run returns it. With it the ledger gets the events C(ready) and
        C(verify); without it nothing but the record is written.
    type: dict
    default: {}
  api_key:
    description: API key of the server. Without it the file that the release's C(launch.json) names is read.
    type: str
attributes:
  check_mode:
    description: What the module does where nothing may be changed.
    support: full
    details:
      - Asks the known questions and judges. The soak, which is load, is left out, and nothing is written.
      - Looks once in place of O(wait). A server that is not ready is reported in RV(health) and is no failure.
  diff_mode:
    description: Whether it shows the difference that it makes.
    support: none
"""

EXAMPLES = r"""
- name: Prove what runs
  sglang_proof:
    release: /opt/sglang/releases/20261129T120000Z-baseline-1a2b3c4d
    device: cuda
    known_answers:
      - prompt: The capital of France is
        contains: Paris
    soak_requests: 200
    run: "{{ resolved.run }}"
  register: __proof
"""

RETURN = r"""
health:
  description: The result of the wait, with the keys of M(sglang_health). Null without O(wait).
  returned: always
  type: dict
findings:
  description:
    - All findings, those about the processes first, then those of O(findings), of the answers and of the soak (rules
      C(known-answer) and C(soak)), then those about the arguments.
    - C(known-answer) of level warning where no answer is known.
  returned: always
  type: list
  elements: dict
answers:
  description: The answers as C({prompt, text, tokens, logprobs, agreed, deviation, elapsed}); tokens are ids.
  returned: always
  type: list
  elements: dict
soak:
  description: C({requests, answered, elapsed}); seconds. Null where it was left out.
  returned: always
  type: dict
record:
  description: The file, the earlier one where this start was on record already; null where nothing could be asked.
  returned: always
  type: str
elapsed:
  description: Seconds that the module took, the wait and the soak included.
  returned: always
  type: float
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_activation_rules import judge
from ansible.module_utils.sglang_answer_rules import known_answers, run_soak, unusable
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_client import Call, Client, ClientError, need_requests
from ansible.module_utils.sglang_findings import errors, finding, summary
from ansible.module_utils.sglang_lock import kept_fresh
from ansible.module_utils.sglang_proc import launch_of
from ansible.module_utils.sglang_process_report import report
from ansible.module_utils.sglang_release_store import without_secrets
from ansible.module_utils.sglang_verify_record import on_file, recorded, server_of, tell_ready, tell_verdict
from ansible.module_utils.sglang_watch import LogFollower
from ansible.module_utils.sglang_watch_processes import Processes
from ansible.module_utils.sglang_watch_ready import WAIT_SPEC, empty, wait, wrong

KNOWN_ANSWER = dict(
    prompt=dict(type="str", required=True),
    tokens=dict(type="list", elements="int", no_log=False),
    text=dict(type="str"),
    contains=dict(type="str"),
    logprobs=dict(type="list", elements="float"),
    min_logprob=dict(type="float"),
)
SPEC = dict(
    release=dict(type="path", required=True),
    wait=dict(type="dict", options=WAIT_SPEC),
    device=dict(type="str", choices=["cuda", "cpu"], default="cuda"),
    known_answers=dict(type="list", elements="dict", default=[], no_log=False, options=KNOWN_ANSWER),
    match=dict(type="float", default=1),
    logprob_tolerance=dict(type="float", default=0.2),
    max_tokens=dict(type="int", default=16, no_log=False),
    soak_requests=dict(type="int", default=200),
    soak_concurrency=dict(type="int", default=8),
    soak_tokens=dict(type="int", default=8, no_log=False),
    min_distinct=dict(type="int", default=2),
    generation_timeout=dict(type="float", default=120),
    request_timeout=dict(type="float", default=30),
    evidence=dict(type="dict", default={}),
    findings=dict(type="list", elements="dict", default=[]),
    python=dict(type="path"),
    run=dict(type="dict", default={}),
    api_key=dict(type="str", no_log=True),
)


def main():
    """Entry point."""
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    params, begin = module.params, time.monotonic()
    result = {"changed": False, "health": None, "findings": list(params["findings"]), "answers": [], "soak": None}
    result["record"] = None

    def passed():
        return round(time.monotonic() - begin, 3)

    release = os.path.realpath(params["release"])
    root, launch = os.path.dirname(os.path.dirname(release)), launch_of(release)
    shared = {name: params[name] for name in ("request_timeout", "generation_timeout", "min_distinct")}
    waiting = dict(shared, **params["wait"]) if params["wait"] else None
    problem = unusable(params) or (waiting and wrong(waiting, module.check_mode))
    if problem:
        module.fail_json(msg=problem, elapsed=passed(), **result)
    problem = need_requests(params["python"])
    if not problem and not launch:
        problem = f"release: {release}/launch.json is missing or damaged. Build the release again."
    if problem and waiting and module.check_mode:
        # A dry run on an empty host: the tasks before this one would have brought what is missing.
        module.exit_json(elapsed=passed(), **dict(result, health=empty(problem)))
    if problem:
        module.fail_json(msg=problem, elapsed=passed(), **result)

    client = Client(launch["endpoint"], key_for(module, launch))
    if waiting:
        result["health"], message = wait(release, launch, client, waiting, module.check_mode)
        if message and module.check_mode:
            module.exit_json(elapsed=passed(), **result)
        if message:
            module.fail_json(msg=message, elapsed=passed(), **result)
    tells = params["run"].get("id") and not module.check_mode
    if tells:
        tell_ready(root, release, params["run"], result["health"] or params["evidence"].get("health") or {})
    processes = report(launch, root)
    asked = time.monotonic()
    found, result["answers"] = known_answers(client, params)
    # A server that does not answer a question at all needs no soak to be refused.
    answered = len(result["answers"]) == len(params["known_answers"])
    if params["soak_requests"] > 0 and not module.check_mode and answered:
        with kept_fresh(root):
            more, result["soak"] = run_soak(client, Processes(release).check, params)
        found += more
    answers = {"findings": found, "answers": result["answers"], "soak": result["soak"]}
    answers["elapsed"] = round(time.monotonic() - asked, 3)
    result["findings"] = [*processes["findings"], *params["findings"], *found]

    limit = params["request_timeout"]
    try:
        info = Call(client.server_info, limit, limit=limit).wait()
    except ClientError as error:
        silent = finding(
            "verify", "server-info", "error", "The server does not say how it runs.", error, "read its log"
        )
        result["findings"].append(silent)
        if tells:
            tell_verdict(root, release, params["run"], dict(result, elapsed=passed()))
        module.fail_json(msg=summary(errors(result["findings"])), elapsed=passed(), **result)
    result["findings"] += judge(launch, info, LogFollower(launch["log"]).read(), params["device"])

    server, results = server_of(release), os.path.join(release, "results")
    result["record"] = on_file(results, server, result["findings"])
    result["changed"] = result["record"] is None
    if result["changed"]:
        result["record"] = os.path.join(results, time.strftime("verify-%Y%m%dT%H%M%SZ.json", time.gmtime()))
    if result["changed"] and not module.check_mode:
        record = dict(
            params["evidence"],
            **({"health": result["health"]} if waiting else {}),
            schema=1,
            processes=recorded(processes),
            release=os.path.basename(release),
            server=server,
            findings=result["findings"],
            answers=answers,
            server_info=without_secrets(info),
        )
        os.makedirs(results, exist_ok=True)
        temporary = os.path.join(module.tmpdir, "verify.json")
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(record, handle, indent=1, sort_keys=True)
        module.atomic_move(temporary, result["record"])
    bad = errors(result["findings"])
    if tells:
        tell_verdict(root, release, params["run"], dict(result, elapsed=passed()))
    if bad:
        text = f"{len(bad)} finding(s) refuse this release:\n{summary(bad)}"
        module.fail_json(msg=text, elapsed=passed(), **result)
    module.exit_json(elapsed=passed(), **result)


if __name__ == "__main__":
    main()
