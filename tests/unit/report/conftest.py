"""The report's functions, and the past of a deployment that never was."""

from __future__ import annotations

import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS.parent / "plugins" / "plugin_utils"))
sys.path.insert(0, str(TESTS / "support"))
import past  # noqa: E402
from ansible.module_utils import sglang_history_read  # noqa: E402


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return a root with 96 runs of eight variants at four concurrencies."""
    folder = tmp_path_factory.mktemp("past") / "root"
    past.write_root(folder, 96, raw=64)
    return folder


@pytest.fixture(scope="session")
def history(root):
    """Return what is read of it, as it arrives on the controller."""
    return sglang_history_read.unpack(sglang_history_read.pack(sglang_history_read.read(str(root), 300)))
