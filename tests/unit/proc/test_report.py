"""What verify learns from the live workers."""

from __future__ import annotations

import json
import pathlib
import socket

import pytest
from ansible.module_utils import sglang_process_report

ARGV = ["python", "-m", "sglang.launch_server"]


@pytest.fixture
def node(root, proc):
    """Return a healthy server with one rank as an object with ``launch``, ``env``, ``rules()``."""
    release = root / "releases" / "r1"
    (release / "run").mkdir()

    class Node:
        env = {"SGLANG_DEPLOY_RELEASE": str(release), "NCCL_ALGO": "Ring"}
        launch = {
            "argv": ARGV,
            "cwd": str(release),
            "env": {},
            "tp_size": 1,
            "endpoint": "http://127.0.0.1:30000",
            "log": f"{release}/logs/server.log",
            "expect": {"env": {"NCCL_ALGO": "Ring"}, "packages": {"sglang": None}, "args": {}},
        }

        def report(self):
            return sglang_process_report.report(self.launch, str(root), str(proc))

        def rules(self):
            return [item["rule"] for item in self.report()["findings"]]

        def worker(self, env=None, **more):
            proc.add(11, ["sglang::scheduler_TP0"], self.env if env is None else env, ppid=10, pgid=10, **more)

        def note(self, origin, start=100):
            text = json.dumps({"schema": 1, "pid": 11, "start": start, "imports": {"sglang": origin}, "kept": {}})
            (release / "run" / "imports-11.json").write_text(text)

    # The parent lacks the variable that sitecustomize sets: it must not matter.
    proc.add(10, ARGV, {"SGLANG_DEPLOY_RELEASE": str(release)})
    return Node()


def test_healthy(node):
    node.worker()
    report = node.report()
    assert report["ok"] and report["findings"] == [] and report["drift"] == []
    assert report["workers"][0]["label"] == "scheduler TP0 (pid 11)"
    assert report["workers"][0]["env"] == {"NCCL_ALGO": {"status": "equal", "expected": "Ring", "actual": "Ring"}}


def test_a_start_has_no_drift(node, proc):
    """A young server whose port is closed has yet to spawn its workers; an old one has lost them."""
    assert node.report()["drift"] == ["0 scheduler processes run, 1 are expected"]
    (proc.path / "uptime").write_text("60.00 1.00\n")
    assert node.report()["drift"] == []


def test_missing_and_different(node):
    node.launch["expect"]["env"] = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}
    node.worker()
    findings = node.report()["findings"]
    assert [(item["rule"], item["level"]) for item in findings] == [
        ("env-different", "error"),
        ("env-missing", "error"),
    ]
    assert "expected 'Tree'; scheduler TP0 (pid 11): 'Ring'" in findings[0]["evidence"]


def test_overridden_by_the_engine_is_a_warning(node):
    node.launch["expect"]["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    node.worker(dict(node.env, CUDA_DEVICE_MAX_CONNECTIONS="8"))
    report = node.report()
    assert report["ok"] and report["drift"] == []
    assert report["findings"][0]["message"] == "CUDA_DEVICE_MAX_CONNECTIONS is overridden by the engine."
    assert report["findings"][0]["level"] == "warning"


def test_overwritten_title(node):
    node.worker({})
    assert node.rules() == ["env-not-readable"] and not node.report()["ok"]


def test_scheduler_missing_and_dead(node, proc):
    assert node.rules() == ["scheduler-missing"]
    proc.add(11, [], {}, ppid=10, pgid=10, state="Z", comm="sglang::schedul")
    assert node.rules() == ["worker-dead", "scheduler-missing"]


def test_no_server(node, proc):
    node.worker()
    (proc.path / "10" / "environ").write_text("")
    (proc.path / "10" / "stat").write_text((proc.path / "10" / "stat").read_text().replace(") S", ") Z"))
    assert node.rules() == ["server-missing"]


def test_another_release_and_another_listener(node, proc, root):
    node.worker()
    proc.add(20, ARGV, {"SGLANG_DEPLOY_RELEASE": f"{root}/releases/r0"})
    proc.add(21, ["nginx"], {})
    proc.listen(10, 30000, 501)
    proc.listen(21, 30000, 502)
    assert node.rules() == ["foreign-process", "foreign-listener"]


def test_other_arguments(node):
    node.worker()
    node.launch["argv"] = [*ARGV, "--x"]
    assert node.rules() == ["argv-differs"]


@pytest.mark.parametrize(
    "origin, start, rule",
    [
        ("{copy}/__init__.py", 100, None),
        ("/engine/sglang/__init__.py", 100, "package-not-the-copy"),
        ("{copy}2/__init__.py", 100, "package-not-the-copy"),
        ("{copy}/__init__.py", 99, "package-unknown"),
        (None, 100, "package-unknown"),
    ],
)
def test_patched_copy(node, origin, start, rule):
    copy = node.launch["cwd"] + "/site/sglang"
    node.launch["expect"]["packages"]["sglang"] = copy
    node.worker()
    if origin:
        node.note(origin.format(copy=copy), start)
    assert node.rules() == ([rule] if rule else [])


def test_patched_copy_with_a_torn_note(node):
    node.launch["expect"]["packages"]["sglang"] = "/x"
    node.worker()
    node.note("/x/__init__.py")
    pathlib.Path(node.launch["cwd"], "run", "imports-11.json").write_text("{torn")
    assert node.rules() == ["package-unknown"]


def test_module_refuses_a_release_without_launch_json(run_module, root):
    result = run_module("sglang_process_info", {"root": str(root), "release": str(root / "releases/r1")})
    assert result["failed"] and "launch.json is missing" in result["msg"]


def test_module(run_module, node, root):
    # The module looks at this machine, where something may listen on the usual port.
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    text = json.dumps(node.launch)
    assert "30000" in text
    (root / "releases/r1/launch.json").write_text(text.replace("30000", str(port)))
    result = run_module("sglang_process_info", {"root": str(root), "release": str(root / "releases/r1")}, check=True)
    assert not result["changed"] and result["processes"] == [] and result["drift"] == ["no server process runs"]
    assert [item["rule"] for item in result["findings"]] == ["server-missing", "scheduler-missing"]
