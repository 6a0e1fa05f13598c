"""How far a start is: one line for the operator, and the file that other shells and the controller read."""

from __future__ import annotations

import glob
import json
import os
import time

from ansible.module_utils import sglang_launch_policy
from ansible.module_utils.sglang_watch import PHASES
from ansible.module_utils.sglang_watch_processes import state_of

INTERVAL = 1.0
FILE = os.path.join("run", "progress.json")


def path_of(release):
    """Return the path of a release's progress file."""
    return os.path.join(release, FILE)


def read(release):
    """Return the progress file of a release as a dict; empty where there is none."""
    try:
        with open(path_of(release), encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def earlier(release):
    """Return ``{phase: seconds}`` of a start that was watched from its beginning: of this release, else the newest.

    Empty where no release beside this one has started either.
    """
    files = glob.glob(os.path.join(os.path.dirname(release), "*", FILE))
    files.sort(key=lambda path: (path == path_of(release), os.stat(path).st_mtime), reverse=True)
    for path in files:
        phases = read(os.path.dirname(os.path.dirname(path))).get("start")
        if phases and set(phases) <= set(PHASES):
            return phases
    return {}


def forecast(before, history, bar=None):
    """Return ``(percent, seconds left)`` of a whole start, measured by an earlier one; ``(None, None)`` without one.

    A phase counts with its earlier length however long it takes now, so the percentage never goes back.

    :param before: ``{phase: seconds}`` of the earlier start.
    :param history: ``[{phase, elapsed}]`` of this one, the last phase still running.
    :param bar: progress of that phase as in :meth:`sglang_watch.StartLog.progress`.
    """
    total = sum(before.values())
    if not total:
        return None, None
    phase, spent = history[-1]["phase"], history[-1]["elapsed"]
    length = before.get(phase, 0)
    here = length * bar["percent"] / 100 if bar else min(spent, length)
    done = sum(seconds for name, seconds in before.items() if PHASES.index(name) < PHASES.index(phase)) + here
    return int(100 * done / total), round(total - done, 1)


def line(data):
    """Return what an operator reads of the content of a progress file."""
    parts = [f"phase {data['phase']}"]
    if data["total"]:
        parts.append(f"{data['percent']}% of it ({data['done']} of {data['total']})")
    if data["start_percent"] is not None:
        parts.append(f"{data['start_percent']}% of the start")
    parts.append(f"{data['elapsed']:.0f} s elapsed")
    if data["start_estimate"] is not None:
        parts.append(f"about {data['start_estimate']:.0f} s left by the start before")
    elif data["estimate"] is not None:
        parts.append(f"about {data['estimate']:.0f} s left of this phase")
    else:
        parts.append("no estimate yet")
    return ", ".join(parts) + (f"; {data['note']}" if data["note"] else "")


class Progress:
    """The progress file of one wait, replaced as a whole at most once in INTERVAL seconds.

    :param release: absolute path of the release.
    :param enabled: False writes nothing.
    """

    def __init__(self, release, enabled=True):
        self.path = path_of(release)
        self.release = release
        self.before = earlier(release) if enabled else {}
        self._enabled = enabled
        self._written = None

    def due(self):
        """Return whether it is time to write again."""
        return self._enabled and (self._written is None or time.monotonic() - self._written >= INTERVAL)

    def write(self, state, log, elapsed, whole=False, **fields):
        """Write the file.

        :param state: ``waiting``, ``ready`` or ``failed``.
        :param log: :class:`sglang_watch.StartLog`.
        :param elapsed: seconds of the wait.
        :param whole: the wait saw the start from its beginning, so its phases are worth remembering.
        :param fields: ``pid``, ``message``, ``note``.
        """
        if not self._enabled:
            return
        self._written = time.monotonic()
        bar, history = log.progress(), log.history()
        percent, left = forecast(self.before, history, bar) if state == "waiting" else (None, None)
        data = {key: (bar or {}).get(key) for key in ("done", "total", "percent", "rate", "estimate")}
        data.update(
            fields,
            schema=1,
            state=state,
            release=os.path.basename(self.release),
            phase=log.phase,
            elapsed=round(elapsed, 1),
            start_percent=percent,
            start_estimate=left,
            waiter=os.getpid(),
            updated=time.time(),
            start={item["phase"]: item["elapsed"] for item in history} if whole else self.before,
        )
        data["text"] = line(data)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path + ".new", "w", encoding="utf-8") as handle:
                json.dump(data, handle, indent=1)
            os.replace(self.path + ".new", self.path)
        except OSError:
            # A full disk must not end the watch that is there to report it.
            self._enabled = False


def waiting(release):
    """Return the line of a wait that goes on in another process now, or None."""
    data = read(release)
    fresh = time.time() - data.get("updated", 0) < 10 * INTERVAL
    return data["text"] if data.get("state") == "waiting" and fresh and data.get("waiter") != os.getpid() else None


def alarm(release):
    """Return what the program beside the server has to say of the server that lives now, or of its death, or None."""
    try:
        with open(os.path.join(release, "run", "health.json"), encoding="utf-8") as handle:
            data = json.load(handle)
        server, state, text = data["server"], data["state"], data["text"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    stopped = os.path.exists(os.path.join(os.path.dirname(os.path.dirname(release)), "stopped"))
    if state == "down":
        return None if stopped else text
    killed = sglang_launch_policy.killed(release)
    if killed:
        return None if stopped else f"{killed}. Nothing has started it again; deploy.yml does"
    now = state_of(server["pid"]) if server["pid"] else None
    return text or None if now is not None and now[1] == server["start"] else None
