"""How an answer is read: ends cut anywhere, no chunks, events that are not parsed one by one, true times."""

from __future__ import annotations

import http.server
import json
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import threading
import urllib.request

import pytest
from ansible.module_utils import sglang_bench_reader as reader
from ansible.module_utils import sglang_bench_stream as stream
from ansible.module_utils.sglang_bench_record import read_records

PATH = pathlib.Path(__file__).resolve().parents[2] / "scripted_server" / "scripted_server.py"
BODY = b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("first", range(1, len(BODY)))
def test_the_end_of_an_answer_is_seen_however_it_is_cut(first):
    """One byte more each time, from a socket that stays open."""
    ours, theirs = socket.socketpair()
    plain = socket.socket(fileno=ours.detach())
    eyes = reader.Reader()
    kept = {"times": [], "blocks": [], "stamps": [], "closed": None}
    with plain, theirs, plain.makefile("rb") as source:
        plain.settimeout(7)
        done = threading.Thread(target=eyes.read, args=(kept, plain, source), daemon=True)
        done.start()
        for piece in (BODY[:first], *(BODY[n : n + 1] for n in range(first, len(BODY)))):
            assert kept["closed"] is None
            theirs.sendall(piece)
        done.join(5)
        assert kept["closed"] == "end"
        assert b"".join(kept["blocks"]) == BODY
        assert len(kept["times"]) == len(kept["blocks"])
        assert plain.gettimeout() == 7
    eyes.close()


def test_an_answer_that_breaks_off_is_told_from_one_that_ends():
    ours, theirs = socket.socketpair()
    eyes = reader.Reader()
    kept = {"times": [], "blocks": [], "stamps": [], "closed": None}
    with ours, theirs, ours.makefile("rb") as source:
        theirs.sendall(BODY[:8])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="before the end"):
            eyes.read(kept, ours, source)
    eyes.close()


class Unchunked(http.server.BaseHTTPRequestHandler):
    """Streams until it closes the connection, as HTTP/1.0 does."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for word in "abcd":
            event = {"choices": [{"delta": {"content": word}, "finish_reason": None}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 4}}
        self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *_args):
        """Say nothing."""


def test_an_answer_without_chunks_is_read_to_its_end(run_module):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unchunked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        args = {"url": f"http://127.0.0.1:{server.server_port}", "requests": 6, "concurrency": 3, "output_tokens": 4}
        result = run_module("sglang_bench", args)
    finally:
        server.shutdown()
        server.server_close()
    assert result["counts"]["completed"] == 6
    assert result["metrics"]["output_tokens_total"] == 24


TEXTS = [" plain", " wört", '"', "\\", "a\nb", "日本", "\u007f", "id", " MARK", "", "x" * 300, " \u2028"]


def event(rng, channel, text):
    """Return one event as one of several servers would write it."""
    fields = {"id": "chatcmpl-1", "created": rng.choice([1, 1, 1, 2]), "model": "id"}
    delta = {"role": None, "content": None, "reasoning_content": None, channel: text}
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    usage = {"usage": rng.choice([None, None, None, {"completion_tokens": 3}])}
    body = {**fields, "choices": [choice], **usage}
    return json.dumps(body, ensure_ascii=rng.random() < 0.5, separators=rng.choice([(",", ":"), (", ", ": ")]))


@pytest.mark.parametrize("seed", range(20))
def test_events_of_one_shape_read_the_same_as_when_each_is_parsed(seed, monkeypatch):
    rng = random.Random(seed)
    blocks = []
    for _ in range(200):
        channel = rng.choice(["content", "content", "content", "reasoning_content"])
        payload = event(rng, channel, rng.choice(TEXTS))
        if rng.random() < 0.02:
            payload = rng.choice([payload[:-1], payload.replace('"model"', '"error": {"message": "boom"}, "model"')])
        blocks.append(b"data: " + payload.encode() + b"\n\n")
    times = list(range(len(blocks)))
    quick = stream.fold("chat", times, blocks)
    monkeypatch.setattr(stream, "shape_of", lambda *_args: None)
    assert quick == stream.fold("chat", times, blocks)


def test_most_events_of_a_usual_answer_are_not_parsed(monkeypatch):
    parsed = []

    def loads(text, original=json.loads):
        parsed.append(text)
        return original(text)

    monkeypatch.setattr(stream.json, "loads", loads)
    one = '{"id":"a","choices":[{"delta":{"content":" %s"},"finish_reason":null}],"usage":null}'
    blocks = [b"data: " + (one % f"w{n}").encode() + b"\n\n" for n in range(500)]
    folded = stream.fold("chat", list(range(500)), blocks)
    assert folded["text"] == "".join(f" w{n}" for n in range(500))
    assert len(folded["arrivals"]) == 500
    assert len(parsed) == 2


@pytest.fixture
def apart(tmp_path):
    """Return the URL of a scripted server in a process of its own, with an interpreter of its own."""
    place = tmp_path / "server.json"
    script = json.dumps({"ttft_ms": 40, "rate": 100})
    subprocess.run([sys.executable, str(PATH), "--background", str(place), "--script", script], check=True)
    yield json.loads(place.read_text())["url"]
    subprocess.run([sys.executable, str(PATH), "--stop", str(place)], check=True)


def test_times_are_the_servers_within_a_millisecond_or_one_percent(apart, run_module, tmp_path):
    """Request by request against the server's own record; the median, since a busy machine delays single ones."""
    args = {"url": apart, "workload": "decode", "requests": 9, "input_tokens": 32, "output_tokens": 21, "warmup": 1}
    for _attempt in range(3):
        result = run_module("sglang_bench", {**args, "results_dir": str(tmp_path)})
        records = read_records(result["result_path"])
        with urllib.request.urlopen(apart + "/truth", timeout=10) as answer:
            truth = json.load(answer)["requests"][-9:]
        first = [item["event_ms"][0] - 1e3 * (real["first"] - real["parsed"]) for item, real in zip(records, truth)]
        pace = [
            (item["event_ms"][-1] - item["event_ms"][0]) / 20 - 1e3 * (real["last"] - real["first"]) / 20
            for item, real in zip(records, truth)
        ]
        if abs(statistics.median(first)) <= 1 and abs(statistics.median(pace)) <= 0.1:
            break
    assert abs(statistics.median(first)) <= 1
    assert abs(statistics.median(pace)) <= 0.1
