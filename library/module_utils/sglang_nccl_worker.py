"""The program that tries collectives: the engine's interpreter runs it, one process for each GPU. Needs torch alone.

It is started once with an environment, imports torch without touching a GPU, and then takes one request a line on its
standard input. For each it forks one process a rank, so that a setting costs no import; settings are read by NCCL when
the process makes its communicator. Events leave as JSON lines on standard output: ``ready``, ``step`` (a rank begins
one), ``result``, ``rank`` (what a rank saw at its end), ``error``, ``end`` (of the trial; no rank is left then).

Every process dies with its parent, and a rank never outlives the limit of its trial.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time

# A rank that fails takes the others down: they get this long to say what they saw, seconds.
GRACE = 1.5
# Values in a check stay whole numbers below 256, which bfloat16 holds exactly for up to 16 ranks.
PERIOD = 7
MAX_CALLS = 20
MAX_BATCHES = 50
# A call that takes longer than this, in seconds, is measured twice by itself: more would only eat up the limit.
SLOW = 0.05
LOADED = ("libnccl", "librccl")


def die_with(parent):
    """Let the kernel kill this process when PARENT, its parent, is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def send(channel, event):
    """Write one event and its time as a line, in one piece: all ranks share the pipe, and a short write is not divided.

    ``at`` is in seconds of a clock that all processes share.
    """
    os.write(channel, (json.dumps({**event, "at": round(time.monotonic(), 3)}) + "\n").encode())


