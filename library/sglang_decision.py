#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Read what a decision is made from, and write the decision into the ledger. The action of the same name decides."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_decision
short_description: Judge by its stored runs whether a release stays
description:
  - Compares the runs of a release with those of another one and says C(better), C(equal), C(worse), C(inconclusive) or
    C(not comparable), with an interval for each metric. C(first) means that there is nothing to compare with.
  - Only runs of the same fingerprint and workload are compared. What counts is in C(docs/deciding.md).
  - The figures are computed on the controller by the action plugin; the host reads its ledger and appends the event
    C(decision).
  - The task fails where RV(outcome=rollback), with the numbers in its message.
author: the sglang deploy authors
attributes:
  check_mode:
    support: full
    description: Decides nothing, since nothing was measured. The result has the same keys with null values.
  diff_mode:
    support: none
    description: Nothing on the host is configured.
options:
  root:
    description: Root directory whose ledger is read and gets the event.
    type: path
    required: true
  release:
    description: Id of the release that is judged.
    type: str
    required: true
  against:
    description: Id of the release to compare with; empty where there is none.
    type: str
    default: ""
  run:
    description: The run, as the action sglang_variant or sglang_run returns it.
    type: dict
    required: true
  thresholds:
    description:
      - The change of each metric that counts as a loss; its sign is the direction of the loss.
      - A relative change, for C(known_answers) a difference of the share of right answers.
    type: dict
    default:
      decode_tok_s_p50: -0.02
      ttft_ms_p50: 0.1
      known_answers: -0.02
  false_alarm:
    description: Chance with which an equal release is called worse, over all metrics and repetitions together.
    type: float
    default: 0.01
  start_spread:
    description:
      - Relative standard deviation of the figures from one start of the same release to the next. Runs of one start
        share it, so that repeating them does not average it out.
    type: float
    default: 0.003
  design:
    description: C(stored) for independent runs; C(interleaved) where both releases were started in turn in this run.
    type: str
    choices: [stored, interleaved]
    default: stored
  budget:
    description: Seconds of measuring in this run, over which an inconclusive comparison is not measured on.
    type: float
    default: 900
  on_inconclusive:
    description:
      - What follows from C(inconclusive) once the budget is spent, and from C(not comparable).
      - C(rollback) lets the previous release come back. C(keep) promotes the release that is judged.
    type: str
    choices: [keep, rollback]
    default: rollback
  promote:
    description: False only records, whatever the verdict.
    type: bool
    default: true
  allreduce_us:
    description:
      - Measured latency of one all-reduce of the verify step's size, in microseconds, for what a result means for
        speculative decoding. 0 where it is not known.
    type: float
    default: 0
  deferred:
    description:
      - Leave the event of a promotion or a rollback to the call that records that verdict; it is then RV(pending).
        O(deferred=true) is for a caller that hands it to C(sglang_release) as C(decision), which writes it first.
      - What neither follows is written at once.
    type: bool
    default: false
  read:
    description:
      - RV(read) from elsewhere, such as C(history) of the M(sglang_bench) that measured last, where the ledger got no
        run and no score since. Without it the ledger is read.
    type: dict
  event:
    description: Set by the action alone - the event to append to the ledger. Without it the ledger is read.
    type: dict
seealso:
  - module: sglang_bench
"""

EXAMPLES = r"""
- name: Judge the release that was just measured
  sglang_decision:
    root: /opt/sglang
    release: 20260102T030405Z-fewchan-0123456789ab
    against: 20260101T030405Z-baseline-ba9876543210
    run: "{{ resolved.run }}"
    thresholds: {decode_tok_s_p50: -0.02, ttft_ms_p50: 0.1}
  register: decision
"""

RETURN = r"""
verdict:
  description: better, equal, worse, inconclusive, not comparable or first; null in check mode.
  returned: always
  type: str
outcome:
  description: promote, rollback, measure (go on measuring) or record; null in check mode.
  returned: always
  type: str
lines:
  description: The comparison for an operator. The difference of the fingerprints is the first line.
  returned: always
  type: list
  elements: str
decision:
  description: The ledger event, see C(docs/ledger.md); null in check mode.
  returned: always
  type: dict
pending:
  description: The same event where nobody has written it yet, see O(deferred); null where it is in the ledger.
  returned: always
  type: dict
read:
  description:
    - Runs and scores of the ledger, decisions and seconds of measuring of this run. For the action; null in its result.
  returned: always
  type: dict
skipped_reason:
  description: Why nothing was decided, or null.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_decision_runs import history
from ansible.module_utils.sglang_decision_spec import ARGUMENTS, RESULT
from ansible.module_utils.sglang_ledger import append
from ansible.module_utils.sglang_lock import without_alive


def main():
    """Entry point."""
    module = AnsibleModule(ARGUMENTS, supports_check_mode=True)
    params = module.params
    if not params["run"].get("id"):
        module.fail_json(msg="run needs the run that the action sglang_variant or sglang_run returns.")
    result = dict.fromkeys(RESULT)
    result["lines"] = []
    event = params["event"]
    try:
        if event is None:
            releases = [params["release"], params["against"]]
            result["read"] = history(params["root"], params["run"]["id"], releases, list(params["thresholds"]))
        elif not module.check_mode:
            append(params["root"], {**event, "event": "decision", "run": without_alive(params["run"])})
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"root: the ledger of {params['root']} cannot be used: {error}", **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
