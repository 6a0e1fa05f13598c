"""A client that streams from one server without a pause, as a user does while an operator works on the host."""

from __future__ import annotations

import http.client
import json
import threading
import time


class Client(threading.Thread):
    """``with Client(port, model) as client``: one streamed chat after the other; ``answered``, ``failed``, ``slowest``.

    :param pause: seconds between two requests.
    """

    def __init__(self, port, model, tokens=8, pause=0.2, limit=60):
        super().__init__(daemon=True)
        self.port, self.limit, self.pause = port, limit, pause
        body = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True}
        self.body = json.dumps(dict(body, messages=[{"role": "user", "content": "w1 w2"}]))
        self.answered, self.failed, self.slowest = 0, [], 0.0
        self._over = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_exc):
        self._over.set()
        self.join(self.limit)

    def _ask(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.limit)
        try:
            connection.request("POST", "/v1/chat/completions", self.body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if answer.status != 200 or "data: [DONE]" not in text:
            raise OSError(f"status {answer.status}: {text[-200:]}")

    def run(self):
        """Ask until told to stop."""
        while not self._over.is_set():
            begin = time.monotonic()
            try:
                self._ask()
                self.answered += 1
                self.slowest = max(self.slowest, time.monotonic() - begin)
            except (OSError, http.client.HTTPException) as problem:
                self.failed.append(f"{time.strftime('%H:%M:%S')} {problem!r}")
            self._over.wait(self.pause)
