"""Whether a serving server still makes tokens: the program ``probe.py`` of a release, which ``watch.py`` loads.

A server can hang with all its processes alive and its port open. The only proof against it is a token. Signs of tokens
that cost nothing come first (the log, a compiler that runs); only where there are none for a while is the server asked
for two tokens, and what it is busy with meanwhile counts for it. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
import urllib.parse

# What SGLang 0.5.9 to 0.5.23 write for each step of the scheduler, and once when the server is ready.
STEP = re.compile(rb"(?:Prefill|Decode) batch")
READY = b"The server is fired up and ready to roll"
# Counters that move with tokens, some with each one and some with the end of a request.
COUNTERS = re.compile(
    r"^sglang:(?:(?:generation|prompt|realtime)_tokens_total|(?:inter_token|time_to_first_token)\w*_count)"
)
COMPILERS = {"nvcc", "cicc", "ptxas", "cudafe++", "ninja", "cc1plus", "g++", "hipcc", "clang"}
# No error of the server, but an answer that tells nothing about its scheduler: a key, a path, a kind of model.
TELLS_NOTHING = (400, 401, 403, 404, 405, 422, 501)
BODY = json.dumps(
    {"text": "1 2 3", "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}, "stream": True}
)
RETRY, BLIND = 5.0, 600.0


class Log:
    """A log that is read on from where the last look ended, through rotation and truncation."""

    def __init__(self, path):
        self.path, self.inode, self.offset, self.rest = path, None, 0, b""

    def read(self):
        """Return what came since the last call; the last line may be cut, and comes with its beginning next time."""
        try:
            with open(self.path, "rb") as handle:
                status = os.fstat(handle.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.inode, self.offset, self.rest = status.st_ino, 0, b""
                handle.seek(self.offset)
                new = handle.read(1 << 24)
        except OSError:
            return b""
        self.offset += len(new)
        text = self.rest + new
        self.rest = text[text.rfind(b"\n") + 1 :][-4096:]
        return text if new else b""


class Probe:
    """The liveness of one server.

    :param launch: content of ``launch.json``; ``watch`` holds ``probe_interval`` and ``hang_seconds``.
    """

    def __init__(self, launch):
        self.launch = launch
        settings = launch.get("watch") or {}
        self.interval, self.limit = settings.get("probe_interval", 15), settings.get("hang_seconds", 30)
        self.log = Log(launch["log"])
        self.served = False
        self.tokens = time.monotonic()
        self.asked = None
        self.error, self.blind, self.counters = "", "", None
        self.asking = self.counting = None
        self.next = 0.0

    def _connect(self, limit):
        url = urllib.parse.urlsplit(self.launch["endpoint"])
        headers = {"Content-Type": "application/json"}
        key_file = self.launch["env"].get("SGLANG_DEPLOY_API_KEY_FILE")
        if key_file:
            with open(key_file, encoding="utf-8") as handle:
                headers["Authorization"] = "Bearer " + handle.read().strip()
        return http.client.HTTPConnection(url.hostname, url.port, timeout=limit), headers

    def _ask(self):
        """Ask for two tokens; each piece of the stream is a sign of life at once."""
        try:
            connection, headers = self._connect(4 * self.limit)
            try:
                connection.request("POST", "/generate", BODY, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    self.error = f"/generate answered HTTP {answer.status}"
                    self.blind = self.error if answer.status in TELLS_NOTHING else ""
                    return
                # An error in the stream holds no text; a body in one piece comes as one line.
                for line in answer:
                    if b'"text"' in line:
                        self._alive()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as problem:
            self.error = f"/generate: {problem or type(problem).__name__}"

    def _count(self):
        """Look at the counters once; one that moved is a sign of tokens."""
        try:
            connection, headers = self._connect(RETRY)
            try:
                connection.request("GET", "/metrics", headers=headers)
                lines = connection.getresponse().read().decode("utf-8", "replace").splitlines()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return
        counters = [line for line in lines if COUNTERS.match(line)]
        if self.counters is not None and counters != self.counters:
            self.tokens = time.monotonic()
        self.counters = counters

    def _alive(self):
        self.served, self.tokens, self.asked, self.error, self.blind = True, time.monotonic(), None, "", ""

    def look(self, compiling, ask):
        """Look once and return why the server is taken for hung, or an empty text.

        :param compiling: a compiler runs below the server.
        :param ask: whether the server may be asked now.
        """
        now = time.monotonic()
        text = self.log.read()
        self.served = self.served or READY in text
        if STEP.search(text) or compiling:
            self.tokens = now
        if self.asking and not self.asking.is_alive():
            # Who cannot be judged is not asked every few seconds.
            self.asking, self.next = None, now + (BLIND if self.blind else RETRY)
        if not self.asking and (not self.interval or not ask or now - self.tokens < self.interval):
            self.asked = None
            return ""
        if self.blind and now < self.next:
            self.asked = None
            return ""
        if not self.asking and now >= self.next:
            self.asked = self.asked or now
            self.asking = threading.Thread(target=self._ask, daemon=True)
            self.asking.start()
        if "--enable-metrics" in self.launch["argv"] and not (self.counting and self.counting.is_alive()):
            self.counting = threading.Thread(target=self._count, daemon=True)
            self.counting.start()
        asked = self.asked
        if not self.served or asked is None or now - max(self.tokens, asked) < self.limit:
            return ""
        what = self.error or "/generate does not answer"
        return f"no token for {now - self.tokens:.0f} s, {now - asked:.0f} s after two were asked for: {what}"
