"""The action saves the call of the module where another call has read the host, in a real playbook run."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from ansible.release import __version__ as ansible_version
from deployment import extra, play
from packaging.version import Version

# Older ones serve the unit tests of modules under old Pythons; playbooks refuse them.
pytestmark = pytest.mark.skipif(Version(ansible_version) < Version("2.19"), reason="a controller has ansible-core 2.19")

ERROR = {
    "rung": "precheck",
    "rule": "port-taken",
    "level": "error",
    "message": "port 1 is taken by another program.",
    "evidence": "pid 4711",
    "advice": "stop it",
}
FOUND = {"findings": [ERROR], "verdict": {"ok": False, "failures": ["port-taken"]}, "elapsed": 0.1}


@pytest.fixture
def checked(tmp_path):
    """Return ``checked(*arguments, **options)``: runs one task of the action, returns its outcome and result."""

    def run_task(*arguments, **options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            number = free.getsockname()[1]
        engine = {"mode": "build", "version": "0.5.9", "root": str(tmp_path / "e"), "base_python": sys.executable}
        given = {"root": str(tmp_path / "r"), "engine": engine, "port": number, "device": "cpu", "python_range": ""}
        given.update(engine_mb=10, **options)
        book = {"name": "Try", "hosts": "localhost", "connection": "local", "gather_facts": False}
        book["tasks"] = [{"name": "Check", "sglang_precheck": given}]
        (tmp_path / "play.yml").write_text(json.dumps([book]))
        done = play(
            tmp_path / "play.yml", "-i", "localhost,", *extra(ansible_python_interpreter=sys.executable), *arguments
        )
        return done, done.events[-2]["result"]

    return run_task


def test_what_was_found_is_judged_and_the_module_is_not_called(checked):
    done, result = checked("-vvv", found=FOUND, env={"HF_TOKEN": "hf_abcdefgh"})
    assert done.rc != 0 and len(done.failures) == 1 and not result["changed"]
    assert (
        result["msg"] == "[precheck/port-taken] port 1 is taken by another program. Seen: pid 4711. Way out: stop it."
    )
    assert {key: result[key] for key in FOUND} == FOUND
    assert "AnsiballZ_sglang_precheck" not in done.out and "hf_abcdefgh" not in done.out
    done, result = checked(found=FOUND, enforce=False)
    assert done.rc == 0 and {key: result[key] for key in FOUND} == FOUND


def test_a_host_that_nobody_has_read_is_read(checked):
    for arguments in ((), ("--check",)):
        done, result = checked(*arguments, found={})
        assert done.rc == 0 and result["verdict"]["ok"], done.out
        assert "gpu" in [item["rule"] for item in result["findings"]]
    done, result = checked(user="no-such-user")
    assert done.rc != 0 and "[precheck/service-user]" in result["msg"]
