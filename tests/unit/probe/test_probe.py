"""The probe with the worker program for real and a torch of lists: what goes wrong in a rank, and what is kept.

A fault is the text of a setting's sitecustomize: each rank runs it before it joins, as it runs that of a release. The
same with a real torch over gloo is in tests/integration.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from ansible.module_utils import sglang_nccl_plan, sglang_nccl_run

FAKE = pathlib.Path(__file__).resolve().parents[2] / "fake_torch"
MODEL = {"hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 64, "torch_dtype": "bfloat16"}
LIMIT = 30
HANGS = ("hangs", "is_missing")
LATE = ("stalls", "crawls")


def rank_1(text):
    """Return a sitecustomize that does something in rank 1 only."""
    return f"import os, time\nimport torch.distributed as dist\nif os.environ['SGLANG_NCCL_PROBE_RANK'] == '1':\n{text}"


FAULTS = {
    "works": "",
    "hangs": rank_1("    dist.all_gather_into_tensor = lambda *args, **more: time.sleep(60)\n"),
    "is_missing": rank_1("    time.sleep(60)\n"),
    # Works while it is checked and then not any more.
    "stalls": rank_1(
        "    real, calls = dist.all_gather_into_tensor, []\n"
        "    def all_gather(*args, **more):\n"
        "        calls.append(1)\n"
        "        return time.sleep(60) if len(calls) > 6 else real(*args, **more)\n"
        "    dist.all_gather_into_tensor = all_gather\n"
    ),
    "crawls": rank_1(
        "    real = dist.all_reduce\n"
        "    def all_reduce(*args, **more):\n"
        "        time.sleep(0.3)\n"
        "        return real(*args, **more)\n"
        "    dist.all_reduce = all_reduce\n"
    ),
    "fails_above": (
        "import torch.distributed as dist\nreal = dist.all_reduce\n"
        "def all_reduce(tensor, *args, **more):\n"
        "    if tensor.numel() > 4 * 8:\n"
        "        raise RuntimeError('NCCL error: unhandled cuda error')\n"
        "    return real(tensor, *args, **more)\n"
        "dist.all_reduce = all_reduce\n"
    ),
    "adds_wrong": rank_1(
        "    real = dist.all_reduce\n"
        "    def all_reduce(tensor, *args, **more):\n"
        "        real(tensor, *args, **more)\n"
        "        tensor[3] = 200\n"
        "    dist.all_reduce = all_reduce\n"
    ),
    "dies": rank_1("    dist.all_reduce = lambda *args, **more: os.kill(os.getpid(), 9)\n"),
}


@pytest.fixture
def probe(tmp_path, run_module):
    """Return ``probe(settings, **params)``, which gives the module's result."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))

    def call(settings, *, check=False, **more):
        params = {
            "root": str(tmp_path), "python": sys.executable, "model": str(tmp_path / "model"), "device": "cpu",
            "tp_size": 2, "env": {"PYTHONPATH": str(FAKE)}, "limit": LIMIT, "enforce": False, "batches": [1], **more,
            "settings": [{"args": {"chunked-prefill-size": 16}, **item} for item in settings],
        }  # fmt: skip
        return run_module("sglang_nccl_probe", params, check=check)

    return call


