#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Compare a server's answers with known ones, and keep asking until it has served more than a warm-up."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_answers
short_description: Compare a server's answers with known ones, then soak it
description:
  - Asks the questions of O(known_answers) at temperature 0 and compares the answers by tokens, by words, and by
    log-probability where the server gives it.
  - Then sends O(soak_requests) small requests, O(soak_concurrency) at a time, and asks once more whether the server is
    well. A server that serves a few requests and then hangs is found here.
  - Does not fail on a wrong answer; it returns RV(findings), which M(sglang_activation) judges with all others.
author:
  - the sglang deploy authors
requirements:
  - requests
options:
  release:
    description: Absolute path of the release; its C(launch.json) names the endpoint.
    type: path
    required: true
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
  python:
    description: An interpreter that has C(requests), used where the one that runs the module has not.
    type: path
  api_key:
    description: API key of the server. Without it the file that the release's C(launch.json) names is read.
    type: str
attributes:
  check_mode:
    description: The known questions are asked; the soak, which is load for a server that works, is left out.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Compare answers and soak
  sglang_answers:
    release: /opt/sglang/releases/20261129T120000Z-baseline-1a2b3c4d
    known_answers:
      - prompt: The capital of France is
        contains: Paris
    soak_requests: 200
  register: __answers
"""

RETURN = r"""
findings:
  description:
    - What is wrong, by the rules C(known-answer) and C(soak).
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
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_answer_rules import EXPECTED, RUNG, known_answers, soak, still_healthy
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_client import Client, need_requests
from ansible.module_utils.sglang_findings import finding
from ansible.module_utils.sglang_lock import kept_fresh
from ansible.module_utils.sglang_proc import launch_of
from ansible.module_utils.sglang_watch_processes import Processes


def check(params):
    """Return which input cannot be used and why, or an empty text."""
    for number, known in enumerate(params["known_answers"]):
        if not any(known[key] for key in EXPECTED):
            return f"known_answers[{number}] ({known['prompt']!r}) expects nothing: give one of {', '.join(EXPECTED)}."
    if not 0 <= params["match"] <= 1:
        return f"match must be between 0 and 1, not {params['match']:g}."
    for name in ("max_tokens", "soak_concurrency", "soak_tokens"):
        if params[name] < 1:
            return f"{name} must be at least 1, not {params[name]}."
    return ""


def run_soak(client, release, params):
    """Return ``(findings, {requests, answered, elapsed})``."""
    begin = time.monotonic()
    requests, limit = params["soak_requests"], params["generation_timeout"]
    processes = Processes(release)
    answered, problem = soak(
        client, processes.check, requests, params["soak_concurrency"], params["soak_tokens"], limit
    )
    problem = problem or still_healthy(client, max(params["soak_tokens"], 2), params["min_distinct"], limit)
    found = []
    if problem:
        message = f"The server answered {answered} of {requests} small requests and is not well after that."
        found = [finding(RUNG, "soak", "error", message, problem, "read its log; the stacks of its workers say more")]
    return found, {"requests": requests, "answered": answered, "elapsed": round(time.monotonic() - begin, 3)}


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec=dict(
            release=dict(type="path", required=True),
            known_answers=dict(
                type="list",
                elements="dict",
                default=[],
                no_log=False,
                options=dict(
                    prompt=dict(type="str", required=True),
                    tokens=dict(type="list", elements="int", no_log=False),
                    text=dict(type="str"),
                    contains=dict(type="str"),
                    logprobs=dict(type="list", elements="float"),
                    min_logprob=dict(type="float"),
                ),
            ),
            match=dict(type="float", default=1),
            logprob_tolerance=dict(type="float", default=0.2),
            max_tokens=dict(type="int", default=16, no_log=False),
            soak_requests=dict(type="int", default=200),
            soak_concurrency=dict(type="int", default=8),
            soak_tokens=dict(type="int", default=8, no_log=False),
            min_distinct=dict(type="int", default=2),
            generation_timeout=dict(type="float", default=120),
            python=dict(type="path"),
            api_key=dict(type="str", no_log=True),
        ),
        supports_check_mode=True,
    )
    params, begin = module.params, time.monotonic()
    findings, answers, soaked = [], [], None

    def result():
        elapsed = round(time.monotonic() - begin, 3)
        return {"changed": False, "findings": findings, "answers": answers, "soak": soaked, "elapsed": elapsed}

    release = os.path.realpath(params["release"])
    launch = launch_of(release)
    problem = check(params) or need_requests(params["python"])
    if not problem and not launch:
        problem = f"release: {release}/launch.json is missing or damaged. Build the release again."
    if problem:
        module.fail_json(msg=problem, **result())
    client = Client(launch["endpoint"], key_for(module, launch))
    if not params["known_answers"]:
        text = "No known answer is declared, so a model that answers fluently and wrongly passes."
        advice = "give known_answers, written from the record of a release that is trusted"
        findings.append(finding(RUNG, "known-answer", "warning", text, "", advice))
    found, answers = known_answers(
        client,
        params["known_answers"],
        params["match"],
        params["logprob_tolerance"],
        params["max_tokens"],
        params["generation_timeout"],
    )
    findings += found
    # A server that does not answer a question at all needs no soak to be refused.
    if params["soak_requests"] > 0 and not module.check_mode and len(answers) == len(params["known_answers"]):
        with kept_fresh(os.path.dirname(os.path.dirname(release))):
            found, soaked = run_soak(client, release, params)
        findings += found
    module.exit_json(**result())


if __name__ == "__main__":
    main()
