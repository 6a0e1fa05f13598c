"""The plan: a ranked list of what shall be tried, held against what the ledgers say was tried. Controller only."""

from __future__ import annotations

import difflib

import yaml

STATES = ("planned", "running", "done", "failed", "refused")
# key: (type, whether it must be there)
KEYS = {
    "id": (str, True),
    "title": (str, True),
    "state": (str, False),
    "variant": (str, False),
    "release": (str, False),
    "runs": (list, False),
    "why": (str, False),
    "expect": (str, False),
    "result": (str, False),
}
# What the newest of these events says of an intervention whose state the plan leaves to the ledger.
SAYS = {
    "refused": "refused",
    "rejected": "failed",
    "promoted": "done",
    "retired": "done",
    "run": "done",
    "activated": "running",
    "created": "running",
    "start": "running",
}
# What of a run is kept with an intervention.
LINKED = ("host", "time", "run", "variant", "release", "asked", "usable", "output_tok_s", "decode_tok_s_p50")
# A release that one of these rejected was refused before it served.
EARLY = ("lint", "precheck", "probe", "canary")


class PlanError(ValueError):
    """The plan cannot be used; the text names the file and every mistake."""


def parse(text, name):
    """Return the interventions of a plan, in their order, which is their rank.

    :param text: YAML: ``{schema: 1, interventions: [{id, title, ...}]}``; docs/report.md has the keys.
    :param name: the file, for the message.
    :raises PlanError: every mistake, one a line.
    """
    try:
        plan = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{name} is no YAML: {error}") from None
    if not isinstance(plan, dict) or plan.get("schema") != 1 or not isinstance(plan.get("interventions"), list):
        raise PlanError(f"{name} must hold 'schema: 1' and the list 'interventions'; docs/plan.example.yml shows one.")
    wrong = [
        f"unknown key {key!r}{_near(key, ('schema', 'interventions'))}"
        for key in plan.keys() - {"schema", "interventions"}
    ]
    known = {}
    for number, item in enumerate(plan["interventions"], 1):
        if not isinstance(item, dict):
            wrong.append(f"intervention {number} is no mapping: give it at least id and title")
            continue
        label = f"intervention {number} ({item.get('id', 'no id')})"
        wrong += [f"{label}: {problem}" for problem in _mistakes(item)]
        if isinstance(item.get("id"), str):
            if item["id"] in known:
                wrong.append(f"{label}: its id is that of intervention {known[item['id']]}; ids are unique")
            known.setdefault(item["id"], number)
    if wrong:
        raise PlanError(f"{name} cannot be used:\n" + "\n".join(wrong))
    return plan["interventions"]


def _near(word, words):
    found = difflib.get_close_matches(str(word), words, 1)
    return f"; did you mean {found[0]}?" if found else f"; known: {', '.join(words)}"


def _mistakes(item):
    for key in item:
        if key not in KEYS:
            yield f"unknown key {key!r}{_near(key, tuple(KEYS))}"
    for key, (kind, required) in KEYS.items():
        value = item.get(key)
        if value is None:
            if required:
                yield f"{key} is missing"
        elif not isinstance(value, kind):
            yield f"{key} must be {'a list of run ids' if kind is list else 'text'}, not {value!r}; quote a number"
        elif kind is list and not all(isinstance(part, str) for part in value):
            yield f"{key} must be a list of run ids as text"
    state = item.get("state")
    if isinstance(state, str) and state not in STATES:
        yield f"state {state!r} is unknown{_near(state, STATES)}"


def link(plan, hosts, runs):
    """Return the interventions with what the ledgers know of them.

    :param plan: result of :func:`parse`.
    :param hosts: ``{name: history}``.
    :param runs: rows of all benchmark runs, see :mod:`sglang_report_data`.
    Each gets ``rank``, ``state``, ``state_from`` ("plan" or "ledger"), ``ledger_state``, ``linked`` (rows of runs, the
    newest first) and ``notes`` (what the plan names and no ledger has, and where plan and ledger differ).
    """
    events = sorted(
        ((event, host) for host, past in hosts.items() for event in past["events"]),
        key=lambda pair: str(pair[0].get("time")),
    )
    return [_linked(rank, item, events, runs) for rank, item in enumerate(plan, 1)]


def _linked(rank, item, events, runs):
    names = {key: item.get(key) for key in ("variant", "release")}
    ids = set(item.get("runs") or [])

    def concerns(entry):
        if names["release"]:
            return entry.get("release") == names["release"]
        if ids:
            return entry.get("run") in ids
        return bool(names["variant"]) and variant_of(entry) == names["variant"]

    mine = [(event, host) for event, host in events if event["event"] in SAYS and concerns(event)]
    rows = [{key: row[key] for key in LINKED} for row in runs if concerns(row)]
    notes = []
    for run in sorted(ids - {event.get("run") for event, _host in events}):
        notes.append(f"run {run} is in no ledger")
    if names["release"] and not any(event.get("release") == names["release"] for event, _host in events):
        notes.append(f"release {names['release']} is in no ledger")
    told = "planned"
    if mine:
        event, host = mine[-1]
        early = event["event"] == "rejected" and event.get("rung") in EARLY
        told = "refused" if early else SAYS[event["event"]]
        reason = " ".join(str(event.get("reason") or "").split())
        rung = f" by {event['rung']}" if event.get("rung") else ""
        notes.append(
            f"{host}: {event['event']}{rung} {event['time'][:16].replace('T', ' ')}"
            + (f": {reason[:200]}" if reason else "")
        )
    state = item.get("state") or told
    if mine and state != told:
        notes.append(f"the ledger says {told}")
    return {
        **dict.fromkeys(KEYS),
        **item,
        "rank": rank,
        "state": state,
        "state_from": "plan" if item.get("state") else "ledger",
        "ledger_state": told if mine else None,
        "linked": list(reversed(rows)),
        "notes": notes,
    }


def variant_of(entry):
    """Return the variant of an event or a run; where it has none, the one that its release's id names."""
    if entry.get("variant"):
        return entry["variant"]
    parts = str(entry.get("release") or "").split("-", 1)
    return parts[1].rpartition("-")[0] if len(parts) == 2 else None