def workers(root):
    """Return the processes of this machine that run the worker program of this root (other tests run beside)."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(root / "probe" / "run-") in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def test_faults(probe, tmp_path):
    """Each fault is named with its place and its rank, and nothing is left of any of them."""
    run = {"id": "r1", "user": "u", "controller": "c"}
    faults = {name: text for name, text in FAULTS.items() if name not in HANGS + LATE}
    result = probe([{"name": name, "variables": {}, "site": text} for name, text in faults.items()], run=run)
    rows = {row["name"]: row for row in result["results"]}
    seen = {name: (row["outcome"], row["where"] and row["where"]["phase"]) for name, row in rows.items()}
    assert seen == {
        "works": ("ok", None), "fails_above": ("failed", "check"), "adds_wrong": ("wrong", "check"),
        "dies": ("crashed", "check"),
    }  # fmt: skip
    assert rows["adds_wrong"]["failed_ranks"] == [1]
    assert rows["dies"]["failed_ranks"] == [1]
    messages = {item["rule"]: item["message"] for item in result["findings"] if "fails_above" in item["message"]}
    assert "prefill of 16 tokens" in messages["probe-fails"], "the first size that fails"
    assert result["verdict"] == {"ok": False, "failures": ["probe-crashes", "probe-fails", "probe-wrong"]}
    assert any(item["message"].startswith("not exercised: NCCL") for item in result["findings"])
    assert workers(tmp_path) == []
    assert [path.name for path in (tmp_path / "probe").iterdir() if path.is_dir()] == [], "no scratch folder is left"
    event = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert (event["event"], event["verdict"], len(event["results"])) == ("probe", "refused", len(faults))
    works = rows["works"]
    assert works["predicted"]["decode"] > 0
    assert all(step["eager"]["p50_us"] > 0 and step["busbw_gbs"] > 0 for step in works["steps"])
    assert all(step["graph"] is None for step in works["steps"]), "a CPU has no graphs"


def test_hangs(probe, tmp_path):
    """A rank that never answers ends with all others at the limit, and the advice names IOMMU and ACS."""
    result = probe([{"name": name, "variables": {}, "site": FAULTS[name]} for name in HANGS], limit=4)
    rows = {row["name"]: row for row in result["results"]}
    assert {name: (row["outcome"], row["where"]["phase"]) for name, row in rows.items()} == {
        "hangs": ("hung", "check"), "is_missing": ("hung", None),
    }  # fmt: skip
    assert all(4 <= row["seconds"] < 6 for row in rows.values())
    assert rows["is_missing"]["failed_ranks"] == [1], "the rank that never came is named"
    assert result["verdict"]["failures"] == ["probe-hangs"]
    assert any("IOMMU" in item["advice"] and "ACS" in item["advice"] for item in result["findings"])
    assert workers(tmp_path) == []


def test_slow_is_not_hung(probe):
    """The limit ends both while they are measured: one that stopped, and one that needs longer than it has."""
    result = probe([{"name": name, "variables": {}, "site": FAULTS[name]} for name in LATE], limit=6)
    rows = {row["name"]: (row["outcome"], row["where"]["phase"]) for row in result["results"]}
    assert rows == {"stalls": ("hung", "time"), "crawls": ("slow", "time")}
    (slow,) = [item for item in result["findings"] if item["rule"] == "probe-too-slow"]
    # How far it came depends on the machine.
    assert re.search("variant crawls is too slow for its limit at all_(reduce|gather) ", slow["message"])
    assert "all values had been right" in slow["evidence"] and "IOMMU" not in slow["advice"]


def test_a_program_that_ends_between_two_trials_is_started_anew(tmp_path, monkeypatch):
    """It was still there when it was looked at, and takes the request no more."""
    plan = sglang_nccl_plan.make_plan(MODEL, {}, 2, graphs=False)
    with sglang_nccl_run.Workers(sys.executable, str(tmp_path), dict(os.environ, PYTHONPATH=str(FAKE))) as workers:
        workers.start()
        first = workers.process
        first.kill()
        first.wait()
        monkeypatch.setattr(first, "poll", lambda: None)
        found = workers.trial({"name": "n", "variables": {}}, plan, LIMIT, "gloo", [0, 1])
        assert found["outcome"] == "ok" and workers.process is not first


def test_killed_module_leaves_nothing(tmp_path):
    """The kernel ends workers and ranks with the module, whatever ends that."""
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\nimport ansible.module_utils\nansible.module_utils.__path__.append(sys.argv[1])\n"
        "from ansible.module_utils import sglang_nccl_plan, sglang_nccl_run\n"
        "model = {'hidden_size': 4, 'num_hidden_layers': 1, 'vocab_size': 8}\n"
        "plan = sglang_nccl_plan.make_plan(model, {}, 2, graphs=False)\n"
        "folder = sys.argv[2]\n"
        "workers = sglang_nccl_run.Workers(sys.executable, folder, dict(os.environ, PYTHONPATH=sys.argv[3]))\n"
        "workers.start()\nprint(workers.process.pid, flush=True)\n"
        "site = 'import time; time.sleep(60)'\n"
        "workers.trial({'name': 'n', 'variables': {}, 'site': site}, plan, 50, 'gloo', [0, 1])\n"
    )
    (tmp_path / "probe" / "run-1").mkdir(parents=True)
    library = pathlib.Path(__file__).resolve().parents[3] / "library" / "module_utils"
    command = [sys.executable, script, library, tmp_path / "probe" / "run-1", FAKE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    leader = int(process.stdout.readline())
    waits_until(lambda: len(sglang_nccl_run.session_members(leader)) == 3)
    process.kill()
    process.communicate()
    waits_until(lambda: sglang_nccl_run.session_members(leader) == [])


def test_a_worker_that_is_gone_with_a_request_unread_is_cleaned_up(tmp_path):
    """The pipe is broken then; what it started is ended all the same."""
    workers = sglang_nccl_run.Workers(sys.executable, str(tmp_path), {})
    workers.process = subprocess.Popen(
        ["sh", "-c", "sleep 60 </dev/null >/dev/null & exit 0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    leader = workers.process.pid
    workers.process.wait()
    workers.process.stdin.write(b"{}")
    assert len(sglang_nccl_run.session_members(leader)) == 1
    assert workers.close() == [] and sglang_nccl_run.session_members(leader) == []


def test_what_a_worker_that_did_not_start_has_left_is_told(probe, monkeypatch):
    """Beside the reason why it did not."""
    real = sglang_nccl_run.Workers.close
    monkeypatch.setattr(sglang_nccl_run.Workers, "close", lambda self: [*real(self), 4711])
    result = probe([{"name": "one", "variables": {}}], python="/bin/true")
    assert result["failed"] and "did not import torch" in result["msg"]
    assert "the probe left processes (pid 4711)" in result["msg"]


def waits_until(true, limit=20):
    """Wait for a condition, and fail where it does not come."""
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_kept_result(probe, tmp_path):
    """What worked is not tried again under the same conditions, and is under others."""
    one = [{"name": "one", "variables": {"NCCL_ALGO": "Ring"}}]
    assert probe(one, check=True)["results"] == []
    first = probe(one)
    assert (first["changed"], first["reused"]) == (True, [])
    again = probe(one)
    assert (again["changed"], again["reused"]) == (False, ["one"])
    assert again["elapsed"] < 1
    assert again["results"][0]["steps"] == first["results"][0]["steps"]
    assert probe(one, check=True)["reused"] == ["one"]
    bench = {"event": "run", "variant": "one", "metrics": {"tpot_ms_p50": 12.2}, "workload": {"concurrency": 1}}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(bench) + "\n")
    assert "12.2 ms a token with 1 streams" in probe(one)["table"]
    assert probe(one, fingerprint="another engine")["reused"] == []


def test_environment_that_is_set_already(probe):
    """A variable of the service wins over the variant's, and that is said; one setting alone starts with its file."""
    site = "import os\nos.environ.setdefault('NCCL_ALGO', 'Ring')\nos.environ['SEEN_BY'] = 'site'\n"
    setting = {"name": "one", "variables": {"NCCL_ALGO": "Ring", "SEEN_BY": "site"}, "site": site}
    result = probe([setting], env={"PYTHONPATH": str(FAKE), "NCCL_ALGO": "Tree"})
    said = [item for item in result["findings"] if item["rule"] == "probe-environment"]
    assert [item["evidence"] for item in said] == ["Tree"]
    assert result["verdict"]["ok"]


