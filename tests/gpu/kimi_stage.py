#!/usr/bin/env python3
"""The ladder with the original launch line on a model of Kimi-K2.5's shape with made-up weights, on 2 to 8 GPUs.

    kimi_stage.py FOLDER [--bundle FOLDER] [--limit 560] [--tp-size N] [--only NAME,NAME]

Like run.py, from an unpacked bundle. The model has hidden size, heads and latent ranks of Kimi-K2.5 and 4 layers of 32
experts; each message of a step is as large as the real model's. It shows which collectives a step makes, with which
settings all schedulers run, and how long a step takes with few layers: not the speed of the real model.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import pathlib
import statistics
import sys
import time
import urllib.request

import run

KIMI_SHAPED = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 18432,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "vocab_size": 1024, "max_position_embeddings": 8192, "rope_theta": 50000.0, "rope_scaling": None,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
# The launch line of group_vars/pcie_gpu, then what this bundle lacks: kernels of FA3, grammars, compilers.
ORIGINAL = {"trust-remote-code": True, "mem-fraction-static": 0.88, "num-continuous-decode-steps": 4,
            "disable-custom-all-reduce": True}  # fmt: skip
BUNDLE = {
    "load-format": "dummy", "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
    "disable-prefill-cuda-graph": True, "enforce-disable-flashinfer-allreduce-fusion": True,
    "cuda-graph-max-bs-decode": 32, "enable-metrics": True,
}  # fmt: skip
PROBED = "baseline,tree_allreduce,fewchan,proto_all,p2p_off"
LADDER = [*run.QUICK, *run.NO_CANARY]
# name, playbook and arguments, seconds, how it must be refused ("": it must succeed)
STEPS = (
    ("probe", ["probe.yml", "-e", f"variants={PROBED}", "-e", "probe_file={folder}/probe.json"], 90, ""),
    ("tree_forced", ["deploy.yml", "-e", "variant=tree", *run.FORCED, *LADDER], 60, "[probe/probe-fails]"),
    ("deploy_baseline", ["deploy.yml", "-e", "variant=baseline", *LADDER], 330, ""),
    # Beside a server that holds 0.88 of each GPU.
    ("canary_fewchan", ["canary.yml", "-e", "variant=fewchan"], 120, ""),
    ("deploy_fewchan", ["deploy.yml", "-e", "variant=fewchan", *LADDER], 200, ""),
    ("rollback", ["rollback.yml"], 150, ""),
)  # fmt: skip
# The last step with each server, after which it is profiled: torch's profiler ended a scheduler with a segmentation
# fault seconds after its profile, when its result was collected as garbage.
LAST = {"canary_fewchan": "baseline", "deploy_fewchan": "fewchan"}
PORT = 31700
# Steps of decoding that a profile asks for, and the tokens of the extend: those of a verify.
PROFILED, VERIFIED = 8, 4


def write_model(folder):
    """Write a model directory without weights: the configuration, and the tokenizer of the tiny model."""
    from ansible.module_utils import sglang_tiny_model

    folder.mkdir(parents=True)
    for name, content in sglang_tiny_model.files(KIMI_SHAPED["vocab_size"], 1).items():
        if "safetensors" not in name:
            (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(KIMI_SHAPED, indent=1))


def variables(folder, python, cards, size):
    """Return run.py's inventory with this model, the original launch line and one and 32 streams."""
    found = run.variables(folder, python, cards, size)
    found["sglang_variant_base"]["args"] = {**ORIGINAL, **BUNDLE}
    return {
        **found, "model_files_source": "config", "model_files_path": str(folder / "kimi-shaped"),
        "sglang_server_served_model_name": "kimi-shaped", "sglang_server_port": PORT,
        # Made-up weights may say one word for ever.
        "sglang_verify_min_distinct": 1, "sglang_verify_timeout": 300, "sglang_canary_layers": 2,
        "sglang_benchmark_workload": "sweep", "sglang_benchmark_levels": [1, 32], "sglang_benchmark_requests": 4,
        "sglang_benchmark_input_tokens": 128, "sglang_benchmark_output_tokens": 64,
    }  # fmt: skip


