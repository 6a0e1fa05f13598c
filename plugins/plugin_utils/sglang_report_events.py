"""What of the ledgers is no measurement: the time line of decisions, and the trials before them. Controller only."""

from __future__ import annotations

from sglang_report_plan import variant_of

# Events that decide about a release or tell of a server's fate: the time line. The rest of the ledger is its detail.
DECISIVE = (
    "promoted",
    "rejected",
    "refused",
    "retired",
    "rollback",
    "decision",
    "activated",
    "stop",
    "worker_died",
    "restart",
    "alarm",
)
TRIALS = ("probe", "tune", "canary")


def _lines(hosts, wanted, more):
    """Return a line for each wanted event, the oldest first; ``more(event)`` gives what a line has of its own."""
    out = []
    for host, past in hosts.items():
        for event in past["events"]:
            if event["event"] in wanted:
                line = {"time": str(event.get("time") or ""), "host": host, "event": event["event"]}
                out.append({**line, "variant": variant_of(event), "release": event.get("release"), **more(event)})
    return sorted(out, key=lambda item: item["time"])


def decisions(hosts):
    """Return the time line, the oldest first."""
    return _lines(
        hosts,
        DECISIVE,
        lambda event: {
            "run": event.get("run"),
            "user": event.get("user"),
            "text": _told(event),
            "lines": event.get("lines") or [],
        },
    )


def _told(event):
    """Return what an event of the time line says, in one line."""
    if event["event"] == "decision":
        against = event.get("against") or {}
        text = f"{event.get('verdict')}: {event.get('outcome')}"
        return text + (f", against {against.get('variant')}" if against else "") + f". {event.get('reason') or ''}"
    if event["event"] == "rollback":
        return f"from {event.get('previous') or 'nothing'}"
    if event["event"] == "worker_died":
        return ", ".join(f"{item.get('title')} (pid {item.get('pid')})" for item in event.get("dead") or [])
    rung = f"by {event['rung']}: " if event.get("rung") else ""
    return rung + " ".join(str(event.get("reason") or "").split())


def trials(hosts):
    """Return the probes, searches and canaries, the newest first, with everything that the event says."""
    common = {"schema", "time", "run", "user", "controller", "event", "variant", "release", "verdict", "results"}
    return _lines(
        hosts,
        TRIALS,
        lambda event: {
            "verdict": str(event.get("verdict") or event.get("outcome") or ""),
            "told": {
                key: value for key, value in event.items() if key not in common and value not in (None, [], {}, "")
            },
            "results": event.get("results") or [],
        },
    )[::-1]
