#!/usr/bin/env python3
"""Time how soon a fault of a starting server is seen, with the scripted server, and count false alarms.

For each fault the watch of sglang_health runs beside an observer of its own, which looks at log and processes every
10 ms and notes the first sign: a line of the error, the death of a process, or the last line before a silence.
Detection is the time from that sign to the end of the watch. The target of a crash is 1 s; that of a silence its limit
and 1 s more.

The naive playbook polls /health with `uri` and `until` for 23 minutes and sees a crash when they are over. Nobody waits
for that here: the column is 1380 s less the time that had passed, or "says ready" where /health answered 200 then.

    bench_health.py [--repeat N] [--healthy N] [--jobs N] [--starts N]

Prints a table; exit status 1 when a target was missed or a fault got another name.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "library"), str(ROOT / "tests" / "support")]
import ansible.module_utils  # noqa: E402

ansible.module_utils.__path__.append(str(ROOT / "library" / "module_utils"))
from ansible.module_utils import sglang_watch  # noqa: E402
from ansible.module_utils.sglang_client import Client  # noqa: E402
from ansible.module_utils.sglang_watch_wait import NotReadyError, Options, Watch  # noqa: E402

NAIVE_SECONDS = 23 * 60
LIMIT = 3.0
# Of a healthy start: still a tenth of the shortest limit of the product, and its phases are silent for half of it.
HEALTHY_LIMIT, LONGEST = 6.0, 3.0
SIGN = b"rror|Traceback|exception"
PHASES = ("imports", "distributed", "weights", "kv_cache", "graph", "warmup")
# Fault: (script, name of the cause, kind). A crash must be seen in 1 s, a silence in its limit and 1 s more.
FAULTS = {
    "bad flag": ({"crash": {"phase": "imports", "log": "bad_flag"}}, ["bad_flag"], "crash"),
    "undefined name after a patch": (
        {"crash": {"phase": "distributed", "log": "undefined_name"}}, ["undefined_name"], "crash",
    ),
    "NCCL algorithm unavailable": (
        {"crash": {"phase": "distributed", "log": "nccl_algorithm"}}, ["nccl_algorithm"], "crash",
    ),
    "one error in 40 tracebacks": (
        {"crash": {"phase": "distributed", "log": "many_ranks"}}, ["cuda_fault"], "crash",
    ),
    "out of memory at weights": ({"crash": {"phase": "weights", "log": "oom_weights"}}, ["oom_weights"], "crash"),
    "out of memory at KV cache": ({"crash": {"phase": "kv_cache", "log": "oom_kv_cache"}}, ["oom_kv_cache"], "crash"),
    "out of memory at graphs": ({"crash": {"phase": "graph", "log": "oom_graph"}}, ["oom_graph"], "crash"),
    "disk full": ({"crash": {"phase": "weights", "log": "disk_full"}}, ["disk_full"], "crash"),
    # The parent may say first that a child ended with signal 9, which is what the OOM killer sends.
    "a worker dies without a word": ({"die": {"phase": "kv_cache", "rank": 0}}, ["worker_died", "oom_killed"], "crash"),
    "a crash whose parent lives on": (
        {"crash": {"phase": "weights", "log": "cut_shard", "parent_linger": 60}}, ["missing_shard"], "crash",
    ),
    "silent in distributed init": ({"hang": {"phase": "distributed", "rank": 0}}, ["stalled"], "stall"),
    "silent in weights": ({"hang": {"phase": "weights", "rank": 0}}, ["stalled"], "stall"),
    "silent in warm-up": ({"hang": {"phase": "warmup", "rank": 0}}, ["stalled"], "stall"),
    "health 200, generation dead": ({"generation": {"mode": "silent"}}, ["generation_dead"], "stall"),
    "answers nonsense": ({"generation": {"mode": "degenerate"}}, ["degenerate"], "crash"),
}  # fmt: skip


def free_port():
    """Return a TCP port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One scripted server with two ranks in a release of its own."""

    def __init__(self, script):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="sg-")) / "releases" / "r"
        for part in ("logs", "model", "run"):
            (self.path / part).mkdir(parents=True)
        self.log = self.path / "logs" / "server.log"
        port = free_port()
        flags = [
            "--model-path",
            str(self.path / "model"),
            "--served-model-name",
            "tiny",
            "--port",
            str(port),
            "--tp-size",
            "2",
        ]
        self.launch = {
            "argv": [sys.executable, "-m", "sglang.launch_server", *flags],
            "endpoint": f"http://127.0.0.1:{port}",
            "served_model_name": "tiny",
            "log": str(self.log),
            "tp_size": 2,
            "env": {},
        }
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests" / "fake_sglang"),
            "FAKE_SGLANG_SCRIPT": json.dumps(script),
            "SGLANG_DEPLOY_RELEASE": str(self.path),
        }
        self.began = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.launch["argv"], cwd=self.path, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def naive(self):
        """Return what polling /health for 23 minutes would have come to at this moment."""
        try:
            with urllib.request.urlopen(self.launch["endpoint"] + "/health", timeout=3) as answer:
                return "says ready" if answer.status == 200 else None
        except (OSError, urllib.error.HTTPError):
            return NAIVE_SECONDS - (time.monotonic() - self.began)

    def end(self):
        """Kill it and remove its files."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has crashed as its script says
        self.process.wait()
        shutil.rmtree(self.path.parents[1], ignore_errors=True)


