#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Wait until the server of a release answers, or say why it never will."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_health
short_description: Wait until the server of a release is ready, proven by real generations
description:
  - Follows log, processes and endpoint of one release at once, from the start of the server to its first answers.
  - Ready means that the server process and all workers live, that the process behind the port carries the release's
    marker, that C(/health) answers 200, that C(/v1/models) has the release's model name, and that O(generations)
    generations in a row gave more than one token, in time, and no degenerate answer.
  - A crash ends the wait within a second of the process's death or of the fatal line, whichever comes first, and is
    named by a catalogue of signatures. An unknown one shows the first error of the log.
  - A server that lives and is silent for longer than its phase allows has stalled. Slow is not stalled, and a kernel
    that is being compiled is not silence.
  - While it waits, C(run/progress.json) of the release says how far it is, and the action of the same name shows that
    on the controller's standard error every few seconds, whatever the callback. A wait ends with its controller, and
    renews the heartbeat of the deploy lock two directories above the release.
  - It needs the Python package C(requests), which the engine has; O(python) names the engine's interpreter.
author:
  - the sglang deploy authors
requirements:
  - requests
options:
  release:
    description: Absolute path of the release; its C(launch.json) names endpoint, model, log and process tree.
    type: path
    required: true
  state:
    description:
      - V(ready) waits, and fails where the server is not ready in the end.
      - V(probe) judges once and never fails. A server whose C(/health) fails while tokens flow is RV(busy), not dead.
    type: str
    choices: [ready, probe]
    default: ready
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
      - A phase that is left out keeps its default.
    type: dict
    default: {}
    suboptions:
      spawned:
        description: The process exists and its log is empty. 60 by default.
        type: float
      imports:
        description: Python imports and the parsing of arguments. 300 by default.
        type: float
      distributed:
        description: The ranks find each other. 180 by default.
        type: float
      weights:
        description: Weights are loaded; the longest time for one shard. 300 by default.
        type: float
      kv_cache:
        description: The KV cache is allocated. 180 by default.
        type: float
      graph:
        description: CUDA graphs are captured; the longest time for one batch size. 600 by default.
        type: float
      warmup:
        description: The server's own first request. 600 by default.
        type: float
  request_timeout:
    description: Seconds for a request that does not generate. C(/health) of a stuck server answers after 20.
    type: float
    default: 30
  generation_timeout:
    description: Seconds for one generation.
    type: float
    default: 120
  generations:
    description: How many generations in a row must succeed. 0 asks for none and is allowed with O(state=probe) only.
    type: int
    default: 3
  max_tokens:
    description: Tokens of each generation, at least 2.
    type: int
    default: 8
  min_distinct:
    description:
      - Different tokens, and different words, that an answer must have at least. The default refuses one token said
        again and again. Tiny models repeat loops of two.
    type: int
    default: 2
  python:
    description: An interpreter that has C(requests), used where the one that runs the module has not.
    type: path
  api_key:
    description: API key of the server. Without it the file that the release's C(launch.json) names is read.
    type: str
  log_lines:
    description: Lines of the log in RV(log_tail).
    type: int
    default: 40
attributes:
  check_mode:
    description: What the module does where nothing may be changed.
    support: full
    details: Judges once as O(state=probe) does, waits for nothing and writes nothing.
  diff_mode:
    description: Whether it shows the difference that it makes.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the server
  sglang_health:
    release: /opt/sglang/releases/20261129T120000Z-baseline-1a2b3c4d
    pid: 4711
    timeout: 1500
    phase_silence:
      weights: 900

- name: Look once
  sglang_health:
    release: /opt/sglang/releases/20261129T120000Z-baseline-1a2b3c4d
    state: probe
    generations: 1
  register: __looked
"""

RETURN = r"""
ready:
  description: Whether the server is ready.
  returned: always
  type: bool
