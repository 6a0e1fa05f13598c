"""The systemd provider with a recorded command runner; a real systemd has a test of its own where one can boot."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_provider import ProviderError, Systemd


class Recorder:
    """A command runner that notes what it is asked and answers from a table."""

    def __init__(self, answers=None):
        self.calls, self.answers = [], answers or {}

    def __call__(self, argv):
        self.calls.append(" ".join(argv))
        return self.answers.get(argv[1], (0, "", ""))


@pytest.fixture
def host(tmp_path):
    """Return ``(provider maker, release, unit directory)``."""
    release = tmp_path / "releases" / "r1"
    release.mkdir(parents=True)
    (release / "sglang-server.service").write_text("[Unit]\n")
    units = tmp_path / "system"
    units.mkdir()

    def make(run, install):
        return Systemd(str(tmp_path), "sglang-server", run, install, unit_dir=str(units))

    return make, release, units


def test_the_link_needs_the_operators_word(host):
    make, release, units = host
    run = Recorder()
    with pytest.raises(ProviderError, match="sglang_server_install_unit: true"):
        make(run, False).prepare(str(release))
    assert run.calls == [] and list(units.iterdir()) == []


def test_the_link_follows_the_release(host):
    make, release, units = host
    run = Recorder()
    other = release.parent / "r2"
    other.mkdir()
    (other / "sglang-server.service").write_text("[Unit]\n")
    for path in (release, other, other):
        make(run, True).prepare(str(path))
        assert (units / "sglang-server.service").resolve() == path / "sglang-server.service"
    assert [item.name for item in units.iterdir()] == ["sglang-server.service"]
    assert run.calls == ["systemctl daemon-reload"] * 3
    # A link that is right needs no permission.
    make(run, False).prepare(str(other))


def test_a_unit_of_somebody_else_is_kept(host, tmp_path_factory):
    """A file, and a link into another root: neither replaced nor stopped."""
    make, release, units = host
    unit, theirs = units / "sglang-server.service", tmp_path_factory.mktemp("theirs") / "sglang-server.service"
    for put in (lambda: unit.write_text("theirs"), lambda: unit.symlink_to(theirs)):
        theirs.write_text("theirs")
        put()
        run = Recorder()
        with pytest.raises(ProviderError, match=r"not of this root.*sglang_server_unit"):
            make(run, True).prepare(str(release))
        make(run, True).settle()
        assert unit.read_text() == "theirs" and run.calls == []
        unit.unlink()


def test_a_link_that_leads_nowhere_is_replaced(host, tmp_path_factory):
    make, release, units = host
    unit = units / "sglang-server.service"
    unit.symlink_to(tmp_path_factory.mktemp("gone") / "sglang-server.service")
    make(Recorder(), True).prepare(str(release))
    assert unit.resolve() == release / "sglang-server.service"


def test_a_link_through_current_is_right_once_the_release_is_current(host, tmp_path):
    """An operator who installed it once need not give the word again."""
    make, release, units = host
    (units / "sglang-server.service").symlink_to(tmp_path / "current" / "sglang-server.service")
    assert make(Recorder(), False).permit(str(release), planned=True)
    with pytest.raises(ProviderError, match="outside the root"):
        make(Recorder(), False).permit(str(release))
    (tmp_path / "current").symlink_to("releases/r1")
    assert make(Recorder(), False).permit(str(release))


def test_start_pid_and_settle(host):
    make, release, _ = host
    show = "MainPID=4711\nActiveState=active\nSubState=running\nResult=success\n"
    run = Recorder({"show": (0, show, "")})
    provider = make(run, True)
    provider.prepare(str(release))
    provider.start()
    assert provider.pid() == (4711, "active/running, result success")
    provider.settle()
    assert not provider.close() and not provider.close(check_mode=True)
    assert run.calls[1:] == [
        "systemctl start sglang-server.service",
        "systemctl show --property=MainPID,ActiveState,SubState,Result sglang-server.service",
        "systemctl stop sglang-server.service",
        "systemctl reset-failed sglang-server.service",
    ]


def test_a_dead_unit_has_no_pid(host):
    make, _, _ = host
    run = Recorder({"show": (0, "MainPID=0\nActiveState=failed\nSubState=failed\nResult=signal\n", "")})
    assert make(run, True).pid() == (None, "failed/failed, result signal")


def test_settle_leaves_a_host_without_the_unit_alone(host):
    make, _, _ = host
    run = Recorder()
    make(run, True).settle()
    assert run.calls == []


def test_what_systemctl_says_is_in_the_message(host):
    make, _, _ = host
    run = Recorder({"start": (1, "", "Job for sglang-server.service failed.")})
    with pytest.raises(ProviderError, match=r"start sglang-server.service' ended with 1: Job for"):
        make(run, True).start()
