"""Collectives between processes, through files: each call writes one and waits for those of the other ranks."""

from __future__ import annotations

import json
import os
import time

from torch import cuda

# What this NCCL takes from the environment, and how it says so.
TAKEN = {"NCCL_ALGO": None, "NCCL_PROTO": None, "NCCL_P2P_LEVEL": ("LOC", "PIX", "PHB", "SYS")}
STATE = {"calls": 0}


class FileStore:
    """Keys in a folder."""

    def __init__(self, path, world):
        self.folder = f"{path}.d"
        os.makedirs(self.folder, exist_ok=True)

    def set(self, key, value):
        path = os.path.join(self.folder, key.replace(" ", "-"))
        with open(f"{path}.{os.getpid()}", "w") as handle:
            handle.write(value)
        os.replace(f"{path}.{os.getpid()}", path)

    def get(self, key):
        path = os.path.join(self.folder, key.replace(" ", "-"))
        while not os.path.exists(path):
            time.sleep(0.0005)
        with open(path, "rb") as handle:
            return handle.read()

    def add(self, key, count):
        with open(os.path.join(self.folder, f"{key}.count"), "ab") as handle:
            handle.write(b"x" * count)
            handle.flush()
            return os.fstat(handle.fileno()).st_size


def init_process_group(backend, store, rank, world_size, timeout, device_id=None):
    """Join the other ranks; as NCCL, say what is taken from the environment."""
    STATE.update(store=store, rank=rank, world=world_size, calls=0, nccl=backend == "nccl")
    _log("NCCL INFO NCCL version 2.28.9+cuda13.0")
    for name, values in TAKEN.items():
        value = os.environ.get(name)
        if value is not None and (values is None or value in values):
            _log(f"NCCL INFO {name} set by environment to {value}")
    _log(f"NCCL INFO Channel 00/0 : {rank}[{rank}] -> {1 - rank}[{1 - rank}] via P2P/CUMEM")
    _exchange([])


def _log(text):
    if STATE["nccl"]:
        with open(os.environ["NCCL_DEBUG_FILE"], "a") as handle:
            handle.write(f"host:{os.getpid()}:{os.getpid()} [{STATE['rank']}] {text}\n")


def _choose(name, count):
    """Say what is chosen, or fail as NCCL does where the environment leaves nothing to choose."""
    if not STATE["nccl"]:
        return
    forced = os.environ.get("NCCL_ALGO", "")
    if name != "AllReduce" and forced.lower() == "tree":
        text = f"no algorithm/protocol available for function {name} with datatype ncclInt8."
        _log(f"enqueue.cc:2012 NCCL WARN {text} NCCL_ALGO was set to {forced}.")
        raise RuntimeError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)")
    if STATE["rank"] == 0:
        _log(f"NCCL INFO {name}: {count * 2} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..1}}")


def _exchange(values):
    """Return what all ranks gave, in their order."""
    store, call = STATE["store"], STATE["calls"]
    STATE["calls"] += 1
    store.set(f"{call}-{STATE['rank']}", json.dumps(values))
    return [json.loads(store.get(f"{call}-{rank}")) for rank in range(STATE["world"])]


@cuda.captured
def all_reduce(tensor):
    """Add up, in place."""
    _choose("AllReduce", tensor.numel())
    tensor.values[:] = [sum(column) for column in zip(*_exchange(tensor.values))]


@cuda.captured
def all_gather_into_tensor(out, tensor):
    """Put the ranks' parts behind one another."""
    _choose("AllGather", tensor.numel())
    out.values[:] = [value for part in _exchange(tensor.values) for value in part]


@cuda.captured
def reduce_scatter_tensor(out, tensor):
    """Add up, and keep this rank's part."""
    total = [sum(column) for column in zip(*_exchange(tensor.values))]
    count = out.numel()
    out.values[:] = total[STATE["rank"] * count : (STATE["rank"] + 1) * count]


@cuda.captured
def broadcast(tensor, source):
    """Take what one rank has."""
    tensor.values[:] = _exchange(tensor.values)[source]