def environments(seen, size):
    """Return whether all schedulers are there and have one environment for NCCL, and NCCL ignored nothing of it."""
    ranks = sorted(item["rank"] for item in seen["schedulers"])
    alike = len({json.dumps(item["nccl"], sort_keys=True) for item in seen["schedulers"]}) == 1
    return ranks == list(range(size)) and alike and bool(seen["nccl"]) and not seen["nccl"]["ignored"]


def post(path, body, limit=60):
    """Send JSON to the server and return its answer's text."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=limit) as answer:
        return answer.read().decode()


def profile(folder, name, size, limit=30):
    """Profile one extend of four tokens and some decode steps; return :func:`of_ranks` by stage.

    The server writes one trace for each rank and stage. Where they do not come, the result says so.
    """
    out = folder / "profile" / name
    out.mkdir(parents=True)
    body = {"output_dir": str(out), "num_steps": PROFILED, "activities": ["CPU", "GPU"], "profile_by_stage": True,
            "with_stack": False, "profile_id": name}  # fmt: skip
    try:
        post("/flush_cache", {})
        post("/start_profile", body)
        sampling = {"max_new_tokens": 4 * PROFILED, "temperature": 0, "ignore_eos": True}
        post("/generate", {"input_ids": list(range(100, 100 + VERIFIED)), "sampling_params": sampling})
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    end, found = time.monotonic() + limit, []
    while time.monotonic() < end and len(found) < 2 * size:
        time.sleep(0.5)
        found = [path for path in out.glob("*.trace.json.gz") if complete(path)]
    stages = collections.defaultdict(list)
    for path in sorted(found):
        stages[path.name.split("-")[-1].split(".")[0].lower()].append(read(path))
    return {stage: of_ranks(ranks) for stage, ranks in stages.items()} or {"error": f"no trace within {limit} s"}


def complete(path):
    """Return whether a trace is written to its end."""
    try:
        return bool(read(path))
    except (OSError, EOFError, ValueError):
        return False


def read(path):
    """Return the events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return json.load(handle)["traceEvents"]


def kind_of(name):
    """Return which collective a kernel or an operator is."""
    name = name.lower().replace("_", "")
    return next((kind for kind in ("allreduce", "allgather", "reducescatter") if kind in name), "other")


def kernels(events):
    """Return the kernels of a trace in their order as ``[(kind of collective or "", microseconds)]``."""
    found = []
    for event in sorted((item for item in events if item.get("cat") == "kernel"), key=lambda item: item["ts"]):
        kind = kind_of(str(event["name"]))
        found.append(("" if kind == "other" and "nccl" not in event["name"].lower() else kind, event["dur"]))
    return found


def collectives(events):
    """Return ``{count: {kind: kernels}, called: {kind: calls}, p50_us: {kind: median}, per_step}`` of a rank's trace.

    ``called`` are those that Python issued, which a replayed graph does not. ``per_step`` is the all-reduces for each
    all-gather, of which a step makes one (its logits); None without any.
    """
    times, called = collections.defaultdict(list), collections.Counter()
    for kind, spent in kernels(events):
        if kind:
            times[kind].append(spent)
    for event in events:
        if event.get("cat") == "cpu_op" and str(event["name"]).startswith("c10d::"):
            called[kind_of(event["name"])] += 1
    count = {kind: len(values) for kind, values in sorted(times.items())}
    most = count or called
    return {
        "count": count,
        "called": dict(sorted(called.items())),
        "p50_us": {kind: round(statistics.median(values), 1) for kind, values in sorted(times.items())},
        "per_step": most["allreduce"] / most["allgather"] if most.get("allgather") and most.get("allreduce") else None,
    }


