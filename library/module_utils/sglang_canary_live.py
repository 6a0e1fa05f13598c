"""The live server's latency while a canary runs: a small request again and again, and whether it is hurt."""

from __future__ import annotations

import statistics
import threading
import time

from ansible.module_utils.sglang_client import ClientError

PHASES = ("before", "during", "after")
PROBES = 5
TOKENS = 4
PROMPT = "The capital of France is"
LIMIT = 30.0
# Seconds between two requests while no canary runs, which the operator waits for.
BRISK = 0.05


class UnmeasuredError(Exception):
    """The live server lives and how fast it answers is not known; the message says why. ``kind`` as of ClientError."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


class LiveProbe:
    """Asks one server for a few tokens, one request at a time, from a thread of its own.

    :param client: :class:`sglang_client.Client` of the live server.
    :param factor: how many times as long as before a request may take.
    :param floor: seconds that a request may take in any case.
    :param interval: seconds between two requests while the canary runs.
    :param limit: seconds for one request, and for those before the canary together; :data:`LIMIT` by default.
    """

    def __init__(self, client, factor, floor, interval, limit=None):
        self.client, self.factor, self.floor, self.interval = client, factor, floor, interval
        self.limit = limit or LIMIT
        self.seconds = {phase: [] for phase in PHASES}
        self.failures = []
        self._kind = None
        self._phase = "before"
        self._asked = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        """Begin, and return when the latency before the canary is known.

        :returns: whether the server answers; one that refuses connections or answers errors cannot be hurt and is not
            watched.
        :raises UnmeasuredError: it is too busy to answer, or asks for another key: it needs its protection most.
        """
        self._thread.start()
        self._some("before")
        answered = len(self.seconds["before"])
        if answered >= PROBES:
            return True
        self.stop()
        if self._kind in ("refused", "http"):
            return False
        said = f"{answered} of {PROBES} requests for {TOKENS} tokens were answered within {self.limit:g} s"
        raise UnmeasuredError(self._kind, "; ".join([said, *self.failures]))

    def phase(self, name):
        """Count what is asked from now on as of another phase."""
        self._phase = name

    def finish(self):
        """Measure once more without the canary, and end."""
        self.phase("after")
        self._some("after")
        self.stop()

    def stop(self):
        """End the thread."""
        self._over.set()
        self._thread.join(self.limit + 1)

    def _some(self, phase):
        end = time.monotonic() + self.limit
        while len(self.seconds[phase]) < PROBES and not self.failures and time.monotonic() < end:
            time.sleep(0.02)

    def _run(self):
        while not self._over.is_set():
            self._asked = begin = time.monotonic()
            phase = self._phase
            try:
                self.client.generate(PROMPT, TOKENS, self.limit)
            except ClientError as problem:
                if not self._over.is_set():
                    self._kind = self._kind or problem.kind
                    self.failures.append(f"{problem} ({phase} the canary)")
            else:
                self.seconds[phase].append(time.monotonic() - begin)
            self._asked = None
            self._over.wait(self.interval if self._phase == "during" else min(BRISK, self.interval))

    @property
    def allowed(self):
        """Seconds that a request may take."""
        before = self.seconds["before"]
        return max(self.floor, self.factor * statistics.median(before)) if before else self.floor

    def hurt(self):
        """Return how the canary hurts the live server, or an empty text."""
        if self.failures:
            return f"the live server failed a request: {self.failures[0]}"
        asked = self._asked
        waiting = time.monotonic() - asked if asked else 0.0
        if waiting > 2 * self.allowed:
            return f"a request to the live server waits for {waiting:.2f} s, {self.allowed:.2f} s are allowed"
        last = self.seconds["during"][-PROBES:]
        if len(last) == PROBES and statistics.median(last) > self.allowed:
            return (
                f"the live server takes {statistics.median(last):.2f} s for a request, {self.allowed:.2f} s are allowed"
            )
        return ""

    def summary(self):
        """Return ``{allowed, failures, before, during, after}``; each phase ``{requests, median, worst}``, seconds."""
        result = {"allowed": round(self.allowed, 3), "failures": list(self.failures)}
        for phase, seconds in self.seconds.items():
            result[phase] = {
                "requests": len(seconds),
                "median": round(statistics.median(seconds), 3) if seconds else None,
                "worst": round(max(seconds), 3) if seconds else None,
            }
        return result
