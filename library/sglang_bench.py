#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Measure a running SGLang server with streaming requests."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_bench
short_description: Measure the speed of a running SGLang server
description:
  - Sends streaming requests and returns time to first token, time per output token, inter-token latency, end-to-end
    latency and throughput, with percentiles.
  - The load is a fixed concurrency, a request rate, a sweep of concurrencies, one stream of decode, prefill only, or
    long context.
  - Failed, refused, truncated and timed-out requests are counted apart. More than the allowed share fails the task,
    and no throughput is given then.
  - The result is kept in one JSON file with the raw record of every request beside it, and one event is appended to
    the ledger.
  - GPUs are sampled during the run where there are any; an Xid error of the driver makes the run invalid and fails the
    task.
  - Two probe requests of one token each tell how the server counts prompt tokens. Probes and warm-up are not measured.
author: the sglang deploy authors
requirements:
  - requests
attributes:
  check_mode:
    support: full
    description: Sends nothing. The result has the same keys with null values and C(skipped_reason).
  diff_mode:
    support: none
    description: Nothing on the host is configured.
  idempotent:
    support: full
    description: Never reports a change; the result file and the ledger line are a record, not a configuration.
options:
  release:
    description:
      - Release directory. Its C(launch.json) tells endpoint and served model name, results go below it, and the
        ledger lies two directories above it, beside the deploy lock, whose heartbeat the run renews.
    type: path
  url:
    description: Base URL of the server, without C(/v1). Wins over the endpoint of O(release). One of both is needed.
    type: str
  model:
    description: Served model name. Without it that of O(release), else C(default).
    type: str
  api:
    description: Interface to measure.
    type: str
    choices: [chat, completions, generate]
    default: chat
  workload:
    description:
      - C(concurrency) keeps O(concurrency) requests in flight. C(rate) sends O(rate) requests a second, whatever is in
        flight. C(sweep) measures one level for each of O(levels). C(decode) is one stream of long answers, C(prefill)
        long prompts with one output token, C(long_context) prompts that fill the server's context.
    type: str
    choices: [concurrency, rate, sweep, decode, prefill, long_context]
    default: concurrency
  requests:
    description:
      - Number of measured requests; in a sweep that of each level, and at least twice the level. 0 means what the
        workload has - 32, rate 64, sweep 16, decode 4, prefill 8, long_context 2.
    type: int
    default: 0
  concurrency:
    description:
      - Requests in flight at the same time; with the workload rate the most that may be. 0 means what the workload
        has - 8, rate 256, decode, prefill and long_context 1. A sweep has O(levels) instead.
    type: int
    default: 0
  levels:
    description: Concurrencies of a sweep, in the order in which they are measured.
    type: list
    elements: int
    default: [1, 2, 4, 8, 16, 32, 64]
  rate:
    description: Requests a second of the workload rate, on average.
    type: float
    default: 2.0
  burstiness:
    description: Shape of the gamma distribution of the gaps between requests of the workload rate. 1 is a Poisson
      process, less comes in bursts, more is steadier.
    type: float
    default: 1.0
  input_tokens:
    description:
      - Prompt tokens of each request, chat template included, as the server counts them. 0 means what the workload
        has - 512, decode 64, prefill 2048, long_context as many as the server can hold, at most 32768.
    type: int
    default: 0
  output_tokens:
    description:
      - Output tokens asked of each request. 0 means what the workload has - 128, decode 256, prefill 1,
        long_context 64.
    type: int
    default: 0
  prompts_file:
    description:
      - File with prompts on the measuring host, instead of synthetic ones - ShareGPT-like JSON, of which the first
        question of each conversation is taken; JSON strings or objects with C(prompt), as a list or a line each; or
        plain text with one prompt a line. O(input_tokens) has no meaning then.
    type: path
  unique_prompts:
    description: Put random letters in front of each prompt of O(prompts_file), so that none is in the server's cache.
    type: bool
    default: true
  tokenizer:
    description:
      - Directory with C(tokenizer.json), by which synthetic prompts are counted. Without it the model directory that
        the release's C(launch.json) names; where neither has one, their length is fitted to the server's own count.
    type: path
  flush_cache:
    description: Empty the server's prefix cache before each level. The server's answer is recorded.
    type: bool
    default: false
  warmup:
    description:
      - Unmeasured requests sent before, which also open the connections. Without it as many as are in flight at most;
        for the workloads rate, prefill and long_context one.
    type: int
  timeout:
    description: Seconds for the whole run.
    type: float
    default: 600
  request_timeout:
    description: Seconds for one request, from sending it to the last byte of its answer.
    type: float
    default: 120
  ignore_eos:
    description: Let the server go on after an end-of-sequence token, so that every answer has O(output_tokens) tokens.
    type: bool
    default: true
  temperature:
    description: Sampling temperature.
    type: float
    default: 0.0
  max_failed:
    description: Share of requests, from 0 to 1, that may fail.
    type: float
    default: 0.0
  limits:
    description:
      - What the figures must reach, as C(min_) or C(max_) with the name of a metric. A missed limit fails the task
        after the run was recorded.
    type: dict
    default: {}
  api_key:
    description:
      - API key of the server, sent as a bearer token. Never logged and never written.
      - Without it the file that the release's C(launch.json) names is read.
    type: str
  validate_certs:
    description: Check the certificate of an https endpoint.
    type: bool
    default: true
  seed:
    description:
      - Seed of the prompts. Without it one is drawn, so that no earlier run's prompts are in the server's cache. It
        is recorded.
    type: int
  results_dir:
    description: Directory of the result file. Without it C(results) in O(release); without both no file is written.
    type: path
  root:
    description: Root directory whose ledger gets the event. Without it the one of O(release); without both no event
      is written.
    type: path
  run:
    description: The run in which this happens, as the variant action returns it; C(id) names the result file.
    type: dict
  variant:
    description: Name of the variant that is served, for the record.
    type: str
  history:
    description:
      - What of the ledger to return as RV(history) once this run is in it, so that M(sglang_decision) needs no call on
        the host. Needs O(root) or O(release), and O(run) with C(id).
    type: dict
    suboptions:
      releases:
        description: Ids of the releases whose runs are wanted.
        type: list
        elements: str
        required: true
      metrics:
        description: Metrics wanted beside those that every decision needs.
        type: list
        elements: str
        default: []
