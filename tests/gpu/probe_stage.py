"""Probe the catalogue's settings and time a search on this machine, without a deployment: `probe_stage.py FOLDER`.

    probe_stage.py FOLDER [SECONDS of the search]

Needs torch in the interpreter that runs it, and ansible-core on its path. Writes summary.json and the logs of NCCL into
FOLDER and prints the summary. Without GPUs it runs two ranks over gloo, with small messages. One GPU gets two ranks,
which NCCL takes for two hosts: real NCCL with its sockets, whose choices and refusals mean something and whose times
do not, since the ranks take turns on the GPU.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
import ansible.module_utils  # noqa: E402

ansible.module_utils.__path__.append(str(ROOT / "library" / "module_utils"))
from ansible.module_utils import (  # noqa: E402
    sglang_nccl_plan,
    sglang_nccl_run,
    sglang_nccl_search,
    sglang_nccl_verdict,
    sglang_variant_resolve,
)

KIMI = {"text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "torch_dtype": "bfloat16"}}
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1024}
VARIANTS = (
    "baseline", "tree", "tree_allreduce", "fewchan", "manychan", "proto_all", "proto_auto", "p2p_off",
)  # fmt: skip
# What the catalogue does not hold: values that NCCL ignores or replaces, and a pair that stalls.
ODD = {
    "level_lower_case": {"NCCL_P2P_LEVEL": "sys"},
    "threads_100": {"NCCL_NTHREADS": "100"},
    "algo_unknown": {"NCCL_ALGO": "Rings"},
    "p2p_off_fewchan": {
        "NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_MIN_NCHANNELS": "1",
        "NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": "131072", "NCCL_NTHREADS": "64",
    },
}  # fmt: skip
LIMITS = {"p2p_off_fewchan": 15}
# NCCL refuses two ranks of one host on one GPU.
OWN_HOST = "import os\nos.environ['NCCL_HOSTID'] = 'rank-' + os.environ['SGLANG_NCCL_PROBE_RANK']\n"


def settings():
    """Return the catalogue's NCCL settings and the odd ones."""
    catalogue = yaml.safe_load((ROOT / "group_vars" / "all" / "variants.yml").read_text())["sglang_variants"]
    base = {"nccl": {}, "env": {}, "args": {}}
    found = []
    for name in VARIANTS:
        variant, _unset = sglang_variant_resolve.resolve(name, catalogue, base, {}, "0.5.20")
        values = {key: str(value) for key, value in variant["nccl"].items() if value is not None}
        found.append({"name": name, "variables": values})
    return found + [{"name": name, "variables": values} for name, values in ODD.items()]


def gpus():
    """Return the GPUs as lines of nvidia-smi; empty without."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def main():
    """Run the stage."""
    out = pathlib.Path(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 240
    before = gpus()
    world, backend = max(len(before), 2), "nccl" if before else "gloo"
    shared = len(before) == 1
    site = OWN_HOST if shared else ""
    plan = sglang_nccl_plan.make_plan(KIMI if before else SMALL, {}, world, graphs=bool(before))
    scratch = out / "scratch"
    scratch.mkdir(parents=True)
    # As the server sets them where they are unset.
    env = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", **os.environ}
    rows, devices, base = [], [0] * world if shared else list(range(world)), None
    with sglang_nccl_run.Workers(sys.executable, str(scratch), env) as workers:
        started = time.monotonic()
        workers.start()
        imported = round(time.monotonic() - started, 2)
        summary = {"gpus": before, "ranks": world, "torch": workers.torch, "import_s": imported}
        for setting in settings():
            limit = LIMITS.get(setting["name"], 60)
            trial = workers.trial({**setting, "site": site}, plan, limit, backend, devices)
            sglang_nccl_verdict.complete(trial, plan)
            base = base or trial
            trial["findings"] = sglang_nccl_verdict.judge(trial, setting, plan, base, exercised=bool(before))
            rows.append({"name": setting["name"], "variables": setting["variables"], **trial})
            print(setting["name"], trial["outcome"], trial["seconds"], trial["predicted"], trial["message"], flush=True)
        (out / "probe.json").write_text(json.dumps(rows, indent=1))
        print(sglang_nccl_verdict.table(sglang_nccl_verdict.ranking(rows)), flush=True)
        weights, started = sglang_nccl_search.PROFILES["mixed"], time.monotonic()

        def measure(setting, effort):
            less, budget = sglang_nccl_search.brief(plan, weights, effort)
            trial = workers.trial({**setting, "site": site}, less, 30, backend, devices, budget=budget)
            print(effort, setting["name"], trial["outcome"], trial["seconds"], flush=True)
            return sglang_nccl_verdict.complete(trial, less)

        allowed = sglang_nccl_search.candidates()
        search = sglang_nccl_search.Search(allowed, settings()[0], weights, measure, 60, time.monotonic, seconds)
        ranked = search.run()
        summary["search"] = {
            "trials": search.done,
            "settings": len(ranked),
            "seconds": round(time.monotonic() - started, 1),
            "stopped": search.stopped,
        }
        leader = workers.process.pid
    summary.update(left=sglang_nccl_run.session_members(leader), gpus_after=gpus())
    summary["best"] = [
        {key: row[key] for key in ("name", "score", "effort", "predicted", "base")} for row in ranked[:5]
    ]
    (out / "search.json").write_text(json.dumps(ranked, indent=1))
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    shutil.make_archive(str(out / "logs"), "gztar", scratch)
    shutil.rmtree(scratch)
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
