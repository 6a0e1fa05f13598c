"""What an engine is said to be, without building one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from ansible.module_utils import sglang_engine as engine

BUILD = {
    "mode": "build",
    "version": "0.5.9",
    "root": "/engines",
    "base_python": "python3",
    "lock_digest": "a",
    "cpu_only": True,
}


def test_the_name_needs_nothing_of_the_host():
    state = engine.describe(BUILD)
    assert state["id"].startswith("0.5.9-") and len(state["id"]) == len("0.5.9-") + 12
    assert state["path"] == f"/engines/{state['id']}" and state["python"] == f"{state['path']}/bin/python3"
    assert not state["present"] and state["fingerprint"] and "not built yet" in state["problem"]


def test_the_fingerprint_covers_what_determines_the_build_and_nothing_else():
    base = engine.describe(BUILD)["fingerprint"]
    for change in (
        {"lock_digest": "b"},
        {"version": "0.5.8"},
        {"base_python": "/usr/bin/python3"},
        {"cpu_only": False},
    ):
        assert engine.describe({**BUILD, **change})["fingerprint"] != base
    for same in ({"root": "/elsewhere"}, {"python": "/ignored"}, {"cpu_only": "true"}):
        assert engine.describe({**BUILD, **same})["fingerprint"] == base


def test_a_torn_marker_is_a_problem_and_not_a_crash(tmp_path):
    declared = {**BUILD, "root": str(tmp_path)}
    path = tmp_path / engine.engine_id(declared)
    path.mkdir()
    assert "unfinished" in engine.describe(declared)["problem"]
    for text in ("", "{", "[]", "{}", "null"):
        (path / "engine.json").write_text(text)
        state = engine.describe(declared)
        assert not state["present"] and "cannot be read" in state["problem"]


@pytest.fixture
def adopted(tmp_path):
    """A virtual environment without pip that claims to have sglang and flashinfer."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    for name, version in (("sglang", "0.5.9"), ("flashinfer_python", "0.6.3")):
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    for name in ("sglang", "flashinfer"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise SystemExit('an adopted package must not be imported')\n")
    return {"mode": "adopt", "version": "0.5.9", "python": str(tmp_path / "env/bin/python3")}, site


def test_adopted_engine(adopted, run_module):
    declared, site = adopted
    before = sorted(str(path) for path in site.rglob("*"))
    started = time.monotonic()
    state = engine.describe(declared)
    assert time.monotonic() - started < 1.0
    assert state["present"] and state["version"] == "0.5.9", state
    assert state["packages"] == {"sglang": "0.5.9", "flashinfer-python": "0.6.3"}
    assert state["origins"]["sglang"] == str(site / "sglang") and state["origins"]["torch"] is None
    result = run_module("sglang_engine_env", {"declared": declared}, check=True)
    assert not result["changed"] and result["engine"] == state
    assert sorted(str(path) for path in site.rglob("*")) == before


def test_another_package_version_is_another_engine(adopted):
    declared, site = adopted
    before = engine.describe(declared)["fingerprint"]
    assert engine.describe(declared)["fingerprint"] == before
    (site / "flashinfer_python-0.6.3.dist-info").rename(site / "flashinfer_python-0.6.4.dist-info")
    assert engine.describe(declared)["fingerprint"] != before


@pytest.mark.parametrize("package", ["sglang", "flashinfer"])
def test_an_edit_and_a_pull_make_another_engine_and_bytecode_does_not(adopted, package):
    declared, site = adopted
    seen = [engine.describe(declared)["fingerprint"]]
    (site / package / "__pycache__").mkdir()
    (site / package / "__pycache__" / "x.pyc").write_text("")
    assert engine.describe(declared)["fingerprint"] == seen[0]
    (site / package / "srt").mkdir()
    (site / package / "srt" / "new.py").write_text("a = 1\n")
    seen.append(engine.describe(declared)["fingerprint"])
    (site / package / "srt" / "new.py").write_text("a = 2\n")
    seen.append(engine.describe(declared)["fingerprint"])
    assert len(set(seen)) == 3


def test_another_checkout_that_an_editable_install_points_to_is_another_engine(adopted, tmp_path):
    declared, site = adopted
    (site / "sglang").rename(tmp_path / "sglang")
    (site / "sglang.pth").write_text(f"{tmp_path}\n")
    before = engine.describe(declared)
    assert before["present"] and before["origins"]["sglang"] == str(tmp_path / "sglang")
    (tmp_path / "sglang" / "server.py").write_text("")
    assert engine.describe(declared)["fingerprint"] != before["fingerprint"]


def test_three_thousand_files_are_looked_at_in_a_moment(adopted):
    declared, site = adopted
    for number in range(3000):
        (site / "sglang" / f"m{number}.py").write_text("")
    started = time.monotonic()
    assert engine.describe(declared)["present"]
    assert time.monotonic() - started < 1.5


def test_what_cannot_be_adopted_is_said(adopted, run_module, tmp_path):
    declared, site = adopted
    script = tmp_path / "chatty"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    cases = [
        ({"version": "0.5.20"}, "has sglang 0.5.9, and version 0.5.20 is declared"),
        ({"python": ""}, "must be the absolute path"),
        ({"python": "/nonexistent/python3"}, "does not exist"),
        ({"python": str(site / "sglang" / "__init__.py")}, "is not an executable file"),
        ({"python": str(tmp_path)}, "is not an executable file"),
        ({"python": str(script)}, "does not answer like a Python interpreter: hello"),
        ({"python": "/bin/false"}, "exits with 1"),
    ]
    for change, says in cases:
        result = run_module("sglang_engine_env", {"declared": {**declared, **change}})
        assert result["failed"] and says in result["msg"] and "sglang_engine_python" in result["msg"]
    (site / "sglang-0.5.9.dist-info" / "METADATA").unlink()
    (site / "sglang-0.5.9.dist-info").rmdir()
    assert "no importable package sglang" in engine.describe(declared)["problem"]
    assert engine.describe({**declared, "version": ""})["present"] is False


def test_an_interpreter_that_hangs_is_given_up(tmp_path):
    script = tmp_path / "hangs"
    script.write_text("#!/bin/sh\nexec sleep 30\n")
    script.chmod(0o755)
    with pytest.raises(engine.EngineError, match="no answer within 0.3 s"):
        engine.probe(str(script), limit=0.3)
