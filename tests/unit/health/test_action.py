"""The actions sglang_health and sglang_proof in a real playbook run: what the terminal shows while the module waits."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import yaml
from ansible.module_utils import sglang_watch_progress
from ansible.release import __version__ as ansible_version
from packaging.version import Version

# Older ones serve the unit tests of modules under old Pythons; playbooks refuse them.
pytestmark = pytest.mark.skipif(Version(ansible_version) < Version("2.19"), reason="a controller has ansible-core 2.19")


@pytest.fixture
def playbook(repository, tmp_path):
    """Return ``playbook(release, callback="default", module="sglang_health")`` which starts a run of one task."""

    def run(release, callback="default", module="sglang_health"):
        wait = {"generations": 1}
        more = wait if module == "sglang_health" else {"wait": wait, "device": "cpu", "soak_requests": 0}
        task = {"release": str(release.path), "python": sys.executable, **more}
        play = {"hosts": "node", "gather_facts": False, "tasks": [{"name": "Wait", module: task}]}
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        inventory = {"all": {"hosts": {"node": {"ansible_connection": "local"}}}}
        inventory["all"]["hosts"]["node"]["ansible_python_interpreter"] = sys.executable
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
        command = [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "-i", str(tmp_path / "hosts.yml")]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
            "ANSIBLE_STDOUT_CALLBACK": callback,
            "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp"),
        }
        return subprocess.Popen(
            [*command, str(tmp_path / "play.yml")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )

    return run


@pytest.mark.parametrize("module", ["sglang_health", "sglang_proof"])
def test_the_terminal_shows_the_progress_and_json_stays_json(module, start, playbook, tmp_path):
    release = start({"phases": {"weights": 8}, "shards": 16})
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks/only_json.py").write_text(ONLY_JSON)
    os.environ["ANSIBLE_CALLBACK_PLUGINS"] = str(tmp_path / "callbacks")
    try:
        output, errors = playbook(release, "only_json", module).communicate(timeout=120)
    finally:
        del os.environ["ANSIBLE_CALLBACK_PLUGINS"]
    result = json.loads(output)
    assert result.get("health", result)["ready"], errors
    lines = [line for line in errors.splitlines() if line.startswith("node: phase ")]
    assert any("phase weights" in line and "% of it" in line and " s elapsed" in line for line in lines), errors
    assert any("left of this phase" in line for line in lines), errors


def test_a_failure_is_that_of_the_module(start, playbook):
    release = start({"crash": {"phase": "weights", "log": "missing_shard"}})
    output, _errors = playbook(release).communicate(timeout=120)
    assert "[missing_shard]" in output and "failed=1" in output


def test_a_killed_controller_leaves_no_waiter(start, playbook):
    release = start({"hang": {"phase": "weights"}})
    run = playbook(release)
    while not (data := sglang_watch_progress.read(str(release.path))):
        time.sleep(0.1)
        assert run.poll() is None
    run.send_signal(signal.SIGKILL)
    run.communicate()
    waiter, end = data["waiter"], time.monotonic() + 30
    while os.path.exists(f"/proc/{waiter}") and not dead(waiter):
        assert time.monotonic() < end, "the module still waits"
        time.sleep(0.1)


def dead(pid):
    """Return whether a process is gone or a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


ONLY_JSON = '''
import json
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: only_json
type: stdout
short_description: Print one result
description: Nothing else.
"""


class CallbackModule(CallbackBase):
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "only_json"

    def v2_runner_on_ok(self, result):
        print(json.dumps(result.result, default=str))

    v2_runner_on_failed = v2_runner_on_ok
'''
