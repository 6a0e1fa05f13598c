"""The verbs on a host whose service manager is a real systemd, over ssh, with the scripted server.

One host for all: each test begins where a promoted baseline serves, wherever the one before ended.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import pytest
from booted_host import ACCOUNT
from deployment import marked, variables_of, wait_for
from engines import fault


@pytest.fixture(scope="module")
def host(make_host):
    return make_host()


@pytest.fixture
def serving(host):
    """Return ``(host, id of the release that serves)``."""
    if not (host.root / "current").exists() or host.unit("ActiveState") != "active":
        host.deploy("baseline").succeeded()
    return host, host.current


def test_deploy(serving):
    """The unit is the release's and has no fault; the server runs as the account, its workers have the variables.

    The unit's main process is the watch, which stays the account that deployed.
    """
    host, release = serving
    path = f"{host.root}/releases/{release}"
    pid = host.serves(release)
    assert host.link == f"{path}/sglang-server.service"
    judged = host.container.ssh("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", host.link)
    assert judged.stdout + judged.stderr == ""
    shown = host.unit("ActiveState", "MainPID", "NRestarts", "UnitFileState", "KillMode", "Restart", "OOMPolicy")
    watch = marked(host.root)[pid]
    assert shown.pop("MainPID") == pathlib.Path(f"/proc/{watch}/status").read_text().partition("NSpid:")[2].split()[1]
    assert os.stat(f"/proc/{watch}").st_uid == 0
    assert shown == {
        "ActiveState": "active",
        "NRestarts": "0",
        "UnitFileState": "linked",
        "KillMode": "mixed",
        "Restart": "on-abnormal",
        "OOMPolicy": "continue",
    }
    account = int(host.container.ssh("id", "-u", ACCOUNT).stdout)
    assert {os.stat(f"/proc/{one}").st_uid for one in marked(host.root)} == {account}
    assert host.launch()["expect"]["env"]["NCCL_PROTO"] == "LL"
    assert len(host.workers()) == 1
    for worker in host.workers():
        variables = variables_of(worker)
        assert host.launch()["expect"]["env"].items() <= variables.items()
        assert "SSH_CONNECTION" not in variables
    assert "fired up and ready to roll" in host.log(release)
    # NCCL pins memory: the server takes all that this machine lets systemd give.
    assert host.unit("LimitMEMLOCK") == "infinity"
    limits = pathlib.Path(f"/proc/{pid}/limits").read_text().splitlines()
    soft, hard = next(line.split()[3:5] for line in limits if line.startswith("Max locked memory"))
    assert soft == hard


def test_the_second_deploy_changes_nothing(serving):
    """Here without pipelining: each module is copied to the host."""
    host, release = serving
    pid = host.serves(release)
    again = host.deploy("baseline", ansible_pipelining=False).succeeded()
    assert again.recap["changed"] == 0
    assert host.serves(release) == pid


def test_a_refused_switch_leaves_the_server_alone(serving):
    host, release = serving
    pid = host.serves(release)
    host.deploy("fewchan", sglang_server_install_unit=False).refused("sglang_server_install_unit: true")
    assert host.serves(release) == pid


def test_switch_and_rollback(serving):
    host, release = serving
    host.deploy("fewchan").succeeded()
    other = host.current
    assert other != release and host.link == f"{host.root}/releases/{other}/sglang-server.service"
    host.serves(other)
    host.run("rollback").succeeded()
    assert host.link == f"{host.root}/releases/{release}/sglang-server.service"
    host.serves(release)
    assert host.unit("NRestarts") == "0"


def restarted(host, pid):
    """Return the pid of the server that follows one that was killed, once it serves."""

    def serves():
        # Children of the killed one live a moment longer: they look like a server, and keep its socket open.
        try:
            found = host.serves(host.current)
        except (AssertionError, OSError):
            return None
        log = host.root / "releases" / host.current / "logs" / "server.log"
        return found if found != pid and "ready to roll" in log.read_text() else None

    return wait_for(serves, "another server serves", 40)


def test_a_promoted_release_is_restarted_until_the_limit(serving):
    """Each restart has its reason and a log; then the unit has failed, and status says why and what to do."""
    host, release = serving
    if not host.ledger("restart"):
        pid = host.server
        time.sleep(1.5)  # the watch looks each second at first
        os.kill(host.workers()[0], signal.SIGKILL)  # as the OOM killer does; the parent lives on
        pid = restarted(host, pid)
        assert host.ledger("restart")[-1]["process"] == "sglang::scheduler" and len(host.workers()) == 1
    for number in (2, 3):
        pid = host.server
        os.kill(pid, signal.SIGKILL)
        assert restarted(host, pid) != pid
        event = host.ledger("restart")[-1]
        assert event["why"] == f"restart {number} of 3 in 120 minutes" and event["status"] == "killed by SIGKILL"
    assert host.unit("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    logs = host.root / "releases" / release / "logs"
    assert all("ready to roll" in (logs / f"server.log{end}").read_text() for end in ("", ".1", ".2", ".3"))
    account = int(host.container.ssh("id", "-u", ACCOUNT).stdout)
    assert {os.stat(f"/proc/{one}").st_uid for one in marked(host.root)} == {account}
    assert host.deploy("baseline").succeeded().recap["changed"] == 0

    os.kill(host.server, signal.SIGKILL)
    wait_for(lambda: host.unit("ActiveState") == "failed", "the unit has failed", 20)
    # By a signal of its own systemd would start the unit again.
    assert host.unit("Result", "ExecMainStatus", "NRestarts") == {
        "Result": "exit-code",
        "ExecMainStatus": "137",
        "NRestarts": "0",
    }
    host.nothing_runs("failed")
    said = host.run("status").succeeded().said
    for words in (
        "no server process runs",
        "restarted 3 times in 120 minutes",
        "deploy.yml starts it",
        "restarted at ",
    ):
        assert words in said, said
    host.deploy("baseline").succeeded()
    host.serves(release)
    assert "alarm" not in host.run("status").succeeded().said


def test_an_experiment_is_not_restarted_and_a_start_that_fails_is_not_repeated(serving):
    """No restart hides a crash; a start that fails after two seconds has one reason; the release before returns."""
    host, release = serving
    restarts = len(host.ledger("restart"))
    host.deploy("fewchan", promote=False).succeeded()
    os.kill(host.server, signal.SIGKILL)
    wait_for(lambda: host.unit("ActiveState") == "failed", "the unit has failed", 10)
    time.sleep(3)
    host.nothing_runs("failed")
    assert "only a promoted one is restarted" in host.run("status").succeeded().said
    host.run("rollback").succeeded()

    starts = len(host.ledger("start"))
    crash = fault(phases={"imports": 2}, crash={"phase": "distributed", "log": "bad_flag"})
    host.deploy("fewchan", **crash).refused("unrecognized arguments", "is rejected", "serves again")
    host.serves(release)
    assert len(host.ledger("start")) == starts + 2
    assert len(host.ledger("restart")) == restarts and host.unit("NRestarts") == "0"


def test_stop_reboot_and_start_by_hand(serving):
    """A stop leaves nothing, a reboot starts nothing, and the current release can be started without Ansible."""
    host, release = serving
    restarts = len(host.ledger("restart"))
    host.run("stop").succeeded()
    time.sleep(3)
    host.nothing_runs()
    assert len(host.ledger("restart")) == restarts
    assert host.current == release
    host.container.ssh("systemctl", "start", "sglang-server")
    wait_for(lambda: not host.port_is_free(), "the server listens", 20)
    host.container.halt()
    assert marked(host.root) == {}
    host.container.boot()
    # Nobody enabled the unit.
    host.nothing_runs()
    host.container.ssh("systemctl", "start", "sglang-server")
    wait_for(lambda: not host.port_is_free(), "the server listens", 20)
    pid = host.serves(release)
    assert host.deploy("baseline").succeeded().recap["changed"] == 0
    assert host.serves(release) == pid


def test_the_lock_of_another_controller(serving):
    """It is named, it is not broken, and the server is left alone."""
    host, release = serving
    pid = host.server
    held = {"id": "elsewhere", "controller": "ops2", "boot_id": "b", "pid": 1, "pid_start": 1, "user": "ops"}
    lock = host.root / "lock"
    lock.write_text(json.dumps({"schema": 1, "run": held, "variant": "fewchan", "since": "2026-01-01T00:00:00Z"}))
    try:
        host.deploy("fewchan").refused("elsewhere", "ops2", "one deploy at a time")
    finally:
        lock.unlink()
    assert host.serves(release) == pid
