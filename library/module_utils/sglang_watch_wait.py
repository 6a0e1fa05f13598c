"""Waiting for a server: log, processes and endpoint looked at together, in one loop that never blocks on a request."""

from __future__ import annotations

import time
import typing
import urllib.parse

from ansible.module_utils import sglang_watch, sglang_watch_processes
from ansible.module_utils.sglang_client import Call, ClientError
from ansible.module_utils.sglang_watch_progress import Progress
from ansible.module_utils.sglang_watch_signatures import cause, classify, match

INTERVAL = 0.05
HEALTH_INTERVAL = 0.4
# After a fatal line or a death: time for the other ranks and the logger to say the rest.
SETTLE = 0.5
QUIET = 0.2
# Phases in which a process that uses no CPU time waits for nothing but another one of the same server.
IDLE_PHASES = ("distributed", "weights", "kv_cache", "graph", "warmup")
PROMPTS = ("The capital of France is", "One, two, three, four,", "Water boils at a temperature of")


class NotReadyError(Exception):
    """The server is not ready. ``cause`` is the dict of :func:`sglang_watch_signatures.cause`."""

    def __init__(self, found):
        super().__init__(found["message"])
        self.cause = found


def degenerate(answer, min_distinct):
    """Return why an answer is no real one, or an empty text.

    Tiny models repeat short loops rightly, so only fewer than ``min_distinct`` different tokens (or words) count.
    With 0, for weights that are noise, the text is not looked at.

    :param answer: ``{text, tokens, ids}``.
    """
    words = answer["text"].split()
    if min_distinct and not words:
        return "the answer is empty"
    if answer["tokens"] < 2:
        return f"the answer has {answer['tokens']} token"
    if len(set(answer["ids"])) < min_distinct <= len(answer["ids"]):
        return f"the answer has {len(set(answer['ids']))} different token(s) of {answer['tokens']}"
    if len(set(words)) < min_distinct <= len(words) and len(words) > 2:
        return f"the answer has {len(set(words))} different word(s) of {len(words)}"
    return ""


class Options(typing.NamedTuple):
    """What the watch is told; times in seconds."""

    timeout: float = 1800
    """For the whole wait."""
    silence: dict = sglang_watch.SILENCE
    """For each phase, see :data:`sglang_watch.SILENCE`."""
    idle_silence: float = 0
    """For silence while no process works, in the phases of IDLE_PHASES; 0 leaves it to ``silence``."""
    request_timeout: float = 30
    """For a request that generates nothing."""
    generation_timeout: float = 120
    generations: int = 3
    """How many must succeed in a row."""
    max_tokens: int = 8
    """Of each generation."""
    min_distinct: int = 2
    """Different tokens (words) that an answer must have."""


