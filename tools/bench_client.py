#!/usr/bin/env python3
"""Hold sglang_bench, and the peers that are installed, against a server of known speed.

Server on one core, client on another. Truth is the server's own record of the measured requests. Prints one line for
each client and workload, and the targets that were missed; exit status 1 when sglang_bench missed one.

    bench_client.py [--engine PYTHON --tokenizer DIR] [--only TEXT]

With --engine the clients run under that interpreter, and with --tokenizer too, sglang.bench_serving of it is the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "scripted_server" / "scripted_server.py"
SMALL = {"requests": 32, "concurrency": 8, "input_tokens": 64, "output_tokens": 64}
WIDE = {"requests": 128, "concurrency": 64, "input_tokens": 64, "output_tokens": 500}
CASES = {
    "32 x 64, 8 at a time": (SMALL, {"ttft_ms": 20, "rate": 300}),
    "the same, 4 tokens an event": (SMALL, {"ttft_ms": 20, "rate": 300, "tokens_per_chunk": 4}),
    "10,000 tok/s over 64": (WIDE, {"ttft_ms": 20, "rate": 156.25}),
    "20,000 tok/s over 64": (WIDE, {"ttft_ms": 20, "rate": 312.5}),
    "40,000 tok/s over 64": (WIDE, {"ttft_ms": 20, "rate": 625}),
    "flood over 64": (WIDE, {"ttft_ms": 20, "rate": 0}),
}
SMALL_WALL = 6.3 / 4  # seconds for the whole process of the first case: a quarter of what sglang.bench_serving takes


def one(url, text):
    """Run one measurement in this process and print the result document without its records."""
    for name, path in (("ansible", []), ("ansible.module_utils", [str(ROOT / "library" / "module_utils")])):
        # The engine has no Ansible; the functions need only the name under which a module finds them.
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = path
    from ansible.module_utils.sglang_bench_run import measure, write

    params = {"url": url, "release": None, "model": "scripted", "api": "chat", "warmup": None, "timeout": 120}
    params.update(
        request_timeout=60, ignore_eos=True, temperature=0.0, max_failed=0.0, limits={}, api_key=None, seed=None
    )
    params.update(run=None, variant=None, validate_certs=True, **json.loads(text))
    document = measure(params)
    with tempfile.TemporaryDirectory() as directory:
        write(document, directory)
    print(json.dumps({key: value for key, value in document.items() if key != "requests"}))


def call(url, path, body=None):
    """Ask the scripted server."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=30) as answer:
        return json.load(answer)