busy:
  description: C(/health) fails while tokens flow. Only a probe finds this.
  returned: always
  type: bool
phase:
  description: Phase reached, one of spawned, imports, distributed, weights, kv_cache, graph, warmup, ready, serving.
  returned: always
  type: str
phases:
  description: Phases seen, in order, as C({phase, elapsed}); seconds.
  returned: always
  type: list
  elements: dict
progress:
  description: C({done, total, percent, rate, estimate}) of the running phase, estimate in seconds; null without one.
  returned: always
  type: dict
elapsed:
  description: Seconds that this module waited.
  returned: always
  type: float
attempts:
  description: Requests sent.
  returned: always
  type: int
last_error:
  description: What the last failed request said.
  returned: always
  type: str
endpoint:
  description: C({url, port, health, generation}), what each of them said last; they fail for different reasons.
  returned: always
  type: dict
cause:
  description:
    - Why it is not ready, C({signature, phase, message, advice, detail, first_error, ranks}). Null when it is.
    - The C(ranks) are the tensor-parallel ranks that reported the failure.
  returned: always
  type: dict
generations:
  description: Each generation as C({text, tokens, elapsed}); seconds.
  returned: always
  type: list
  elements: dict
served_model:
  description: The model name seen at the endpoint, null where it was not ours or not asked.
  returned: always
  type: str
pid:
  description: Pid of the server process, null where none was found.
  returned: always
  type: int
waiting:
  description: What another run that waits for this server says of its progress; null where none waits.
  returned: always
  type: str
alarm:
  description:
    - What the program C(watch.py) beside the server has reported, a worker that died under a living parent for example;
      null where it has seen nothing.
  returned: always
  type: str
stacks:
  description:
    - The file with the stacks of parent and workers of a server that lives and does not go on, taken by C(py-spy) from
      beside the engine's interpreter or from PATH. Null where nothing hangs or there is no C(py-spy).
  returned: always
  type: str
log_tail:
  description: Last lines of the log, each cut to 300 characters.
  returned: always
  type: list
  elements: str
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_client import Client, need_requests
from ansible.module_utils.sglang_watch_ready import WAIT_SPEC, empty, explain, wait, wrong


def load(module, path):
    """Return the release's ``launch.json``; None where it is missing. Fails where it cannot be used."""
    name = os.path.join(path, "launch.json")
    try:
        with open(name, encoding="utf-8") as handle:
            launch = json.load(handle)
        return {key: launch[key] for key in ("endpoint", "served_model_name", "log", "argv", "env")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as problem:
        return module.fail_json(
            msg=f"release: {name} cannot be used: {problem!r}. Build the release again.", **empty("")
        )


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec=dict(
            WAIT_SPEC,
            release=dict(type="path", required=True),
            state=dict(type="str", choices=["ready", "probe"], default="ready"),
            request_timeout=dict(type="float", default=30),
            generation_timeout=dict(type="float", default=120),
            min_distinct=dict(type="int", default=2),
            python=dict(type="path"),
            api_key=dict(type="str", no_log=True),
            log_lines=dict(type="int", default=40),
        ),
        supports_check_mode=True,
    )
    params = module.params
    once = module.check_mode or params["state"] == "probe"
    problem = wrong(params, once)
    if problem:
        module.fail_json(msg=problem, **empty(""))
    release = os.path.realpath(params["release"])
    launch = load(module, release)
    if launch is None:
        result = empty(f"release: {release} has no launch.json")
        if once:
            module.exit_json(**result)
        module.fail_json(msg=explain(result), **result)
    problem = need_requests(params["python"])
    if problem and module.check_mode:
        module.exit_json(**empty(problem))
    if problem:
        module.fail_json(msg=problem, **empty(problem))
    client = Client(launch["endpoint"], key_for(module, launch))
    result, message = wait(release, launch, client, params, once, params["log_lines"])
    if message and not once:
        module.fail_json(msg=message, **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
