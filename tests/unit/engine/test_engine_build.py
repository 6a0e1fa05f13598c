"""Real virtual environments and a real pip, with a wheel of a few lines."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from ansible.module_utils import sglang_engine_build

from .conftest import VERSION, write_wheel

MODULE = "sglang_engine_env"


def test_a_build_keeps_the_deploy_lock_fresh_and_check_mode_does_not(run_module, arguments, tmp_path):
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"schema": 1, "run": {"id": "r"}, "variant": "v", "since": ""}))
    before = time.time() - 800
    os.utime(lock, (before, before))
    assert arguments["declared"]["root"] == str(tmp_path / "engines")
    run_module(MODULE, arguments, check=True)
    assert lock.stat().st_mtime == pytest.approx(before, abs=1)
    arguments["pip_args"] = ["--no-such-option"]  # the shortest build there is
    assert "pip install of the lock file failed" in run_module(MODULE, arguments)["msg"]
    assert time.time() - lock.stat().st_mtime < 60


def test_check_mode_builds_nothing_and_names_the_directory(run_module, arguments, tmp_path):
    result = run_module(MODULE, arguments, check=True, diff=True)
    assert result["changed"] and not result["engine"]["present"]
    assert result["engine"]["path"] in result["actions"][0]
    assert "sglang==0.5.9" in result["diff"]["after"]
    assert not (tmp_path / "engines").exists()


def test_build_then_nothing_to_do_then_an_unfinished_directory(run_module, arguments, monkeypatch):
    # The environment of an operator must not decide how an engine comes out.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    first = run_module(MODULE, arguments)
    assert first["changed"] and first["engine"]["present"], first
    path = pathlib.Path(first["engine"]["path"])
    marker = json.loads((path / "engine.json").read_text())
    assert marker["version"] == VERSION and marker["packages"]["sglang"] == VERSION
    assert marker["digest"] == first["engine"]["fingerprint"]
    assert list(path.glob("lib/python3.*/site-packages/sglang/__pycache__/*.pyc"))
    assert first["engine"]["origins"]["sglang"].endswith("site-packages/sglang")

    second = run_module(MODULE, arguments)
    assert not second["changed"] and second["engine"] == first["engine"] and second["elapsed"] < 0.5

    (path / "engine.json").unlink()
    (path / "rubbish").write_text("left by a build that was killed")
    third = run_module(MODULE, arguments, check=True)
    assert third["changed"] and "unfinished" in third["actions"][0] and (path / "rubbish").exists()
    assert run_module(MODULE, arguments)["engine"]["present"]
    assert not (path / "rubbish").exists()


def test_a_replaced_base_interpreter_is_noticed(run_module, arguments, tmp_path):
    path = pathlib.Path(run_module(MODULE, arguments)["engine"]["path"])
    python = path / "bin" / "python3"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    result = run_module(MODULE, arguments, check=True)
    assert result["changed"] and "now leads to" in result["actions"][0]


def test_failed_pip_leaves_no_marker_and_hides_the_password(run_module, arguments):
    arguments["lock"] += "missing-package==1.0\n"
    arguments["pip_args"] = ["--index-url=http://operator:s3cret@127.0.0.1:9/simple", "--retries=0", "--no-cache-dir"]
    result = run_module(MODULE, arguments)
    assert result["failed"] and "pip install of the lock file failed" in result["msg"]
    assert "s3cret" not in json.dumps(result)
    assert not result["engine"]["present"] and not result["changed"]
    assert not (pathlib.Path(result["engine"]["path"]) / "engine.json").exists()


def test_pip_arguments_are_not_on_the_command_line(tmp_path, arguments, monkeypatch):
    seen = []
    real = subprocess.run

    def recording(argv, *args, **kwargs):
        seen.append(" ".join(map(str, argv)))
        return real(argv, *args, **kwargs)

    monkeypatch.setattr(sglang_engine_build.subprocess, "run", recording)
    sglang_engine_build.build(arguments["declared"], arguments["lock"], {}, arguments["pip_args"], 120)
    assert len(seen) >= 4 and not [line for line in seen if "--find-links" in line]


def test_metadata_and_code_must_agree(run_module, arguments, wheels):
    write_wheel(wheels, "sglang", VERSION, '__version__ = "0.5.8"\n')
    result = run_module(MODULE, arguments)
    assert result["failed"] and "imports sglang 0.5.8" in result["msg"]


def test_standins_are_installed_compiled_and_never_over_a_real_package(run_module, arguments, wheels, monkeypatch):
    monkeypatch.setattr(sglang_engine_build, "gpu_evidence", lambda: None)
    arguments["declared"]["cpu_only"] = True
    arguments["standins"] = {"sgl_kernel/__init__.py": "", "sgl_kernel/kvcacheio.py": "answer = 42\n"}
    result = run_module(MODULE, arguments)
    assert result["engine"]["present"], result
    done = subprocess.run(
        [result["engine"]["python"], "-c", "import sgl_kernel.kvcacheio as k; print(k.answer)"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={},
    )
    assert done.stdout == "42\n"
    assert os.listdir(os.path.join(result["engine"]["origins"]["sgl_kernel"], "__pycache__"))

    write_wheel(wheels, "sgl_kernel", "1.0", "")
    arguments["lock"] += "sgl-kernel==1.0\n"
    arguments["declared"]["lock_digest"] = "other"
    result = run_module(MODULE, arguments)
    assert result["failed"] and "installs the real sgl_kernel" in result["msg"]


def test_a_second_builder_is_told_at_once(arguments):
    with (
        sglang_engine_build._one_builder(arguments["declared"]["root"]),
        pytest.raises(sglang_engine_build.EngineError, match="another run is building"),
    ):
        sglang_engine_build.build(arguments["declared"], arguments["lock"], {}, arguments["pip_args"], 60)


def test_a_full_disk_is_one_clear_error(run_module, arguments, tmp_path):
    (tmp_path / "engines").write_text("a file where the directory should be")
    result = run_module(MODULE, arguments)
    assert result["failed"] and str(tmp_path / "engines") in result["msg"] and "Traceback" not in result["msg"]


@pytest.mark.parametrize(
    ("change", "lock", "pip_args", "says"),
    [
        ({"version": "0.5.20"}, None, None, "the lock file pins sglang 0.5.9, and version 0.5.20 is declared"),
        ({"version": ""}, None, None, "is not a release number"),
        ({"version": "../x"}, None, None, "is not a release number"),
        ({"root": "engines"}, None, None, "root must be an absolute path"),
        ({"base_python": "/nonexistent/python3"}, None, None, "/nonexistent/python3 does not exist"),
        ({"base_python": "no-such-python"}, None, None, "is not found in PATH"),
        ({"base_python": "/bin/false"}, None, None, "exits with 1"),
        ({"lock_digest": ""}, None, None, "lock_digest is empty"),
        ({}, "sglang==0.5.9\nrequests>=2\n", None, "line 2 of the lock file is not an exact pin"),
        ({}, "# python: >=3.1,<3.2\nsglang==0.5.9\n", None, "this lock file is for >=3.1,<3.2"),
        ({}, None, ["-i", "https://x"], "do not begin with --"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run_module, arguments, tmp_path, change, lock, pip_args, says):
    arguments["declared"].update(change)
    arguments["lock"] = arguments["lock"] if lock is None else lock
    arguments["pip_args"] = arguments["pip_args"] if pip_args is None else pip_args
    for check in (True, False):
        result = run_module(MODULE, arguments, check=check)
        assert result["failed"] and says in result["msg"], result["msg"]
        assert not result["changed"] and not (tmp_path / "engines").exists()


def test_standins_are_refused_beside_a_gpu(tmp_path, arguments):
    device = tmp_path / "nvidiactl"
    assert sglang_engine_build.gpu_evidence(str(device), str(tmp_path / "none")) is None
    device.write_text("")
    seen = sglang_engine_build.gpu_evidence(str(device), str(tmp_path / "none"))
    assert seen == str(device)
    arguments["declared"]["cpu_only"] = True
    with pytest.raises(sglang_engine_build.EngineError, match="stand-ins are refused here"):
        sglang_engine_build.refuse_gpu(arguments["declared"], lambda: seen)


def test_standins_without_the_declaration_are_refused(run_module, arguments):
    arguments["standins"] = {"sgl_kernel/__init__.py": ""}
    result = run_module(MODULE, arguments)
    assert result["failed"] and "declared cpu_only" in result["msg"]


def test_redaction_keeps_the_host():
    text = sglang_engine_build.redact(
        "Looking in https://user:pw@host/simple", ["--index-url=https://user:pw@host/simple"]
    )
    assert "pw" not in text and "host" in text


def test_lock_of_the_role_is_all_pins(repository):
    for lock in (repository / "roles/sglang_engine/files").glob("*.lock"):
        text = lock.read_text()
        assert sglang_engine_build.lock_pins(text)["sglang"] in lock.name
        low, high = sglang_engine_build.python_range(text)
        assert low < high
    assert sys.version_info
