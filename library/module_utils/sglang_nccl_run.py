"""Start the worker program, give it trials, and be sure that nothing of it is left."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import time

from ansible.module_utils import sglang_nccl_log, sglang_nccl_worker, sglang_proc

# What the worker needs at most to import torch, and beyond a trial's own limit to end it, seconds.
IMPORT_LIMIT = 180
END_LIMIT = 15
# More calls than a slow message gets in one mode while it is measured.
MEASURED = 20
# Seconds of measuring for each step and mode.
BUDGET = 0.08


class WorkerError(Exception):
    """The worker program itself failed; the text holds the end of its log."""


def session_members(leader):
    """Return the living processes in the session that LEADER led."""
    found = []
    for name in os.listdir("/proc"):
        stat = sglang_proc.stat_of(name, "/proc") if name.isdigit() else None
        if stat and stat["sid"] == leader and sglang_proc.alive(stat["state"]):
            found.append(stat["pid"])
    return found


class Workers:
    """A worker program with one environment; use it as a context manager.

    :param python: the engine's interpreter.
    :param folder: empty directory for program and logs.
    :param env: the whole environment of the program.
    :param user: account that the program runs as, as ``(uid, gid)``; None is the own one.
    """

    def __init__(self, python, folder, env, user=None):
        self.python, self.folder, self.env, self.user = python, folder, env, user
        self.process, self.buffer, self.torch, self.number = None, b"", None, 0
        self.left = []

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.close()

    def _own(self, path):
        if self.user:
            os.chown(path, *self.user)

    def start(self):
        """Start the program and wait until it has imported torch."""
        program = os.path.join(self.folder, "worker.py")
        with open(program, "w", encoding="utf-8") as handle:
            handle.write(inspect.getsource(sglang_nccl_worker))
        self._own(self.folder)
        log = os.path.join(self.folder, "worker.log")
        more = {"user": self.user[0], "group": self.user[1], "extra_groups": []} if self.user else {}
        with open(log, "ab") as handle:
            self.process = subprocess.Popen(
                [self.python, program, str(os.getpid())], cwd=self.folder, env=self.env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=handle, start_new_session=True, **more,
            )  # fmt: skip
        self.buffer = b""
        for event in self._events(time.monotonic() + IMPORT_LIMIT):
            if event["event"] == "ready":
                self.torch = event["torch"]
                return
        self.close()
        raise WorkerError(f"the engine's interpreter {self.python} did not import torch: {tail(log)}")

    def _events(self, deadline):
        """Yield events until the deadline, or until the program's output ends."""
        stream = self.process.stdout.fileno()
        while True:
            line, newline, rest = self.buffer.partition(b"\n")
            if newline:
                self.buffer = rest
                yield json.loads(line)
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                return
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                return
            self.buffer += chunk

    def _send(self, request):
        """Give the program one request; one that has ended since it was looked at is started anew."""
        line = (json.dumps(request) + "\n").encode()
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            self.close()
            self.start()
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def trial(self, setting, plan, limit, backend, devices, timed=True, budget=BUDGET):
        """Try one setting and return what was seen; see :func:`digest`.

        :param setting: ``{name, variables, site}``; ``site`` is the text of a sitecustomize, or "".
        :param limit: seconds from the first fork to the last result.
        """
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.start()
        self.number += 1
        folder = os.path.join(self.folder, f"{self.number}")
        os.mkdir(folder)
        self._own(folder)
        site = ""
        if setting.get("site"):
            site = os.path.join(folder, "sitecustomize.py")
            with open(site, "w", encoding="utf-8") as handle:
                handle.write(setting["site"])
        request = {
            "name": setting["name"], "variables": setting["variables"],
            "defaults": setting.get("defaults") or {}, "site": site, "folder": folder, "limit": limit,
            "backend": backend, "devices": devices, "timed": timed, "budget": budget, "world": plan["world"],
            "dtype": plan["dtype"], "steps": plan["steps"],
        }  # fmt: skip
        self._send(request)
        started, events = time.monotonic(), []
        for event in self._events(started + limit + END_LIMIT):
            events.append(event)
            if event["event"] == "end":
                break
        else:
            self.close()
        logs = {}
        for rank in range(plan["world"]):
            text = read(os.path.join(folder, f"nccl-{rank}.log"))
            logs[rank] = sglang_nccl_log.parse(text) if text else None
        return digest(events, plan, logs, round(time.monotonic() - started, 3))

    def close(self):
        """End the program with all that it started; return what the kernel did not end, of earlier programs too."""
        if self.process is None:
            return self.left
        leader = self.process.pid
        # A program that is gone has not read the last request.
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        deadline = time.monotonic() + 10
        while True:
            left = session_members(leader)
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.process.poll()
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if not left:
            self.process.wait()
        self.process.stdout.close()
        self.process = None
        self.left += left
        return self.left


