"""As much of torch as the probe's worker asks for, with lists for tensors: for tests that have no engine or no GPU.

A "GPU" computes at once; a graph keeps the operations of its body and does them at each replay.
"""

from __future__ import annotations

from torch import cuda

__version__ = "0+fake"
bfloat16, float16, float32 = "bfloat16", "float16", "float32"


class Tensor:
    """A flat list of numbers."""

    def __init__(self, values):
        self.values = list(values)

    def _each(self, other, what):
        others = other.values if isinstance(other, Tensor) else [other] * len(self.values)
        return Tensor(what(one, two) for one, two in zip(self.values, others))

    def __mod__(self, other):
        return self._each(other, lambda one, two: one % two)

    def __mul__(self, other):
        return self._each(other, lambda one, two: one * two)

    def __add__(self, other):
        return self._each(other, lambda one, two: one + two)

    def __ne__(self, other):
        return self._each(other, lambda one, two: one != two)

    __hash__ = None

    def __getitem__(self, place):
        return Tensor(self.values[place])

    def __setitem__(self, place, value):
        self.values[place] = value

    def to(self, _dtype):
        return self

    def numel(self):
        return len(self.values)

    @cuda.captured
    def copy_(self, other):
        self.values[:] = other.values

    @cuda.captured
    def zero_(self):
        self.values[:] = [0] * len(self.values)

    def sum(self):
        return Tensor([sum(self.values)])

    def item(self):
        return self.values[0]


def arange(count, device=None):
    """Return 0, 1, 2 and so on."""
    return Tensor(range(count))


def zeros_like(other):
    """Return as many zeros."""
    return Tensor([0] * other.numel())


def cat(parts):
    """Return tensors behind one another."""
    return Tensor(value for part in parts for value in part.values)


def device(*names):
    """Return the name of a device."""
    return names[0]


def set_num_threads(_count):
    """Do nothing: lists have no threads."""
