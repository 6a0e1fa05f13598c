"""A start that makes its release the current one: when the link moves, and when it stays."""

from __future__ import annotations

import os
import socket

import pytest
from ansible.module_utils import sglang_lock, sglang_release_store

OLD, NEW = "20260101T000000Z-baseline-0a1b2c3d4e5f", "20260102T000000Z-fewchan-1a1b2c3d4e5f"
RUN = {"id": "run-1", "user": "operator", "controller": "here"}


@pytest.fixture
def sealed(node):
    """Return ``sealed(name, state="built")``: the path of a rendered release with a manifest."""

    def make(name, state="built"):
        path = node.release(name)
        _, variant, digest = sglang_release_store.parse_id(name)
        manifest = {"schema": sglang_release_store.SCHEMA, "id": name, "variant": variant, "digest": digest}
        manifest.update(state=state, created="2026-01-01T00:00:00.000Z", run="r", record={}, history=[])
        manifest["files"] = {"count": 1, "bytes": 1, "sha256": "0" * 64} if state != "building" else None
        sglang_release_store.write_manifest(str(path), manifest)
        return path

    return make


def current(node):
    """Return the id that the link names, or None."""
    return sglang_release_store.read_current(str(node.root))


def start(node, path, **more):
    """Start with activation."""
    return node.service("started", path, **{"activate": True, "run": RUN, "reason": "because", **more})


def test_the_link_moves_before_the_old_server_stops(node, sealed):
    old, new = sealed(OLD), sealed(NEW)
    first = start(node, old)
    assert not first.get("failed") and first["activation"]["msg"] == f"current: none -> {OLD}" and current(node) == OLD
    node.wait(4)
    dry = start(node, new, check=True)
    assert dry["activation"]["changed"] and f"current -> {NEW}" in dry["activation"]["after"] and current(node) == OLD
    second = start(node, new)
    assert second["changed"] and current(node) == NEW and len(second["stopped"]) == 4
    events = [("activated", OLD), ("start", OLD), ("activated", NEW), ("stop", OLD), ("start", NEW)]
    assert node.ledger() == events
    manifest = sglang_release_store.read_manifest(str(new))
    assert manifest["state"] == "active" and manifest["history"][-1]["reason"] == "because"
    assert sglang_lock.read(str(node.root)) is None
    again = start(node, new)
    assert not again["changed"] and again["pid"] == second["pid"] and again["activation"]["changed"] is False


def test_a_running_server_of_another_link_only_moves_the_link(node, sealed):
    path = sealed(OLD)
    pid = node.service("started", path)["pid"]
    node.wait(4)
    result = start(node, path)
    assert result["changed"] and result["pid"] == pid and result["stopped"] == [] and current(node) == OLD


def test_what_may_not_start_does_not_become_current(node, sealed):
    with socket.create_server(("127.0.0.1", node.port)):
        result = start(node, sealed(OLD))
    assert result["failed"] and "is taken by" in result["msg"] and result["activation"] is None
    assert current(node) is None and node.ledger() == []


def test_an_unfinished_release_stops_nothing(node, sealed):
    old, new = sealed(OLD), sealed(NEW, "building")
    pid = start(node, old)["pid"]
    node.wait(4)
    result = start(node, new)
    assert result["failed"] and "was never finished" in result["msg"] and current(node) == OLD
    assert os.path.exists(f"/proc/{pid}") and len(node.living()) == 4


def test_the_lock_of_another_run_is_respected(node, sealed):
    path = sealed(OLD)
    sglang_lock.acquire(str(node.root), {"id": "other", "user": "x", "controller": "elsewhere"})
    result = start(node, path)
    assert result["failed"] and "is held by" in result["msg"] and current(node) is None and node.living() == []


def test_a_link_needs_a_run(node, sealed):
    result = start(node, sealed(OLD), run={})
    assert result["failed"] and result["msg"].startswith("run: ")