def read(path):
    """Return a log's text, or "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def tail(path, lines=8):
    """Return the last lines of a log as one text."""
    return "\n".join(read(path).strip().splitlines()[-lines:]) or "its log is empty"


def digest(events, plan, logs, elapsed):
    """Return one trial's outcome from its events.

    :returns: ``{outcome: ok|failed|wrong|hung|slow|crashed, where: {phase, mode, step}, message, failed_ranks, stuck,
        seconds, steps: [step with eager and graph figures], ranks: {rank: event}, log}``. ``where`` is that of the
        first error, or of the rank that is furthest behind; ``step`` is an index into the plan's steps or None.
    """
    end = next((item for item in events if item["event"] == "end"), None)
    mistakes = [item for item in events if item["event"] == "error"]
    places = {item["rank"]: item for item in events if item["event"] == "step"}
    results = [item for item in events if item["event"] == "result"]
    found = {
        "outcome": "ok", "where": None, "message": "", "seconds": elapsed, "failed_ranks": [], "stuck": 0,
        "ranks": {item["rank"]: item for item in events if item["event"] == "rank"},
        "log": sglang_nccl_log.merge(logs.values()), "steps": figures(results, plan),
    }  # fmt: skip
    if end:
        found["stuck"] = len(end["stuck"])
    dead = {
        int(rank): code
        for rank, code in (end or {}).get("codes", {}).items()
        if code and int(rank) not in (end or {})["killed"]
    }
    # A rank that a signal ended told nothing; what the others say then follows from it.
    silent = {rank: code for rank, code in dead.items() if code < 0 and rank not in {item["rank"] for item in mistakes}}
    if mistakes and not silent:
        first = mistakes[0]
        found["outcome"] = "wrong" if first["type"] == "ArithmeticError" else "failed"
        found["message"] = cause(first, found["log"])
        # What fails elsewhere or in another way follows from the first.
        alike = [item for item in mistakes if all(item[key] == first[key] for key in ("type", "phase", "step", "mode"))]
        found["failed_ranks"] = sorted({item["rank"] for item in alike})
        found["where"] = {key: first[key] for key in ("phase", "step", "mode")}
    elif dead:
        rank, code = min((silent or dead).items())
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        found.update(outcome="crashed", message=f"rank {rank} ended with {how}", failed_ranks=sorted(silent or dead))
        found["where"] = _place(places.get(rank))
    elif end is None or end["timed_out"] or len(found["ranks"]) < plan["world"]:
        behind = min(range(plan["world"]), key=lambda rank: _order(places.get(rank)))
        found["outcome"], found["where"] = "hung", _place(places.get(behind))
        if end and may_move([item for item in events if item.get("rank") == behind], end):
            found["outcome"] = "slow"
        rest = [rank for rank in range(plan["world"]) if _order(places.get(rank)) == _order(places.get(behind))]
        found["failed_ranks"] = rest
        found["message"] = "no result within the limit"
        if len(rest) < plan["world"]:
            found["message"] += f"; furthest behind: rank {', '.join(map(str, rest))}"
    return found


def may_move(events, end):
    """Return whether a rank that the limit ended was slow rather than stuck.

    It was measuring what had been right before, and was silent for no longer than that takes at the pace of the check.

    :param events: those of the rank, each with its time ``at``.
    """
    last = events[-1] if events else {}
    if last.get("event") != "step" or last["phase"] != "time":
        return False
    for item, after in zip(events, events[1:]):
        if item["event"] == "step" and item["phase"] == "check" and _same(item, last):
            return end["ended"] - last["at"] <= 2 + MEASURED * (after["at"] - item["at"])
    return False


def _same(item, other):
    return all(item[key] == other[key] for key in ("step", "mode"))


def cause(error, log):
    """Return the line that says what went wrong: NCCL's own, which stands before the errors that follow from it."""
    own = [text for text in log["warnings"] if not re_follow(text)]
    text = error["message"].strip().splitlines()
    return own[0] if own and error["type"] != "ArithmeticError" else " ".join(text[-2:]) if text else error["type"]


def re_follow(text):
    """Return whether a warning of NCCL only reports that a peer or the communicator is gone."""
    return any(word in text for word in ("unhandled", "remote process exited", "Connection closed", "Accept failed"))


PHASES = ("environment", "init", "check", "time", "end")


def _order(place):
    if place is None:
        return (-1, -1, "")
    step = -1 if place["step"] is None else place["step"]
    return PHASES.index(place["phase"]), step, place["mode"] or ""


def _place(place):
    return {key: (place or {}).get(key) for key in ("phase", "step", "mode")}


def figures(results, plan):
    """Return the plan's steps with ``eager`` and ``graph``: the slowest rank's figures, or None where not measured."""
    steps = []
    for index, step in enumerate(plan["steps"]):
        row = {key: step[key] for key in ("phase", "tokens", "collective", "bytes")}
        for mode in ("eager", "graph"):
            mine = [item for item in results if item["step"] == index and item["mode"] == mode]
            row[mode] = None
            if len(mine) == plan["world"]:
                slow = max(mine, key=lambda item: item["p50_us"])
                row[mode] = {key: slow[key] for key in ("p50_us", "p99_us", "mean_us", "calls", "batches")}
        steps.append(row)
    return steps