class Rank:
    """One rank of a trial."""

    def __init__(self, rank, request, channel):
        self.rank, self.request, self.channel = rank, request, channel
        self.world, self.cuda = request["world"], request["backend"] == "nccl"
        self.where = {"phase": "environment", "step": None, "mode": None}
        self.started = time.monotonic()

    def tell(self, event, **more):
        """Send one event of this rank."""
        send(self.channel, {"event": event, "rank": self.rank, "name": self.request["name"], **more})

    def at(self, phase, step=None, mode=None):
        """Note and tell where this rank is, so that a hang can be placed."""
        self.where = {"phase": phase, "step": step, "mode": mode}
        self.tell("step", **self.where)

    def log(self, name):
        """Return the path of a log of this rank."""
        return os.path.join(self.request["folder"], f"{name}-{self.rank}.log")

    def environment(self):
        """Set the variant's variables as the server's start does, and let NCCL write down what it makes of them."""
        os.environ["SGLANG_NCCL_PROBE_RANK"] = str(self.rank)
        if self.request["site"]:
            runpy.run_path(self.request["site"])
        for values in (self.request["variables"], self.request["defaults"]):
            for name, value in values.items():
                os.environ.setdefault(name, value)
        self.seen = {name: os.environ.get(name) for name in self.request["variables"]}
        self.seen.update((name, value) for name, value in os.environ.items() if name.startswith("NCCL_"))
        os.environ.update(
            NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ENV,TUNING,GRAPH", NCCL_DEBUG_FILE=self.log("nccl"),
            TORCH_NCCL_ENABLE_MONITORING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        )  # fmt: skip

    def join(self):
        """Make the communicator."""
        import datetime

        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.at("init")
        started, more = time.monotonic(), {}
        if self.cuda:
            self.device = torch.device("cuda", self.request["devices"][self.rank])
            torch.cuda.set_device(self.device)
            more["device_id"] = self.device
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
        self.dtype = getattr(torch, self.request["dtype"])
        context = time.monotonic() - started
        self.store = dist.FileStore(os.path.join(self.request["folder"], "store"), self.world)
        dist.init_process_group(
            self.request["backend"], store=self.store, rank=self.rank, world_size=self.world,
            timeout=datetime.timedelta(seconds=self.request["limit"] + 30), **more,
        )  # fmt: skip
        self.init = {"context_s": round(context, 3), "communicator_s": round(time.monotonic() - started - context, 3)}

    def buffers(self, step):
        """Return a step's ``(call, fill, clear, wrong)``: issue it, fill or zero its input, count wrong outputs."""
        torch, dist, world, n = self.torch, self.dist, self.world, step["elements"]

        def pattern(count, add):
            return (torch.arange(count, device=self.device) % PERIOD + add).to(self.dtype)

        kind = step["collective"]
        if kind == "all_reduce":
            source, expected = (
                pattern(n, self.rank),
                (torch.arange(n, device=self.device) % PERIOD * world + world * (world - 1) // 2).to(self.dtype),
            )
            data = out = torch.zeros_like(source)

            def call():
                dist.all_reduce(data)

        elif kind == "all_gather":
            source = pattern(n, self.rank)
            expected = torch.cat([pattern(n, rank) for rank in range(world)])
            data, out = torch.zeros_like(source), torch.zeros_like(expected)

            def call():
                dist.all_gather_into_tensor(out, data)

        elif kind == "reduce_scatter":
            source = pattern(n * world, self.rank)
            total = torch.arange(n * world, device=self.device) % PERIOD * world + world * (world - 1) // 2
            expected = total[self.rank * n : (self.rank + 1) * n].to(self.dtype)
            data, out = torch.zeros_like(source), torch.zeros_like(expected)

            def call():
                dist.reduce_scatter_tensor(out, data)

        else:
            source, expected = pattern(n, self.rank), pattern(n, 0)
            data = out = torch.zeros_like(source)

            def call():
                dist.broadcast(data, 0)

        def wrong():
            return int((out != expected).sum().item())

        return call, lambda: data.copy_(source), data.zero_, wrong

    def sync(self):
        """Wait for the GPU."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def capture(self, body, calls):
        """Return a CUDA graph with BODY in it CALLS times."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                body()
        return graph

    def check(self, index, step):
        """Run a step eagerly and replay it from a graph; raise where a value is wrong."""
        call, fill, _clear, wrong = self.buffers(step)

        def once():
            fill()
            call()

        for mode in step["modes"]:
            self.at("check", index, mode)
            if mode == "eager":
                once()
            else:
                graph = self.capture(once, 1)
                for _ in range(2):
                    graph.replay()
            self.sync()
            bad = wrong()
            if bad:
                raise ArithmeticError(f"{bad} values are wrong")

    def batches(self, run, count):
        """Return the seconds of COUNT calls of RUN, each by itself."""
        if not self.cuda:
            marks = [time.perf_counter()]
            for _ in range(count):
                run()
                marks.append(time.perf_counter())
            return [after - before for before, after in zip(marks, marks[1:])]
        marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        self.sync()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(marks, marks[1:])]

    def agree(self, key, seconds, budget):
        """Return ``(calls in a batch, batches)``, the same for all ranks: rank 0 derives them from its own speed."""
        if self.rank == 0:
            calls = 1 if seconds > SLOW else max(2, min(MAX_CALLS, int(0.02 / seconds)))
            count = 2 if seconds > SLOW else max(5, min(MAX_BATCHES, int(budget / (calls * seconds))))
            self.store.set(key, f"{calls} {count}")
        return [int(item) for item in self.store.get(key).split()]

    def time(self, index, step):
        """Measure a step and send its result: microseconds for one call, over batches of calls."""
        call, _fill, clear, _wrong = self.buffers(step)
        clear()
        budget, seconds = self.request["budget"], None
        for mode in step["modes"]:
            self.at("time", index, mode)
            call()
            self.sync()
            if seconds is None:
                seconds = max(min(self.batches(call, 3)), 1e-6)
            calls, count = self.agree(f"{index} {mode}", seconds, budget)
            if mode == "graph":
                graph = self.capture(call, calls)
                graph.replay()
                run = graph.replay
            else:

                def run(calls=calls):
                    for _ in range(calls):
                        call()

                run()
            self.sync()
            found = sorted(item / calls * 1e6 for item in self.batches(run, count))
            seconds = found[len(found) // 2] / 1e6
            self.tell(
                "result", step=index, mode=mode, calls=calls, batches=count,
                p50_us=round(found[len(found) // 2], 2), p99_us=round(found[int(len(found) * 0.99)], 2),
                mean_us=round(sum(found) / len(found), 2),
            )  # fmt: skip

    def hush(self):
        """Stop NCCL from writing a line for every call, whose cost would be measured; say whether that worked."""
        os.environ.update(NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=self.log("nccl-timed"))
        library = loaded_library()
        reset = library and getattr(ctypes.CDLL(library), "ncclResetDebugInit", None)
        if reset:
            reset()
        return _size(self.log("nccl"))

    def run(self):
        """Do the whole trial."""
        self.environment()
        self.join()
        steps = self.request["steps"]
        for index, step in enumerate(steps):
            self.check(index, step)
        before = self.hush()
        if self.request["timed"]:
            for index, step in enumerate(steps):
                self.time(index, step)
        self.at("end")
        # The others may still read this rank's memory.
        self.store.add("done", 1)
        while self.store.add("done", 0) < self.world:
            time.sleep(0.002)
        library = loaded_library()
        self.tell(
            "rank", env=self.seen, init=self.init, seconds=round(time.monotonic() - self.started, 3),
            hushed=_size(self.log("nccl")) == before, library=library, version=library_version(library),
            device=self.torch.cuda.get_device_name(self.device) if self.cuda else "cpu",
        )  # fmt: skip


def _size(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def loaded_library():
    """Return the path of the NCCL library that this process has mapped, or None."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as handle:
        for line in handle:
            path = line.split(None, 5)[-1].strip()
            if os.path.basename(path).startswith(LOADED):
                return path
    return None


def library_version(path):
    """Return the version that an NCCL library reports, as ``2.28.9``, or None."""
    if not path:
        return None
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    value = number.value
    return f"{value // 10000}.{value // 100 % 100}.{value % 100}" if value >= 10000 else str(value)


def rank_main(rank, request, channel, parent):
    """Be one rank; does not return."""
    die_with(parent)
    worker, code = Rank(rank, request, channel), 1
    try:
        log = os.open(worker.log("rank"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(number, target)
        worker.run()
        code = 0
    except BaseException as error:
        text = str(error).strip() or type(error).__name__
        worker.tell("error", type=type(error).__name__, message=text[:1500], **worker.where)
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Not a return: what the libraries do at exit can wait for ranks that are gone.
        os._exit(code)


def trial(request, channel):
    """Run one request to its end: all ranks have ended or are killed."""
    started = time.monotonic()
    sys.stderr.flush()
    me, ranks = os.getpid(), {}
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            rank_main(rank, request, channel, me)
        ranks[pid] = rank
    deadline, codes, killed, late, ended = started + request["limit"], {}, [], False, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid in ranks:
            rank = ranks.pop(pid)
            codes[rank] = os.waitstatus_to_exitcode(status)
            if codes[rank] and not killed:
                deadline = min(deadline, now + GRACE)
            continue
        if now < deadline:
            time.sleep(0.005)
            continue
        if killed:
            # The kernel does not end a process that waits for the driver.
            break
        late, ended = not any(codes.values()), round(now, 3)
        killed, deadline = sorted(ranks.values()), now + 10
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
    send(
        channel,
        {
            "event": "end", "name": request["name"], "codes": codes, "killed": killed, "timed_out": late,
            "ended": ended, "stuck": sorted(ranks), "seconds": round(time.monotonic() - started, 3),
        },
    )  # fmt: skip


def main():
    """Serve requests until standard input ends."""
    die_with(int(sys.argv[1]))
    channel = os.dup(1)
    os.dup2(2, 1)
    started = time.monotonic()
    import torch
    import torch.distributed

    ready = {"event": "ready", "torch": torch.__version__, "seconds": round(time.monotonic() - started, 3)}
    send(channel, ready)
    while True:
        line = sys.stdin.buffer.readline()
        if not line:
            break
        trial(json.loads(line), channel)


if __name__ == "__main__":
    main()