"""

EXAMPLES = r"""
- name: Measure the release that serves
  sglang_bench:
    release: /opt/sglang/current
    requests: 128
    concurrency: 16
    input_tokens: 1024
    output_tokens: 256
  vars:
    ansible_python_interpreter: /opt/engine/bin/python3
  register: result

- name: Find the concurrency beyond which nothing is gained
  sglang_bench:
    release: /opt/sglang/current
    workload: sweep
    levels: [1, 4, 16, 64]

- name: Measure any server and let one request of ten fail
  sglang_bench:
    url: http://127.0.0.1:30000
    model: default
    api: generate
    max_failed: 0.1
    results_dir: /tmp/results
"""

RETURN = r"""
metrics:
  description:
    - Figures of the completed requests, the unit in each name. Distributions have C(_mean), C(_p50), C(_p90), C(_p95),
      C(_p99) and C(_std). All null in check mode and when the run failed. Of a sweep those of the fastest level.
  returned: always
  type: dict
  sample: {output_tok_s: 2184.1, ttft_ms_p50: 20.6, tpot_ms_mean: 3.34, itl_ms_p99: 3.9, concurrency_effective: 7.9}
levels:
  description:
    - One entry for each level of load with C(level), C(concurrency), C(rate), C(requests), C(metrics), C(counts),
      C(flags), C(notes), C(failure), C(client), C(server) and C(cache_flush). Only a sweep has several.
  returned: always
  type: list
  elements: dict
counts:
  description:
    - Requests by outcome over all levels. C(failed) is the sum of C(refused), C(unauthorized), C(http_error),
      C(stream_error), C(truncated), C(empty), C(timed_out) and C(not_sent). C(usage_missing) are completed requests
      whose tokens had to be counted by events, C(unresolved) those whose tokens the client read too late to tell the
      time between them, C(one_event) those that the server sent in one event; both have no TPOT, ITL and decode speed.
  returned: always
  type: dict
  sample: {requested: 32, completed: 32, failed: 0, truncated: 0, usage_missing: 0, unresolved: 0, one_event: 0}
