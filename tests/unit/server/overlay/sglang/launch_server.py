"""A scripted ``sglang.launch_server``: the real one's process tree and titles, an HTTP port, and faults on demand.

Faults come from the environment: FAKE_CRASH=<text> dies at once with that text; FAKE_SETSID=1 gives the workers a
session of their own; FAKE_LOSE=1 starts them without an environment; FAKE_IGNORE_TERM=1 makes every process ignore
SIGTERM; FAKE_ORPHANS=1 leaves the workers behind when the server ends.
"""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading

WORKER = """
import ctypes, signal, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode()[:15], 0, 0, 0)
if sys.argv[2] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


class Server(http.server.ThreadingHTTPServer):
    """An HTTP server for IPv4 or IPv6."""

    def __init__(self, host, port):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), http.server.BaseHTTPRequestHandler)


def spawn(title):
    """Start one worker that is called TITLE and return it when it is ready."""
    flag = os.environ.get("FAKE_IGNORE_TERM", "0")
    worker = subprocess.Popen(
        [title, "-I", "-c", WORKER, title, flag],
        executable=sys.executable,
        env={} if os.environ.get("FAKE_LOSE") else None,
        start_new_session=bool(os.environ.get("FAKE_SETSID")),
        stdout=subprocess.PIPE,
    )
    worker.stdout.readline()
    return worker


def main():
    """Parse the flags that matter and serve until SIGTERM."""
    if os.environ.get("FAKE_CRASH"):
        print("Traceback (most recent call last):", file=sys.stderr)
        sys.exit(os.environ["FAKE_CRASH"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    options, _ = parser.parse_known_args()
    server = Server(options.host, options.port)
    ranks = range(options.tp_size)
    titles = [f"sglang::scheduler_TP{rank}" if options.tp_size > 1 else "sglang::scheduler" for rank in ranks]
    workers = [spawn(title) for title in [*titles, "sglang::detokenizer"]]
    print("The server is fired up and ready to roll!", flush=True)

    def stop(signum, frame):
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("FAKE_IGNORE_TERM") else stop)
    server.serve_forever(poll_interval=0.05)
    if not os.environ.get("FAKE_ORPHANS"):
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()
