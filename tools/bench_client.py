#!/usr/bin/env python3
"""Hold sglang_bench, and the peers that are installed, against a server of known speed.

Server on one core, client on another. Truth is the server's own record of the measured requests. Prints one line for
each client and workload, and the targets that were missed; exit status 1 when sglang_bench missed one.

    bench_client.py [--engine PYTHON --tokenizer DIR] [--aiperf PROGRAM] [--guidellm PROGRAM] [--only TEXT]

The clients run under the interpreter --engine, and with --tokenizer sglang.bench_serving of it is a peer; engine and
model of the embedded node are taken where `make deploy` has made them. aiperf and guidellm are peers where they are
installed, in environments of their own; they need --tokenizer as well.
"CPU s" is of the whole process with its children, "us/token" what sglang_bench measures of its own run.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "scripted_server" / "scripted_server.py"
MEASURE = ROOT / "tests" / "support" / "measure.py"
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
# Seconds for the whole process of the first case where bench_serving is not asked here: a quarter of what it takes.
SMALL_WALL = 6.3 / 4
FLOOD = {"bench_serving": 0.9, "aiperf": 3.0, "guidellm": 3.0}  # least ratio to what a peer reads under flood


def call(url, path, body=None):
    """Ask the scripted server."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=30) as answer:
        return json.load(answer)


def timed(command, core, env=None):
    """Run a command on one core and return ``(wall seconds, CPU seconds with children, stdout)``."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    pinned = ["taskset", "-c", str(core), *command]
    process = subprocess.Popen(pinned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    out, err = process.communicate()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"{command[:4]} ended with {process.returncode}: {err.decode()[-600:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, out.decode()


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
    """Measure with sglang_bench; returns its figures."""
    wanted = {**load, "url": url, "model": "scripted"}
    wall, cpu, out = timed([python, str(MEASURE), json.dumps([wanted])], core)
    document = json.loads(out)
    numbers = document["metrics"]
    if document["failure"]:
        raise RuntimeError(document["failure"])
    told = {"output_tok_s": numbers["output_tok_s"], "note": ",".join(document["flags"]), "wall": wall, "cpu": cpu}
    told.update({f"{name}_ms": numbers[f"{name}_ms_mean"] for name in ("ttft", "tpot", "itl")})
    told["cpu_us"] = document["client"]["cpu_us_per_token"]
    return told


def bench_serving(python, url, load, core, tokenizer):
    """Measure with sglang.bench_serving of the engine; returns its figures."""
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
        wall, cpu, _out = timed(command, core, {**env, "PYTHONPATH": directory})
        numbers = json.loads(result.read_text().splitlines()[-1])
    told = {"output_tok_s": numbers["output_throughput"], "wall": wall, "cpu": cpu}
    return {**told, **{f"{name}_ms": numbers[f"mean_{name}_ms"] for name in ("ttft", "tpot", "itl")}}


def aiperf(program, url, load, core, tokenizer):
    """Measure with aiperf; returns its figures. What it calls inter-token latency is the others' TPOT."""
    with tempfile.TemporaryDirectory() as directory:
        command = [program, "profile", "--model", "scripted", "--tokenizer", tokenizer, "--url", url, "--streaming"]
        command += ["--endpoint-type", "chat", "--concurrency", str(load["concurrency"])]
        command += ["--request-count", str(load["requests"]), "--output-artifact-dir", directory, "--ui", "none"]
        for name, key in (("input", "synthetic-input-tokens"), ("output", "output-tokens")):
            command += [f"--{key}-mean", str(load[f"{name}_tokens"]), f"--{key}-stddev", "0"]
        wall, cpu, _out = timed([*command, "--extra-inputs", "ignore_eos:true"], core)
        (path,) = pathlib.Path(directory).rglob("profile_export_aiperf.json")
        numbers = json.loads(path.read_text())
    told = {"output_tok_s": numbers["output_token_throughput"]["avg"], "wall": wall, "cpu": cpu, "itl_ms": None}
    told.update(ttft_ms=numbers["time_to_first_token"]["avg"], tpot_ms=numbers["inter_token_latency"]["avg"])
    return told


