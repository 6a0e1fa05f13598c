"""Who holds the deploy lock in the eyes of the program that stays beside a server."""

from __future__ import annotations

import json
import socket
import subprocess
import time

from ansible.module_utils import sglang_launch_policy, sglang_launch_watch, sglang_lock, sglang_proc


def test_a_killed_run_of_this_host_holds_no_lock(tmp_path):
    """Judged as the deploy judges it, or a crash after a killed benchmark.yml would wait for the heartbeat's limit."""
    other = subprocess.Popen(["sleep", "60"])
    run = {"id": "r7", "user": "ops", "controller": socket.gethostname(), "boot_id": sglang_proc.boot_id()}
    run.update(pid=other.pid, pid_start=sglang_launch_watch.stat_of(other.pid)[3], pid_ns=sglang_lock.pid_namespace())
    asking = {"id": "r8", "controller": "elsewhere"}

    def held(**more):
        (tmp_path / "lock").write_text(json.dumps({"run": {**run, **more}}))
        mine = bool(sglang_launch_policy.holder(str(tmp_path)))
        assert mine == (sglang_lock.judge(sglang_lock.read(str(tmp_path)), asking)[0] is not False)
        return mine

    try:
        assert held()
        assert not held(pid_start=run["pid_start"] + 1)
        assert held(boot_id="another")
        assert not sglang_lock.machine_id() or not held(boot_id="another", machine_id=sglang_lock.machine_id())
        assert held(boot_id="another", machine_id="0" * 32)
        assert held(pid_ns="pid:[1]", pid_start=0) and held(controller="a third", pid_start=0)
        assert held(boot_id=None, pid_start=0)
    finally:
        other.kill()
    while sglang_launch_watch.stat_of(other.pid)[1] != "Z":
        time.sleep(0.01)
    assert not held()
    other.wait()
    assert not held()
