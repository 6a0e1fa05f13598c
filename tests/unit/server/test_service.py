"""Start and stop with a real supervisor and a scripted server of several processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from ansible.module_utils import (
    sglang_ledger,
    sglang_ports,
    sglang_proc,
    sglang_provider,
    sglang_service_core,
    sglang_stopped,
    sglang_terminate,
)

from .conftest import LOCK


def test_start_stop_and_both_again(node, monkeypatch):
    monkeypatch.setenv("LEAK", "from the operator's shell")
    path = node.release()
    dry = node.service("started", path, check=True)
    assert (dry["changed"], dry["pid"], dry["state"]) == (True, None, "running") and node.living() == []

    first = node.service("started", path)
    assert first["changed"] and not first.get("failed"), first
    processes = node.wait(4)
    server = next(item for item in processes if item["role"] == "server")
    assert server["pid"] == first["pid"] and first["started_at"].endswith("Z")
    assert first.keys() == dry.keys()
    env = sglang_proc.environ(first["pid"])
    assert "LEAK" not in env and not [name for name in env if name.startswith("SUPERVISOR")]
    watch = sglang_proc.stat_of(server["ppid"], "/proc")
    assert sglang_proc.cmdline(watch["pid"])[-1] == f"{path}/watch.py"
    supervisor = sglang_proc.environ(watch["ppid"])
    assert set(supervisor) == {"PATH", "HOME", "LANG"}

    again = node.service("started", path)
    assert not again["changed"] and again["pid"] == first["pid"] and again["reasons"] == []

    dry = node.service("stopped", check=True)
    assert dry["changed"] and len(dry["stopped"]) == 4 and len(node.living()) == 4
    stopped = node.service("stopped")
    assert stopped["changed"] and stopped["killed"] == [] and sorted(stopped["stopped"]) == sorted(dry["stopped"])
    assert node.living() == [] and sglang_proc.listeners(node.port) == []
    assert sglang_proc.cmdline(watch["pid"]) == sglang_proc.cmdline(watch["ppid"]) == []
    assert not node.service("stopped")["changed"]
    assert node.ledger() == [("start", "r1"), ("stop", "r1")]


def test_another_release_replaces_the_running_one(node):
    old, new = node.release("r1"), node.release("r2")
    node.service("started", old)
    node.wait(4)
    result = node.service("started", new)
    assert not result.get("failed"), result
    assert "processes of another release run: r1" in result["reasons"] and len(result["stopped"]) == 4
    assert {item["release"] for item in node.wait(4)} == {str(new)}
    assert node.ledger() == [("start", "r1"), ("stop", "r1"), ("start", "r2")]


@pytest.mark.parametrize("faults", [{"FAKE_SETSID": 1}, {"FAKE_LOSE": 1}, {"FAKE_ORPHANS": 1, "FAKE_SETSID": 1}])
def test_a_killed_server_leaves_nothing_behind(node, faults):
    node.service("started", node.release(**faults))
    server = next(item for item in node.wait(4) if item["role"] == "server")
    os.kill(server["pid"], signal.SIGKILL)
    result = node.service("stopped")
    assert not result.get("failed"), result
    assert node.living() == [] and sglang_proc.listeners(node.port) == []
    # The killed server itself may still be seen dying.
    assert len(set(result["stopped"]) - {server["pid"]}) == 3


def test_what_ignores_sigterm_is_killed_and_named(node):
    node.service("started", node.release(FAKE_IGNORE_TERM=1))
    node.wait(4)
    result = node.service("stopped", stop_timeout=1)
    assert sorted(item["role"] for item in result["killed"]) == ["detokenizer", "scheduler", "scheduler", "server"]
    assert {item["signal"] for item in result["killed"]} == {"SIGKILL"}
    assert node.living() == [] and result["elapsed"] >= 1


def test_orphans_that_ignore_the_end_of_their_server(node):
    node.service("started", node.release(FAKE_ORPHANS=1))
    node.wait(4)
    result = node.service("stopped")
    assert sorted(item["role"] for item in result["killed"]) == ["detokenizer", "scheduler", "scheduler"]
    assert node.living() == []


def test_a_start_clears_the_orphans_of_a_killed_run(node):
    path = node.release(FAKE_ORPHANS=1)
    node.service("started", path)
    server = next(item for item in node.wait(4) if item["role"] == "server")
    os.kill(server["pid"], signal.SIGKILL)
    result = node.service("started", path)
    assert not result.get("failed"), result
    assert len(result["stopped"]) == 3 and result["pid"] != server["pid"]
    assert len(node.wait(4)) == 4


def test_a_dead_scheduler_is_drift_and_a_start_heals_it(node):
    path = node.release()
    first = node.service("started", path)
    scheduler = next(item for item in node.wait(4) if item["role"] == "scheduler")
    os.kill(scheduler["pid"], signal.SIGKILL)
    result = node.service("started", path)
    assert result["changed"] and result["pid"] != first["pid"]
    # Once the port is open, the number of schedulers counts as well.
    assert f"scheduler pid {scheduler['pid']} is a zombie" in result["reasons"]
    assert len(node.wait(4)) == 4


def test_a_port_of_another_process_is_refused_and_the_process_lives(node):
    holder = subprocess.Popen([sys.executable, "-m", "http.server", str(node.port), "--bind", "127.0.0.1"])
    try:
        while not sglang_proc.listeners(node.port):
            assert holder.poll() is None
        result = node.service("started", node.release())
        assert result["failed"] and f"pid {holder.pid} " in result["msg"] and str(node.port) in result["msg"]
        assert "elapsed" in result and node.living() == [] and node.service("started", check=True, path=node.release())
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()


def test_a_stop_names_who_took_the_port_meanwhile(node):
    node.service("started", node.release())
    node.wait(4)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", node.port))
        other.bind(("127.0.0.2", node.port))
        other.listen()
        with pytest.raises(sglang_terminate.TerminateError) as caught:
            sglang_terminate.terminate(str(node.root), kill_timeout=0.5)
    assert f"port {node.port} is still taken by pid {os.getpid()} " in str(caught.value)
    assert caught.value.elapsed >= 0.5 and node.living() == []


def test_a_stop_names_who_has_a_derived_port(node):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        number = other.getsockname()[1]
        path = node.release()
        assert not node.launch(path, args={"nccl-port": number}).get("failed")
        node.service("started", path)
        node.wait(4)
        other.listen()
        with pytest.raises(sglang_terminate.TerminateError) as caught:
            sglang_terminate.terminate(str(node.root), kill_timeout=0.5)
    assert str(caught.value).startswith(f"port {number} is still taken by pid {os.getpid()} ")
    assert node.living() == []


@pytest.mark.parametrize(
    ("device", "mine", "fails"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_a_stop_names_who_holds_gpu_memory(node, tmp_path, monkeypatch, device, mine, fails):
    """What the driver has not taken back from a process of the release; another program's memory is its own."""
    path = node.release()
    assert not node.launch(path, args={"device": device}).get("failed")
    pid = node.service("started", path)["pid"]
    node.wait(4)
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{pid if mine else os.getpid()}, 512 MiB'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if fails:
        with pytest.raises(
            sglang_terminate.TerminateError, match=rf"GPU memory is still held by pid {pid} \(512 MiB\)"
        ):
            sglang_terminate.terminate(str(node.root), kill_timeout=0.5)
    else:
        assert pid in sglang_terminate.terminate(str(node.root), kill_timeout=0.5)["found"]
    assert node.living() == []


