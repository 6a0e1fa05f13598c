"""The HTTP surface of the server: the same paths, status codes and answer keys as SGLang 0.5.9."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from . import __version__
from .process import log

WORDS = [f"w{n}" for n in (136, 94, 514, 235, 814, 360, 657, 395, 22, 871, 410, 77)]


class State:
    """What the handlers share: arguments, script, whether warmed up, whether a worker died, how many were served."""

    def __init__(self, args, script):
        self.args, self.script = args, script
        self.lock = threading.Lock()
        self.ready_at = None
        self.served = 0
        self.answered = 0
        self.running = 0
        self.dead = threading.Event()

    @property
    def model(self):
        """Name under which the model is served."""
        return self.script["served_model_name"] or self.args["served_model_name"] or self.args["model_path"]


class Server(ThreadingHTTPServer):
    """Threading server that also binds IPv6 and leaves no thread behind at the end."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, state):
        host = "::1" if state.script["ipv6_only"] else state.args["host"]
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.state = state
        super().__init__((host, state.args["port"]), Handler)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        """Nothing here: the access line is written in SGLang's own shape."""

    def _send(self, status, body=b"", kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self._access(status)

    def _access(self, status):
        phrase = self.responses.get(status, ("",))[0]
        peer = f"{self.client_address[0]}:{self.client_address[1]}"
        log(f'INFO:     {peer} - "{self.command} {self.path} HTTP/1.1" {status} {phrase}')

    def _allowed(self):
        key = self.server.state.args["api_key"]
        if not key or self.path.startswith(("/health", "/metrics")):
            return True
        if self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._send(401, {"error": "Unauthorized"})
        return False

    def do_GET(self):
        """Answer the read-only paths."""
        state = self.server.state
        path = self.path.split("?")[0]
        if not self._allowed():
            return
        if path in ("/health", "/health_generate"):
            self._send(self._health())
        elif path == "/v1/models":
            self._send(
                200,
                {
                    "object": "list",
                    "data": [
                        {
                            "id": state.model,
                            "object": "model",
                            "created": int(time.time()),
                            "owned_by": "sglang",
                            "root": state.model,
                            "parent": None,
                            "max_model_len": 2048,
                        }
                    ],
                },
            )
        elif path in ("/model_info", "/get_model_info"):
            self._send(
                200,
                {
                    "model_path": state.args["model_path"],
                    "tokenizer_path": state.args["model_path"],
                    "is_generation": True,
                    "preferred_sampling_params": None,
                    "weight_version": "default",
                    "has_image_understanding": False,
                    "has_audio_understanding": False,
                    "model_type": "llama",
                    "architectures": ["LlamaForCausalLM"],
                },
            )
        elif path in ("/server_info", "/get_server_info"):
            info = dict(state.args, status="ready", max_req_input_len=2042, version=__version__)
            memory = {"weight": 0.0, "kvcache": 0.0, "token_capacity": 4096, "graph": 0}
            internal = dict(state.args, use_mla_backend=False, last_gen_throughput=0.0, memory_usage=memory)
            if state.args["speculative_algorithm"]:
                internal["avg_spec_accept_length"] = state.script["accept_length"]
            info["internal_states"] = [internal]
            info.update(state.script["server_info"])
            self._send(200, info)
        elif path == "/metrics" and state.args["enable_metrics"]:
            labels = f'{{engine_type="unified",model_name="{state.model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"}}'
            self._send(
                200,
                (
                    f"sglang:num_running_reqs{labels} {state.running}.0\n"
                    f"sglang:num_queue_reqs{labels} 0.0\n"
                    f"sglang:generation_tokens_total{labels} {state.answered * 8}.0\n"
                    f"sglang:spec_accept_length{labels} {state.script['accept_length']}\n"
                ).encode(),
                "text/plain; version=0.0.4",
            )
        else:
            self._send(404, {"detail": "Not Found"})

    def _health(self):
        state = self.server.state
        if state.ready_at is None:
            return 503
        fault = state.script["health"]
        since = time.monotonic() - state.ready_at
        end = float("inf") if fault["seconds"] is None else fault["from"] + fault["seconds"]
        if fault["status"] and fault["from"] <= since < end and (state.running or not fault["busy"]):
            return fault["status"]
        if state.dead.is_set():
            time.sleep(state.script["health_dead_seconds"])
            log(
                "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. "
                "tic start time: 00:00:00. last_heartbeat time: 00:00:00"
            )
            return 503
        time.sleep(state.script["health_seconds"])
        return 200

    def do_POST(self):
        """Answer the three generation paths."""
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if not self._allowed():
            return
        kind = {"/generate": "native", "/v1/completions": "completion", "/v1/chat/completions": "chat"}.get(self.path)
        if kind is None:
            self._send(404, {"detail": "Not Found"})
            return
        warmup = state.ready_at is None
        with state.lock:
            state.served += not warmup
            number = state.served
            state.running += 1
        try:
            self._generate(kind, body, number, warmup)
        finally:
            with state.lock:
                state.running -= 1

    def _generate(self, kind, body, number, warmup):
        state = self.server.state
        fault = state.script["generation"]
        mode = fault["mode"] if not warmup and number > fault["after"] else "answer"
        if mode == "silent" or state.dead.is_set():
            time.sleep(3600)
        if mode == "error":
            self._send(500, {"error": {"message": "scripted failure", "type": "InternalServerError", "code": 500}})
            return
        with state.lock:
            state.answered += not warmup
        limit = body.get("sampling_params", body).get("max_new_tokens" if kind == "native" else "max_tokens") or 16
        log(
            "Prefill batch, #new-seq: 1, #new-token: 2, #cached-token: 0, token usage: 0.00, #running-req: 0, "
            "#queue-req: 0, input throughput (token/s): 9.39, cpu graph: False",
            0 if state.args["tp_size"] > 1 else None,
        )
        said = (fault["text"] or "").split() or WORDS
        words = {
            "empty": [""] * limit,
            "one_token": WORDS[:1],
            "degenerate": [fault["text"] or "foss"] * limit,
        }.get(mode) or [said[i % len(said)] for i in range(limit)]
        answer = _Answer(kind, state.model, words, int(bool(mode == "empty")))
        if not body.get("stream"):
            time.sleep(state.script["token_seconds"] * len(words))
            whole = answer.whole()
            if body.get("return_logprob"):
                whole["meta_info"]["output_token_logprobs"] = [[-0.125, number, None] for number in answer.ids]
            self._send(200, whole)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        usage = (body.get("stream_options") or {}).get("include_usage")
        for done, event in enumerate(answer.events(usage)):
            if mode == "cut" and done > 1:
                self.close_connection = True
                return
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
            time.sleep(state.script["token_seconds"])
        self.wfile.write(b"0\r\n\r\n")
        self._access(200)


class _Answer:
    """One answer in the shape of its endpoint."""

    def __init__(self, kind, model, words, blank):
        self.kind, self.words = kind, words
        self.pieces = ["" if blank else f" {word}" for word in words]
        self.ids = [WORDS.index(word) + 100 if word in WORDS else 200 + sum(map(ord, word)) % 700 for word in words]
        self.base = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self.usage = {
            "prompt_tokens": 2,
            "total_tokens": 2 + len(words),
            "completion_tokens": len(words),
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def _native(self, count):
        done = count == len(self.words)
        return {
            "text": "".join(self.pieces[:count]),
            "output_ids": self.ids[:count],
            "meta_info": {
                "id": self.base["id"],
                "finish_reason": {"type": "length", "length": count} if done else None,
                "prompt_tokens": 2,
                "weight_version": "default",
                "completion_tokens": count,
                "cached_tokens": 0,
                "e2e_latency": 0.05,
            },
        }

    def _choice(self, **fields):
        return dict({"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None}, **fields)

    def whole(self):
        """The answer to a request without streaming."""
        if self.kind == "native":
            return self._native(len(self.words))
        text = "".join(self.pieces)
        content = (
            {"text": text}
            if self.kind == "completion"
            else {"message": {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}}
        )
        return dict(
            self.base,
            object="text_completion" if self.kind == "completion" else "chat.completion",
            choices=[self._choice(finish_reason="length", **content)],
            usage=self.usage,
            metadata={"weight_version": "default"},
        )

    def events(self, usage):
        """The chunks of a stream, the last one being the text ``[DONE]``."""
        if self.kind == "native":
            for count in range(1, len(self.words) + 1):
                yield self._native(count)
        else:
            yield from self._openai_events(usage)
        yield "[DONE]"

    def _openai_events(self, usage):
        chat = self.kind == "chat"
        base = dict(self.base, object="chat.completion.chunk" if chat else "text_completion", usage=None)
        delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
        if chat:
            yield dict(base, choices=[self._choice(delta=dict(delta, role="assistant", content=""))])
        for number, piece in enumerate(self.pieces, 1):
            fields = (
                {"delta": dict(delta, content=piece)}
                if chat
                else {"text": piece, "finish_reason": "length" if number == len(self.pieces) else None}
            )
            yield dict(base, choices=[self._choice(**fields)])
        if chat:
            yield dict(base, choices=[self._choice(delta=delta, finish_reason="length")])
        if usage:
            yield dict(base, choices=[], usage=self.usage)
