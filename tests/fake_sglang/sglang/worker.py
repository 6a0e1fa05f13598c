"""A scheduler or detokenizer process: goes through the phases of a start, writes their log lines, then waits."""

from __future__ import annotations

import os
import signal
import time

from . import script as scripts
from .process import die_with_parent, log, raw, set_title


class CrashError(Exception):
    """The script ends this worker here."""


def run(title, rank, tp_size, pipe, script, use_graphs, shards_on_disk):
    """Body of a worker.

    :param title: process title, as SGLang gives it.
    :param rank: tensor-parallel rank; None for the detokenizer.
    :param pipe: connection to the parent; "ready" is sent once, "go" is read before the warm-up's crash point.
    """
    set_title(title)
    if not script["orphans"]:
        die_with_parent()
    if script["setsid"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if script["ignore_term"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name, value in script["child_env"].items():
        if value is None:
            os.unsetenv(name)
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if rank is None:
        pipe.send("ready")
        _wait_forever()
    label = rank if tp_size > 1 else None
    script["held"] = b"x" * (script["ballast_mb"] << 20)
    try:
        for phase in ("imports", "distributed", "weights", "kv_cache", "graph"):
            if phase != "graph" or use_graphs:
                _phase(phase, script, rank, label, shards_on_disk)
    except CrashError:
        os.kill(os.getppid(), signal.SIGQUIT)
        _wait_forever()
    pipe.send("ready")
    _wait_forever()


def _wait_forever():
    while True:
        time.sleep(3600)


def _work(seconds):
    """Use a fifth of a core for so long and say nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        slice_ = time.process_time() + 0.02
        while time.process_time() < slice_:
            pass
        time.sleep(0.08)


def check_faults(script, phase, rank, label=None):
    """Do what the script asks at the start of a phase: crash, die by a signal, or fall silent."""
    crash, die, hang = script["crash"], script["die"], script["hang"]
    compile_ = script["compile"]
    if compile_ and compile_["phase"] == phase and not rank:
        pid = os.fork()
        if not pid:
            set_title("nvcc")
            time.sleep(compile_["seconds"])
            os._exit(0)
        os.waitpid(pid, 0)
    if hang and hang["phase"] == phase and hang.get("rank", rank) == rank:
        _work(hang["works"]) if "works" in hang else _wait_forever()
    if die and die["phase"] == phase and die.get("rank", 0) == rank:
        os.kill(os.getpid(), die.get("signal", signal.SIGKILL))
    if crash and crash["phase"] == phase:
        if crash.get("rank", 0) != rank:
            time.sleep(crash.get("linger", 0) + 30)
        for line in scripts.fault_lines(crash):
            raw(line) if crash.get("log") or line.startswith((" ", "Traceback")) else log(line, label)
        time.sleep(crash.get("linger", 0))
        raise CrashError


def _phase(phase, script, rank, label, shards_on_disk):
    length = scripts.seconds(script, phase, rank)
    if phase == "imports":
        check_faults(script, phase, rank, label)
        time.sleep(length)
        log("Mamba selective_state_update backend initialized: triton", label)
    elif phase == "distributed":
        log("Init torch distributed begin.", label)
        check_faults(script, phase, rank, label)
        time.sleep(length)
        log(f"Init torch distributed ends. elapsed={length:.2f} s, mem usage=0.02 GB", label)
    elif phase == "weights":
        log("Load weight begin. avail mem=21.89 GB", label)
        shards = shards_on_disk or script["shards"]
        for done in range(shards + 1):
            if done:
                time.sleep(length / shards)
            if done == shards // 2:
                check_faults(script, phase, rank, label)
            if not rank and shards:
                raw(
                    f"\rLoading safetensors checkpoint shards: {100 * done // shards:3d}% Completed | {done}/{shards} "
                    f"[00:00<00:00, {shards / max(length, 0.001):.2f}it/s]"
                )
        log(
            f"Load weight end. elapsed={length:.2f} s, type=LlamaForCausalLM, dtype=torch.bfloat16, "
            "avail mem=21.89 GB, mem usage=0.00 GB.",
            label,
        )
    elif phase == "kv_cache":
        log("Using KV cache dtype: torch.bfloat16", label)
        check_faults(script, phase, rank, label)
        time.sleep(length)
        log("KV Cache is allocated. #tokens: 4096, K size: 0.00 GB, V size: 0.00 GB", label)
        log("Memory pool end. avail mem=21.82 GB", label)
    elif phase == "graph":
        log("Capture cuda graph begin. This can take up to several minutes. avail mem=21.80 GB", label)
        graphs = script["graphs"]
        for done in range(graphs + 1):
            if done:
                time.sleep(length / graphs)
            if done == graphs // 2:
                check_faults(script, phase, rank, label)
            if not rank:  # tqdm redraws one line with carriage returns; the line ends only with the last batch size
                raw(
                    f"\rCapturing batches (bs={2 ** (graphs - done)} avail_mem=21.80 GB): {100 * done // graphs:3d}%|"
                    f"    | {done}/{graphs} [00:00<00:00, 2.00it/s]",
                    "\n" if done == graphs else "",
                )
        log(f"Capture cuda graph end. Time elapsed: {length:.2f} s. mem usage=0.10 GB. avail mem=21.70 GB.", label)
    if rank == 0 and phase == "kv_cache":
        log(
            "max_total_num_tokens=4096, chunked_prefill_size=4096, max_prefill_tokens=16384, "
            "max_running_requests=2048, context_len=2048, available_cpu_mem=21.82 GB",
            label,
        )