def test_the_service_module_says_what_for(node):
    path = node.release()
    node.service("started", path)
    node.wait(4)
    node.service("stopped", temporary=True, run={"id": "r7", "user": "ops"})
    assert sglang_stopped.read(str(node.root))["temporary"]
    # The next stop is somebody else's, although nothing runs.
    node.service("stopped", run={"id": "r8", "user": "other"})
    found = sglang_stopped.read(str(node.root))
    assert (found["user"], found["temporary"]) == ("other", False)
    assert not node.service("started", path).get("failed")
    assert sglang_stopped.read(str(node.root)) is None


def test_ports_of_a_launch():
    """As they stand in the launch line, in both spellings."""
    launch = {"argv": ["p", "--nccl-port=900", "--enable-dp-attention", "--port", "80"], "endpoint": "http://[::]:80"}
    assert sglang_ports.ports_of(launch) == {80, 900, *range(313, 320)}
    assert sglang_ports.ports_of({"argv": ["p", "--nccl-port", "x"], "endpoint": "http://h:80"}) == {80}
    assert sglang_ports.ports_of({}) == set()


def test_a_crash_at_once_is_reported_with_its_first_error(node):
    result = node.service("started", node.release(FAKE_CRASH="ValueError: no such model"))
    assert result["failed"] and "ValueError: no such model" in result["msg"] and "server.log" in result["msg"]
    assert result["pid"] is None and result["log_tail"][-1] == "ValueError: no such model"
    assert node.ledger() == [("alarm", "r1"), ("start", "r1")]


def promoted(node, **faults):
    """Start a release that is current and promoted; return its path and server."""
    path = node.release(**faults)
    (path / "manifest.json").write_text('{"state": "promoted"}')
    (node.root / "current").symlink_to(path)
    result = node.service("started", path)
    assert not result.get("failed"), result
    return path, next(item for item in node.wait(4) if item["role"] == "server")


def events(node, count):
    """Wait for so many events in the ledger and return the last."""
    end = time.monotonic() + 30
    while len(node.ledger()) < count:
        assert time.monotonic() < end, node.ledger()
        time.sleep(0.05)
    assert len(node.ledger()) == count
    return sglang_ledger.read(str(node.root))[0][-1]


def state(node):
    """Return the state that supervisor gives the program."""
    provider = sglang_provider.Supervisor(str(node.root), "sglang-server", None, sys.executable, LOCK.read_text())
    return provider.pid()[1].split()[0]


