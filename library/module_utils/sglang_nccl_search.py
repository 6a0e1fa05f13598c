"""A bounded search over NCCL's settings: which candidates there are, and successive halving over them.

The score of a setting is the weighted sum of its predicted times in collectives, each divided by the base's: 1.0 is as
fast as the base, lower is better. It says what the microbenchmark shows and nothing about a server.
"""

from __future__ import annotations

import itertools

# What is varied; null leaves a variable unset. In the order in which they are varied: the first counts most.
SPACE = {
    "NCCL_ALGO": [None, "Ring", "ring;allreduce:tree"],
    "NCCL_PROTO": [None, "LL", "LL,Simple", "LL,LL128,Simple", "Simple"],
    "NCCL_P2P_LEVEL": [None, "SYS", "PHB"],
    "NCCL_CHANNELS": [None, (1, 2), (4, 4), (8, 8), (8, None), (16, 32)],
    "NCCL_BUFFSIZE": [None, "1048576", "33554432"],
    "NCCL_NTHREADS": [None, "128", "512"],
}
CORE = ("NCCL_ALGO", "NCCL_PROTO")
# Shares of a host's work: one stream, speculation, many streams, prefill.
PROFILES = {
    "single": {"decode": 0.8, "verify": 0.0, "decode_many": 0.0, "prefill": 0.2},
    "speculation": {"decode": 0.2, "verify": 0.6, "decode_many": 0.0, "prefill": 0.2},
    "many": {"decode": 0.0, "verify": 0.0, "decode_many": 0.7, "prefill": 0.3},
    "mixed": {"decode": 0.4, "verify": 0.2, "decode_many": 0.2, "prefill": 0.2},
}


def variables(choice):
    """Return one point of the space as environment variables."""
    found = {name: value for name, value in choice.items() if name != "NCCL_CHANNELS" and value is not None}
    low, high = choice.get("NCCL_CHANNELS") or (None, None)
    if low is not None:
        found["NCCL_MIN_CTAS"] = str(low)
    if high is not None:
        found["NCCL_MAX_CTAS"] = str(high)
    return found


def label(values):
    """Return a short name for a set of variables."""
    return " ".join(f"{name[5:]}={value}" for name, value in sorted(values.items())) or "NCCL's own choice"


def candidates(space=None):
    """Return all settings of the space with at most two changes beside algorithm and protocol, as ``[{name, variables,
    changes}]``: those with none first. ``changes`` counts them.
    """
    space = space or SPACE
    first = [name for name in CORE if name in space]
    rest = [name for name in space if name not in first]
    extras = [{}] + [{name: value} for name in rest for value in space[name] if value is not None]
    for one, other in itertools.combinations(rest, 2):
        extras += [
            {one: left, other: right} for left in space[one] for right in space[other] if None not in (left, right)
        ]
    found = []
    for extra in extras:
        for values in itertools.product(*(space[name] for name in first)):
            chosen = variables({**dict(zip(first, values)), **extra})
            found.append({"name": label(chosen), "variables": chosen, "changes": len(extra)})
    return found


def extensions(setting, allowed):
    """Return the allowed settings that are SETTING with one more change."""
    own, core = setting["variables"], [setting["variables"].get(name) for name in CORE]
    return [
        item
        for item in allowed
        if item["changes"] == setting["changes"] + 1
        and own.items() <= item["variables"].items()
        # What leaves NCCL the choice is a part of every other setting.
        and core == [item["variables"].get(name) for name in CORE]
    ]


def brief(plan, weights, effort):
    """Return ``(plan, seconds of measuring a step)`` for an effort; a brief trial leaves out what has no weight."""
    if effort == 2:
        return plan, 0.15
    named = {
        "decode": "decode",
        "decode_many": "decode",
        "verify": "verify",
        "verify_eager": "verify",
        "prefill": "prefill",
    }
    phases = {named[name] for name, weight in weights.items() if weight}
    steps = []
    for step in plan["steps"]:
        # The server calls a prefill directly and replays the rest; its large messages take equally long either way.
        mode = "graph" if "graph" in step["modes"] and step["phase"] != "prefill" else "eager"
        if step["phase"] in phases:
            steps.append({**step, "modes": [mode]})
    return {**plan, "steps": steps}, (0.02, 0.06)[effort]


def score(predicted, base, weights):
    """Return the weighted time against the base's, or None where a figure with weight is missing."""
    total = 0.0
    for name, weight in weights.items():
        if not weight:
            continue
        if not predicted.get(name) or not base.get(name):
            return None
        total += weight * predicted[name] / base[name]
    return round(total / sum(weights.values()), 4)