class Watch:
    """One server from its start to its first answers.

    :param release: absolute path of the release.
    :param launch: content of its ``launch.json``.
    :param client: :class:`sglang_client.Client`.
    :param options: :class:`Options`.
    :param pid: the server's pid where it is known.
    :param progress: :class:`Progress`, or None to write nothing.
    :param abandoned: function that returns whether nobody waits for the answer any more.
    """

    def __init__(self, release, launch, client, options, pid=None, progress=None, abandoned=lambda: False):
        self.release, self.launch, self.client, self.options = release, launch, client, options
        self.begin = time.monotonic()
        self.log = sglang_watch.StartLog()
        self.follower = sglang_watch.LogFollower(launch["log"])
        self.processes = sglang_watch_processes.Processes(release, pid)
        self.progress = progress or Progress(release, enabled=False)
        self.attempts = 0
        self.last_error = ""
        self.port = "closed"
        self.health = "not asked"
        self.generation = "not asked"
        self.generations = []
        self.served_model = None
        self.answered = None
        self.busy = False
        self.proven = False
        self._abandoned = abandoned
        self._whole = False

    @property
    def elapsed(self):
        """Seconds since the watch began."""
        return time.monotonic() - self.begin

    def wait(self):
        """Wait until the server is ready.

        :raises NotReadyError: it crashed, stalled, does not answer or answers nonsense, or the time limit passed.
        """
        lanes = [self._health_lane(), self._generation_lane()]
        self.look()
        self._whole = self.log.phase in ("spawned", "imports")
        while lanes:
            self.look()
            lanes = [lane for lane in lanes if next(lane, "over") != "over"]
            self._limits()
            if self.progress.due():
                self._report("waiting")
            time.sleep(INTERVAL)
        self.look()
        self.log.enter("serving")
        self.last_error = ""
        self._report("ready")

    def look(self):
        """Read the log and check the processes; raise NotReadyError on a crash."""
        self.log.feed(self.follower.read())
        dead = self.processes.check()
        if not dead and self.log.phase in ("warmup", "ready", "serving"):
            dead = self.processes.headless()
        if dead or self.log.fatal:
            self._settle()
            raise NotReadyError(self._crash(self.processes.check() or dead))

    def _settle(self):
        begin = quiet = time.monotonic()
        while time.monotonic() - begin < SETTLE:
            lines = self.follower.read()
            self.log.feed(lines)
            now = time.monotonic()
            quiet = now if lines else quiet
            if now - quiet > QUIET and not self.processes.server_alive:
                break
            time.sleep(0.02)
        self.log.feed(self.follower.flush())

    def _crash(self, dead):
        complaints = sglang_watch_processes.kernel_complaints(self.begin)
        errors = self.log.errors + [
            {"line": None, "rank": None, "phase": self.log.phase, "text": line} for line in complaints
        ]
        ranks = self.log.ranks_failed()
        found = classify(errors, self.log.phase, ranks)
        if found is None or (match(found["detail"]) or {}).get("generic"):
            # The log only shows what followed; the processes may know more.
            if self.processes.oom_killed():
                found = cause("oom_killed", self.log.phase, dead[1] if dead else "", ranks=ranks)
            elif dead and (found is None or found["signature"] == "peer_lost" or dead[0] == "worker_died"):
                found = cause(dead[0], self.log.phase, dead[1], found["first_error"] if found else "", ranks)
        if found is None:
            found = cause("unknown", self.log.phase, self.log.fatal or "", self.log.fatal or "", ranks)
        if found["signature"] == "port_taken":
            others, _ours = sglang_watch_processes.foreign_listeners(self.launch["endpoint"], self.release)
            if others:
                found["detail"] += " (held by " + "; ".join(others) + ")"
        return found

    def _limits(self):
        phase = self.log.phase
        if self.elapsed >= self.options.timeout:
            raise NotReadyError(cause("timeout", phase, self.last_error))
        now, limit = time.monotonic(), self.options.silence["ready"]
        # All generations came and only /health fails; while tokens flow to somebody it may just be busy.
        if self.answered and self.health != "200" and now - max(self.answered, self.log.tokens_moved or 0) >= limit:
            detail = f"/health: {self.health}, {now - self.answered:.0f} s after {len(self.generations)} generations"
            raise NotReadyError(cause("health_failed", phase, detail))
        silent, limit = now - self.log.moved, self.options.silence[phase]
        idle = self.options.idle_silence
        # What neither speaks nor works is no slow start, so that takes less patience.
        still = idle and phase in IDLE_PHASES and min(silent, self.processes.idle()) >= idle
        if phase in ("ready", "serving") or (silent < limit and not still):
            return
        compilers = self.processes.compiling()
        if compilers:
            # A kernel that is being compiled says nothing for minutes.
            self.log.moved = time.monotonic()
            self.last_error = f"{', '.join(compilers)} at work below the server"
            return
        hang = phase in ("distributed", "graph") and self.log.nccl_seen
        detail = f"silent for {silent:.0f} s in phase {phase}, "
        detail += f"limit {limit} s" if silent >= limit else f"and no process works; limit for both {idle:g} s"
        raise NotReadyError(cause("p2p_hang" if hang else "stalled", phase, detail))

    def _report(self, state):
        if state == "waiting" and self._abandoned():
            raise NotReadyError(cause("abandoned", self.log.phase, self.last_error))
        compilers = self.processes.compiling()
        self.progress.write(
            state,
            self.log,
            self.elapsed,
            whole=self._whole and state == "ready",
            pid=self.processes.pid,
            message=self.last_error,
            note=f"{', '.join(compilers)} at work" if compilers else "",
        )

    def failed(self, found):
        """Leave the failure in the progress file."""
        self.last_error = self.last_error or found["detail"]
        self._report("failed")

    # ---- the endpoint ------------------------------------------------------------------------------------------

    def _call(self, function, *args, limit):
        """Run a call while the loop goes on; returns its result, raises ClientError."""
        self.attempts += 1
        call = Call(function, *args, limit, limit=limit)
        while not call.finished():
            yield
        return call.result

    @staticmethod
    def _pause(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield

    def _note(self, problem):
        """Remember what a request said, and what it proves about the port."""
        self.last_error = str(problem)
        if problem.kind != "refused":
            self.port = "open"
        if problem.kind == "unauthorised":
            raise NotReadyError(cause("unauthorised", self.log.phase, str(problem)))

    def prove_listener(self):
        """Find out whether the process behind the port is of this release.

        :raises NotReadyError: another process holds the port.
        """
        others, ours = sglang_watch_processes.foreign_listeners(self.launch["endpoint"], self.release)
        if others:
            port = urllib.parse.urlsplit(self.launch["endpoint"]).port
            raise NotReadyError(
                cause("foreign_listener", self.log.phase, f"port {port} is held by " + "; ".join(others))
            )
        self.proven = ours
        return ours

    def _health_lane(self):
        while True:
            try:
                yield from self._call(self.client.health, limit=self.options.request_timeout)
                self.port, self.health = "open", "200"
            except ClientError as problem:
                self.health = str(problem.status or problem.kind)
                self._note(problem)
            if self.port == "open" and not self.proven:
                self.prove_listener()
            if self.health == "200" and self.proven:
                return
            yield from self._pause(HEALTH_INTERVAL)

    def _generation_lane(self):
        # A ready server's /health costs a second, so the ready line opens this lane as well.
        while self.health != "200" and self.log.phase not in ("ready", "serving"):
            yield
        if self.health == "refused":
            self.health = "not asked"  # what it said before the server listened says nothing now
        while not self.proven and not self.prove_listener():
            yield from self._pause(HEALTH_INTERVAL)
        yield from self._check_model()
        while len(self.generations) < self.options.generations:
            yield from self._one_generation()
        self.prove_listener()
        self.answered = time.monotonic()

    def _check_model(self):
        end = time.monotonic() + self.options.request_timeout
        while True:
            try:
                names = yield from self._call(self.client.models, limit=self.options.request_timeout)
                break
            except ClientError as problem:
                self._note(problem)
                if time.monotonic() > end:
                    raise NotReadyError(cause("health_failed", self.log.phase, str(problem))) from None
            yield from self._pause(HEALTH_INTERVAL)
        wanted = self.launch["served_model_name"]
        if wanted not in names:
            raise NotReadyError(cause("wrong_model", self.log.phase, f"served: {', '.join(names)}; expected: {wanted}"))
        self.port, self.served_model = "open", wanted

    def _one_generation(self, once=False):
        prompt = PROMPTS[len(self.generations) % len(PROMPTS)]
        limit = self.options.generation_timeout
        first = time.monotonic()
        while True:
            # Tokens that somebody got in this attempt count, not those of an attempt before it.
            begin = time.monotonic()
            try:
                answer = yield from self._call(self.client.generate, prompt, self.options.max_tokens, limit=limit)
                break
            except ClientError as problem:
                self.generation = str(problem)
                self._note(problem)
                if problem.kind == "timeout" and (self.log.tokens_moved or 0) < begin:
                    raise NotReadyError(cause("generation_dead", self.log.phase, str(problem))) from None
                # 503: still warming up. Tokens that flow elsewhere: busy, not dead; the whole limit ends it.
                # A connection that is closed unanswered may be one of a start; one look asks no second time.
                final = problem.kind in ("http", "invalid") and problem.status != 503
                closed = problem.kind == "refused" and time.monotonic() - first >= limit
                if final or closed or (once and problem.kind != "timeout"):
                    raise NotReadyError(cause("generation_failed", self.log.phase, str(problem))) from None
            yield from self._pause(HEALTH_INTERVAL)
        reason = degenerate(answer, self.options.min_distinct)
        shown = {key: answer[key] for key in ("text", "tokens", "elapsed")}
        self.generations.append(shown)
        self.generation = reason or "answered"
        if reason:
            self.last_error = reason
            raise NotReadyError(cause("degenerate", self.log.phase, f"{reason}: {answer['text'][:200]!r}"))

    # ---- one look ----------------------------------------------------------------------------------------------

    def probe(self):
        """Judge once, without waiting for anything but the answers.

        A server whose /health fails while tokens flow is busy, not dead.

        :raises NotReadyError: it is not ready now.
        """
        self.look()
        if self.processes.pid is None:
            raise NotReadyError(
                cause("not_running", self.log.phase, f"no process carries the marker of {self.release}")
            )
        before = self._metrics()
        for lane in (self._one_health(), self._check_model()):
            self._drain(lane)
        if not self.proven:
            self.prove_listener()
        try:
            while len(self.generations) < self.options.generations:
                self._drain(self._one_generation(once=True))
        except NotReadyError:
            if self.health == "200" or not self._flowing(before):
                raise
        if self.health != "200":
            if not self.generations and not self._flowing(before):
                raise NotReadyError(cause("health_failed", self.log.phase, f"/health: {self.health}"))
            self.busy = True
        self.look()
        self.log.enter("serving")

    def _one_health(self):
        try:
            yield from self._call(self.client.health, limit=self.options.request_timeout)
            self.port, self.health = "open", "200"
        except ClientError as problem:
            self.health = str(problem.status or problem.kind)
            self._note(problem)
            if problem.kind == "refused":
                raise NotReadyError(cause("health_failed", self.log.phase, str(problem))) from None

    def _drain(self, lane):
        for _ in lane:
            self.look()
            if self.elapsed >= self.options.timeout:
                raise NotReadyError(cause("timeout", self.log.phase, self.last_error))
            time.sleep(0.02)

    def _metrics(self):
        try:
            return Call(self.client.metrics, 5, limit=5).wait()
        except (ClientError, ValueError):
            return {}

    def _flowing(self, before):
        """Whether the server generates for somebody: its counters moved, or its log shows decoding since the start."""
        self.log.feed(self.follower.read())
        now = self._metrics()
        name = "sglang:generation_tokens_total"
        grown = name in now and name in before and now[name] > before[name]
        return grown or now.get("sglang:num_running_reqs", 0) > 0
