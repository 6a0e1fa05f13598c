"""The module on real folders: copy, patch, record, bytecode, the ways a package can be installed, and refusals."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import py_compile
import subprocess
import sys

import pytest
import shapes

MODULE = "sglang_patch"
GUARD = "srt/layers/communicator.py"
SM120 = "_is_sm120_supported = _is_cuda and is_sm120_supported()"


def contents(folder):
    """Return {relative path: bytes} of a folder, for comparing before and after."""
    return {str(item.relative_to(folder)): item.read_bytes() for item in sorted(folder.rglob("*")) if item.is_file()}


def states(result):
    return {item["name"]: item["state"] for item in result["results"]}


def test_applies_to_a_copy_and_leaves_the_engine(engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    before = contents(engine.root)
    result = run_module(MODULE, engine.args(entries), diff=True)
    assert result["changed"] is True
    assert states(result) == {"sm120_allreduce_fusion": "applied", "flashinfer_sm120_gate": "not_exercised"}
    assert result["results"][0]["admitted"] == ["9.0", "10.0", "12.0"]
    assert result["packages"] == {"sglang": str(engine.site / "sglang")}
    assert SM120 in (engine.site / "sglang" / GUARD).read_text()
    assert f"+{SM120}" in result["diff"][0]["prepared"]
    assert contents(engine.root) == before
    assert not (engine.site / "sglang" / GUARD).samefile(engine.root / "sglang" / GUARD)
    record = json.loads((engine.site / ".patches.json").read_text())
    assert record["packages"]["sglang"]["version"] == "0.5.9"
    assert record["entries"][0]["digest"] == entries[0]["digest"]


def test_an_edit_in_the_wrong_place_is_not_copied(engine, entries, run_module):
    package = engine.add("sglang", "0.5.18")
    engine.add("flashinfer", "0.6.17")
    args = package / "srt/server_args.py"
    args.write_text(
        args.read_text().replace("is_sm100_supported())\n", "is_sm100_supported() or is_sm120_supported())\n")
    )
    result = run_module(MODULE, engine.args(entries, capabilities=["12.0"]))
    assert states(result)["sm120_allreduce_fusion"] == "conflict"
    assert "edited by hand in ServerArgs._handle_model_capability_adjustments" in result["msg"]
    assert "Ways out: take that edit back in the engine; or install sglang 0.5.18 anew" in result["msg"]
    assert not engine.site.exists()


def test_second_and_third_run_change_no_byte(engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    first = run_module(MODULE, engine.args(entries))
    before = contents(engine.release)
    for _run in range(2):
        result = run_module(MODULE, engine.args(entries), diff=True)
        assert (result["changed"], result["diff"]) == (False, [])
        assert states(result)["sm120_allreduce_fusion"] == "already_applied"
        assert result["results"][0]["hunks"] == first["results"][0]["hunks"]
    assert contents(engine.release) == before


def test_check_mode_gives_the_same_keys_and_writes_nothing(engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    dry = run_module(MODULE, engine.args(entries), check=True, diff=True)
    assert not engine.site.exists()
    wet = run_module(MODULE, engine.args(entries), diff=True)
    assert dry.keys() == wet.keys()
    assert (dry["changed"], dry["diff"], dry["results"]) == (wet["changed"], wet["diff"], wet["results"])


def test_check_mode_on_an_empty_host_shows_the_declared_texts(engine, entries, run_module, tmp_path):
    missing = {"python": str(tmp_path / "none" / "python"), "chdir": str(tmp_path / "none")}
    result = run_module(MODULE, engine.args(entries, engine_version="0.5.9", **missing), check=True, diff=True)
    assert result["changed"] is True
    text = result["diff"][0]["prepared"]
    assert "declared for sglang 0.5.9: sglang/srt/layers/communicator.py" in text
    assert f"+{SM120}" in text
    failed = run_module(MODULE, engine.args(entries, engine_version="0.5.7", **missing), check=True)
    assert failed["failed"] is True
    assert "not_applicable" in failed["msg"]
    real = run_module(MODULE, engine.args(entries, engine_version="0.5.9", **missing))
    assert "install the engine first" in real["msg"]


def run_copy(engine, code):
    """Run code in a fresh interpreter with the service's environment."""
    arguments = engine.args([])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **arguments["env"]},
        cwd=arguments["chdir"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


EQUAL_LENGTH = {
    "name": "equal_length",
    "edition": 1,
    "summary": "An edit that keeps the size of the file",
    "package": "sglang",
    "distribution": "sglang",
    "families": [
        {
            "name": "all",
            "versions": ">=0.5",
            "files": [
                {
                    "path": "gate.py",
                    "edits": [{"scope": "gate", "find": "[9,   ]", "replace": "[9, 12]"}],
                    "gates": [{"scope": "gate", "kind": "majors", "text": "majors", "pristine": ["9.0"]}],
                }
            ],
        }
    ],
}


def test_stale_bytecode_never_runs(engine, run_module):
    """The edit keeps the size, the engine's bytecode travels with the copy, and the old time is put back."""
    source = "def gate():\n    return dict(majors=[9,   ])\n"
    package = engine.add("sglang", "0.5.9", {"gate.py": source})
    py_compile.compile(str(package / "gate.py"))
    ask = "import sglang.gate as g; print(g.gate()['majors'], g.__file__)"
    assert run_copy(engine, ask) == f"[9] {package / 'gate.py'}"
    assert run_module(MODULE, engine.args([EQUAL_LENGTH]))["changed"] is True
    patched = engine.site / "sglang" / "gate.py"
    assert patched.stat().st_size == (package / "gate.py").stat().st_size
    assert patched.stat().st_mtime >= (package / "gate.py").stat().st_mtime + 2
    cached = list((engine.site / "sglang" / "__pycache__").glob("gate.*.pyc"))
    assert [item.read_bytes()[4] for item in cached] == [3]  # compared with the source's hash at each start
    os.utime(patched, ns=(0, (package / "gate.py").stat().st_mtime_ns))
    assert run_copy(engine, ask) == f"[9, 12] {patched}"
    run_module(MODULE, engine.args([EQUAL_LENGTH], state="absent"))
    assert run_copy(engine, ask) == f"[9] {package / 'gate.py'}"


def test_bytecode_of_unpatched_files_stays_valid(engine, entries, run_module):
    package = engine.add("sglang", "0.5.9")
    (package / "other.py").write_text("x = 1\n")
    cached = pathlib.Path(py_compile.compile(str(package / "other.py")))
    run_module(MODULE, engine.args(entries))
    twin = engine.site / "sglang" / "__pycache__" / cached.name
    assert twin.read_bytes() == cached.read_bytes()
    assert (engine.site / "sglang" / "other.py").stat().st_mtime_ns == (package / "other.py").stat().st_mtime_ns


def test_a_changed_edition_starts_from_the_pristine_file(engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    run_module(MODULE, engine.args(entries))
    second = copy.deepcopy(entries)
    second[0]["edition"] = 2
    second[0]["families"][0]["files"][0]["definitions"][0]["text"] += "  # edition 2"
    result = run_module(MODULE, engine.args(second))
    text = (engine.site / "sglang" / GUARD).read_text()
    assert (result["changed"], text.count("_is_sm120_supported ="), text.count("edition 2")) == (True, 1, 1)


@pytest.mark.parametrize("change", ["version", "file", "tampered", "interrupted", "added", "many"])
def test_a_copy_that_is_not_of_this_engine_is_made_again(change, engine, entries, run_module):
    package = engine.add("sglang", "0.5.9")
    run_module(MODULE, engine.args(entries))
    if change == "version":
        (package / "_version.py").write_text('__version__ = "0.5.8.post1"\n')
    elif change == "file":
        (package / "__init__.py").write_text("x = 1\n")
    elif change == "tampered":
        (engine.site / "sglang" / GUARD).write_bytes(b"\xff")
    elif change == "interrupted":
        (engine.site / "sglang" / "__init__.py").unlink()
        (engine.site / ".sglang.partial-1").mkdir()
    else:
        for number in range({"added": 1, "many": 5}[change]):
            (engine.site / f"sglang/srt/hand{number}.py").write_text("x = 1\n")
    dry = run_module(MODULE, engine.args(entries), check=True)
    result = run_module(MODULE, engine.args(entries))
    assert (dry["changed"], dry["results"]) == (result["changed"], result["results"])
    said = {
        "tampered": f"the copy is made again: {GUARD} was changed",
        "interrupted": "the copy is made again: __init__.py is missing",
        "added": "the copy is made again: srt/hand0.py was added",
        "many": "the copy is made again: "
        + "".join(f"srt/hand{number}.py was added, " for number in range(3))[:-2]
        + " and 2 more",
    }
    assert result["results"][0]["message"] == said.get(change, "")
    # A text, or from ansible-core 2.19 on a record that holds it; older ones repeat those of the dry run.
    warned = [item if isinstance(item, str) else item["event"]["msg"] for item in result.get("warnings", [])]
    mine = {text for text in warned if text.startswith(str(engine.site))}
    assert mine == ({f"{engine.site}/sglang: {said[change]}"} if change in said else set())
    assert not list((engine.site / "sglang/srt").glob("hand*"))
    assert (result["changed"], states(result)["sm120_allreduce_fusion"]) == (True, "applied")
    assert SM120 in (engine.site / "sglang" / GUARD).read_text()
    assert (engine.site / "sglang" / "__init__.py").read_text() == (package / "__init__.py").read_text()
    assert sorted(os.listdir(engine.site)) == [".patches.json", "sglang"]
    assert run_module(MODULE, engine.args(entries))["changed"] is False


def test_a_patched_file_that_the_engine_cannot_compile_leaves_the_old_copy(engine, entries, run_module, tmp_path):
    engine.add("sglang", "0.5.9")
    run_module(MODULE, engine.args(entries))
    before = contents(engine.site)
    broken = tmp_path / "python"
    refusal = 'case "$2" in *py_compile*) echo no such syntax >&2; exit 1;; esac'
    broken.write_text(f'#!/bin/sh\n{refusal}\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    changed = copy.deepcopy(entries)
    changed[0]["families"][0]["files"][0]["definitions"][0]["text"] += "  # other"
    result = run_module(MODULE, engine.args(changed, python=str(broken)))
    assert "no such syntax" in result["msg"]
    assert contents(engine.site) == before


def test_absent_keeps_what_other_entries_need(engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    engine.add("flashinfer", "0.6.3")
    run_module(MODULE, engine.args(entries, allow_experimental=True))
    result = run_module(MODULE, engine.args(entries[:1], state="absent", allow_experimental=True))
    assert sorted(os.listdir(engine.site)) == [".patches.json", "flashinfer"]
    assert states(result)["sm120_allreduce_fusion"] == "absent"
    assert run_module(MODULE, engine.args(entries[:1], state="absent", allow_experimental=True))["changed"] is False
    assert run_module(MODULE, engine.args([]))["changed"] is True
    assert os.listdir(engine.site) == []


@pytest.mark.parametrize(
    "more, state",
    [
        ({}, "refused"),
        ({"capabilities": ["12.0"]}, "refused"),
        ({"capabilities": ["9.0"]}, "not_exercised"),
        ({"capabilities": ["none"]}, "not_exercised"),
        ({"capabilities": ["12.0"], "allow_experimental": "true"}, "applied"),
    ],
)
def test_the_experimental_gate(more, state, engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    engine.add("flashinfer", "0.6.3")
    result = run_module(MODULE, engine.args(entries, **more))
    assert states(result)["flashinfer_sm120_gate"] == state
    if state == "refused":
        assert not engine.site.exists()
        for word in ("0.6.3 admits 9.0, 10.0 and refuses 12.0", "0.5.20", "allow_experimental", "pcie_ipc"):
            assert word in result["msg"]
    assert (engine.site / "flashinfer").exists() is (state == "applied")


@pytest.mark.parametrize(
    "version, more, state",
    [
        ("0.6.7.post3", {"allow_experimental": True}, "refused"),
        ("0.6.7.post3", {"allow_experimental": True, "capabilities": ["12.0"]}, "refused"),
        ("0.6.7.post3", {"allow_experimental": True, "capabilities": ["9.0"]}, "not_exercised"),
        ("0.6.11.post1", {"allow_experimental": True, "capabilities": ["12.0"]}, "applied"),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_flashinfer_that_demands_multicast_is_refused(by_hand, version, more, state, engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    package = engine.add("flashinfer", version)
    if by_hand:
        text = (package / "jit/comm.py").read_text()
        (package / "jit/comm.py").write_text(text.replace("[9, 10]", "[9, 10, 12]"))
        state = "already_applied" if state == "applied" else state
    result = run_module(MODULE, engine.args(entries, **more))
    assert states(result)["flashinfer_sm120_gate"] == state
    if state == "refused":
        assert not engine.site.exists()
        for word in ("NVLink multicast", "lack its all-reduces", "0.5.20", "pcie_ipc", "use SGLang 0.5.9, or 0.5.12"):
            assert word in result["msg"]
        assert "allow the experimental" not in result["msg"]


def test_a_flashinfer_that_admits_sm120_needs_no_patch(engine, entries, run_module):
    engine.add("sglang", "0.5.18")
    engine.add("flashinfer", "0.6.17")
    result = run_module(MODULE, engine.args(entries, capabilities=["12.0"]))
    assert states(result) == {"sm120_allreduce_fusion": "applied", "flashinfer_sm120_gate": "upstream"}
    assert list(result["packages"]) == ["sglang"]


def test_two_places_are_both_named(engine, entries, run_module, tmp_path):
    engine.add("sglang", "0.5.9")
    other = shapes.write(tmp_path / "other", "sglang", "0.5.9", shapes.SGLANG["0.5.9"])
    arguments = engine.args(entries)
    arguments["env"]["PYTHONPATH"] += os.pathsep + str(tmp_path / "other")
    message = run_module(MODULE, arguments)["msg"]
    assert str(other) in message
    assert str(engine.root / "sglang") in message
    # python -m puts the working directory first: a package lying there is a second place as well.
    shapes.write(engine.release, "sglang", "0.5.9", shapes.SGLANG["0.5.9"])
    assert str(engine.release / "sglang") in run_module(MODULE, engine.args(entries))["msg"]


def test_a_copy_and_a_wheel_install(engine, entries, run_module):
    engine.add("sglang", "0.5.9")

    def recorded():
        run_module(MODULE, engine.args(entries))
        package = json.loads((engine.site / ".patches.json").read_text())["packages"]["sglang"]
        return package["kind"], package["version"]

    assert recorded() == ("copy", "0.5.9")
    engine.metadata("sglang", "0.5.9.post1")
    assert recorded() == ("wheel", "0.5.9.post1")


def test_a_link_to_the_package_has_the_version_beside_the_link(engine, entries, run_module, tmp_path):
    source = shapes.write(tmp_path / "checkout", "sglang", "0.0.0", shapes.SGLANG["0.5.9"])
    (source / "_version.py").unlink()
    engine.metadata("sglang", "0.5.9")
    (engine.root / "sglang").symlink_to(source)
    item = run_module(MODULE, engine.args(entries))["results"][0]
    assert (item["state"], item["version"], item["origin"]) == ("applied", "0.5.9", str(source))


def test_an_editable_install_is_found_through_its_finder(engine, entries, run_module, tmp_path):
    source = shapes.write(tmp_path / "checkout" / "python", "sglang", "0.0.0", shapes.SGLANG["0.5.9"])
    engine.root.mkdir()
    engine.metadata("sglang", "0.5.9.post2.dev3+gabc", editable=True)
    finder = (
        "import importlib.machinery as m, sys\n\n\nclass Finder:\n    @classmethod\n"
        "    def find_spec(cls, name, path=None, "
        f"target=None):\n        return m.PathFinder.find_spec(name, [{str(source.parent)!r}])\n"
        "\n\nsys.meta_path.append(Finder)\n"
    )
    (engine.root / "sitecustomize.py").write_text(finder)
    result = run_module(MODULE, engine.args(entries))
    assert states(result)["sm120_allreduce_fusion"] == "applied"
    assert result["results"][0]["origin"] == str(source)
    assert result["results"][0]["version"] == "0.5.9.post2.dev3+gabc"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_endings_survive_on_disk(newline, engine, entries, run_module):
    files = {path: text.replace("\n", newline) for path, text in shapes.SGLANG["0.5.9"].items()}
    engine.add("sglang", "0.5.9", files)
    run_module(MODULE, engine.args(entries))
    data = (engine.site / "sglang" / GUARD).read_bytes()
    assert SM120.encode() in data
    assert (data.count(b"\r\n") == data.count(b"\n")) is (newline == "\r\n")


def test_a_byte_order_mark_stays(engine, entries, run_module):
    package = engine.add("sglang", "0.5.9")
    text = (package / GUARD).read_text()
    (package / GUARD).write_bytes(b"\xef\xbb\xbf" + text.encode())
    result = run_module(MODULE, engine.args(entries))
    assert states(result)["sm120_allreduce_fusion"] == "applied"
    data = (engine.site / "sglang" / GUARD).read_bytes()
    assert data.startswith(b"\xef\xbb\xbf" + text[:6].encode())
    assert (SM120.encode() in data, data.count(b"\xef\xbb\xbf")) == (True, 1)
    assert run_module(MODULE, engine.args(entries))["changed"] is False


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"schema": 1, "packages": {"sglang": 1}, "entries": []}', '{"schema": 1, "packages": {}}']
    + [f'{{"schema": 1, "packages": {{}}, "entries": [{item}]}}' for item in ("1", "{}", '{"entry": 1}', "null")],
)
@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_damaged_record_is_one_clear_error(state, damage, engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    run_module(MODULE, engine.args(entries))
    (engine.site / ".patches.json").write_text(damage)
    before = contents(engine.site)
    result = run_module(MODULE, engine.args(entries, state=state))
    assert result["failed"] is True
    for word in (f"{engine.site}/.patches.json is damaged", "Way out: delete it and the package folders"):
        assert word in result["msg"]
    assert contents(engine.site) == before


def test_a_package_that_is_not_installed_fails_the_patch_that_needs_it(engine, entries, run_module):
    engine.root.mkdir()
    result = run_module(MODULE, engine.args(entries))
    assert result["failed"] is True
    assert "sglang is not installed" in result["msg"]


def test_a_site_that_cannot_be_made_is_named(engine, entries, run_module):
    engine.add("sglang", "0.5.9")
    engine.release.joinpath("file").write_text("in the way")
    result = run_module(MODULE, engine.args(entries, site=str(engine.release / "file/site")))
    assert result["failed"] is True
    assert f"site {engine.release}/file/site cannot be written" in result["msg"]


def test_malformed_entries_and_a_missing_companion_are_refused(engine, entries, run_module):
    assert "unknown key verions" in run_module(MODULE, engine.args([{**entries[1], "verions": []}]))["msg"]
    assert "requires flashinfer_sm120_gate" in run_module(MODULE, engine.args(entries[:1]))["msg"]


@pytest.mark.skipif("SGLANG_ENGINE_PYTHON" not in os.environ, reason="SGLANG_ENGINE_PYTHON names no SGLang 0.5.9")
def test_the_installed_engine(engine, entries, run_module):
    python = os.environ["SGLANG_ENGINE_PYTHON"]
    result = run_module(MODULE, engine.args(entries, python=python, env={}))
    assert states(result)["sm120_allreduce_fusion"] == "applied"
    assert run_module(MODULE, engine.args(entries, python=python, env={}))["changed"] is False
