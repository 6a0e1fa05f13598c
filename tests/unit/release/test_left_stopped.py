"""A server that was stopped for a canary in its place, whose run was killed."""

from __future__ import annotations

from ansible.module_utils import sglang_stopped


def test_a_run_is_told_of_a_server_that_a_killed_canary_left_stopped(host):
    """As a warning where it can go on, with the reason where it cannot."""
    _first, second = host.deploy("a"), host.deploy("b")
    sglang_stopped.write(host.root, {"id": "r7", "user": "ops"}, "stopped", True)
    for state in ("locked", "target"):
        result = host.ok(state)
        assert "by ops for a canary in its place" in str(result["warnings"])
        assert result["plan"]["stopped"]["temporary"]
        host.ok("unlocked")
    assert host.ok("reported")["info"]["stopped"]["ended"]
    assert "for a canary in its place" in host.call("target", release=second)["msg"]
    sglang_stopped.write(host.root, {"id": "r7", "user": "ops"}, "stopped", False)
    assert not host.ok("target")["plan"]["stopped"]["temporary"]