def timed(command, core, env=None):
    """Run a command on one core and return ``(wall seconds, CPU seconds, stdout)``."""
    began = time.perf_counter()
    pinned = ["taskset", "-c", str(core), *command]
    process = subprocess.Popen(pinned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    out, err = process.communicate()
    wall = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{command[:4]} ended with {process.returncode}: {err.decode()[-600:]}")
    return wall, out.decode()


def truth(url, count, tokens):
    """Return what the server did for the last ``count`` requests of ``tokens`` tokens."""
    done = [item for item in call(url, "/truth")["requests"] if item["tokens"] == tokens][-count:]
    window = max(item["last"] for item in done) - min(item["parsed"] for item in done)
    return {
        "output_tok_s": sum(item["tokens"] for item in done) / window,
        "ttft_ms": 1e3 * sum(item["first"] - item["parsed"] for item in done) / len(done),
        "tpot_ms": 1e3 * sum((item["last"] - item["first"]) / (item["tokens"] - 1) for item in done) / len(done),
    }


def own(python, url, load, core):
    """Measure with sglang_bench; returns wall seconds and the figures."""
    wall, out = timed([python, __file__, "--one", url, json.dumps(load)], core)
    document = json.loads(out)
    numbers = document["metrics"]
    if document["failure"]:
        raise RuntimeError(document["failure"])
    told = {"output_tok_s": numbers["output_tok_s"], "note": ",".join(document["flags"])}
    told.update({f"{name}_ms": numbers[f"{name}_ms_mean"] for name in ("ttft", "tpot", "itl")})
    told["cpu_us"] = 1e6 * document["client"]["cpu_share"] * numbers["window_s"] / numbers["output_tokens_total"]
    return wall, told


def peer(python, url, load, core, tokenizer):
    """Measure with sglang.bench_serving of the engine; returns wall seconds and its figures."""
    with tempfile.TemporaryDirectory() as directory:
        # bench_serving imports the package for data sets that it does not use here.
        pathlib.Path(directory, "datasets.py").write_text("def load_dataset(*_args, **_kwargs):\n    raise OSError\n")
        result = pathlib.Path(directory, "out.jsonl")
        host, port = url.rsplit("/", 1)[1].split(":")
        command = [python, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--host", host, "--port", port]
        command += ["--model", "scripted", "--tokenizer", tokenizer, "--dataset-name", "random-ids", "--disable-tqdm"]
        command += ["--random-input-len", str(load["input_tokens"]), "--random-output-len", str(load["output_tokens"])]
        command += ["--random-range-ratio", "1.0", "--num-prompts", str(load["requests"])]
        command += ["--max-concurrency", str(load["concurrency"]), "--output-file", str(result)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        wall, _out = timed(command, core, {**env, "PYTHONPATH": directory})
        numbers = json.loads(result.read_text().splitlines()[-1])
    told = {"output_tok_s": numbers["output_throughput"], "note": "", "cpu_us": None}
    told.update({f"{name}_ms": numbers[f"mean_{name}_ms"] for name in ("ttft", "tpot", "itl")})
    return wall, told


def missed(case, script, load, wall, told, real):
    """Return the targets that sglang_bench missed in one case, as texts."""
    out = []
    if not script["rate"]:
        return out  # under flood the answer waits in socket buffers: the server's window is not the client's
    for name, limit in (("output_tok_s", 0.01), ("ttft_ms", 0.03), ("tpot_ms", 0.005)):
        error = told[name] / real[name] - 1
        if abs(error) > limit and load is SMALL:
            out.append(f"{case}: {name} is off by {error:+.2%}, allowed {limit:.1%}")
    if abs(told["itl_ms"] / real["tpot_ms"] - 1) > 0.01:
        out.append(f"{case}: itl_ms is {told['itl_ms']:.3f}, true {real['tpot_ms']:.3f}")
    if load is SMALL and script.get("tokens_per_chunk", 1) == 1 and wall > SMALL_WALL:
        out.append(f"{case}: the whole process took {wall:.2f} s, allowed {SMALL_WALL:.2f} s")
    best = (
        load["concurrency"]
        * load["output_tokens"]
        / (script["ttft_ms"] / 1e3 + (load["output_tokens"] - 1) / script["rate"])
    )
    if load is WIDE and told["output_tok_s"] < 0.95 * best:
        out.append(f"{case}: {told['output_tok_s']:.0f} tok/s of {best:.0f} that the schedule gives, allowed 5 % less")
    return out


def main():
    """Run every case with every client."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--engine", default=sys.executable, help="interpreter with requests")
    parser.add_argument("--tokenizer", help="model directory; runs sglang.bench_serving of the engine as well")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the workloads whose name contains this")
    parser.add_argument("--one", nargs=2, metavar=("URL", "JSON"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(*options.one)
    cores = sorted(os.sched_getaffinity(0))
    print(f"load average {os.getloadavg()[0]:.2f}, server on core {cores[0]}, client on core {cores[-1]}")
    head = f"{'workload':28} {'client':14} {'wall s':>6} {'tok/s':>9} {'true':>9} {'error':>7}"
    print(f"{head} {'TTFT':>7} {'error':>7} {'TPOT':>7} {'error':>7} {'ITL':>7} {'us/token':>8} flags")
    command = ["taskset", "-c", str(cores[0]), sys.executable, str(SERVER)]
    faults = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            for case, (load, script) in CASES.items():
                if options.only not in case:
                    continue
                clients = {"sglang_bench": lambda load=load: own(options.engine, url, load, cores[-1])}
                if options.tokenizer:
                    clients["bench_serving"] = lambda load=load: peer(
                        options.engine, url, load, cores[-1], os.path.abspath(options.tokenizer)
                    )
                for name, run in clients.items():
                    call(url, "/script", {"tokens_per_chunk": 1, **script})
                    wall, told = run()
                    real = truth(url, load["requests"], load["output_tokens"])
                    text = f"{case:28} {name:14} {wall:6.2f} {told['output_tok_s']:9.0f} {real['output_tok_s']:9.0f}"
                    text += f" {told['output_tok_s'] / real['output_tok_s'] - 1:+7.2%}"
                    for key in ("ttft_ms", "tpot_ms"):
                        text += f" {told[key]:7.3f} {told[key] / real[key] - 1:+7.2%}"
                    cpu = "-" if told["cpu_us"] is None else f"{told['cpu_us']:.1f}"
                    print(f"{text} {told['itl_ms']:7.3f} {cpu:>8} {told['note']}", flush=True)
                    if name == "sglang_bench":
                        faults += missed(case, script, load, wall, told, real)
        finally:
            server.terminate()
    print("\n".join(["missed:", *faults]) if faults else "every target was reached")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