valid:
  description: Whether the figures may be used - no failure and no Xid error. Null when nothing was measured.
  returned: always
  type: bool
flags:
  description:
    - Remarks on the run - C(client_bottleneck), C(unresolved), C(one_event), C(usage_missing),
      C(degenerate_output), C(failed_requests), C(concurrency_not_held), C(rate_not_held), C(prompts_cached),
      C(prompt_length_not_calibrated).
  returned: always
  type: list
  elements: str
findings:
  description: Findings of the rung benchmark - a failed run, missed limits and Xid as errors, each flag as a warning.
  returned: always
  type: list
  elements: dict
gpu:
  description: Samples of the GPUs during the run, and Xid errors; C(exercised) is false where there is no GPU.
  returned: always
  type: dict
fingerprint:
  description: What the measurement depends on beside the variant; C(digest) is equal for comparable runs.
  returned: always
  type: dict
workload:
  description: What was asked for, presets filled in.
  returned: always
  type: dict
workload_digest:
  description: Equal for runs that put the same load on a server.
  returned: always
  type: str
client:
  description: What the client itself used. C(cpu_share) 1.0 is one full core, C(lag_ms_p99) how late its threads got
    their turn, C(read_lag_ms_p99) how late bytes were read that the kernel had, C(unresolved_share) the share of
    answers whose tokens it cannot tell apart in time.
  returned: always
  type: dict
  sample: {cpu_share: 0.09, cpu_us_per_token: 12.1, lag_ms_p99: 0.4, lag_ms_max: 1.1, bottleneck: false}
server:
  description: The server's own figures of the measured time from C(/metrics) and C(/get_server_info); C(missing)
    names what it did not give. C(derived) has accept length, cache hit rate, queue and generation throughput.
  returned: always
  type: dict
seed:
  description: Seed of the prompts.
  returned: always
  type: int
result_path:
  description: The result file, or null; the raw records lie beside it.
  returned: always
  type: str
  sample: /opt/sglang/releases/20261129T150000Z-baseline-1f2e3d4c/results/bench-20261129T150230Z-r1.json
history:
  description:
    - The C(read) of M(sglang_decision) after this run. Null where O(history) did not ask for it, where the ledger
      cannot be read, and where Ansible would mask a part of it because the API key occurs there; M(sglang_decision)
      then reads the ledger itself.
  returned: always
  type: dict
elapsed:
  description: Seconds of the whole run, probes and warm-up included.
  returned: always
  type: float
skipped_reason:
  description: Why nothing was measured, or null.
  returned: always
  type: str