def test_supervisor_starts_a_killed_watch_again_which_counts_and_names_it(node):
    """A stop and a start by hand are neither counted nor refused afterwards, and a play's start begins anew."""
    path, server = promoted(node, FAKE_ORPHANS=1)
    os.kill(server["ppid"], signal.SIGKILL)
    event = events(node, 2)
    assert (event["event"], event["process"], event["why"]) == ("restart", "watch.py", "restart 1 of 3 in 120 minutes")
    assert f"watch.py (pid {server['ppid']}) was killed by SIGKILL, and the server with it" in event["reason"]
    again = next(item for item in node.wait(4) if item["role"] == "server")
    assert again["pid"] == event["pid"] and again["ppid"] != server["ppid"] and state(node) == "RUNNING"

    assert not node.service("stopped").get("failed") and node.living() == []
    assert not node.service("started", path).get("failed")
    node.wait(4)
    assert [name for name, _release in node.ledger()] == ["start", "restart", "stop", "start"]
    assert json.loads((path / "run/health.json").read_text())["restarts"] == []


def test_a_killed_watch_of_an_experiment_stays_down(node):
    path, server = promoted(node)
    (path / "manifest.json").write_text('{"state": "active"}')
    os.kill(server["ppid"], signal.SIGKILL)
    event = events(node, 2)
    assert (event["event"], event["kind"], event["process"]) == ("alarm", "server_died", "watch.py")
    assert event["why"] == "the release is active and only a promoted one is restarted"
    time.sleep(2.5)
    assert node.living() == [] and state(node) in ("EXITED", "FATAL") and len(node.ledger()) == 2
    result = node.service("started", path)
    assert not result.get("failed") and len(node.wait(4)) == 4


def test_an_interpreter_that_is_killed_at_once_is_tried_once(node, tmp_path):
    """Which looks like a killed watch; this one never came as far as to decide."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho tried >>{tmp_path}/tries\nkill -SEGV $$\n")
    python.chmod(0o755)
    path = node.release()
    assert not node.launch(path, python=str(python)).get("failed")
    result = node.service("started", path)
    assert result["failed"] and "died at once" in result["msg"]
    time.sleep(2.5)
    assert (tmp_path / "tries").read_text() == "tried\n" and state(node) == "FATAL"
    assert not node.launch(path).get("failed") and not node.service("started", path).get("failed")
    assert len(node.wait(4)) == 4


def test_an_interpreter_that_is_not_there(node):
    path = node.release()
    assert not node.launch(path, python="/no/such/python").get("failed")
    result = node.service("started", path)
    assert result["failed"] and "/no/such/python" in result["msg"]


def test_a_release_that_was_not_rendered(node):
    (node.root / "releases" / "r1").mkdir(parents=True)
    result = node.service("started", node.root / "releases" / "r1")
    assert result["failed"] and "launch.json is missing" in result["msg"]
    assert node.service("started", node.root / "releases" / "r1", check=True)["changed"]


def test_a_root_too_long_for_a_socket(node):
    node.root = node.root / ("x" * 90)
    result = node.service("started", node.release())
    node.root = node.root.parent
    assert result["failed"] and "sglang_server_root is too long" in result["msg"]


def test_each_start_has_a_log(node):
    path = node.release()
    for _ in range(4):
        node.service("started", path, log_keep=2)
        node.wait(4)
        node.service("stopped")
    assert sorted(os.listdir(path / "logs")) == ["server.log", "server.log.1", "server.log.2"]
    assert (path / "logs/server.log").read_text().count("fired up") == 1


@pytest.mark.parametrize("keep, names", [(0, []), (1, ["log.1"]), (3, ["log.1", "log.2", "log.3"])])
def test_rotate(tmp_path, keep, names):
    for name in ("log", "log.1", "log.2", "log.3", "log.9"):
        (tmp_path / name).write_text(name)
    sglang_service_core.rotate(str(tmp_path / "log"), keep)
    assert sorted(os.listdir(tmp_path)) == names
    if keep:
        assert (tmp_path / "log.1").read_text() == "log"
    sglang_service_core.rotate(str(tmp_path / "log"), keep)
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(
    "lines, error",
    [
        (
            ["INFO ok", "Traceback (most recent call last):", "  File x", "OSError: gone", "KeyError: later"],
            "OSError: gone",
        ),
        (
            ["launch_server.py: error: unrecognized arguments: --x"],
            "launch_server.py: error: unrecognized arguments: --x",
        ),
        (["/usr/bin/python3: No module named sglang"], "/usr/bin/python3: No module named sglang"),
        (["torch.cuda.OutOfMemoryError: CUDA out of memory"], "torch.cuda.OutOfMemoryError: CUDA out of memory"),
        (["Killed", ""], "Killed"),
        ([], ""),
    ],
)
def test_first_error(lines, error):
    assert sglang_service_core.first_error(lines) == error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start the server as another account")
def test_a_service_account(node):
    import pwd

    os.chmod(node.root, 0o755)
    path = node.release()
    assert not node.launch(path, user="nobody", python="/usr/bin/python3", api_key="").get("failed")
    result = node.service("started", path)
    assert not result.get("failed"), result
    assert {item["uid"] for item in node.wait(4)} == {pwd.getpwnam("nobody").pw_uid}
    assert sglang_proc.environ(result["pid"])["USER"] == "nobody"
