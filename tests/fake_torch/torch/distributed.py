"""Collectives between processes, through files: each call writes one and waits for those of the other ranks."""

from __future__ import annotations

import json
import os
import time

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


def init_process_group(backend, store, rank, world_size, timeout):
    """Join the other ranks."""
    STATE.update(store=store, rank=rank, world=world_size, calls=0)
    _exchange([])


def _exchange(values):
    """Return what all ranks gave, in their order."""
    store, call = STATE["store"], STATE["calls"]
    STATE["calls"] += 1
    store.set(f"{call}-{STATE['rank']}", json.dumps(values))
    return [json.loads(store.get(f"{call}-{rank}")) for rank in range(STATE["world"])]


def all_reduce(tensor):
    """Add up, in place."""
    tensor.values[:] = [sum(column) for column in zip(*_exchange(tensor.values))]


def all_gather_into_tensor(out, tensor):
    """Put the ranks' parts behind one another."""
    out.values[:] = [value for part in _exchange(tensor.values) for value in part]


def reduce_scatter_tensor(out, tensor):
    """Add up, and keep this rank's part."""
    total = [sum(column) for column in zip(*_exchange(tensor.values))]
    count = out.numel()
    out.values[:] = total[STATE["rank"] * count : (STATE["rank"] + 1) * count]


def broadcast(tensor, source):
    """Take what one rank has."""
    tensor.values[:] = _exchange(tensor.values)[source]