"""

import os
import traceback

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible.module_utils.common.parameters import remove_values
from ansible.module_utils.sglang_api_key import key_for
from ansible.module_utils.sglang_bench_record import event, write
from ansible.module_utils.sglang_bench_run import measure, target
from ansible.module_utils.sglang_bench_stats import CLIENT, COUNTS, METRICS
from ansible.module_utils.sglang_bench_workload import InputError, resolve
from ansible.module_utils.sglang_decision_runs import history
from ansible.module_utils.sglang_findings import errors, summary
from ansible.module_utils.sglang_ledger import append
from ansible.module_utils.sglang_lock import kept_fresh, without_alive
from ansible.module_utils.sglang_proc import launch_of

try:
    import requests  # noqa: F401

    REQUESTS_ERROR = None
except ImportError:
    REQUESTS_ERROR = traceback.format_exc()

# no_log is said where the name alone would suggest a secret.
ARGUMENTS = {
    "release": {"type": "path"},
    "url": {"type": "str"},
    "model": {"type": "str"},
    "api": {"type": "str", "choices": ["chat", "completions", "generate"], "default": "chat"},
    "workload": {
        "type": "str",
        "choices": ["concurrency", "rate", "sweep", "decode", "prefill", "long_context"],
        "default": "concurrency",
    },
    "requests": {"type": "int", "default": 0},
    "concurrency": {"type": "int", "default": 0},
    "levels": {"type": "list", "elements": "int", "default": [1, 2, 4, 8, 16, 32, 64]},
    "rate": {"type": "float", "default": 2.0},
    "burstiness": {"type": "float", "default": 1.0},
    "input_tokens": {"type": "int", "default": 0, "no_log": False},
    "output_tokens": {"type": "int", "default": 0, "no_log": False},
    "prompts_file": {"type": "path"},
    "unique_prompts": {"type": "bool", "default": True},
    "tokenizer": {"type": "path", "no_log": False},
    "flush_cache": {"type": "bool", "default": False},
    "warmup": {"type": "int"},
    "timeout": {"type": "float", "default": 600},
    "request_timeout": {"type": "float", "default": 120},
    "ignore_eos": {"type": "bool", "default": True},
    "temperature": {"type": "float", "default": 0.0},
    "max_failed": {"type": "float", "default": 0.0},
    "limits": {"type": "dict", "default": {}},
    "api_key": {"type": "str", "no_log": True},
    "validate_certs": {"type": "bool", "default": True},
    "seed": {"type": "int"},
    "results_dir": {"type": "path"},
    "root": {"type": "path"},
    "run": {"type": "dict"},
    "variant": {"type": "str"},
    "history": {
        "type": "dict",
        "options": {
            "releases": {"type": "list", "elements": "str", "required": True},
            "metrics": {"type": "list", "elements": "str", "default": []},
        },
    },
}
KEYS = (
    "metrics",
    "levels",
    "counts",
    "valid",
    "flags",
    "findings",
    "gpu",
    "fingerprint",
    "workload",
    "workload_digest",
    "client",
    "server",
    "elapsed",
)


def empty(params, reason):
    """Return the result of a run that was not made, with every key of a real one."""
    return {
        **dict.fromkeys(KEYS),
        "metrics": dict.fromkeys(METRICS),
        "counts": dict.fromkeys(COUNTS),
        "levels": [],
        "flags": [],
        "findings": [],
        "client": dict.fromkeys(CLIENT),
        "server": dict.fromkeys(("counters", "gauges", "info", "samples", "derived", "missing")),
        "seed": params["seed"],
        "result_path": None,
        "history": None,
        "elapsed": 0.0,
        "skipped_reason": reason,
    }


def told(module, root, run):
    """Return the history that was asked for, or None where it cannot be read or would be masked on its way."""
    try:
        found = history(root, run["id"], **module.params["history"])
    except (OSError, ValueError):
        return None
    return found if remove_values(found, module.no_log_values) == found else None


def main():
    """Entry point."""
    module = AnsibleModule(ARGUMENTS, supports_check_mode=True, required_one_of=[("release", "url")])
    params = module.params
    try:
        resolved = resolve(params)
        if params["history"] and params["run"] and not params["run"].get("id"):
            raise InputError("run must have an id where history is asked for: give what the variant action returns.")
        if module.check_mode:
            module.exit_json(changed=False, **empty(params, "check mode: no load is sent"))
        if REQUESTS_ERROR:
            module.fail_json(msg=missing_required_lib("requests"), exception=REQUESTS_ERROR, **empty(params, None))
        release = os.path.realpath(params["release"]) if params["release"] else None
        url, model, files = target(release, params["url"], params["model"])
        key = key_for(module, launch_of(release) if release else {})
        root = params["root"] or (os.path.dirname(os.path.dirname(release)) if release else None)
        run = params["run"] and without_alive(params["run"])
        resolved.update(release=release, url=url, model=model, api_key=key, run=run)
        resolved["tokenizer"] = params["tokenizer"] or files
        with kept_fresh(root):
            document, raw = measure(resolved)
    except InputError as error:
        module.fail_json(msg=str(error), **empty(params, None))
    result = {key: document[key] for key in KEYS}
    result.update(seed=document["workload"]["seed"], result_path=None, history=None, skipped_reason=None)
    directory = params["results_dir"] or (os.path.join(release, "results") if release else None)
    try:
        if directory:
            result["result_path"] = write(document, raw, directory)
        if root:
            append(root, event(document, result["result_path"]))
    except OSError as error:
        module.fail_json(
            msg=f"The run was measured but could not be recorded: {error}. Check results_dir and root.", **result
        )
    if root and run and params["history"]:
        result["history"] = told(module, root, run)
    refused = errors(document["findings"])
    if refused:
        module.fail_json(msg=summary(refused), **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