class Observer(threading.Thread):
    """Notes when the first sign of a fault was there to be seen, from log and /proc alone."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.sign, self.written = server, None, None
        self.over = threading.Event()
        self.start()

    def _dead(self, pids):
        for pid in pids:
            try:
                state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return True
            if state in "ZX":
                return True
        return False

    def run(self):
        """Look every 10 ms until told to stop."""
        pid, words, workers, size = self.server.process.pid, SIGN.split(b"|"), set(), 0
        while not self.over.wait(0.01):
            now = time.monotonic()
            # Lines that the questions of the watch cause are no sign of life.
            text = b"".join(line for line in self.server.log.read_bytes().splitlines() if b" HTTP/1." not in line)
            if len(text) != size:
                size, self.written = len(text), now
            try:
                children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                named = [pathlib.Path(f"/proc/{one}/comm").read_text() for one in children]
                workers |= {one for one, name in zip(children, named) if name.startswith("sglang::")}
            except OSError:
                pass  # one has just died, which the next line sees
            if self.sign is None and (self._dead({pid} | workers) or any(word in text for word in words)):
                self.sign = now


def trial(script, limit=LIMIT):
    """Start one server and watch it; return ``(cause or None, seconds from the sign, naive)``."""
    server = Server(script)
    observer = Observer(server)
    options = Options(
        timeout=60, silence=dict.fromkeys(sglang_watch.PHASES, limit), generation_timeout=limit, request_timeout=5
    )
    watch = Watch(str(server.path), server.launch, Client(server.launch["endpoint"]), options, server.process.pid)
    try:
        watch.wait()
        return None, 0.0, None
    except NotReadyError as problem:
        now = time.monotonic()
        observer.over.set()
        since = observer.sign if observer.sign else observer.written
        return problem.cause, now - since, server.naive()
    finally:
        observer.over.set()
        observer.join()
        server.end()


def speeds(seed):
    """Return the script of a healthy start at random speeds; a phase takes between 10 ms and LONGEST seconds."""
    draw = random.Random(seed)
    phases = {phase: round(LONGEST ** draw.uniform(-4, 1), 3) for phase in PHASES}
    # Many shards, so that a long phase moves.
    return {
        "phases": dict(phases, weights=round(draw.uniform(0.1, 5.0), 2)),
        "shards": 16,
        "token_seconds": draw.uniform(0.001, 0.03),
    }


def main():
    """Run all trials side by side and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=3, help="trials of each fault (3)")
    parser.add_argument("--healthy", type=int, default=100, help="healthy starts (100)")
    cores = os.cpu_count() or 1
    # A fault is timed, so nothing else may want the processor; a healthy start mostly sleeps.
    parser.add_argument("--jobs", type=int, default=cores, help="faults at a time (cores)")
    parser.add_argument("--starts", type=int, default=4 * cores, help="healthy starts at a time (four a core)")
    options = parser.parse_args()
    missed, named = [], 0
    print(f"{'fault':32} {'median':>8} {'worst':>8} {'target':>8}   naive playbook")
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        pending = {
            name: [pool.submit(trial, script) for _ in range(options.repeat)] for name, (script, *_) in FAULTS.items()
        }
        for name, trials in pending.items():
            _script, wanted, kind = FAULTS[name]
            done = [one.result() for one in trials]
            seconds = [one[1] for one in done]
            target = 1.0 if kind == "crash" else LIMIT + 1
            naive = done[0][2]
            shown = naive if isinstance(naive, str) else f"{naive or NAIVE_SECONDS:.0f} s (computed)"
            right = all(cause and cause["signature"] in wanted for cause, *_ in done)
            named += right
            late = max(seconds) > target
            if late or not right:
                missed.append(f"{name}: {'late' if late else [cause and cause['signature'] for cause, *_ in done]}")
            print(
                f"{name:32} {statistics.median(seconds):7.2f}s {max(seconds):7.2f}s {target:7.1f}s   {shown}",
                flush=True,
            )
    with concurrent.futures.ProcessPoolExecutor(options.starts) as pool:
        healthy = [pool.submit(trial, speeds(seed), HEALTHY_LIMIT) for seed in range(options.healthy)]
        alarms = [(seed, one.result()[0]) for seed, one in enumerate(healthy) if one.result()[0]]
    missed += [f"false alarm, seed {seed}: {cause['signature']} {cause['detail']}" for seed, cause in alarms]
    print(f"false alarms in {options.healthy} healthy starts at random speeds: {len(alarms)}")
    print(f"faults called by their name: {named} of {len(FAULTS)}")
    for line in missed:
        print("missed:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
