"""``python -m sglang.launch_server FLAGS``: the parent process of the scripted server."""

from __future__ import annotations

import argparse
import errno
import glob
import http.client
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time

from . import script as scripts
from .http_server import Server, State
from .process import log, raw
from .worker import run as run_worker

ALIASES = {"model_path": ["--model"], "tp_size": ["--tp", "--tensor-parallel-size"]}


def parse(argv):
    """Parse the flags of SGLang 0.5.9 (``server_args.json``: its field names and defaults) into a dict."""
    parser = argparse.ArgumentParser(prog="launch_server.py")
    with open(os.path.join(os.path.dirname(__file__), "server_args.json"), encoding="utf-8") as handle:
        defaults = json.load(handle)
    for name, default in defaults.items():
        flags = ["--" + name.replace("_", "-"), *ALIASES.get(name, [])]
        if isinstance(default, bool):
            parser.add_argument(*flags, dest=name, action="store_true", default=default)
        elif isinstance(default, list) or name == "cuda_graph_bs":
            parser.add_argument(*flags, dest=name, nargs="+", default=default)
        else:
            parser.add_argument(
                *flags,
                dest=name,
                default=default,
                required=name == "model_path",
                type=type(default) if isinstance(default, (int, float)) else str,
            )
    args = vars(parser.parse_args(argv))
    args["tokenizer_path"] = args["tokenizer_path"] or args["model_path"]
    args["served_model_name"] = args["served_model_name"] or args["model_path"]
    return args


class Parent:
    """The server process: workers, HTTP, warm-up, stop."""

    def __init__(self, args, script):
        self.args, self.script = args, script
        self.state = State(args, script)
        self.workers = []

    def kill_tree(self):
        """End the workers and this process with SIGKILL: a stop of 0.5.9 never returns 0, not even a clean one."""
        for worker in self.workers:
            if worker.is_alive() and not self.script["orphans"]:
                worker.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_quit(self, *_):
        """A worker reported an exception."""
        log("Received sigquit from a child process. It usually means the child failed.")
        time.sleep((self.script["crash"] or {}).get("parent_linger", 0))
        self.kill_tree()

    def on_term(self, *_):
        """Stop in the way of the real server, after ``stop_seconds``."""
        log("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        if self.script["ignore_term"]:
            return
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self):
        time.sleep(self.script["stop_seconds"])
        log("Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].")
        self.kill_tree()

    def start_workers(self):
        """Spawn the workers and wait until each said that it is ready; a dead one leaves this waiting, as in 0.5.9."""
        context = multiprocessing.get_context("spawn")
        size = self.args["tp_size"]
        shards = len(glob.glob(os.path.join(self.args["model_path"], "*.safetensors")))
        graphs = not self.args["disable_cuda_graph"]
        pipes = []
        names = [(f"sglang::scheduler_TP{rank}" if size > 1 else "sglang::scheduler", rank) for rank in range(size)]
        for title, rank in [*names, ("sglang::detokenizer", None)]:
            mine, theirs = context.Pipe()
            worker = context.Process(target=run_worker, args=(title, rank, size, theirs, self.script, graphs, shards))
            worker.start()
            self.workers.append(worker)
            pipes.append(mine)
        # The last writer stays open here, as in 0.5.9: the death of that worker is never noticed by the parent.
        for rank, pipe in enumerate(pipes):
            while not pipe.poll(0.05):
                pass
            try:
                pipe.recv()
            except EOFError:
                log(f"Rank {rank} scheduler is dead. Please check if there are relevant logs.")
                self.workers[rank].join()
                log(f"Exit code: {self.workers[rank].exitcode}")
                raise
        threading.Thread(target=self._watch_workers, daemon=True).start()

    def _watch_workers(self):
        while all(worker.is_alive() for worker in self.workers):
            time.sleep(0.05)
        self.state.dead.set()

    def listen(self):
        """Bind and serve in a thread; return False where the address is taken."""
        if self.script["accept_only"]:
            self.socket = socket.create_server((self.args["host"], self.args["port"]), backlog=128)
            return True
        try:
            server = Server(self.state)
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
            log(
                f"ERROR:    [Errno 98] error while attempting to bind on address ('{self.args['host']}', "
                f"{self.args['port']}): address already in use"
            )
            log("INFO:     Waiting for application shutdown.")
            return False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return True

    def request(self, method, path, body=None):
        """Send one request of the warm-up to our own address, whoever listens there; return its status or None."""
        host = "::1" if self.script["ipv6_only"] else self.args["host"]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        connection = http.client.HTTPConnection(host, self.args["port"], timeout=5)
        headers = {"Authorization": f"Bearer {self.args['api_key']}"} if self.args["api_key"] else {}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except OSError:
            return None
        finally:
            connection.close()

    def warm_up(self, bound):
        """Ask for model info and one generation; True where both were answered."""
        phase = scripts.seconds(self.script, "warmup")
        script = self.script
        fault = {key: script[key] for key in ("crash", "hang") if (script[key] or {}).get("phase") == "warmup"}
        if "hang" in fault or self.script["accept_only"]:
            threading.Event().wait()
        if "crash" in fault:
            for line in scripts.fault_lines(fault["crash"]):
                raw(line)
            self.on_quit()
        if (self.script["die"] or {}).get("phase") == "warmup":
            self.workers[self.script["die"].get("rank", 0)].kill()
            threading.Event().wait()
        time.sleep(phase)
        body = json.dumps({"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}})
        statuses = (self.request("GET", "/model_info"), self.request("POST", "/generate", body))
        if statuses != (200, 200):
            log("Initialization failed. warmup error: Traceback (most recent call last):")
            raw(f"AssertionError: res=<Response [{statuses[0]}]>")
            if not bound:
                time.sleep(120)
            self.kill_tree()

    def serve(self):
        """Run until a signal ends it. rc 3 where another SGLang answered the warm-up."""
        signal.signal(signal.SIGQUIT, self.on_quit)
        signal.signal(signal.SIGTERM, self.on_term)
        shown = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        log(f"server_args=ServerArgs({shown})")
        if not os.path.isdir(self.args["model_path"]):
            raise OSError(
                f"Can't load the configuration of '{self.args['model_path']}'. If you were trying to load it "
                "from a hub, make sure you don't have a local directory with the same name."
            )
        log("Using default HuggingFace chat template with detected content format: string")
        self.start_workers()
        log(f"INFO:     Started server process [{os.getpid()}]")
        log("INFO:     Waiting for application startup.")
        log("INFO:     Application startup complete.")
        bound = self.listen()
        if bound:
            log(f"INFO:     Uvicorn running on http://{self.args['host']}:{self.args['port']} (Press CTRL+C to quit)")
        self.warm_up(bound)
        self.state.ready_at = time.monotonic()
        log("The server is fired up and ready to roll!")
        if not bound:
            log("INFO:     Application shutdown complete.")
            for worker in self.workers:
                worker.kill()
            sys.stderr.flush()
            os._exit(3)
        die = self.script["die"] or {}
        if die.get("phase") == "serving":
            time.sleep(die.get("after", 0))
            self.workers[die.get("rank", 0)].kill()
        threading.Event().wait()


def main():
    """Start the server named by the command line and the script."""
    Parent(parse(sys.argv[1:]), scripts.load()).serve()


if __name__ == "__main__":
    main()
