"""A server of known speed: what a benchmark client is measured against.

It speaks the streaming chat, completions and generate interfaces, paces every token by an absolute deadline (no
drift), and
keeps its own record of each request: parsed, first token written, last token written, tokens. ``GET /truth`` returns
that record, ``POST /script`` changes the script while it runs. Faults are part of the script.

One process, asyncio on ``select``: unlike ``epoll`` its timeouts are not rounded up to a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

FAULTS = ("", "401", "503", "close", "error", "no_done", "short", "stall", "silent", "empty")
CHANNELS = ("content", "reasoning_content", "reasoning", "both", "tool_calls")
WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa".split()
TEXT = tuple(random.Random(5).choices(WORDS, k=4096))


@dataclass
class Script:
    """What the server does.

    :param ttft_ms: milliseconds from the parsed request to the first token.
    :param rate: tokens a second of one stream; 0 sends as fast as the socket takes them.
    :param tokens_per_chunk: tokens in one event; the first token always comes alone.
    :param channel: delta field that carries the text, one of :data:`CHANNELS`.
    :param usage: send the usage event when asked for it.
    :param cached_tokens: cached prompt tokens to report; null reports none.
    :param role_at_once: send the empty role chunk with the headers and not with the first token.
    :param repeat: answer one word again and again.
    :param fault: one of :data:`FAULTS`.
    :param fault_every: the fault meets each request whose number is divisible by this.
    :param template_tokens: tokens that the chat template adds to the prompt's words.
    :param context: tokens that the model is said to take.
    :param queue: waiting requests to report.
    :param accept_length: tokens accepted a step to report; 0 means no speculation.
    """

    ttft_ms: float = 20.0
    rate: float = 300.0
    tokens_per_chunk: int = 1
    channel: str = "content"
    usage: bool = True
    cached_tokens: int | None = None
    role_at_once: bool = False
    repeat: bool = False
    fault: str = ""
    fault_every: int = 1
    template_tokens: int = 5
    context: int = 4096
    queue: int = 0
    accept_length: float = 0.0
    model: str = "scripted"


@dataclass
class State:
    """The script in force and what was done under it."""

    script: Script = field(default_factory=Script)
    seen: int = 0
    connections: int = 0
    done: list = field(default_factory=list)
    prompts: list = field(default_factory=list)
    flushes: int = 0


def _response(status, body, content_type="application/json"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


class Stream:
    """One answer being streamed over one connection."""

    def __init__(self, protocol, api, body, fault):
        script = protocol.state.script
        self.protocol, self.api, self.script, self.fault = protocol, api, script, fault
        self.loop = asyncio.get_running_loop()
        params = body.get("sampling_params", {}) if api == "generate" else body
        self.asked = int(
            params.get("max_new_tokens") or params.get("max_completion_tokens") or params.get("max_tokens") or 16
        )
        self.total = max(1, self.asked // 2) if fault in ("short", "close", "error", "stall") else self.asked
        self.want_usage = script.usage and bool((body.get("stream_options") or {}).get("include_usage"))
        self.prompt_tokens = _prompt_tokens(api, body, script)
        self.sent = 0
        self.text = ""
        self.parsed = time.perf_counter()
        self.first = self.last = None
        self.due = self.loop.time() + script.ttft_ms / 1000.0
        self.interval = 1.0 / script.rate if script.rate else 0.0
        kind = "chat.completion.chunk" if api == "chat" else "text_completion"
        self.ready = {}
        self.prefix = (
            f'data: {{"id":"chatcmpl-{id(self):032x}","object":"{kind}",'
            f'"created":1795967208,"model":"{script.model}","choices":[{{"index":0,'
        )

    def start(self):
        """Send the headers and schedule the first token."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        if self.api == "chat" and self.script.role_at_once:
            head += _chunk(self._role())
        self.protocol.transport.write(head)
        if self.fault != "silent":
            self.loop.call_at(self.due, self._finish if self.fault == "empty" else self._emit)

    def _role(self):
        return (self.prefix + '"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n').encode()

    def _event(self, words):
        text = "".join(" " + word for word in words)
        if self.api == "generate":
            self.text += text
            meta = {"finish_reason": None, "prompt_tokens": self.prompt_tokens, "completion_tokens": self.sent}
            return ("data: " + json.dumps({"text": self.text, "meta_info": meta}) + "\n\n").encode()
        if self.api == "completions":
            return f'{self.prefix}"text":"{text}","logprobs":null,"finish_reason":null}}]}}\n\n'.encode()
        channel = self.script.channel
        if channel == "both":
            channel = "reasoning_content" if self.sent <= self.total // 2 else "content"
        if channel == "tool_calls":
            delta = f'"content":null,"tool_calls":[{{"index":0,"function":{{"arguments":"{text}"}}}}]'
        elif channel == "content":
            delta = f'"role":null,"content":"{text}","reasoning_content":null,"tool_calls":null'
        else:
            delta = f'"role":null,"content":null,"{channel}":"{text}","tool_calls":null'
        tail = '"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n'
        return f'{self.prefix}"delta":{{{delta}}},{tail}'.encode()

    def _framed(self, words):
        """Return an event in its chunk. Those that depend on the words alone are kept: at 40,000 tokens a second the
        making of them would be the limit."""
        if self.api == "generate" or self.script.channel == "both":
            return _chunk(self._event(words))
        out = self.ready.get(words)
        if out is None:
            out = self.ready[words] = _chunk(self._event(words))
        return out

    def _emit(self):
        protocol = self.protocol
        if protocol.closed:
            return
        if protocol.paused:
            protocol.resume_call = self._emit
            return
        count = 1 if self.sent == 0 else min(self.script.tokens_per_chunk, self.total - self.sent)
        words = ("foss",) * count if self.script.repeat else TEXT[self.sent % 4000 : self.sent % 4000 + count]
        self.sent += count
        out = self._framed(words)
        if self.sent == 1 and self.api == "chat" and not self.script.role_at_once:
            out = _chunk(self._role()) + out
        protocol.transport.write(out)
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        if self.sent >= self.total:
            self._finish()
        elif self.interval:
            self.due += self.interval * min(self.script.tokens_per_chunk, self.total - self.sent)
            self.loop.call_at(self.due, self._emit)
        else:
            self.loop.call_soon(self._emit)

    def _finish(self):
        transport, script = self.protocol.transport, self.script
        if self.fault == "stall":
            return
        if self.fault == "close":
            transport.abort()
            return
        out = b""
        if self.fault == "error":
            error = {
                "error": {"message": "out of memory in the decode step", "type": "InternalServerError", "code": 500}
            }
            out += _chunk(b"data: " + json.dumps(error).encode() + b"\n\n")
        else:
            reason = "stop" if self.fault == "short" else "length"
            usage = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.sent,
                "total_tokens": self.prompt_tokens + self.sent,
            }
            if self.api == "generate":
                meta = {
                    "finish_reason": {"type": reason},
                    **{k: usage[k] for k in ("prompt_tokens", "completion_tokens")},
                }
                if script.cached_tokens is not None:
                    meta["cached_tokens"] = script.cached_tokens
                out += _chunk(b"data: " + json.dumps({"text": self.text, "meta_info": meta}).encode() + b"\n\n")
            elif self.fault != "no_done":
                empty = '"delta":{"content":null}' if self.api == "chat" else '"text":""'
                out += _chunk((self.prefix + empty + f',"finish_reason":"{reason}"}}]}}\n\n').encode())
            if script.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
            if self.want_usage and self.api != "generate" and self.fault != "no_done":
                out += _chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if self.fault != "no_done":
            out += _chunk(b"data: [DONE]\n\n")
        transport.write(out + b"0\r\n\r\n")
        record = {
            "parsed": self.parsed,
            "first": self.first,
            "last": self.last,
            "tokens": self.sent,
            "prompt_tokens": self.prompt_tokens,
        }
        self.protocol.state.done.append(record)


