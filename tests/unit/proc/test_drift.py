"""Live processes against launch.json."""

from __future__ import annotations

import time

import pytest
from ansible.module_utils import sglang_proc

ARGV = ["python", "-m", "sglang.launch_server", "--tp-size", "2"]


@pytest.fixture
def live(root, proc):
    """Return ``(launch, env, add)`` of a healthy server with two ranks; ``add`` replaces or adds processes."""
    release = f"{root}/releases/r1"
    env = {"SGLANG_DEPLOY_RELEASE": release, "NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    launch = {
        "argv": ARGV,
        "cwd": release,
        "env": {"SGLANG_DEPLOY_RELEASE": release},
        "tp_size": 2,
        "endpoint": "http://127.0.0.1:30000",
        "log": f"{release}/logs/server.log",
        "expect": {"env": {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "packages": {}, "args": {}},
    }
    proc.add(10, ARGV, env)
    proc.add(11, ["sglang::scheduler_TP0"], env, ppid=10, pgid=10)
    return launch, env, str(root)


def drift(live, proc, **more):
    """Return the drift of the live processes."""
    return sglang_proc.drift(live[0], live[2], proc=str(proc), **more)


def healthy(live, proc):
    """Add the second rank."""
    proc.add(12, ["sglang::scheduler_TP1"], live[1], ppid=10, pgid=10)


def test_none(live, proc):
    healthy(live, proc)
    assert drift(live, proc) == []


def test_it_takes_less_than_50_ms(live, proc):
    healthy(live, proc)
    for pid in range(1000, 2000):
        proc.add(pid, ["other"], {"A": "b" * 2000})
    begin = time.perf_counter()
    assert drift(live, proc) == []
    # Twice the wanted figure: the machine that runs the tests may be busy.
    assert time.perf_counter() - begin < 0.1


def test_rank_missing(live, proc):
    assert drift(live, proc) == ["1 scheduler processes run, 2 are expected"]
    assert drift(live, proc, loading=True) == []


def test_zombie_scheduler_counts_even_while_loading(live, proc):
    proc.add(12, [], {}, state="Z", ppid=10, pgid=10, comm="sglang::schedul")
    assert drift(live, proc, loading=True) == ["scheduler pid 12 is a zombie"]


def test_no_server(live, proc, root):
    live[0]["argv"] = ["other"]
    healthy(live, proc)
    assert drift(live, proc) == ["the server runs with other arguments than launch.json"]
    (proc.path / "10" / "environ").write_text("")
    (proc.path / "10" / "stat").write_text((proc.path / "10" / "stat").read_text().replace(") S", ") Z"))
    assert drift(live, proc) == ["no server process runs"]


def test_another_release(live, proc, root):
    healthy(live, proc)
    proc.add(20, ARGV, {"SGLANG_DEPLOY_RELEASE": f"{root}/releases/r2"})
    assert drift(live, proc) == ["processes of another release run: r2"]


def test_environment_of_the_server(live, proc):
    healthy(live, proc)
    live[0]["env"]["OMP_NUM_THREADS"] = "1"
    assert drift(live, proc) == ["the server's environment differs from launch.json in OMP_NUM_THREADS"]


@pytest.mark.parametrize("value", [None, "Tree"])
def test_environment_of_a_worker(live, proc, value):
    env = dict(live[1])
    env.pop("NCCL_ALGO")
    proc.add(12, ["sglang::scheduler_TP1"], dict(env, **({"NCCL_ALGO": value} if value else {})), ppid=10, pgid=10)
    assert drift(live, proc) == ["scheduler pid 12 does not hold the expected NCCL_ALGO"]


def test_overwritten_title_is_no_drift(live, proc):
    proc.add(12, ["sglang::scheduler_TP1"], {}, ppid=10, pgid=10)
    assert drift(live, proc) == []


@pytest.mark.parametrize(
    "args, count",
    [
        ({}, 2),
        ({"pp-size": 2}, 4),
        ({"dp-size": "2"}, 4),
        ({"dp-size": 2, "enable-dp-attention": True}, 2),
        ({"nnodes": 2}, 1),
    ],
)
def test_expected_schedulers(args, count):
    assert sglang_proc.expected_schedulers({"tp_size": 2, "expect": {"args": args}}) == count


@pytest.mark.parametrize(
    "endpoint, port",
    [("http://127.0.0.1:30000", 30000), ("http://[::1]:8000/", 8000), ("http://x", None), (None, None)],
)
def test_port_of(endpoint, port):
    assert sglang_proc.port_of({"endpoint": endpoint}) == port
