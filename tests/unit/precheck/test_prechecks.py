"""Each check with both outcomes, on hosts made of text and on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest
from ansible.module_utils.sglang_precheck_host import Host
from ansible.module_utils.sglang_precheck_kernel import acs_control
from ansible.module_utils.sglang_precheck_run import CHECKS
from ansible.module_utils.sglang_prechecks import HOST_CHECKS, in_range, run_checks

from .hosts import GB, FakeHost, captured, card, config_space, matrix

# What a healthy host says about itself.
FACTS = {"gpu", "engine-packages", "nccl-library", "nvidia-params", "sitecustomize"}
WANTED = {
    "root": "/opt/sglang",
    "engine": {"mode": "adopt", "python": "/opt/ml-env/bin/python3", "version": "0.5.20"},
    "model": {"source": "existing", "path": "/shared/model"},
    "user": "sglang",
    "port": 8000,
    "device": "cuda",
    "gpu_count": 8,
    "compute_capability": "12.0",
    "args": {},
    "env": {},
    "patches": [],
    "built": False,
    "allow_experimental": False,
    "model_sha256": {},
    "python_range": ">=3.10,<3.14",
    "engine_mb": 2500,
    "release_mb": 100,
    "margin_mb": 500,
}
BUILD = {"mode": "build", "version": "0.5.9", "root": "/opt/sglang/engines", "base_python": "/usr/bin/python3"}
NOT_BUILT = {"present": False, "python": None, "problem": "not built yet"}


def run(host, **change):
    """Return ``(findings by rule without the facts, verdict)``."""
    findings, verdict = run_checks({**WANTED, **change}, host, CHECKS)
    by_rule = {}
    for item in findings:
        if item["level"] != "info" or item["rule"] not in FACTS or "cpu" in item["message"]:
            by_rule.setdefault(item["rule"], []).append(item)
        assert item["message"].endswith(".") and (item["advice"] or item["level"] == "info"), item
    return by_rule, verdict


def test_a_host_with_everything_right_has_facts_and_no_complaint():
    assert run(FakeHost()) == ({}, {"ok": True, "failures": []})
    findings, _verdict = run_checks(WANTED, FakeHost(), CHECKS)
    assert {item["rule"] for item in findings} == FACTS
    seen = {item["rule"]: f"{item['message']} {item['evidence']}" for item in findings}
    assert "8 GPUs answer" in seen["gpu"] and "580.95.05" in seen["gpu"] and "capability 12.0" in seen["gpu"]
    assert "sglang 0.5.20 in" in seen["engine-packages"] and "NCCL is" in seen["nccl-library"]
    assert "2.29.7" in seen["nccl-library"] and "ForceP2P=0x11" in seen["nvidia-params"]


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("opt/sglang", "absolute"),
        ("/" + "x" * 80, "has 81 bytes and may have 80"),
        ("/closed/sglang", "cannot be created"),
    ],
)
def test_root(root, says):
    host = FakeHost()
    host.directories.add("/closed")
    host.closed.add("/closed")
    found, verdict = run(host, root=root)
    assert says in found["root-path"][0]["message"] and verdict == {"ok": False, "failures": ["root-path"]}


def test_service_user():
    found, verdict = run(FakeHost(), user="nobody-here")
    assert verdict["failures"] == ["service-user"] and "nobody-here" in found["service-user"][0]["message"]
    assert run(FakeHost(), user="")[1]["ok"]


def test_adopted_engine_and_its_python():
    host = FakeHost()
    host.state["python_version"] = "3.9.2"
    assert "is Python 3.9.2" in run(host)[0]["interpreter"][0]["message"]
    host.state.update(present=False, problem="has no importable package sglang")
    found, verdict = run(host)
    assert found["engine"][0]["evidence"] == "has no importable package sglang" and verdict["failures"] == ["engine"]


def test_base_interpreter_of_a_build():
    host = FakeHost()
    host.state = dict(host.state, **NOT_BUILT)
    assert run(host, engine=BUILD)[1]["ok"]
    assert run(host, engine=dict(BUILD, base_python="/none/python3"))[1]["failures"] == ["interpreter"]
    assert "PATH" in run(host, engine=dict(BUILD, base_python="no-such-python"))[0]["interpreter"][0]["evidence"]
    host.pythons["/usr/bin/python3"] = "3.14.0"
    assert run(host, engine=BUILD)[1]["failures"] == ["interpreter"]


def test_disk_is_counted_for_each_file_system():
    host = FakeHost()
    host.state = dict(host.state, **NOT_BUILT)
    host.volumes = {"/": (GB, 10**7, 1)}
    found, verdict = run(host, engine=BUILD)
    assert verdict["failures"] == ["disk-space"]
    assert "needs 3100 MB" in found["disk-space"][0]["message"] and "1024 MB free" in found["disk-space"][0]["evidence"]
    host.state = FakeHost().state
    assert run(host, engine=BUILD)[1]["ok"], "an engine that is there needs no room"
    host.state = dict(host.state, **NOT_BUILT)
    host.directories.add("/big")
    host.volumes["/big"] = (10 * GB, 10**7, 2)
    assert run(host, engine=dict(BUILD, root="/big/engines"))[1]["ok"]
    host.volumes["/big"] = (10 * GB, 100, 2)
    found, _verdict = run(host, engine=dict(BUILD, root="/big/engines"))
    assert "100 inodes free" in found["disk-space"][0]["evidence"]
    host.volumes["/big"] = (10 * GB, None, 2)
    assert run(host, engine=dict(BUILD, root="/big/engines"))[1]["ok"]


def holder(pid, address="0.0.0.0"):
    return {
        "pid": pid,
        "address": address,
        "inode": 1,
        "uid": 0,
        "cmdline": ["python3", "-m", "server"],
        "release": None,
    }


def test_port():
    host = FakeHost()
    host.holders = [holder(4711)]
    found, verdict = run(host)
    assert verdict["failures"] == ["port-taken"] and "pid 4711" in found["port-taken"][0]["evidence"]
    host.models = {"http://127.0.0.1:8000": ["kimi"], "http://[::1]:8000": ["other"]}
    found = run(host)[0]["port-taken"][0]
    assert "another model server" in found["message"] and "serves kimi" in found["evidence"]
    host.holders = [holder(4711, "::")]
    assert "serves other" in run(host)[0]["port-taken"][0]["evidence"]
    host.ours = {4711}
    assert run(host)[1]["ok"]
    host.holders = [holder(None)]
    assert run(host)[1]["failures"] == ["port-taken"]
    assert run(host, port=70000)[1]["failures"] == ["port"]


def test_model_files_each_get_a_finding():
    host = FakeHost()
    host.problems = ["a is missing", "b is a git-LFS pointer"]
    assert [item["evidence"] for item in run(host)[0]["model-files"]] == host.problems
    assert len(run(host, model_sha256={"c": "00"})[0]["model-files"]) == 3
    assert run(host, model={"source": "generate", "path": "/x"})[1]["ok"] and run(host, model={})[1]["ok"]


def test_warnings_do_not_refuse():
    host = FakeHost()
    host.lock_limit = 65536
    host.environ["https_proxy"] = "http://proxy:3128"
    host.environ["http_proxy"] = "http://proxy:3128"
    host.files["/etc/nccl.conf"] = "# comment\nNCCL_ALGO=Tree\n"
    host.files["/srv/sglang/.nccl.conf"] = "NCCL_DEBUG=INFO\n"
    host.files["/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"] = "N\n"
    found, verdict = run(host)
    assert verdict["ok"] and set(found) == {"memory-lock", "proxy", "nccl-conf", "uvm-hmm"}
    assert {item["level"] for items in found.values() for item in items} == {"warning"}
    assert [item["evidence"] for item in found["nccl-conf"]] == ["NCCL_ALGO=Tree", "NCCL_DEBUG=INFO"]
    host.environ["no_proxy"] = "example.org, localhost"
    assert "proxy" not in run(host)[0]


def test_a_cpu_host_says_what_is_not_exercised():
    host = FakeHost()
    host.commands = {}
    found, verdict = run(host, device="cpu")
    assert verdict["ok"] and "not exercised" in found["gpu"][0]["message"] and found["gpu"][0]["level"] == "info"


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"


@pytest.mark.parametrize(
    ("answer", "rule", "advice"),
    [
        ((127, "", "nvidia-smi: not found"), "gpu-missing", "install the NVIDIA driver"),
        ((18, MISMATCH, ""), "gpu-driver-mismatch", "reboot"),
        ((9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""), "gpu-driver", "Xid"),
        ((15, "Unable to determine the device handle for GPU0000:81:00.0: GPU is lost.", ""), "gpu-driver", "reboot"),
        ((124, "", "nvidia-smi gave no answer within 10 s"), "gpu-driver", "Xid"),
        ((0, "", ""), "gpu-count", "lspci"),
        ((0, "\n".join(card(index) for index in range(7)), ""), "gpu-count", "lspci"),
    ],
)
def test_gpus_that_are_missing_or_do_not_answer(answer, rule, advice):
    host = FakeHost()
    host.commands["--query-gpu"] = answer
    found, verdict = run(host)
    assert verdict["failures"] == [rule] and advice in found[rule][0]["advice"]
    if rule == "gpu-count":
        assert "8 are expected" in found[rule][0]["message"]


def test_a_gpu_in_use():
    host = FakeHost()
    host.commands["--query-compute-apps"] = (
        0,
        "GPU-00000002, 99, /usr/bin/python3, 81000\nGPU-00000003, 77, sglang, 90000\n",
        "",
    )
    host.ours = {77}
    found, verdict = run(host)
    assert verdict["failures"] == ["gpu-memory-taken"] and len(found["gpu-memory-taken"]) == 1
    assert "GPU 2" in found["gpu-memory-taken"][0]["message"] and "pid 99" in found["gpu-memory-taken"][0]["evidence"]
    host.commands["--query-compute-apps"] = (0, "", "")
    host.commands["--query-gpu"] = (
        0,
        "\n".join(card(i, memory__used="40000" if i == 5 else "3") for i in range(8)),
        "",
    )
    host.cache.clear()
    found, verdict = run(host)
    assert verdict["ok"] and "GPU 5 holds memory of no visible process" in found["gpu-memory-taken"][0]["message"]


def test_what_makes_gpus_slow():
    host = FakeHost()
    lines = [
        card(0, pcie__link__width__current="8", power__limit="300.00", pcie__link__gen__current="1"),
        card(1, persistence_mode="Disabled", name="NVIDIA L40S", compute_cap="8.9"),
        card(2, memory__used="[N/A]", power__limit="[Not Supported]", pcie__link__gen__current="4", pstate="P0"),
    ]
    host.commands["--query-gpu"] = (0, "\n".join(lines), "")
    host.commands["topo"] = (0, matrix(3, bad={(0, 2)}), "")
    host.commands["dmesg"] = (0, captured("dmesg-xid.txt"), "")
    host.commands["MEMORY"] = (0, captured("memory.txt").replace("131072", "256", 1), "")
    found, verdict = run(host, gpu_count=3, compute_capability="")
    assert verdict["ok"]
    slow = {
        "gpu-pcie-width",
        "gpu-pcie-gen",
        "gpu-power",
        "gpu-persistence",
        "gpu-mixed",
        "gpu-p2p",
        "gpu-xid",
        "gpu-bar1",
    }
    assert set(found) == slow
    assert found["gpu-pcie-width"][0]["message"] == "GPU 0 has 8 of 16 PCIe lanes."
    assert [(item["level"], item["message"]) for item in found["gpu-pcie-gen"]] == [
        ("info", "GPU 0 runs PCIe generation 1 of 5."),
        ("warning", "GPU 2 runs PCIe generation 4 of 5."),
    ]
    assert found["gpu-power"][0]["evidence"] == "range 300.00 to 600.00 W"
    assert found["gpu-bar1"][0]["evidence"] == "00000000:01:00.0 256 MiB of 97887 MiB"
    assert found["gpu-p2p"][0]["evidence"] == "GPU0-GPU2=CNS"
    assert (
        "2 Xid errors" in found["gpu-xid"][0]["message"]
        and "79 = the GPU has fallen" in found["gpu-xid"][0]["evidence"]
    )
    host.commands["dmesg"] = (1, "", "dmesg: read kernel buffer failed: Operation not permitted")
    assert run(host, gpu_count=3, compute_capability="")[0]["gpu-xid"][0]["level"] == "info"


def test_the_declared_compute_capability_is_compared():
    found, verdict = run(FakeHost(), compute_capability="9.0")
    assert verdict["failures"] == ["gpu-capability"] and "GPU 7 has 12.0" in found["gpu-capability"][0]["evidence"]
    assert run(FakeHost(), compute_capability="9.0", device="cpu")[1]["ok"]
    assert run(FakeHost(), compute_capability="12")[1]["ok"]


def test_what_nvidia_smi_does_not_say_is_said():
    host = FakeHost()
    refusal = "Invalid combination of input arguments: --display/-d flags can not be combined"
    for answer in ((1, refusal, ""), (0, captured("memory.txt")[:400], "")):
        host.commands["MEMORY"] = answer
        found, verdict = run(host)
        assert verdict["ok"] and "does not say how large" in found["gpu-bar1"][0]["message"]
    host.commands["topo"] = (6, "", "Not Supported")
    found, verdict = run(host)
    assert verdict["ok"] and found["gpu-p2p"][0]["evidence"] == "Not Supported"
    assert found["gpu-p2p"][0]["level"] == "info"


@pytest.mark.parametrize(
    ("args", "taken", "flag"),
    [
        ({}, 8233, None),
        ({"nccl-port": "28000"}, 28000, "nccl-port"),
        ({"dist-init-addr": "10.0.0.1:5000"}, 5000, "dist-init-addr"),
        ({"dist-init-addr": "10.0.0.1:5000"}, 5001, None),
        ({"dist-init-addr": "[::1]:5000", "enable-dp-attention": True}, 5006, "enable-dp-attention"),
        ({"enable-dp-attention": True}, 8233, "enable-dp-attention"),
        ({"enable-dp-attention": "true"}, 8239, "enable-dp-attention"),
        ({"enable-dp-attention": True}, 8240, None),
        ({"enable-dp-attention": False}, 8233, None),
    ],
)
def test_derived_ports(args, taken, flag):
    host = FakeHost()
    host.holders = [dict(holder(99), port=taken)]
    found, verdict = run(host, args=args)
    assert verdict["failures"] == (["port-derived"] if flag else [])
    if flag:
        assert f"port {taken}, which {flag}" in found["port-derived"][0]["message"]
        host.ours = {99}
        assert run(host, args=args)[1]["ok"]


def test_iommu_and_acs_on_the_path():
    host = FakeHost()
    for bus in ("01", "81"):
        host.files[f"/sys/bus/pci/devices/0000:{bus}:00.0/iommu_group/type"] = "DMA-FQ\n"
    host.files["/sys/bus/pci/devices/0000:11:00.0/iommu_group/type"] = "identity\n"
    host.files["/sys/bus/pci/devices/0000:00:01.1/config"] = config_space(acs=0x1D)
    host.files["/sys/bus/pci/devices/0000:00:11.1/config"] = config_space(acs=0)
    host.files["/sys/bus/pci/devices/0000:00:81.1/config"] = config_space(size=64)
    found, verdict = run(host)
    assert verdict["ok"] and set(found) == {"p2p-hang", "iommu", "acs", "acs-unread"}
    assert "p2p_off" in found["p2p-hang"][0]["advice"] and "0000:00:01.1 0x001d" in found["p2p-hang"][0]["evidence"]
    assert found["acs-unread"][0]["evidence"] == "0000:00:81.1"
    assert found["iommu"][0]["evidence"] == "GPU 0 DMA-FQ; GPU 4 DMA-FQ"
    assert found["acs"][0]["evidence"] == "0000:00:01.1 0x001d"


def test_acs_control_reads_any_bytes():
    assert acs_control(config_space(acs=0x1D)) == 0x1D
    for raw in (None, b"", config_space(size=64), config_space(), b"\xff" * 4096, b"\x01\x00\x01\x10" * 1024):
        assert acs_control(raw) is None


def test_a_check_that_fails_is_a_finding():
    def broken(_wanted, _host):
        raise LookupError("unforeseen")

    findings, verdict = run_checks(WANTED, FakeHost(), [broken, *HOST_CHECKS])
    assert verdict == {"ok": False, "failures": ["broken"]} and "unforeseen" in findings[0]["evidence"]


def test_ranges():
    assert in_range("3.11.2", ">=3.10,<3.14") and in_range("3.10.0", ">=3.10") and in_range("3.9", "")
    assert not in_range("3.9.18", ">=3.10,<3.14") and not in_range("3.14.0", "<3.14")
    with pytest.raises(ValueError, match="python_range must look like"):
        in_range("3.11", "3.11")


# From here on: this machine.


@pytest.fixture
def arguments(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    engine = {"mode": "build", "version": "0.5.9", "root": "/tmp/e", "base_python": sys.executable, "lock_digest": "a"}
    return {
        "root": "/tmp/sglang-precheck",
        "engine": engine,
        "port": number,
        "device": "cpu",
        "python_range": "",
        "engine_mb": 10,
    }


def test_live_machine(run_module, arguments):
    for check in (False, True):
        result = run_module("sglang_precheck", arguments, check=check)
        assert result["verdict"]["ok"] and not result["changed"] and result["elapsed"] < 5, result
        assert [item["rule"] for item in result["findings"] if item["rule"] == "gpu"]
    assert not os.path.exists(arguments["root"])


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_live_machine_without_a_gpu_is_a_finding(run_module, arguments):
    result = run_module("sglang_precheck", dict(arguments, device="cuda", gpu_count=8))
    assert result["failed"] and result["verdict"]["failures"] == ["gpu-missing"]
    assert "[precheck/gpu-missing]" in result["msg"] and "Way out: install the NVIDIA driver" in result["msg"]
    assert not run_module("sglang_precheck", dict(arguments, device="cuda", enforce=False)).get("failed")


class Models(http.server.BaseHTTPRequestHandler):
    """Answers like a model server."""

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "somebody-elses"}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        """Say nothing."""


def test_live_foreign_server_is_named(run_module, arguments):
    with http.server.ThreadingHTTPServer(("127.0.0.1", arguments["port"]), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run_module("sglang_precheck", arguments)
        server.shutdown()
    assert result["failed"] and "another model server" in result["msg"]
    assert f"pid {os.getpid()}" in result["msg"] and "serves somebody-elses" in result["msg"]


def test_live_silent_port_does_not_hold_the_check_up(run_module, arguments):
    with socket.create_server(("127.0.0.1", arguments["port"])):
        result = run_module("sglang_precheck", arguments)
    assert result["verdict"]["failures"] == ["port-taken"] and result["elapsed"] < 8


def test_live_own_release_may_hold_the_port(run_module, arguments):
    environment = dict(os.environ, SGLANG_DEPLOY_RELEASE=f"{arguments['root']}/releases/x")
    code = (
        "import socket, time\n"
        f"s = socket.create_server(('127.0.0.1', {arguments['port']}))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            assert run_module("sglang_precheck", arguments)["verdict"]["ok"]
            other = run_module("sglang_precheck", dict(arguments, root="/tmp/another-root", enforce=False))
            assert other["verdict"]["failures"] == ["port-taken"]
        finally:
            process.kill()


def test_live_host_readers():
    host = Host("/opt/sglang", command_limit=0.3)
    assert host.run(["sh", "-c", "echo out; exit 3"]) == (3, "out\n", "")
    assert host.run(["no-such-program"])[0] == 127 and host.run(["/etc"])[0] == 126
    assert host.run(["sleep", "5"])[0] == 124
    assert host.read("/nonexistent") is None and host.existing("/proc/none/x") == "/proc"
    assert host.account("root").pw_uid == 0 and host.account("no-such-user") is None
    free, _inodes, device = host.free("/")
    assert free >= 0 and device == os.stat("/").st_dev


@pytest.mark.parametrize(
    ("answer", "rule", "advice"),
    [
        (f"printf '%s' '{MISMATCH}'; exit 18", "gpu-driver-mismatch", "hold the driver packages"),
        (
            "echo 'Unable to determine the device handle for GPU0000:81:00.0: GPU is lost.'; exit 15",
            "gpu-driver",
            "Xid",
        ),
        ("exit 0", "gpu-count", "0 GPUs answer and 8 are expected"),
    ],
)
def test_live_program_that_answers_like_a_sick_driver(
    run_module, arguments, tmp_path, monkeypatch, answer, rule, advice
):
    stub = tmp_path / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\n{answer}\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = run_module("sglang_precheck", dict(arguments, device="cuda", gpu_count=8))
    assert result["verdict"]["failures"] == [rule] and advice in result["msg"]


def test_live_model_files(run_module, arguments, tmp_path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + b"1234"
    files = {
        "a.safetensors": whole,
        "b.safetensors": whole[:-2],
        "c.safetensors": b"version https://git-lfs.github.com/spec/v1",
    }
    index = {"weight_map": {f"w{number}": name for number, name in enumerate([*files, "d.safetensors"])}}
    index["weight_map"].update(w="a.safetensors")
    del index["weight_map"]["w0"]
    files.update({"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()})
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    declared = {"source": "existing", "path": str(tmp_path)}
    digests = {"a.safetensors": "0" * 64, "config.json": hashlib.sha256(b"{}").hexdigest()}
    result = run_module("sglang_precheck", dict(arguments, model=declared, model_sha256=digests))
    seen = [item["evidence"] for item in result["findings"] if item["rule"] == "model-files"]
    assert result["verdict"]["failures"] == ["model-files"] and len(seen) == 4, seen
    for name, what in {
        "b": "its header says",
        "c": "git-LFS pointer",
        "d": "is missing",
        "a": "another SHA-256",
    }.items():
        assert any(text.startswith(f"{name}.safetensors") and what in text for text in seen), (name, seen)