@pytest.fixture
def with_gpus(tmp_path, monkeypatch):
    """Put an nvidia-smi of two GPUs on PATH."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\ncase $* in *memory.used*) printf '10\\n10\\n';; topo*) echo 'GPU0 X NV18';;"
        " *) printf 'Fake GPU, GPU-0, 580.1\\nFake GPU, GPU-1, 580.1\\n';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_with_gpus(probe, with_gpus):
    """Graphs are captured and replayed, NCCL's words are read, Tree is refused by name, an ignored value is said."""
    settings = {
        "baseline": {"NCCL_ALGO": "Ring"}, "tree": {"NCCL_ALGO": "Tree"}, "lower": {"NCCL_P2P_LEVEL": "sys"},
        "alike": {"NCCL_ALGO": "Ring"},
    }  # fmt: skip
    settings = [{"name": name, "variables": values} for name, values in settings.items()]
    result = probe(settings, device="cuda", base="baseline", threshold=1e9)
    rows = {row["name"]: row for row in result["results"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "baseline": "ok", "tree": "failed", "lower": "ok", "alike": "ok",
    }  # fmt: skip
    assert all(step["graph"]["p50_us"] > 0 and step["eager"]["calls"] >= 2 for step in rows["baseline"]["steps"])
    assert rows["alike"]["steps"] == rows["baseline"]["steps"], "variants with the same setting are measured once"
    assert rows["baseline"]["steps"][0]["choice"] == {"algorithm": "RING", "protocol": "LL", "channels": 2}
    assert rows["baseline"]["nccl"]["transports"] == {"0>1": ["P2P/CUMEM"], "1>0": ["P2P/CUMEM"]}
    assert rows["baseline"]["nccl"]["environment"] == {"NCCL_ALGO": "Ring"}
    said = {(item["rule"], item["level"]): item for item in result["findings"]}
    assert said.keys() == {("probe-fails", "error"), ("probe-ignored", "warning")}
    fails = said["probe-fails", "error"]
    assert "variant tree fails at all_gather for decode of 1 token" in fails["message"]
    assert "no algorithm/protocol available for function AllGather" in fails["evidence"]
    assert "NCCL_P2P_LEVEL is ignored by NCCL in silence" in said["probe-ignored", "warning"]["message"]
    assert result["exercised"]
    assert probe(settings[:1], device="cuda")["reused"] == ["baseline"]


def test_a_dry_run_of_a_host_that_lacks_everything_is_no_failure(probe, tmp_path):
    settings = [{"name": "one", "variables": {}, "args": {}, "site": ""}]
    result = probe(settings, check=True, model=str(tmp_path / "none"))
    assert result["verdict"]["ok"] and not result["exercised"] and not result["changed"]
    (found,) = result["findings"]
    assert found["rule"] == "not-exercised" and "config.json cannot be read" in found["evidence"]


def test_tokens_of_the_environment_are_not_shown(probe):
    """Neither in the result nor in what Ansible shows of the call."""
    result = probe([{"name": "works", "variables": {}}], check=True, env={"HF_TOKEN": "hf_abcdefgh"})
    assert "env" in json.dumps(result) and "hf_abcdefgh" not in json.dumps(result)
