"""Whether a server makes tokens, judged without a server process: the log, the counters, an answer or none."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time

import pytest
from ansible.module_utils import sglang_launch_probe

READY = "[2026-01-01 00:00:00] The server is fired up and ready to roll!\n"
DECODE = "[2026-01-01 00:00:00 TP0] Decode batch, #running-req: 1, #token: 9, gen throughput (token/s): 9.00\n"


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        """Return the time."""
        return self.now


@pytest.fixture
def endpoint():
    """Return an HTTP server whose ``answer`` is called for each POST and whose ``counters`` /metrics shows."""

    class Handler(http.server.BaseHTTPRequestHandler):
        """One request."""

        def log_message(self, *_args):
            """Nothing."""

        def do_GET(self):
            """Answer /metrics."""
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"sglang:inter_token_latency_seconds_count{{}} {server.counters}\n".encode())

        def do_POST(self):
            """Answer /generate."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            server.answer(self)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.asked, server.counters = True, [], 1
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def status(code, body=b""):
    """Return an answer with a status."""

    def answer(handler):
        handler.send_response(code)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


TOKENS = status(200, b'data: {"text": " 4", "meta_info": {}}\n\ndata: [DONE]\n\n')


def silent(_handler):
    """Never answer."""
    time.sleep(30)


@pytest.fixture
def made(endpoint, tmp_path, monkeypatch):
    """Return ``made(**watch)``: a probe of a ready server, with ``after(seconds, ...)`` to look later."""
    clock = Clock()
    monkeypatch.setattr(sglang_launch_probe, "time", clock)
    log = tmp_path / "server.log"
    log.write_text(READY)

    def make(argv=(), env=None, **watch):
        url = f"http://127.0.0.1:{endpoint.server_address[1]}"
        launch = {"log": str(log), "endpoint": url, "argv": list(argv), "env": env or {}, "watch": watch}
        probe = sglang_launch_probe.Probe(launch)

        def after(seconds, compiling=False, ask=True):
            clock.now += seconds
            text = probe.look(compiling, ask)
            for thread in (probe.asking, probe.counting):
                if thread:
                    # A question that is never answered need only be sent.
                    thread.join(0.05 if thread is probe.asking and endpoint.answer is silent else 1)
            return text

        probe.after, probe.file = after, log
        return probe

    return make


def test_tokens_in_the_log_ask_nothing(made, endpoint):
    probe = made()
    for _ in range(20):
        with open(probe.file, "a", encoding="utf-8") as log:
            log.write(DECODE)
        assert probe.after(14) == ""
    assert endpoint.asked == []


def test_a_quiet_server_is_asked_and_answers(made, endpoint, tmp_path):
    (tmp_path / "key").write_text("secret-key-of-this\n")
    endpoint.answer = TOKENS
    probe = made(env={"SGLANG_DEPLOY_API_KEY_FILE": str(tmp_path / "key")})
    for _ in range(12):
        assert probe.after(5) == ""
    assert len(endpoint.asked) in (3, 4)
    path, key, body = endpoint.asked[0]
    assert (path, key) == ("/generate", "Bearer secret-key-of-this")
    assert json.loads(body)["sampling_params"]["max_new_tokens"] == 2


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_ipv6_and_a_name_of_two_families(tmp_path, host):  # F22
    """A listener of one family behind a name of two, and an address in brackets."""
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET

    class Server(http.server.ThreadingHTTPServer):
        """A server of one family."""

        address_family = family

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers two tokens."""

        def log_message(self, *_args):
            """Nothing."""

        do_POST = TOKENS  # noqa: N815

    server = Server(("::1" if host == "[::1]" else "127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        launch = {"log": str(tmp_path / "none"), "endpoint": f"http://{host}:{server.server_address[1]}", "env": {}}
        probe = sglang_launch_probe.Probe(dict(launch, argv=[]))
        probe._ask()
        assert probe.served and probe.error == ""
    finally:
        server.shutdown()
        server.server_close()


def test_silence_is_found_within_a_minute(made, endpoint):
    endpoint.answer = silent
    probe = made()
    found = [step for step in range(1, 13) if probe.after(5)]
    assert found and 5 * found[0] <= 55 and len(endpoint.asked) == 1
    assert "/generate does not answer" in probe.after(5)


@pytest.mark.parametrize("sign", ["log", "compiler", "counters"])
def test_a_question_in_a_long_queue_is_no_hang(made, endpoint, sign):
    endpoint.answer = silent
    probe = made(argv=["--enable-metrics"])
    for _ in range(30):
        if sign == "log":
            with open(probe.file, "a", encoding="utf-8") as log:
                log.write(DECODE)
        endpoint.counters += sign == "counters"
        # The first step is quiet, so that the server is asked.
        assert probe.after(16, compiling=sign == "compiler" and probe.asking is not None) == ""
    for _ in range(3):
        probe.after(16)
    assert probe.after(16) != ""


def test_503_counts_only_where_no_token_flows(made, endpoint):
    endpoint.answer = status(503)
    probe = made()
    for _ in range(20):
        with open(probe.file, "a", encoding="utf-8") as log:
            log.write(DECODE)
        assert probe.after(20) == ""
    found = [probe.after(5) for _ in range(12)]
    assert "/generate answered HTTP 503" in found[-1]
    endpoint.answer = TOKENS
    probe.after(6)
    assert probe.after(1) == ""


@pytest.mark.parametrize("code", [401, 404, 400])
def test_an_answer_that_tells_nothing_is_no_verdict_and_is_seldom_asked_for(made, endpoint, code):
    endpoint.answer = status(code)
    probe = made()
    assert not any(probe.after(5) for _ in range(100))
    assert len(endpoint.asked) == 1 and str(code) in probe.blind
    probe.after(200)
    assert len(endpoint.asked) == 2


def test_nobody_is_asked_under_the_lock_or_where_it_is_switched_off(made, endpoint):
    endpoint.answer = silent
    assert not any(made().after(5, ask=False) for _ in range(30))
    off = made(probe_interval=0)
    assert not any(off.after(5) for _ in range(30))
    assert endpoint.asked == []


def test_a_start_is_no_hang(made, endpoint):
    """What has not served yet loads or warms up, for whatever time."""
    endpoint.answer = silent
    probe = made()
    probe.file.write_text("Load weight begin.\n")
    assert not any(probe.after(10) for _ in range(60))
    probe.file.write_text("Load weight begin.\n" + READY)
    assert any(probe.after(10) for _ in range(12))


def test_the_log_is_followed_through_rotation_and_truncation(tmp_path):
    path = tmp_path / "server.log"
    log = sglang_launch_probe.Log(str(path))
    assert log.read() == b""
    path.write_text("one\ntw")
    assert log.read() == b"one\ntw" and log.read() == b""
    with open(path, "a", encoding="utf-8") as handle:
        handle.write("o\n")
    assert log.read() == b"two\n"
    path.rename(tmp_path / "server.log.1")
    path.write_text("three\n")
    assert log.read() == b"three\n"
    path.write_text("4\n")
    assert log.read() == b"4\n"
