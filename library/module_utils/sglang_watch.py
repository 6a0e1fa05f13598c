"""What a server's log says about its start: phases, progress, errors.

:class:`LogFollower` reads a growing file through rotation and truncation, :class:`StartLog` turns its lines into the
phase of the start. Both are plain objects that know neither processes nor HTTP.
"""

from __future__ import annotations

import os
import re
import time

PHASES = (
    "spawned",
    "imports",
    "distributed",
    "weights",
    "kv_cache",
    "graph",
    "warmup",
    "ready",
    "serving",
)

# Seconds without any sign of life in a phase before the start counts as stalled. A phase that reports progress may be
# as long as it likes: only silence is limited. Weights: one shard from a slow disk. Graph and warm-up: kernels that are
# compiled on first use (compilers seen below the server suspend the limit anyhow).
SILENCE = {
    "spawned": 60,
    "imports": 300,
    "distributed": 180,
    "weights": 300,
    "kv_cache": 180,
    "graph": 600,
    "warmup": 600,
    "ready": 300,
    "serving": 300,
}

# The first line of each phase, in the words of SGLang 0.5.8 to 0.5.23. A line may stand for the end of one phase.
_PHASE_LINES = tuple(
    (phase, re.compile(text))
    for phase, text in (
        ("distributed", r"Init torch distributed begin"),
        ("weights", r"Load weight begin|Loading .*checkpoint shards:|Multi-thread loading .*shards:"),
        ("kv_cache", r"Load weight end|Using KV cache dtype|KV Cache is allocated"),
        ("graph", r"Capture (?:[\w-]+ )*(?i:graph) begin|Capturing batches"),
        ("warmup", r"Application startup complete|Uvicorn running on"),
        ("ready", r"The server is fired up and ready to roll!"),
    )
)
_TAG = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)*? ?(?:TP(\d+))?(?: [A-Z]+\d+)*\] ")
_BAR = re.compile(r"(Loading .*?shards|Multi-thread loading .*?shards|Capturing batches).*?(\d+)/(\d+) \[")
# Lines that our own questions cause. They are no sign that the start goes on.
_ECHO = re.compile(r'"(?:GET|POST) /\S* HTTP/')

# An error's last line (the only one of a traceback that says what happened), or a line that stands alone.
_ERROR = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|NotFound|Interrupt|Failure)(?:: |$)"
    r"|NCCL WARN |launch_server\.py: error: |\[Errno \d+\]|Watchdog caught collective operation timeout"
    r"|NVRM: Xid|^Fatal Python error|Segmentation fault|Driver/library version mismatch"
    r"|[Ee]xit ?code ?=?:? ?-\d+|Out of memory: Killed process"
)
# Messages that have this shape and stop nothing.
_HARMLESS = re.compile(
    r"Ignore import error|openai_harmony|Can not initialize OpenAIServingResponses|Fail to set RLIMIT|"
    r"Setup Custom allreduce failed|Health check failed"
)
# After one of these the start cannot succeed any more, whatever the processes still do.
_FATAL = re.compile(
    r"Scheduler hit an exception|DetokenizerManager hit an exception|TokenizerManager hit an exception"
    r"|Received sigquit from a child|It usually means one child failed|scheduler is dead\."
    r"|launch_server\.py: error: |error while attempting to bind on address|Initialization failed\. warmup error"
    r"|Subprocess \S+ \(pid=\d+\) crashed|Watchdog caught collective operation timeout|^Fatal Python error"
)
MAX_LINE = 2000


