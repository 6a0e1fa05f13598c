#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ask questions with known answers and count how many are right: a figure of a release, like its speed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_score
short_description: Count how many known questions a server answers rightly
description:
  - Asks every question at temperature 0, all of them several times over, and appends one event C(score) to the ledger
    for each time. A wrong answer is counted and fails nothing; M(sglang_decision) compares the shares of two releases.
  - Questions that no release may get wrong belong to the known answers of M(sglang_proof), where they refuse it.
  - A question that is not answered at all counts as wrong.
author: the sglang deploy authors
requirements:
  - requests
attributes:
  check_mode:
    support: full
    description: Asks nothing. The result has the same keys, C(scores) is empty.
  diff_mode:
    support: none
    description: Nothing on the host is configured.
options:
  release:
    description: Absolute path of the release; its C(launch.json) names the endpoint.
    type: path
    required: true
  questions:
    description: The questions, at least one. Each needs one of C(text) and C(contains).
    type: list
    elements: dict
    required: true
    suboptions:
      prompt:
        description: The question.
        type: str
        required: true
      text:
        description: The answer begins with these words.
        type: str
      contains:
        description: A part of the answer, in any case.
        type: str
  repeats:
    description: How often all questions are asked.
    type: int
    default: 3
  max_tokens:
    description: Tokens of each answer.
    type: int
    default: 32
  timeout:
    description: Seconds for one answer.
    type: float
    default: 120
  run:
    description: The run, as the action sglang_variant or sglang_run returns it.
    type: dict
    required: true
  variant:
    description: Name of the variant that is served, for the record.
    type: str
  python:
    description: An interpreter that has C(requests), used where the one that runs the module has not.
    type: path
  api_key:
    description: API key of the server. Without it the file that the release's C(launch.json) names is read.
    type: str
seealso:
  - module: sglang_decision
"""

EXAMPLES = r"""
- name: Ask two questions three times
  sglang_score:
    release: /opt/sglang/current
    questions:
      - {prompt: The capital of France is, contains: Paris}
      - {prompt: "12 * 12 =", text: "144"}
    run: "{{ resolved.run }}"
"""

RETURN = r"""
scores:
  description: One entry for each time - C(asked), C(right), C(answers) (true or false in the order of the questions).
  returned: always
  type: list
  elements: dict
wrong:
  description: Questions that were answered wrongly at least once, with the last wrong answer, at most twenty.
  returned: always
  type: list
  elements: dict
  sample:
    - prompt: The capital of France is
      answer: Lyon
elapsed:
  description: Seconds that the module took.
  returned: always
  type: float
"""

import hashlib
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_answer_rules import compare
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_client import Call, Client, ClientError, need_requests
from ansible.module_utils.sglang_ledger import append
from ansible.module_utils.sglang_lock import kept_fresh, without_alive
from ansible.module_utils.sglang_proc import launch_of

QUESTION = {"prompt": {"type": "str", "required": True}, "text": {"type": "str"}, "contains": {"type": "str"}}
ARGUMENTS = {
    "release": {"type": "path", "required": True},
    "questions": {"type": "list", "elements": "dict", "required": True, "options": QUESTION},
    "repeats": {"type": "int", "default": 3},
    "max_tokens": {"type": "int", "default": 32, "no_log": False},
    "timeout": {"type": "float", "default": 120},
    "run": {"type": "dict", "required": True},
    "variant": {"type": "str"},
    "python": {"type": "path"},
    "api_key": {"type": "str", "no_log": True},
}
SHOWN = 20


def unusable(params):
    """Return which input makes no sense, or an empty text."""
    if not params["questions"]:
        return "questions is empty: give at least one, with the answer's text or a part of it in contains."
    for number, known in enumerate(params["questions"]):
        if not (known["text"] or known["contains"]):
            return f"questions[{number}] ({known['prompt']!r}) expects nothing: give text or contains."
    for name in ("repeats", "max_tokens"):
        if params[name] < 1:
            return f"{name} must be at least 1, not {params[name]}."
    return "" if params["run"].get("id") else "run needs the run that the action sglang_variant or sglang_run returns."


def answer_to(client, known, params):
    """Return ``(right, text)`` of one question."""
    limit = params["timeout"]
    try:
        answer = Call(client.generate, known["prompt"], params["max_tokens"], limit, limit=limit).wait()
    except ClientError as problem:
        return False, f"no answer: {problem}"
    expected = dict(known, tokens=None, logprobs=None, min_logprob=None)
    wrong, _agreed, _deviation = compare(expected, answer, 1.0, 0.0)
    return not wrong, answer["text"]


def main():
    """Entry point."""
    module = AnsibleModule(ARGUMENTS, supports_check_mode=True)
    params, begin = module.params, time.monotonic()
    result = {"changed": False, "scores": [], "wrong": [], "elapsed": 0.0}
    problem = unusable(params)
    if problem:
        module.fail_json(msg=problem, **result)
    if module.check_mode:
        module.exit_json(**result)
    problem = need_requests(params["python"])
    release = os.path.realpath(params["release"])
    launch = launch_of(release)
    if not problem and not launch:
        problem = f"release: {release}/launch.json is missing or damaged. Build the release again."
    if problem:
        module.fail_json(msg=problem, **result)
    client = Client(launch["endpoint"], key_for(module, launch))
    root = os.path.dirname(os.path.dirname(release))
    text = json.dumps([params["questions"], params["max_tokens"]], sort_keys=True)
    common = {
        "event": "score",
        "run": without_alive(params["run"]),
        "release": os.path.basename(release),
        "variant": params["variant"],
        "questions_digest": hashlib.sha256(text.encode()).hexdigest()[:12],
    }
    wrong = {}
    with kept_fresh(root):
        for _ in range(params["repeats"]):
            answers = []
            for known in params["questions"]:
                right, said = answer_to(client, known, params)
                answers.append(right)
                if not right:
                    wrong[known["prompt"]] = said[:200]
            score = {"asked": len(answers), "right": sum(answers), "answers": answers}
            result["scores"].append(score)
            append(root, {**common, **score})
    result["wrong"] = [{"prompt": prompt, "answer": said} for prompt, said in list(wrong.items())[:SHOWN]]
    result["elapsed"] = round(time.monotonic() - begin, 3)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
