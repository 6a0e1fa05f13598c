"""A stop that was wanted: who, when, and whether the run meant to start the server again."""

from __future__ import annotations

import os

from ansible.module_utils import sglang_stopped

RUN = {"id": "r7", "user": "ops"}


def test_who_stopped_it_and_for_how_long(tmp_path):
    root = str(tmp_path)
    assert sglang_stopped.read(root) is None and sglang_stopped.left(None) == ""
    sglang_stopped.write(root, RUN, "stopped", False)
    found = sglang_stopped.read(root)
    assert found["time"].startswith("20") and (found["user"], found["temporary"]) == ("ops", False)
    assert sglang_stopped.left(found) == ""
    sglang_stopped.write(root, RUN, "stopped", True)
    found = sglang_stopped.read(root)
    assert f"at {found['time']} by ops for a canary in its place" in sglang_stopped.left(found)
    # A start stops what runs first; killed in between, nobody wanted a stop.
    sglang_stopped.write(root, RUN, "started", False)
    assert sglang_stopped.read(root) is None


def test_the_file_of_an_earlier_version(tmp_path):
    path = tmp_path / "stopped"
    for text in ("", "[]", '{"schema": 1, "run": "r7"}'):
        path.write_text(text)
        os.utime(path, (0, 0))
        assert sglang_stopped.read(str(tmp_path)) == {"time": "1970-01-01T00:00:00Z", "user": None, "temporary": False}
