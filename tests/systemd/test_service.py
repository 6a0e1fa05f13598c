"""The service module against a real systemd: what the verbs would take too long to show."""

from __future__ import annotations

import json
import os
import signal

import pytest
from deployment import marked, wait_for


@pytest.fixture(scope="module")
def other(make_host):
    """Return a root with a unit of another name, whose releases are made by the modules alone."""
    return make_host(sglang_server_unit="sglang-other")


def started(host, release, **script):
    """Start a release whose server follows a script of faults; return the module's result."""
    rendered = host.render(release, env={"FAKE_SGLANG_SCRIPT": json.dumps(script)})
    assert not rendered["failed"], rendered
    result = host.service("started", release)
    assert not result["failed"], result
    wait_for(lambda: not host.port_is_free(), "the server listens", 20)
    return result


def add_unmarked(host):
    """Put a process without the marker, in its own session, into the unit's control group; return its pid inside."""
    group = f"system.slice/{host.name}.service/cgroup.procs"
    line = "env -i setsid sleep 900 >/dev/null 2>&1 </dev/null & p=$!; for f in systemd unified .; do "
    line += f"g=/sys/fs/cgroup/$f/{group}; [ ! -e $g ] || echo $p >$g; done; echo $p"
    pid = host.container.ssh(line).stdout.strip()
    assert pid in host.in_control_group()
    return pid


def test_the_unit_needs_the_operators_word(other):
    """Nothing outside the root without it, and the message says how."""
    refusal = other.render("r1", install_unit=False)
    assert refusal["failed"], refusal
    for words in (other.link_path, "outside the root", "sglang_server_install_unit: true", "provider: supervisor"):
        assert words in refusal["msg"]
    assert other.link is None and not other.root.exists()


def test_a_start_that_dies_at_once(other):
    """The first error of the log is the message, and it is tried once."""
    other.render("r1", env={"FAKE_SGLANG_SCRIPT": '{"nonsense": 1}'})
    result = other.service("started", "r1")
    assert result["failed"] and "died at once" in result["msg"] and "unknown keys" in result["msg"], result
    assert "exit-code" in result["msg"]
    assert other.unit("NRestarts") == "0"
    other.nothing_runs("failed")


def test_stop_takes_what_only_systemd_knows(other):
    """A server deaf to SIGTERM, workers in sessions of their own, a child without marker: all are in the group."""
    started(other, "r2", ignore_term=True, setsid=True, orphans=True)
    add_unmarked(other)
    result = other.service("stopped", stop_timeout=1)
    assert result["changed"] and not result["failed"], result
    assert [item["role"] for item in result["killed"]].count("server") == 1, result
    other.nothing_runs()
    assert other.service("stopped")["changed"] is False


def test_crash_takes_the_children_that_left(other):
    """SIGKILL of the server alone; the workers would outlive it."""
    started(other, "r3", setsid=True, orphans=True)
    add_unmarked(other)
    assert len(marked(other.root)) > 1
    os.kill(other.server, signal.SIGKILL)
    wait_for(lambda: other.unit("ActiveState") == "failed", "the unit has failed", 15)
    other.nothing_runs("failed")


def test_a_killed_watch_is_started_again_by_systemd_and_the_policy_counts_it(other):
    """The unit's main process alone is killed: a restart with the signal's name, twice; an experiment stays down."""
    started(other, "r8", setsid=True, orphans=True)
    manifest = other.root / "releases" / "r8" / "manifest.json"
    manifest.write_text('{"state": "promoted"}')
    other.container.ssh("ln", "-sfn", "releases/r8", f"{other.root}/current")
    for number, name in ((1, "KILL"), (2, "SEGV")):
        old = set(marked(other.root))
        other.container.ssh("systemctl", "kill", "--kill-who=main", f"--signal={name}", other.name)
        wait_for(lambda number=number: len(other.ledger("restart")) == number, "the restart", 30)
        event = other.ledger("restart")[-1]
        assert event["process"] == "watch.py" and f"was killed by SIG{name}, and the server with it" in event["reason"]
        assert event["why"] == f"restart {number} of 3 in 120 minutes"
        wait_for(lambda: not other.port_is_free(), "the server listens", 20)
        assert not old & set(marked(other.root)) and other.unit("ActiveState") == "active"
    manifest.write_text('{"state": "active"}')
    other.container.ssh("systemctl", "kill", "--kill-who=main", "--signal=KILL", other.name)
    wait_for(lambda: other.unit("ActiveState") == "failed", "the unit has failed", 20)
    assert other.unit("Result", "NRestarts") == {"Result": "exit-code", "NRestarts": "3"}
    other.nothing_runs("failed")
    event = other.ledger("alarm")[-1]
    assert (event["kind"], event["process"]) == ("server_died", "watch.py") and "only a promoted one" in event["why"]

    # By hand it starts, and a stop is a stop.
    other.container.ssh("systemctl", "start", other.name)
    wait_for(lambda: not other.port_is_free(), "the server listens", 20)
    other.container.ssh("systemctl", "stop", other.name)
    other.nothing_runs()
    assert len(other.ledger("restart")) == 2


def test_the_unit_of_another_root_is_left_alone(other, make_host):
    """Two roots with one name of a unit: the second is refused, and its stop does not stop the first."""
    started(other, "r4")
    pid = other.server
    second = make_host(sglang_server_unit="sglang-other")
    refusal = second.render("r1")
    assert refusal["failed"] and "not of this root" in refusal["msg"] and "sglang_server_unit" in refusal["msg"]
    assert second.service("stopped")["changed"] is False
    assert other.server == pid and other.unit("ActiveState") == "active"


def test_a_unit_whose_release_is_gone(other):
    """A link that leads nowhere stops neither the stop nor the next start."""
    other.service("stopped")
    other.container.ssh("rm", "-r", f"{other.root}/releases/{os.path.basename(os.path.dirname(other.link))}")
    other.container.ssh("systemctl", "daemon-reload")
    assert not other.service("stopped")["failed"]
    started(other, "r5")


def test_an_interpreter_that_cannot_be_run(other):
    """Type=exec: systemctl itself reports it."""
    other.render("r6", python="/opt/none/bin/python3")
    result = other.service("started", "r6")
    assert result["failed"] and "systemctl start sglang-other.service" in result["msg"], result
    other.service("stopped")
    other.nothing_runs()


def test_a_link_of_the_operator_through_current_needs_no_permission(other):
    """Installed once by hand, it follows every switch."""
    other.container.ssh("ln", "-sfn", f"{other.root}/current/{other.name}.service", other.link_path)
    assert not other.render("r7", install_unit=False)["failed"]
    other.container.ssh("ln", "-sfn", "releases/r7", f"{other.root}/current")
    result = other.service("started", "r7", install_unit=False)
    assert not result["failed"], result
    assert other.link == f"{other.root}/current/{other.name}.service"
    assert other.unit("ActiveState") == "active"
