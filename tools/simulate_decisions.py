#!/usr/bin/env python3
"""Print how often a release is judged rightly, for the noise of a host: loss of 5 %, no change, gain of 5 %.

Every case is drawn anew: five runs of each release, or more where the verdict is open and is measured on. The noise is
the relative standard deviation from run to run; the default thresholds and spread from start to start are used.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import sys

import ansible.module_utils

ROOT = pathlib.Path(__file__).resolve().parents[1]
ansible.module_utils.__path__.append(str(ROOT / "library" / "module_utils"))
sys.path[:0] = [str(ROOT / "plugins" / "plugin_utils"), str(ROOT / "tests" / "unit" / "decision")]

import sglang_verdict as verdicts  # noqa: E402
from ansible.module_utils.sglang_decision_spec import ARGUMENTS  # noqa: E402
from samples import runs  # noqa: E402

SPREAD = ARGUMENTS["start_spread"]["default"]


def drawn(rng, noise, change, count, luck):
    """Return runs of one start: 80 tok/s and 100 ms, changed, with the luck of the start and noise."""
    decodes = [80.0 * (1 + change) * math.exp(luck + rng.gauss(0, noise)) for _ in range(count)]
    return runs("a", decodes, [100.0 * math.exp(-luck + rng.gauss(0, noise)) for _ in range(count)])


def share(rng, times, noise, change, count, looks):
    """Return ``{verdict: share}`` of so many comparisons."""
    found = {}
    for _ in range(times):
        old, new = rng.gauss(0, SPREAD), rng.gauss(0, SPREAD)
        baseline, candidate = drawn(rng, noise, 0.0, count, old), drawn(rng, noise, change, count, new)
        for look in range(1, looks + 1):
            word = verdicts.judge(candidate, baseline, verdicts.THRESHOLDS, look=look, between=SPREAD)["verdict"]
            if word != verdicts.INCONCLUSIVE:
                break
            candidate = candidate + drawn(rng, noise, change, count, new)
        found[word] = found.get(word, 0.0) + 1.0 / times
    return found


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="comparisons in each cell (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each release (default: %(default)s)")
    args = parser.parse_args()
    words = (verdicts.WORSE, verdicts.EQUAL, verdicts.BETTER, verdicts.INCONCLUSIVE)
    print("| noise | change | looks | " + " | ".join(words) + " |")
    print("|---" * (3 + len(words)) + "|")
    for noise in (0.003, 0.005, 0.01, 0.015, 0.02, 0.05, 0.1):
        for change, looks in ((-0.05, 1), (-0.05, 4), (0.0, 1), (0.0, 4), (0.05, 1)):
            found = share(random.Random(1), args.times, noise, change, args.runs, looks)
            cells = " | ".join(f"{found.get(word, 0.0):.1%}" for word in words)
            print(f"| {noise:.1%} | {change:+.0%} | {looks} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
