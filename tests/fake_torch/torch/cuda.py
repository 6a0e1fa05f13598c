"""Graphs and events without a GPU."""

from __future__ import annotations

import contextlib
import functools
import time

BODIES = []


def captured(operation):
    """Let an operation be kept in the graph that is being captured, or be done at once."""

    @functools.wraps(operation)
    def do(*args):
        return BODIES[-1].append((operation, args)) if BODIES else operation(*args)

    return do


class CUDAGraph:
    """Operations, in their order."""

    def __init__(self):
        self.body = []

    def replay(self):
        for operation, args in self.body:
            operation(*args)


@contextlib.contextmanager
def graph(target, capture_error_mode):
    """Capture what is done inside."""
    BODIES.append(target.body)
    yield
    BODIES.pop()


class Event:
    """A moment."""

    def __init__(self, enable_timing):
        self.moment = None

    def record(self):
        self.moment = time.perf_counter()

    def elapsed_time(self, later):
        return (later.moment - self.moment) * 1e3


def set_device(_device):
    """Do nothing."""


def synchronize():
    """Do nothing: everything has been done."""


def get_device_name(_device):
    """Return the name of no GPU."""
    return "Fake GPU"