def of_ranks(traces):
    """Return :func:`collectives` of the first rank with ``{ranks, alike, share, waiting}``.

    ``share`` is the collectives' part of the time of a rank's kernels. A kernel of theirs runs until the last rank has
    come, so the shortest of all ranks counts as its time, and ``waiting`` is the part of a rank's kernels beyond it.
    Both are None where the ranks made different ones, or none.
    """
    rows, ranks = [collectives(events) for events in traces], [kernels(events) for events in traces]
    each = [[spent for kind, spent in rank if kind] for rank in ranks]
    alike = all(row["count"] == rows[0]["count"] for row in rows)
    result = {**rows[0], "ranks": len(rows), "alike": alike, "share": None, "waiting": None}
    if alike and each[0]:
        own = sum(map(min, zip(*each)))
        other = statistics.mean(sum(spent for kind, spent in rank if not kind) for rank in ranks)
        whole = statistics.mean(map(sum, each)) + other
        result.update(share=round(own / (own + other), 3), waiting=round(1 - (own + other) / whole, 3))
    return result


def benchmark(root):
    """Return workload and figures of the newest benchmark in the ledger, None where there is none."""
    lines = (root / "ledger.jsonl").read_text().splitlines() if (root / "ledger.jsonl").exists() else []
    events = [event for event in map(json.loads, lines) if event["event"] == "run"]
    return {key: events[-1][key] for key in ("workload", "metrics", "levels") if key in events[-1]} if events else None


def main():
    """Run the stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--bundle", type=pathlib.Path, default=run.PROJECT.parent, help="with site/ and wheels/")
    parser.add_argument("--limit", type=float, default=560)
    parser.add_argument("--tp-size", type=int, default=0, help="GPUs of the server; all by default")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    started, folder, bundle = time.monotonic(), options.folder.resolve(), options.bundle.resolve()
    cards = run.gpus()
    size = options.tp_size or len(cards)
    if size < 2:
        sys.exit(f"not run: this machine has {len(cards)} GPUs, and the stage is about collectives")
    sys.path.insert(0, str(bundle / "site"))
    import ansible.module_utils

    ansible.module_utils.__path__.append(str(run.PROJECT / "library" / "module_utils"))
    (folder / "kimi").mkdir(parents=True)
    (folder / "kimi" / "config.json").write_text(json.dumps(run.KIMI))
    write_model(folder / "kimi-shaped")
    python = run.make_engine(folder, bundle)
    (folder / "variables.json").write_text(json.dumps(variables(folder, python, len(cards), size)))
    summary = {"gpus": cards, "tp_size": size, "layers": KIMI_SHAPED["num_hidden_layers"], "steps": {}}
    summary.update(not_run={}, profile={})
    only = set(filter(None, options.only.split(",")))
    for name, arguments, limit, refusal in STEPS:
        left = options.limit - (time.monotonic() - started)
        if only and name not in only:
            continue
        if left < 60:
            summary["not_run"][name] = f"{left:.0f} s are left"
            continue
        done = run.play(python, folder, bundle, arguments, min(limit, left - 25))
        done["as_expected"] = run.as_expected(done["rc"], (folder / "play.log").read_text(), refusal)
        if done["as_expected"] and name.startswith(("deploy", "rollback")):
            done.update(run.schedulers(folder / "root", bundle))
            done["environment_ok"] = environments(done, size)
            done["as_expected"] = done["environment_ok"]
            if name.startswith("deploy"):
                done["benchmark"] = benchmark(folder / "root")
        summary["steps"][name] = done
        print(f"{name}: rc {done['rc']} in {done['seconds']} s", flush=True)
        if not done["as_expected"]:
            print(done["tail"], flush=True)
        if name in LAST:
            summary["profile"][LAST[name]] = profile(folder, LAST[name], size)
            print(f"profile of {LAST[name]}: {summary['profile'][LAST[name]]}", flush=True)
    return run.finish(summary, python, folder, bundle, started)


if __name__ == "__main__":
    sys.exit(main())
