"""What a decision is made from: the runs and scores of a host's ledger, short enough to travel to the controller."""

from __future__ import annotations

from ansible.module_utils import sglang_ledger
from ansible.module_utils.sglang_decision_spec import ATTRIBUTED, FIGURES

# The rest of a run stays in its result file.
KEPT = ("release", "variant", "time", "run", "result", "valid", "failure", "flags", "workload_digest", "fingerprint")
# More runs of one release than any comparison needs; the newest count.
MOST = 60


def number(value):
    """Return a finite number, or None."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and abs(value) < 1e300 else None


def measured_at(event):
    """Return what holds the figures of a run: its ledger event; of a sweep the level with the highest concurrency.

    The event itself repeats the fastest level, which need not be the same one in two runs of a sweep.
    """
    levels = event.get("levels") or []
    return max(levels, key=lambda level: level.get("concurrency") or 0) if len(levels) > 1 else event


def run_of(event, start, metrics):
    """Return one run from its ledger event; ``start`` counts the starts of the server before it."""
    level = measured_at(event)
    # A history for the report has the figures of a level beside its concurrency.
    figures = level.get("metrics") or level
    derived = ((level.get("server") or {}).get("derived")) or {}
    return {
        **{key: event.get(key) for key in KEPT},
        "flags": level.get("flags", event.get("flags")),
        "valid": event.get("valid", True) is not False,
        "start": start,
        "workload": event.get("workload") or {},
        "metrics": {name: number(figures.get(name)) for name in metrics},
        "accept_length": number(derived.get("accept_length")),
        "elapsed": number(event.get("elapsed")) or 0.0,
    }


def score_of(event, start):
    """Return one score from its ledger event."""
    keys = ("release", "variant", "run", "asked", "right", "questions_digest")
    return {**{key: event.get(key) for key in keys}, "start": start}


def history(root, run, releases, metrics):
    """Return what a decision needs, see :func:`read`.

    :param releases: ids, an empty one names none. :param metrics: figures beside those that every decision needs.
    """
    wanted = [name for name in releases if name]
    return read(root, run, wanted, ATTRIBUTED, sorted(set(FIGURES) | set(metrics)))


def conditions(event):
    """Return what is equal in two runs that compare: the digests of the load and of the fingerprint."""
    return event.get("workload_digest"), (event.get("fingerprint") or {}).get("digest")


def attributed(events, judged, variants):
    """Return of each of the variants the newest release with a run that counts.

    A run counts where it is usable and compares with the newest one of the release ``judged``.
    """
    wanted = next((conditions(event) for event in reversed(events) if event.get("release") == judged), None)
    found = {}
    for event in events:
        usable = event.get("valid", True) is not False and not event.get("failure")
        if usable and event.get("variant") in variants and conditions(event) == wanted:
            found[event["variant"]] = event.get("release")
    return set(found.values())


def read(root, run, releases, variants, metrics):
    """Return ``{runs, scores, looks, spent, problems}``.

    :param run: id of this playbook run. :param releases: ids whose runs are wanted, first the one that is judged.
    :param variants: names whose runs are wanted as well, of the releases that :func:`attributed` finds.
    :param metrics: names of the figures to take along.
    ``runs`` and ``scores`` are in the order of the ledger. ``looks`` is the number of decisions that this playbook run
    has made, ``spent`` the seconds that it has measured; both by release.
    """
    events, problems = sglang_ledger.read(root)
    found, scores, looks, spent, start = [], [], {}, {}, 0
    for event in events:
        name, release = event["event"], event.get("release")
        if name in ("start", "restart"):
            start += 1
        elif name == "run":
            if event.get("run") == run:
                spent[release] = spent.get(release, 0.0) + (number(event.get("elapsed")) or 0.0)
            if release in releases or event.get("variant") in variants:
                found.append((event, start))
        elif name == "score" and release in releases:
            scores.append(score_of(event, start))
        elif name == "decision" and event.get("run") == run:
            looks[release] = looks.get(release, 0) + 1
    judged = releases[0] if releases else ""
    kept = attributed([event for event, _start in found], judged, variants) | set(releases)
    return {
        "runs": newest([run_of(event, begun, metrics) for event, begun in found if event.get("release") in kept]),
        "scores": newest(scores),
        "looks": looks,
        "spent": spent,
        "problems": problems,
    }


def newest(items):
    """Return the last :data:`MOST` items of each release, in their order."""
    left, kept = {}, []
    for item in reversed(items):
        left[item["release"]] = left.get(item["release"], 0) + 1
        if left[item["release"]] <= MOST:
            kept.append(item)
    return kept[::-1]