def _prompt_text(api, body):
    if api == "chat":
        return " ".join(str(message.get("content") or "") for message in body.get("messages", []))
    return str(body.get("prompt" if api == "completions" else "text") or "")


def _model(script):
    return {"id": script.model, "object": "model", "max_model_len": script.context}


def _prompt_tokens(api, body, script):
    return len(_prompt_text(api, body).split()) + (script.template_tokens if api == "chat" else 0)


class Protocol(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, one request at a time on a connection."""

    def __init__(self, state):
        self.state, self.buffer, self.transport = state, b"", None
        self.closed = self.paused = False
        self.resume_call = None

    def connection_made(self, transport):
        self.transport = transport
        self.state.connections += 1

    def connection_lost(self, exc):
        self.closed = True

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused, call, self.resume_call = False, self.resume_call, None
        if call:
            call()

    def data_received(self, data):
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        method, path, _ = lines[0].split(" ", 2)
        self._answer(method, path, json.loads(rest[:length] or b"{}"))

    def _answer(self, method, path, body):
        state, write = self.state, self.transport.write
        apis = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/generate": "generate"}
        if method == "POST" and path in apis:
            state.seen += 1
            state.prompts.append(_prompt_text(apis[path], body))
            fault = state.script.fault if state.seen % state.script.fault_every == 0 else ""
            if fault == "401":
                write(_response("401 Unauthorized", {"error": "Unauthorized"}))
            elif fault == "503":
                write(_response("503 Service Unavailable", {"error": {"message": "busy"}}))
            else:
                Stream(self, apis[path], body, fault).start()
        elif path == "/script":
            state.script = Script(**{**asdict(state.script), **body})
            state.seen, state.connections = 0, 0
            state.done.clear()
            state.prompts.clear()
            write(_response("200 OK", asdict(state.script)))
        elif path == "/truth":
            write(_response("200 OK", {"connections": state.connections, "requests": state.done}))
        elif path == "/v1/models":
            write(_response("200 OK", {"object": "list", "data": [_model(state.script)]}))
        elif path == "/flush_cache":
            state.flushes += 1
            write(_response("200 OK", b"Cache flushed."))
        elif path in ("/health", "/health_generate"):
            write(_response("200 OK", b""))
        elif path in ("/server_info", "/get_server_info"):
            info = {
                "version": "0.0-scripted",
                "internal_states": [{"last_gen_throughput": state.script.rate}],
            }
            write(_response("200 OK", info))
        elif path == "/metrics":
            cached = (state.script.cached_tokens or 0) * len(state.done)
            series = {
                "generation_tokens_total": sum(item["tokens"] for item in state.done),
                "prompt_tokens_total": sum(item["prompt_tokens"] for item in state.done),
                "cached_tokens_total": cached,
                "num_queue_reqs": state.script.queue,
                "gen_throughput": state.script.rate,
                "spec_accept_length": state.script.accept_length,
            }
            label = '{model_name="scripted"}'
            text = "".join(f"# TYPE {name} x\nsglang:{name}{label} {float(value)}\n" for name, value in series.items())
            write(_response("200 OK", text.encode(), "text/plain"))
        else:
            write(_response("404 Not Found", {"error": "not found"}))


class ScriptedServer:
    """The server in a thread of this process, for tests: ``with ScriptedServer(rate=500) as server: server.url``."""

    def __init__(self, host="127.0.0.1", port=0, **script):
        self.state = State(Script(**script))
        self.host, self.port, self.url = host, port, None
        self.loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._ready = threading.Event()

    def serve(self):
        """Serve until :meth:`stop`; blocks."""
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(
            self.loop.create_server(lambda: Protocol(self.state), self.host, self.port, backlog=1024)
        )
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"
        self._ready.set()
        try:
            self.loop.run_forever()
        finally:
            server.close()
            self.loop.close()

    def stop(self):
        """End :meth:`serve` from another thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def __enter__(self):
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        self._ready.wait(5)
        return self

    def __exit__(self, *_exc):
        self.stop()
        self._thread.join(5)


def background(path, arguments):
    """Start this program apart from the caller, wait until it listens, and write ``{pid, url}`` to ``path``."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = process.stdout.readline().decode().strip()
    if not url:
        print(f"the server ended with {process.wait()}", file=sys.stderr)
        return 1
    with open(path, "w", encoding="utf-8") as handle:
        json.dump({"pid": process.pid, "url": url}, handle)
    return 0


def stop(path):
    """End the process named in ``path``, when it still is this program, and remove the file."""
    with open(path, encoding="utf-8") as handle:
        pid = json.load(handle)["pid"]
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            ours = os.path.basename(__file__).encode() in handle.read()
    except FileNotFoundError:
        ours = False
    if ours:
        os.kill(pid, signal.SIGTERM)
    os.unlink(path)
    return 0


def main(argv=None):
    """Run from the command line; prints the endpoint in one line when it listens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", type=json.loads, default={}, help="JSON object with the fields of Script")
    parser.add_argument(
        "--background", metavar="FILE", help="start a process of its own and write its pid and url here"
    )
    parser.add_argument("--stop", metavar="FILE", help="stop the process that --background wrote here")
    options = parser.parse_args(argv)
    if options.stop:
        return stop(options.stop)
    if options.background:
        arguments = ["--host", options.host, "--port", str(options.port), "--script", json.dumps(options.script)]
        return background(options.background, arguments)
    server = ScriptedServer(options.host, options.port, **options.script)
    threading.Thread(target=lambda: (server._ready.wait(), print(server.url, flush=True)), daemon=True).start()
    try:
        server.serve()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