def guidellm(program, url, load, core, tokenizer):
    """Measure with guidellm; returns its figures. Its inter-token latency is the others' TPOT; its TPOT is not."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "out.json")
        command = [program, "run", "--backend", f"kind=openai_http,target={url},model=scripted"]
        command += ["--profile", f"kind=concurrent,streams={load['concurrency']}"]
        command += ["--constraint", f"kind=max_requests,count={load['requests']}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--disable-console-interactive"]
        shape = f"prompt_tokens={load['input_tokens']},output_tokens={load['output_tokens']}"
        command += ["--data", f"kind=synthetic_text,{shape}", "--output", f"kind=json,path={path}"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        wall, cpu, _out = timed(command, core, {**os.environ, **offline})
        numbers = json.loads(path.read_text())["benchmarks"][0]["metrics"]

    def mean(name):
        return numbers[name]["successful"]["mean"]

    told = {"output_tok_s": mean("output_tokens_per_second"), "wall": wall, "cpu": cpu, "itl_ms": None}
    return {**told, "ttft_ms": mean("time_to_first_token_ms"), "tpot_ms": mean("inter_token_latency_ms")}


def missed(case, script, load, seen, real):
    """Return the targets that sglang_bench missed in one case, as texts.

    :param seen: figures of each client that ran, by its name.
    """
    out, told = [], seen["sglang_bench"]
    if not script["rate"]:
        # The answer waits in socket buffers: the server's window is not the client's, so only clients are compared.
        for name, least in FLOOD.items():
            if name in seen and told["output_tok_s"] < least * seen[name]["output_tok_s"]:
                ratio = told["output_tok_s"] / seen[name]["output_tok_s"]
                out.append(f"{case}: {ratio:.2f} times what {name} reads, wanted {least}")
        return out
    if told["tpot_ms"] is None:
        return [*out, f"{case}: the client was kept from reading ({told['note']})"]
    for name, limit in (("output_tok_s", 0.01), ("ttft_ms", 0.03), ("tpot_ms", 0.005)):
        error = told[name] / real[name] - 1
        if abs(error) > limit and load is SMALL:
            out.append(f"{case}: {name} is off by {error:+.2%}, allowed {limit:.1%}")
    if abs(told["itl_ms"] / real["tpot_ms"] - 1) > 0.01:
        out.append(f"{case}: itl_ms is {told['itl_ms']:.3f}, true {real['tpot_ms']:.3f}")
    wall = seen["bench_serving"]["wall"] / 4 if "bench_serving" in seen else SMALL_WALL
    if load is SMALL and script.get("tokens_per_chunk", 1) == 1 and told["wall"] > wall:
        out.append(f"{case}: the whole process took {told['wall']:.2f} s, allowed {wall:.2f} s")
    best = (
        load["concurrency"]
        * load["output_tokens"]
        / (script["ttft_ms"] / 1e3 + (load["output_tokens"] - 1) / script["rate"])
    )
    if load is WIDE and told["output_tok_s"] < 0.95 * best:
        out.append(f"{case}: {told['output_tok_s']:.0f} tok/s of {best:.0f} that the schedule gives, allowed 5 % less")
    if load is WIDE and "client_bottleneck" in told["note"]:
        out.append(f"{case}: the client was late by its own measure")
    return out


def clients(options, url, core):
    """Return ``{name: measure(load)}`` of the clients that can run here."""
    found = {"sglang_bench": lambda load: own(options.engine, url, load, core)}
    if not options.tokenizer:
        return found
    tokenizer = os.path.abspath(options.tokenizer)
    found["bench_serving"] = lambda load: bench_serving(options.engine, url, load, core, tokenizer)
    for measure in (aiperf, guidellm):
        program = getattr(options, measure.__name__) or shutil.which(measure.__name__)
        if program:
            found[measure.__name__] = lambda load, measure=measure, at=program: measure(at, url, load, core, tokenizer)
    return found


def line(case, name, told, real):
    """Return one line of the table."""
    text = f"{case:28} {name:14} {told['wall']:6.2f} {told['cpu']:6.2f} {told['output_tok_s']:9.0f}"
    text += f" {real['output_tok_s']:9.0f} {told['output_tok_s'] / real['output_tok_s'] - 1:+7.2%}"
    for key in ("ttft_ms", "tpot_ms"):
        text += f" {'-':>15}" if told[key] is None else f" {told[key]:7.3f} {told[key] / real[key] - 1:+7.2%}"
    for key, width, places in (("itl_ms", 7, 3), ("cpu_us", 8, 1)):
        text += f" {'-':>{width}}" if told.get(key) is None else f" {told[key]:{width}.{places}f}"
    return f"{text} {told.get('note', '')}"


def embedded(pattern, otherwise):
    """Return the newest path of the embedded node that matches, else the other value."""
    found = sorted((ROOT / ".embedded").glob(pattern), key=lambda path: path.lstat().st_mtime)
    return str(found[-1]) if found else otherwise


def main():
    """Run every case with every client."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--engine", default=embedded("engines/*/bin/python3", sys.executable), help="with requests")
    parser.add_argument("--tokenizer", default=embedded("models/*", None), help="model directory; runs the peers")
    parser.add_argument("--aiperf", help="program, where it is not in PATH")
    parser.add_argument("--guidellm", help="program, where it is not in PATH")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the workloads whose name contains this")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print(f"load average {os.getloadavg()[0]:.2f}, server on core {cores[0]}, client on core {cores[-1]}")
    head = f"{'workload':28} {'client':14} {'wall s':>6} {'CPU s':>6} {'tok/s':>9} {'true':>9} {'error':>7}"
    print(f"{head} {'TTFT':>7} {'error':>7} {'TPOT':>7} {'error':>7} {'ITL':>7} {'us/token':>8} flags")
    command = ["taskset", "-c", str(cores[0]), sys.executable, str(SERVER)]
    faults = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            for case, (load, script) in CASES.items():
                if options.only not in case:
                    continue
                seen, real = {}, {}
                for name, run in clients(options, url, cores[-1]).items():
                    call(url, "/script", {"tokens_per_chunk": 1, **script})
                    seen[name] = run(load)
                    real[name] = truth(url, load["requests"], load["output_tokens"])
                    print(line(case, name, seen[name], real[name]), flush=True)
                faults += missed(case, script, load, seen, real["sglang_bench"])
        finally:
            server.terminate()
    print("\n".join(["missed:", *faults]) if faults else "every target was reached")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
