#!/usr/bin/env python3
"""Deploy the real server on a machine with GPUs and without network, and print one JSON summary.

    run.py FOLDER [--bundle FOLDER] [--limit 560] [--tp-size N] [--only NAME,NAME]

Run it from an unpacked bundle (make gpu-bundle) with the machine's own Python, the one that has torch. FOLDER gets the
engine, the root of the deployment and summary.json. No server, process or GPU memory is left. Each step has a limit and
none starts for which no time is left; what was not run is named.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import time

PROJECT = pathlib.Path(__file__).resolve().parents[2]
KIMI = {"text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "torch_dtype": "bfloat16"}}
# What an image sets for its GPUs must reach the server, whose service starts with a clean environment.
PASSED_ON = ("NVSHMEM_", "TORCH_", "CUDA_", "NVIDIA_", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PATH")
FORCED = ["-e", "sglang_force=true"]
QUICK = ["-e", "sglang_decision_enabled=false", "-e", "repeats=1"]
NO_CANARY = ["-e", "canary=false"]
# name, playbook and arguments, seconds, how it must be refused ("": it must succeed), GPUs that it needs
STEPS = (
    ("precheck", ["precheck.yml", "-e", "variant=baseline"], 60, "", 1),
    ("probe_all", ["probe.yml", "-e", "variants=all", "-e", "probe_file={folder}/probe.json"], 150, "", 2),
    ("deploy_baseline", ["deploy.yml", "-e", "variant=baseline", *QUICK, *NO_CANARY], 240, "", 1),
    ("tree_forced", ["deploy.yml", "-e", "variant=tree", *FORCED, *QUICK], 60, "[probe/probe-fails]", 2),
    # The base switches fusion off for good: a variant that asks for it gets nothing and must be refused by that name.
    ("fusion_inactive", ["deploy.yml", "-e", "variant=fusion", *FORCED, *QUICK, *NO_CANARY], 240,
     "[verify/allreduce-fusion]", 1),
    ("deploy_fewchan", ["deploy.yml", "-e", "variant=fewchan", *QUICK], 240, "", 1),
    ("rollback", ["rollback.yml"], 150, "", 1),
    ("status", ["status.yml"], 30, "", 1),
    ("tune", ["tune.yml", "-e", "tune_seconds=150", "-e", "tune_file={folder}/tuned.yml"], 240, "", 2),
)  # fmt: skip


def gpus():
    """Return ``[(name, driver, MiB used)]``; empty without GPUs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [tuple(cell.strip() for cell in line.split(",")) for line in done.stdout.splitlines()]


