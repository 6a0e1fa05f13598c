"""precheck.yml on a simulated host: nvidia-smi of eight SM120 cards, an adopted engine of real release packages."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import venv

import pytest

HERE = pathlib.Path(__file__).parent


class SimulatedHost:
    """A host of the group pcie_gpu on this machine."""

    def __init__(self, repository, folder, unpacked):
        self.repository, self.folder, self.unpacked = repository, folder, unpacked
        self.python = folder / "env" / "bin" / "python3"
        venv.create(folder / "env", with_pip=False, symlinks=True)
        self.site = next((folder / "env").glob("lib/python3*/site-packages"))
        # torch is no part of the question: a package that can be found and its metadata.
        (self.site / "torch").mkdir()
        (self.site / "torch" / "__init__.py").write_text("")
        (self.site / "torch-2.9.1.dist-info").mkdir()
        (self.site / "torch-2.9.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.1\n")
        (folder / "bin").mkdir()
        stub = folder / "bin" / "nvidia-smi"
        stub.write_text(f"#!{sys.executable}\n" + (HERE / "nvidia-smi").read_text())
        stub.chmod(0o755)
        (folder / "hosts.yml").write_text(
            "sglang: {children: {pcie_gpu: {hosts: {gpu01: {ansible_connection: local}}}}}\n"
        )
        (folder / "group_vars").symlink_to(repository / "group_vars")

    def install(self, distribution, version):
        """Put a real release package in the place of what the environment has of it."""
        for old in self.site.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)
        for item in self.unpacked(distribution, version).iterdir():
            if item.is_dir() and (self.site / item.name).exists():
                shutil.rmtree(self.site / item.name)
            shutil.move(str(item), str(self.site / item.name))

    def precheck(self, **extra):
        """Run precheck.yml for fewchan_fusion and return ``(exit status, verdict, output)``; the engine's version is
        the group's default unless given."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        variables = {
            "variant": "fewchan_fusion",
            "sglang_root": str(self.folder / "root"),
            "sglang_engine_mode": "adopt",
            "sglang_engine_python": str(self.python),
            "sglang_server_port": port,
            # No 600 GB here; the weights are not what is looked at.
            "model_files_source": "generate",
            "ansible_python_interpreter": sys.executable,
            "host_preflight_verdict_file": str(self.folder / "verdict.json"),
            **extra,
        }
        environment = dict(
            os.environ,
            PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}",
            ANSIBLE_CONFIG=str(self.repository / "ansible.cfg"),
        )
        command = [sys.executable, "-m", "ansible", "playbook", "precheck.yml", "-i", str(self.folder / "hosts.yml")]
        command += ["-e", json.dumps(variables)]
        done = subprocess.run(
            command, cwd=self.repository, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        output = done.stdout + done.stderr
        verdict = self.folder / "verdict.json"
        assert verdict.exists(), output
        result = json.loads(verdict.read_text())
        verdict.unlink()
        return done.returncode, result, output


def finding(verdict, rule, about=""):
    """Return one finding of the host as text."""
    found = [
        item for item in verdict["hosts"]["gpu01"]["findings"] if item["rule"] == rule and about in item["message"]
    ]
    assert len(found) == 1, f"{rule}: {verdict}"
    return f"{found[0]['level']}: {found[0]['message']} {found[0]['evidence']} {found[0]['advice']}"


@pytest.fixture
def host(repository, tmp_path, unpacked):
    return SimulatedHost(repository, tmp_path, unpacked)


def test_the_default_engine_goes_through_and_a_downgraded_flashinfer_is_seen(host):
    host.install("sglang", "0.5.20")
    host.install("flashinfer-python", "0.6.18")
    status, verdict, output = host.precheck()
    assert status == 0 and verdict["ok"] and verdict["failures"] == [], output
    assert "it then admits 9.0, 10.0, 12.0" in finding(verdict, "patch-fits", "sm120_allreduce_fusion")
    assert "flashinfer 0.6.18" in finding(verdict, "patch-fits", "flashinfer_sm120_gate")
    assert "majors 9, 10, 12" in finding(verdict, "flashinfer-gate")
    assert "8 GPUs answer" in finding(verdict, "gpu") and "capability 12.0" in finding(verdict, "gpu")
    cards = [item for item in verdict["hosts"]["gpu01"]["findings"] if item["rule"].startswith("gpu")]
    assert {item["rule"] for item in cards} == {"gpu", "gpu-pcie-gen"} and {item["level"] for item in cards} == {"info"}
    assert not (host.folder / "root").exists(), "precheck wrote below the root"

    # Lint judges by what the release pins; only the host knows what pip left there.
    host.install("flashinfer-python", "0.6.3")
    status, verdict, output = host.precheck()
    assert status != 0 and verdict["failures"] == ["patch-refused"], output
    assert "flashinfer 0.6.3" in finding(verdict, "patch-refused")
    assert "flashinfer-python 0.6.3, sglang 0.5.20 wants 0.6.18" in finding(verdict, "package-pins")


def test_0_5_9_is_refused_with_the_facts_and_the_ways_out(host):
    host.install("sglang", "0.5.9")
    host.install("flashinfer-python", "0.6.3")
    status, verdict, output = host.precheck(sglang_engine_version="0.5.9")
    assert status != 0 and verdict["failures"] == ["fusion-gate", "patch-refused"], output
    refusal = finding(verdict, "patch-refused")
    for fact in ("the GPUs have compute capability 12.0", "flashinfer 0.6.3 in", "the engine is SGLang 0.5.9"):
        assert fact in refusal
    assert "admits 9.0, 10.0 and refuses 12.0" in refusal
    for way_out in ("0.5.20", "sglang_patches_allow_experimental=true", "pcie_ipc (SGLang 0.5.22"):
        assert way_out in refusal
    assert "way out" in output.lower() and "is refused: fusion-gate, patch-refused" in " ".join(output.split())

    status, verdict, output = host.precheck(sglang_engine_version="0.5.9", sglang_patches_allow_experimental="true")
    assert status == 0 and verdict["ok"], output
    assert "it then admits 9.0, 10.0, 12.0" in finding(verdict, "patch-fits", "flashinfer_sm120_gate")


def test_0_5_10_is_refused_also_where_experimental_patches_are_allowed(host):
    host.install("sglang", "0.5.10.post1")
    host.install("flashinfer-python", "0.6.7.post3")
    allowed = {"sglang_engine_version": "0.5.10.post1", "sglang_patches_allow_experimental": "true"}
    status, verdict, output = host.precheck(**allowed)
    assert status != 0 and verdict["failures"] == ["fusion-gate", "patch-refused"], output
    for rule in verdict["failures"]:
        told = finding(verdict, rule)
        for words in (
            "NVLink multicast, which no SM12x card has",
            "would then lack its all-reduces",
            "0.5.20",
            "pcie_ipc",
        ):
            assert words in told
        assert "allow the experimental" not in told

    # Lint goes by the pin and can be forced; what is installed is judged all the same.
    status, verdict, output = host.precheck(**allowed, sglang_force="true")
    assert status != 0 and verdict["failures"] == ["patch-refused"], output
