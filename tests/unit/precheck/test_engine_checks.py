"""What the engine's interpreter has: origins, pins, FlashInfer's gate, patches, the NCCL that is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_precheck_engine import ENGINE_CHECKS
from ansible.module_utils.sglang_precheck_host import Host
from ansible.module_utils.sglang_prechecks import run_checks

from .hosts import NCCL, SITE, FakeHost, captured, card

OTHER = "/opt/nccl/lib/libnccl.so.2"
FUSION = {"flashinfer-allreduce-fusion-backend": "auto"}
GATE = {
    "name": "flashinfer_sm120_gate",
    "package": "flashinfer",
    "ways_out": ["another engine", "allow it", "pcie_ipc"],
}
WANTED = {
    "root": "/opt/sglang",
    "engine": {"mode": "adopt", "python": "/opt/ml-env/bin/python3", "version": "0.5.20"},
    "device": "cuda",
    "compute_capability": "12.0",
    "args": {},
    "env": {},
    "patches": [],
    "built": False,
    "allow_experimental": False,
}


def run(host, **change):
    """Return ``({rule: text of its findings}, verdict)``."""
    findings, verdict = run_checks({**WANTED, **change}, host, ENGINE_CHECKS)
    texts = {}
    for item in findings:
        line = f"{item['level']}: {item['message']} {item['evidence']} {item['advice']}\n"
        texts[item["rule"]] = texts.get(item["rule"], "") + line
    return texts, verdict


def test_two_places_are_both_named():
    host = FakeHost()
    host.places["sglang"].append("/src/sglang/python/sglang")
    host.places["triton"].append("/usr/lib/python3/dist-packages/triton")
    texts, verdict = run(host)
    assert verdict["failures"] == ["package-origins"]
    assert f"{SITE}/sglang and /src/sglang/python/sglang" in texts["package-origins"]
    assert "warning: the engine finds triton" in texts["package-origins"]


def test_missing_packages():
    host = FakeHost()
    host.places.update(torch=[], flashinfer=[])
    texts, verdict = run(host)
    assert verdict["failures"] == ["package-missing"]
    assert "error: the engine cannot import torch" in texts["package-missing"]
    assert "warning: the engine cannot import flashinfer" in texts["package-missing"]
    assert "flashinfer" not in run(host, device="cpu")[0]["package-missing"]


def test_an_interpreter_that_does_not_answer():
    host = FakeHost()
    host.places = SiteError("python failed: boom")
    texts, verdict = run(host)
    assert verdict["failures"] == ["engine-answers"] and "boom" in texts["engine-answers"]


def test_an_engine_that_is_not_there_yet_is_not_judged():
    host = FakeHost()
    host.state["present"] = False
    assert run(host, patches=[GATE]) == ({}, {"ok": True, "failures": []})


def test_pins():
    host = FakeHost()
    host.files[f"{SITE}/sglang-0.5.20.dist-info/METADATA"] = (
        "Name: sglang\nRequires-Dist: flashinfer_python[cu13]==0.6.18\nRequires-Dist: torch==2.13.0\n"
        "Requires-Dist: sglang-kernel==0.4.7\nRequires-Dist: transformers>=5\nRequires-Dist: triton==9 ; extra == 'x'\n"
    )
    host.files[f"{SITE}/torch-2.13.0.dist-info/METADATA"] = "Requires-Dist: nvidia-nccl-cu13==2.29.7; os == 'Linux'\n"
    host.state["packages"]["torch"] = "2.13.0"
    assert "package-pins" not in run(host)[0]
    host.state["packages"].update({"flashinfer-python": "0.6.3", "nvidia-nccl-cu13": "2.28.9"})
    texts, verdict = run(host)
    assert verdict["ok"] and "flashinfer-python 0.6.3, sglang 0.5.20 wants 0.6.18" in texts["package-pins"]
    assert "nvidia-nccl-cu13 2.28.9, torch 2.13.0 wants 2.29.7" in texts["package-pins"]


def test_flashinfer_gate():
    host = FakeHost()
    path = f"{SITE}/flashinfer/jit/comm.py"
    host.files[path] = captured("comm-0.6.3.py.txt")
    texts, verdict = run(host)
    assert verdict["ok"] and "info" in texts["flashinfer-gate"] and "majors 9, 10" in texts["flashinfer-gate"]
    texts, verdict = run(host, args=FUSION)
    assert verdict["failures"] == ["flashinfer-gate"]
    assert "FlashInfer 0.6.18" in texts["flashinfer-gate"] and "compute capability 12.0" in texts["flashinfer-gate"]
    assert "lists the majors 9, 10" in texts["flashinfer-gate"]
    host.patch_results = [result("applied", ok=True)]
    assert run(host, args=FUSION, patches=[GATE])[1]["ok"], "the gate's patch is judged by the patch engine"
    host.files[path] = host.files[path].replace("[9, 10]", "[9, 10, 12]")
    texts, verdict = run(host, args=FUSION)
    assert verdict["ok"] and "majors 9, 10, 12" in texts["flashinfer-gate"]
    host.files[path] = "def other(): pass\n"
    texts, verdict = run(host, args=FUSION)
    assert verdict["ok"] and "not known what that admits" in texts["flashinfer-gate"]


def result(state, ok=False, message="seen", **more):
    base = {"name": "flashinfer_sm120_gate", "state": state, "ok": ok, "message": message, "package": "flashinfer"}
    base |= {"version": "0.6.3", "origin": f"{SITE}/flashinfer", "admitted": [], "files": [], "ways_out": []}
    return {**base, **more}


def test_patches():
    host = FakeHost()
    host.patch_results = [result("applied", ok=True, admitted=["9.0", "12.0"], files=["jit/comm.py"])]
    texts, verdict = run(host, patches=[GATE], allow_experimental=True, env={"A": "b"})
    assert verdict["ok"] and "it then admits 9.0, 12.0" in texts["patch-fits"]
    assert (
        host.asked["capabilities"] == ["12.0"] and host.asked["allow_experimental"] and host.asked["env"] == {"A": "b"}
    )
    host.patch_results = [result("refused", message="admits 9.0 and refuses 12.0. Ways out: x")]
    texts, verdict = run(host, patches=[GATE])
    assert verdict["failures"] == ["patch-refused"]
    for fact in ("the GPUs have compute capability 12.0", "flashinfer 0.6.3 in", "the engine is SGLang 0.5.20"):
        assert fact in texts["patch-refused"]
    assert "another engine; or allow it; or pcie_ipc" in texts["patch-refused"]
    host.patch_results = [result("refused", ways_out=["0.5.9 only"])]
    assert "0.5.9 only" in run(host, patches=[GATE])[0]["patch-refused"]
    # Edited in other words: the version is covered, so another engine is not the way out.
    for state in ("conflict", "upstream"):
        host.patch_results = [result(state)]
        assert "install the package anew" in run(host, patches=[dict(GATE, ways_out=[])])[0]["patch-refused"]
    assert run(host, patches=[GATE], built=True)[1]["ok"], "a sealed release has its patches"
    host.patch_results = SiteError("two places, /a and /b")
    texts, verdict = run(host, patches=[GATE])
    assert verdict["failures"] == ["patch-refused"] and "/a and /b" in texts["patch-refused"]


def test_the_capability_of_the_cards_counts_more_than_the_declared_one():
    host = FakeHost()
    host.patch_results = [result("not_exercised", ok=True)]
    host.commands["--query-gpu"] = (0, card(0, compute_cap="9.0"), "")
    run(host, patches=[GATE])
    assert host.asked["capabilities"] == ["9.0"]
    host.commands.clear()
    host.cache.clear()
    run(host, patches=[GATE])
    assert host.asked["capabilities"] == ["12.0"]
    run(host, patches=[GATE], device="cpu")
    assert host.asked["capabilities"] == ["none"]


def test_more_than_one_libnccl():
    host = FakeHost()
    host.files[OTHER] = "elf"
    host.versions[OTHER] = "2.30.4"
    texts, verdict = run(host, env={"LD_LIBRARY_PATH": "/nothing:/opt/nccl/lib"})
    assert verdict["ok"] and f"{NCCL} (2.29.7)" in texts["nccl-candidates"] and "(2.30.4)" in texts["nccl-candidates"]
    texts, verdict = run(host, env={"SGLANG_NCCL_SO_PATH": OTHER})
    assert verdict["ok"] and f"SGLANG_NCCL_SO_PATH={OTHER}" in texts["nccl-candidates"]
    texts, verdict = run(host, env={"SGLANG_NCCL_SO_PATH": "/none.so"})
    assert verdict["failures"] == ["nccl-library"] and "/none.so" in texts["nccl-library"]
    host.state["packages"]["nvidia-nccl-cu12"] = "2.27.5"
    assert "nvidia-nccl-cu12 2.27.5, nvidia-nccl-cu13 2.29.7" in run(host)[0]["nccl-two-wheels"]
    del host.files[NCCL]
    assert "torch may hold it inside" in run(host)[0]["nccl-library"]
    assert not {"nccl-library", "nccl-candidates"} & set(run(host, device="cpu")[0])


def test_the_libnccl_of_the_running_server():
    host = FakeHost()
    host.workers = {NCCL: [11, 12]}
    assert "info" in run(host)[0]["nccl-loaded"]
    host.workers = {OTHER: [11, 12]}
    host.files[OTHER], host.versions[OTHER] = "elf", "2.28.9"
    texts, verdict = run(host)
    assert verdict["ok"] and "warning" in texts["nccl-loaded"]
    assert f"{OTHER} (2.28.9) in pid 11, 12" in texts["nccl-loaded"] and f"beside torch: {NCCL}" in texts["nccl-loaded"]
    host.workers = {OTHER: [11], NCCL: [12]}
    assert "warning" in run(host)[0]["nccl-loaded"]


def test_live_readers(tmp_path):
    """The same questions to this machine."""
    host = Host(str(tmp_path))
    assert host.version_of_library("/none") is None and host.read_link("/none") is None
    (tmp_path / "libnccl.so.2.30.4").write_bytes(b"x")
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.30.4")
    assert host.version_of_library(str(tmp_path / "libnccl.so.2")) == "2.30.4"
    (tmp_path / "libnccl.so").write_bytes(b"\0" * 5000 + b"NCCL version 2.27.5+cuda12.9\0")
    assert host.version_of_library(str(tmp_path / "libnccl.so")) == "2.27.5"
    folders = host.python_path(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert folders[0] == str(tmp_path) and any(folder.endswith("site-packages") for folder in folders)
    with pytest.raises(SiteError):
        host.python_path("/none/python3", {})
    first, second = tmp_path / "a" / "sglang", tmp_path / "b" / "sglang"
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    path = f"{first.parent}:{second.parent}"
    assert host.candidates(sys.executable, {"sglang": "sglang"}, {"PYTHONPATH": path})["sglang"]["candidates"] == [
        str(first),
        str(second),
    ]


def counting(folder, then):
    """Return an interpreter that writes a line into the file beside it at each start, and then does what THEN says."""
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\necho started >> "{folder}/starts"\n{then}\n')
    python.chmod(0o755)
    return str(python), lambda: (folder / "starts").read_text().count("started")


def test_live_interpreter_is_started_once_for_all_questions(tmp_path):
    python, starts = counting(tmp_path, f'exec "{sys.executable}" "$@"')
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    for name, version in (("sglang-0.5.9.dist-info/METADATA", "0.5.9"), ("Other_Name-2.0.egg-info/PKG-INFO", "2.0")):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(f"Metadata-Version: 2.1\nVersion: {version}\n\nVersion: 9\n")
    host, env = Host(str(tmp_path / "root")), {"PYTHONPATH": str(tmp_path)}
    seen = host.candidates(python, {"sglang": "sglang", "torch": "other-name"}, env)
    versions = {name: [item["version"] for item in answer["distributions"]] for name, answer in seen.items()}
    assert versions == {"sglang": ["0.5.9"], "torch": ["2.0"]}
    assert host.candidates(python, {"sglang": "sglang"}, env) == {"sglang": seen["sglang"]}
    assert host.python_path(python, env)[0] == str(tmp_path)
    assert starts() == 1
    # Another package or another environment is another question.
    assert list(host.candidates(python, {"flashinfer": "flashinfer-python"}, env)) == ["flashinfer"]
    assert host.python_path(python, {})[0] != str(tmp_path)
    assert starts() == 3


def test_live_interpreter_that_fails_is_not_started_again(tmp_path):
    python, starts = counting(tmp_path, "echo no such library >&2; exit 1")
    host = Host(str(tmp_path / "root"))
    for ask in (lambda: host.candidates(python, {"sglang": "sglang"}, {}), lambda: host.python_path(python, {})):
        with pytest.raises(SiteError, match="no such library"):
            ask()
    assert starts() == 1


def test_live_mapped_library(tmp_path):
    """A worker of the own release that has mapped a file of that name."""
    library = tmp_path / "libnccl.so.2"
    shutil.copyfile(sys.executable, library)
    code = (
        "import mmap, sys, time\n"
        f"f = open({str(library)!r}, 'rb')\nm = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "print('up', flush=True)\ntime.sleep(60)\n"
    )
    environment = dict(os.environ, SGLANG_DEPLOY_RELEASE=f"{tmp_path}/releases/x")
    argv = ["sglang::scheduler_TP0", "-c", code]
    with subprocess.Popen(argv, executable=sys.executable, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            assert Host(str(tmp_path)).mapped("libnccl") == {str(library): [process.pid]}
            assert Host("/another/root").mapped("libnccl") == {}
        finally:
            process.kill()