def capability():
    """Return the compute capability of the first GPU, such as ``9.0``; empty where it cannot be asked."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def make_engine(folder, bundle):
    """Make an interpreter that sees the bundle's packages first and the machine's own after them."""
    venv = folder / "engine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    # Python reads .pth files of its own site-packages only.
    nested = [line for path in (bundle / "site").glob("*.pth") for line in path.read_text().splitlines()]
    paths = [bundle / "site", *(bundle / "site" / line for line in nested), sysconfig.get_path("purelib")]
    (site / "bundle.pth").write_text("".join(f"{path}\n" for path in paths))
    return venv / "bin" / "python3"


def variables(folder, python, cards, size):
    """Return what the inventory would say of this machine."""
    env = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    env["HF_HUB_OFFLINE"] = "1"
    # NCCL's variables belong to the variant. It shall say in the server's log what it takes from the environment.
    nccl = {name: os.environ[name] for name in ("NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME") if name in os.environ}
    nccl.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ENV")
    return {
        "sglang_root": str(folder / "root"), "sglang_device": "cuda", "sglang_server_provider": "supervisor",
        "sglang_engine_mode": "adopt", "sglang_engine_python": str(python), "sglang_engine_version": "0.5.15.post1",
        "model_files_source": "generate", "model_files_seed": 1, "model_files_vocab_size": 1024,
        "sglang_server_host": "127.0.0.1", "sglang_server_port": 31700, "sglang_server_tp_size": size,
        "sglang_server_served_model_name": "tiny-llama", "sglang_server_env": env,
        "host_preflight_gpu_count": cards, "sglang_compute_capability": capability(), "sglang_interconnect": "nvlink",
        "sglang_gpu_memory_gib": 140, "sglang_probe_model_path": str(folder / "kimi"),
        "sglang_verify_timeout": 220, "sglang_verify_soak_requests": 10, "sglang_verify_known_answers": [],
        "sglang_benchmark_requests": 16, "sglang_benchmark_concurrency": 4, "sglang_benchmark_output_tokens": 64,
        "sglang_variant_base": {"nccl": nccl, "env": {}, "args": {
            "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
            "disable-custom-all-reduce": True, "disable-prefill-cuda-graph": True, "cuda-graph-max-bs-decode": 8,
            "enforce-disable-flashinfer-allreduce-fusion": True, "mem-fraction-static": 0.3, "enable-metrics": True,
        }},
    }  # fmt: skip


def schedulers(root, bundle):
    """Return what the running server shows: the schedulers' NCCL variables, and what NCCL's own log says it took."""
    sys.path.insert(0, str(bundle / "site"))
    import ansible.module_utils

    ansible.module_utils.__path__.append(str(PROJECT / "library" / "module_utils"))
    from ansible.module_utils import sglang_nccl_log, sglang_proc

    found = {"schedulers": [], "nccl": None}
    for item in sglang_proc.scan(str(root)):
        if item["role"] == "scheduler":
            env = sglang_proc.environ(item["pid"])
            mine = {name: value for name, value in env.items() if name.startswith("NCCL_")}
            found["schedulers"].append({"rank": item["tp_rank"], "nccl": mine})
    log = root / "current" / "logs" / "server.log"
    if log.exists():
        seen = sglang_nccl_log.parse(log.read_text(errors="replace"))
        asked = sglang_proc.launch_of(str(root / "current")).get("expect", {}).get("env", {})
        seen["ignored"] = sglang_nccl_log.ignored({k: v for k, v in asked.items() if k.startswith("NCCL_")}, seen)
        found["nccl"] = {key: seen[key] for key in ("version", "environment", "transports", "ignored", "warnings")}
    return found


def play(python, folder, bundle, arguments, limit):
    """Run one playbook; return ``{rc, seconds, tail}``, rc 124 where it took too long. All it said is in play.log."""
    env = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "PIP_NO_INDEX": "1",
           "PIP_FIND_LINKS": str(bundle / "wheels"), "PYTHONDONTWRITEBYTECODE": ""}  # fmt: skip
    command = [python, "-m", "ansible", "playbook", "-i", PROJECT / "tests" / "gpu" / "inventory"]
    command += [item.format(folder=folder) for item in arguments] + ["-e", f"@{folder / 'variables.json'}"]
    started, log = time.monotonic(), folder / "play.log"
    with open(log, "w+", encoding="utf-8") as handle:
        process = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=handle, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = 124
    return {"rc": code, "seconds": round(time.monotonic() - started, 1), "tail": log.read_text()[-4000:]}


def as_expected(code, said, refusal):
    """Return whether a step ended as it must: by success, or refused in the words of REFUSAL and for no other reason.

    :param said: all that the playbook wrote.
    """
    return code == 0 if not refusal else code not in (0, 124) and refusal in said


def finish(summary, python, folder, bundle, started):
    """Stop the server, complete the summary, keep and print it; return the exit status."""
    summary["stop"] = play(python, folder, bundle, ["stop.yml"], 60)
    time.sleep(2)
    summary["gpus_after"] = gpus()
    summary["as_expected"] = all(step["as_expected"] for step in summary["steps"].values())
    summary["seconds"] = round(time.monotonic() - started, 1)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    for step in summary["steps"].values():
        step.pop("tail")
    print(json.dumps(summary, indent=1))
    return 0 if summary["as_expected"] else 1


def main():
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--bundle", type=pathlib.Path, default=PROJECT.parent, help="with site/ and wheels/")
    parser.add_argument("--limit", type=float, default=560)
    parser.add_argument("--tp-size", type=int, default=0, help="GPUs of the server; all by default")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    started, folder, bundle = time.monotonic(), options.folder.resolve(), options.bundle.resolve()
    cards = gpus()
    if not cards:
        sys.exit("not run: this machine has no GPU that nvidia-smi shows")
    (folder / "kimi").mkdir(parents=True)
    (folder / "kimi" / "config.json").write_text(json.dumps(KIMI))
    python, size = make_engine(folder, bundle), options.tp_size or len(cards)
    (folder / "variables.json").write_text(json.dumps(variables(folder, python, len(cards), size)))
    summary = {"gpus": cards, "tp_size": size, "steps": {}, "not_run": {}}
    only = set(filter(None, options.only.split(",")))
    for name, arguments, limit, refusal, needed in STEPS:
        left = options.limit - (time.monotonic() - started)
        if only and name not in only:
            continue
        if needed > size or not (PROJECT / arguments[0]).exists() or left < 40:
            reason = f"needs {needed} GPUs" if needed > size else f"{left:.0f} s are left"
            summary["not_run"][name] = reason if (PROJECT / arguments[0]).exists() else "no such verb"
            continue
        done = play(python, folder, bundle, arguments, min(limit, left - 25))
        done["as_expected"] = as_expected(done["rc"], (folder / "play.log").read_text(), refusal)
        if name.startswith(("deploy", "rollback")):
            done.update(schedulers(folder / "root", bundle))
        summary["steps"][name] = done
        print(f"{name}: rc {done['rc']} in {done['seconds']} s", flush=True)
        if not done["as_expected"]:
            print(done["tail"], flush=True)
    return finish(summary, python, folder, bundle, started)


if __name__ == "__main__":
    sys.exit(main())