class LogFollower:
    """Read what is added to a log file, whatever is done to the file meanwhile.

    A new file under the name (rotation) is read from its start after the rest of the old one; a file that became
    shorter (truncation) is read again from its start; a missing file is waited for.
    """

    def __init__(self, path):
        self.path = path
        self._file = None
        self._rest = b""

    def _open(self):
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 - stays open between reads, so that a rotated file is read to its end
        except OSError:
            self._file = None

    def _replaced(self):
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        mine = os.fstat(self._file.fileno())
        return (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev)

    def read(self):
        """Return the lines added since the last call, without their ends.

        A carriage return ends a line too: progress bars redraw themselves with it. An unfinished line is kept back.
        """
        if self._file is None:
            self._open()
            if self._file is None:
                return []
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        data = self._rest + self._file.read()
        if self._replaced():
            data += self._file.read()
            self._file.close()
            self._open()
            data += b"\n" + (self._file.read() if self._file else b"")
        *lines, self._rest = re.split(rb"[\r\n]", data)
        return [line[:MAX_LINE].decode("utf-8", "replace") for line in lines if line.strip()]

    def flush(self):
        """Return the unfinished last line as a list, for a log that nobody writes any more."""
        rest, self._rest = self._rest, b""
        return [rest[:MAX_LINE].decode("utf-8", "replace")] if rest.strip() else []

    def close(self):
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class StartLog:
    """The state of a start, fed line by line.

    ``phase`` is that of the slowest rank seen and never goes back; ``moved`` is the time (of ``clock``, in seconds) of
    the last line that our own requests did not cause; ``errors`` holds ``{line, rank, phase, text}`` in order.
    """

    def __init__(self, clock=time.monotonic, keep=200):
        self._clock = clock
        self._keep = keep
        self.reset()

    def reset(self):
        """Forget everything: a new start writes into the same file."""
        now = self._clock()
        self.phase = "spawned"
        self.phases = [{"phase": "spawned", "started": now}]
        self.moved = now
        self.tokens_moved = None
        self.tail = []
        self.errors = []
        self.fatal = None
        self.nccl_seen = False
        self._ranks = {}
        self._count = 0
        self._announced = False
        self._bar = None
        self._crashing = None
        self._failed = set()

    def feed(self, lines):
        """Take new lines."""
        for line in lines:
            self._line(line)

    def _line(self, line):
        if "server_args=ServerArgs(" in line:
            # The parent writes it once; what it wrote before that (warnings of imports) is of the same start.
            if self._announced or self.phase not in ("spawned", "imports"):
                self.reset()
            self._announced = True
        now = self._clock()
        self._count += 1
        self.tail = self.tail[-(self._keep - 1) :] + [line]
        echo = _ECHO.search(line)
        if not echo:
            self.moved = now
        tag = _TAG.match(line)
        rank = int(tag.group(1)) if tag and tag.group(1) else None
        body = line[tag.end() :] if tag else line
        self._advance("imports", None)
        for phase, pattern in _PHASE_LINES:
            if pattern.search(body):
                self._advance(phase, rank)
        self._progress(body, now)
        if "Decode batch" in body:
            self.tokens_moved = now
        self.nccl_seen = self.nccl_seen or "NCCL INFO" in line or "using nccl" in line
        if _HARMLESS.search(line):
            return
        if _ERROR.search(body) and not echo:
            # A traceback has no rank in its lines: it belongs to the one that last announced an exception.
            speaker = self._crashing if rank is None else rank
            where = self._ranks.get(speaker, self.phase)
            self.errors.append({"line": self._count, "rank": rank, "phase": where, "text": body[:500]})
        if _FATAL.search(line):
            self.fatal = self.fatal or body[:500]
            if rank is not None:
                self._crashing = rank
                self._failed.add(rank)

    def _advance(self, phase, rank):
        """Note that a rank (None: the parent) entered a phase."""
        order = PHASES.index
        key = "parent" if rank is None and phase in ("imports", "warmup", "ready") else rank or 0
        if order(phase) > order(self._ranks.get(key, "spawned")):
            self._ranks[key] = phase
        parent = self._ranks.get("parent", "spawned")
        workers = [value for name, value in self._ranks.items() if name != "parent"]
        # The parent listens only after every worker has reported.
        reached = parent if parent in ("warmup", "ready") or not workers else min(workers, key=order)
        self.enter(reached)

    def enter(self, phase):
        """Go on to a phase, if it is a later one."""
        if PHASES.index(phase) > PHASES.index(self.phase):
            self.phase = phase
            self.phases.append({"phase": phase, "started": self._clock()})

    def _progress(self, body, now):
        bars = _BAR.findall(body)
        if not bars:
            return
        name, done, total = bars[-1]
        # One rank may draw its bar before the slowest one is in that phase.
        phase, done, total = "graph" if name.startswith("Capturing") else "weights", int(done), int(total)
        bar = self._bar
        if bar is None or phase != bar["phase"] or done < bar["done"] or total != bar["total"]:
            self._bar = {"phase": phase, "first": done, "begin": now, "done": done, "total": total, "at": now}
        elif done > self._bar["done"]:
            self._bar.update(done=done, at=now)

    def progress(self):
        """Return ``{done, total, percent, rate, estimate}`` of the running bar, or None.

        ``rate`` is in steps a second and ``estimate`` in seconds left; both are None until one step was seen.
        """
        bar = self._bar
        if not bar or not bar["total"] or bar["phase"] != self.phase:
            return None
        steps, spent = bar["done"] - bar["first"], bar["at"] - bar["begin"]
        rate = steps / spent if steps and spent > 0.2 else None
        left = (bar["total"] - bar["done"]) / rate if rate else None
        return {
            "done": bar["done"],
            "total": bar["total"],
            "percent": 100 * bar["done"] // bar["total"],
            "rate": None if rate is None else round(rate, 3),
            "estimate": None if left is None else round(left, 1),
        }

    def history(self):
        """Return the phases in order as ``[{phase, elapsed}]``, seconds each; the last one is still running."""
        ends = [item["started"] for item in self.phases[1:]] + [self._clock()]
        return [
            {"phase": item["phase"], "elapsed": round(max(end - item["started"], 0), 2)}
            for item, end in zip(self.phases, ends)
        ]

    def ranks_failed(self):
        """Return the tensor-parallel ranks that reported a failure, sorted."""
        return sorted(self._failed)