class Search:
    """One search; :meth:`run` gives its rows.

    :param allowed: settings of :func:`candidates` that the lint lets pass.
    :param base: the setting to compare with, ``{name, variables}``.
    :param weights: of a profile, see :data:`PROFILES`.
    :param measure: ``measure(setting, effort)`` gives a completed trial; effort is 0, 1 or 2.
    :param trials: at most so many settings are tried, the repeated ones counted again.
    :param clock: function that gives seconds; no trial starts after LIMIT of them.
    """

    def __init__(self, allowed, base, weights, measure, trials=100, clock=None, limit=300.0):
        self.allowed, self.base, self.weights, self.measure = allowed, base, weights, measure
        self.left, self.clock, self.limit = trials, clock, limit
        self.started = clock() if clock else 0.0
        self.rows, self.references, self.done, self.seen = {}, {}, 0, {}
        self.stopped = ""  # why nothing is measured at length

    def over(self, share=1.0):
        """Return whether the bounds forbid another trial in this share of the time."""
        return self.left <= 0 or bool(self.clock) and self.clock() - self.started > share * self.limit

    def _try(self, setting, effort):
        self.left, self.done = self.left - 1, self.done + 1
        trial = self.measure(setting, effort)
        if trial["outcome"] == "ok":
            self.seen.setdefault(setting["name"], []).append(dict(trial["predicted"]))
        return trial

    def spread(self):
        """Return ``{figure: fraction}``: how far figures of one and the same setting lay apart in several trials."""
        found = {}
        for name, weight in self.weights.items():
            rows = [[one[name] for one in trials if one.get(name)] for trials in self.seen.values()]
            found[name] = round(max([max(row) / min(row) - 1 for row in rows if weight and row] or [0.0]), 4)
        return found

    def noise(self):
        """Return by how much two scores of one setting may differ, from the spread of what was measured repeatedly."""
        return round(
            sum(self.weights[name] * part for name, part in self.spread().items()) / sum(self.weights.values()), 4
        )

    def again(self, settings):
        """Measure the base and SETTINGS at full length once more; the lower figure of both trials counts, for each."""
        for setting in (self.base, *settings):
            if self.over():
                return
            trial = self._try(setting, 2)
            old = self.references[2] if setting is self.base else self.rows[setting["name"]]["predicted"]
            if trial["outcome"] == "ok":
                old.update(
                    {
                        name: min(value, old[name])
                        for name, value in trial["predicted"].items()
                        if value and old.get(name)
                    }
                )
        for setting in settings:
            row = self.rows[setting["name"]]
            if row["score"] is not None:
                row["score"] = score(row["predicted"], self.references[2], self.weights)

    def reference(self, effort):
        """Return the base's figures at an effort, measured once; None where it worked only at a lower effort."""
        if effort not in self.references and not self.stopped:
            trial = self._try(self.base, effort)
            if trial["outcome"] == "ok":
                self.references[effort] = trial["predicted"]
            elif self.references:
                self.stopped = f"the base {self.base['name']} was measured briefly only: {trial['message']}"
            else:
                raise ValueError(f"the base {self.base['name']} does not work: {trial['message']}")
        return self.references.get(effort)

    def rate(self, settings, effort, keep):
        """Measure settings and return the best KEEP of those that work."""
        reference, scored = self.reference(effort), []
        for setting in settings if reference else ():
            if self.over(1.0 if effort == 2 else 0.8):
                break
            trial = self._try(setting, effort)
            value = score(trial["predicted"], reference, self.weights) if trial["outcome"] == "ok" else None
            row = {
                **setting, "effort": effort, "score": value, "outcome": trial["outcome"], "message": trial["message"],
                "predicted": trial["predicted"], "base": reference, "seconds": trial["seconds"],
            }  # fmt: skip
            self.rows[setting["name"]] = row
            if value is not None:
                scored.append((value, len(setting["variables"]), setting["name"], setting))
        return [item[-1] for item in sorted(scored, key=lambda item: item[:3])[:keep]]

    def run(self):
        """Search and return the rows, best first: those that were measured most thoroughly lead.

        Algorithm and protocol come first; the best of them get one further change, the best of those a second. Each
        time many are measured briefly and a third of them again (successive halving); the last three are measured at
        full length, for which a fifth of the time is kept.
        """
        finalists, level = [], [item for item in self.allowed if item["changes"] == 0]
        while level and self.left > 8 and not self.over(0.8) and not self.stopped:
            level = level[: max(1, (self.left - 8) * 3 // 4)]
            best = self.rate(self.rate(level, 0, max(3, -(-len(level) // 3))), 1, 3)
            finalists += [item for item in best if item not in finalists]
            level = []
            for item in best[:2]:
                level += [other for other in extensions(item, self.allowed) if other not in level]
        # Where the time was too short for a second look, the first one has to do.
        works = [row for row in self.rows.values() if row["score"] is not None]
        finalists = finalists or [item for item in self.allowed if item["name"] in {row["name"] for row in works}]
        finalists.sort(key=lambda item: self.rows[item["name"]]["score"])
        if self.rate(finalists[:3], 2, 1):
            self.again(finalists[:3])

        def order(row):
            return row["score"] is None, -row["effort"], row["score"] or 0.0, row["name"]

        rows = sorted(self.rows.values(), key=order)
        last = [row for row in rows if row["effort"] == 2 and row["score"] is not None]
        alike = [row for row in last if row["score"] <= last[0]["score"] + self.noise()]
        alike.sort(key=lambda row: len(row["variables"]))
        return alike + [row for row in rows if row not in alike]
