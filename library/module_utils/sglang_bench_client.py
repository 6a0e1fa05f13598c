"""The load: worker threads over ``requests``, each with its own connection, that keep bytes and times and parse
nothing.

The caller's thread ticks beside them: it ends what is overdue and measures how late it gets the interpreter, which is
what every other thread of the client suffers too.
"""

from __future__ import annotations

import json
import socket
import threading
import time

from ansible.module_utils.sglang_bench_reader import Reader, can_read, clock
from ansible.module_utils.sglang_bench_resolve import TICK, clock_offset, lateness, why_not
from ansible.module_utils.sglang_bench_stream import record

START = 0.02  # seconds until the first request of a rate is due, while the threads start
STEP = 0.001  # seconds by which the time of day may move against the clock while its stamps are used
KEEP = 64 << 20  # bytes of unparsed answers; above this finished answers are parsed during the run

_now = threading.local()


def adapter():
    """Return a ``requests`` adapter with one connection that notes when it writes a request's first byte.

    What the client's own library does before that byte is not the server's time.
    """
    import requests

    def noting(pool):
        class Connection(pool.ConnectionCls):
            def send(self, data):
                if getattr(_now, "sent", None) is None:
                    _now.sent = clock()
                return super().send(data)

        return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

    out = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=1)
    manager = out.poolmanager
    manager.pool_classes_by_scheme = {scheme: noting(pool) for scheme, pool in manager.pool_classes_by_scheme.items()}
    return out


class Client:
    """Sends prepared requests and returns their records.

    :param url: full URL of the endpoint.
    :param api: ``chat``, ``completions`` or ``generate``.
    :param asked: output tokens that a measured request asks for.
    :param request_timeout: seconds for one request from sending to its last byte.
    :param deadline: value of :data:`clock` at which everything ends.
    """

    def __init__(self, url, api, asked, ignore_eos, request_timeout, deadline, api_key=None, verify=True):
        import requests

        self.requests = requests
        self.url, self.api, self.asked, self.ignore_eos = url, api, asked, ignore_eos
        self.request_timeout, self.deadline, self.verify = request_timeout, deadline, verify
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
        }
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.lock = threading.Lock()
        self.active = {}
        self.kept = 0
        self.adapters = []
        self.given_up = ""
        self.reader = Reader()
        self.offset = clock_offset()

    def give_up(self, why):
        """Send nothing more; requests of later runs end as ``not_sent`` with this reason."""
        self.given_up, self.deadline = why, clock()

    def prepare(self, body):
        """Return a request ready to send; done before the clock runs."""
        return self.requests.Request("POST", self.url, headers=self.headers, data=json.dumps(body).encode()).prepare()

    def open(self, count):
        """Make ``count`` independent connections-to-be."""
        while len(self.adapters) < count:
            self.adapters.append(adapter())

    def close(self):
        """Close every connection and stop reading."""
        self.reader.close()
        for each in self.adapters:
            each.close()
        self.adapters = []

    def send(self, link, prepared, index, due=None):
        """Send one request, read it to its end and return what was kept (input of ``sglang_bench_stream.record``)."""
        stream = {"index": index, "sent": None, "end": None, "status": None, "kind": None, "closed": None, "detail": ""}
        stream.update(times=[], blocks=[], stamps=[], framed=False, due=due)
        exceptions, raw = self.requests.exceptions, None
        patience = min(self.request_timeout, max(0.05, self.deadline - clock()))
        stream["sent"], _now.sent = clock(), None
        try:
            response = link.send(prepared, stream=True, timeout=(patience, patience), verify=self.verify)
            stream["sent"] = _now.sent or stream["sent"]
            stream["status"] = response.status_code
            raw = response.raw
            if response.status_code != 200:
                self._refusal(stream, raw)
            else:
                self.active[index] = (stream, raw)
                self._read(stream, raw)
        except exceptions.Timeout as error:
            stream["kind"], stream["detail"] = "timed_out", f"no answer within {patience:.1f} s: {error}"
        except exceptions.ConnectionError as error:
            refused = any(sign in str(error) for sign in ("refused", "Failed to establish", "Failed to resolve"))
            stream["kind"], stream["detail"] = "refused" if refused else "truncated", str(error)
        except Exception as error:
            # urllib3, http.client and the socket raise many types when a stream breaks; each is one failed request.
            late = isinstance(error, socket.timeout) or type(error).__name__ == "ReadTimeoutError"
            stream["closed"] = stream["closed"] or ("timed_out" if late else "broken")
            stream["detail"] = stream["detail"] or f"{type(error).__name__}: {error}"
            if stream["status"] is None:
                stream["kind"] = "refused"
        finally:
            self.active.pop(index, None)
            stream["end"] = clock()
            if raw is not None and stream["closed"] not in (None, "end"):
                raw.close()
        return stream

    def _read(self, stream, raw):
        """Read an answer to its end.

        The usual answer is chunked; it is taken from the socket with its framing and unframed after the run: while
        tokens arrive that time belongs to the next ones.
        """
        times, blocks = stream["times"], stream["blocks"]
        inner = getattr(raw, "_original_response", None)
        source, sock = getattr(inner, "fp", None), getattr(raw.connection, "sock", None)
        stream["framed"] = bool(source is not None and inner.chunked and can_read(sock) and hasattr(source, "read1"))
        if stream["framed"]:
            self.reader.read(stream, sock, source)
            inner.close()
            raw.release_conn()
            return
        block = raw.read1()
        while block:
            times.append(clock())
            blocks.append(block)
            block = raw.read1()
        stream["closed"] = stream["closed"] or "end"

    @staticmethod
    def _refusal(stream, raw):
        stream["kind"] = "unauthorized" if stream["status"] in (401, 403) else "http_error"
        stream["detail"] = f"HTTP {stream['status']}"
        text = raw.read(4096).decode("utf-8", "replace")
        raw.drain_conn()
        stream["detail"] = f"HTTP {stream['status']}: {text[:300]}"

    def _worker(self, link, queue, out):
        while True:
            with self.lock:
                item = next(queue, None)
            if item is None:
                return
            index, prepared, due = item
            while due is not None and clock() < min(due, self.deadline):
                time.sleep(max(0.0, min(due, self.deadline) - clock()))
            if clock() >= self.deadline:
                return
            stream = self.send(link, prepared, index, due)
            self.kept += sum(map(len, stream["blocks"]))
            out.append(self._record(stream) if self.kept > KEEP else stream)

    def run(self, prepared, concurrency, arrivals=None):
        """Send all, at most ``concurrency`` at a time.

        :param prepared: list of prepared requests.
        :param arrivals: seconds from now at which each is due; without it each worker sends its next at once.
        :returns: ``(records, client)``; client is ``{cpu_s, wall_s, lags, read_lags}``: how late each tick was, and how
            late each read was after the kernel had its bytes, in seconds.
        Requests that were never sent because the time was over have the kind ``not_sent``.
        """
        concurrency = max(1, min(concurrency, len(prepared)))
        self.open(concurrency)
        began = clock() + (START if arrivals else 0.0)
        due = [began + when for when in arrivals] if arrivals else [None] * len(prepared)
        queue, out, ticks = iter(list(zip(range(len(prepared)), prepared, due))), [], []
        threads = [
            threading.Thread(target=self._worker, args=(link, queue, out), daemon=True)
            for link in self.adapters[:concurrency]
        ]
        cpu, began = time.process_time(), clock()
        for thread in threads:
            thread.start()
        tick = began
        while any(thread.is_alive() for thread in threads):
            tick = max(tick + TICK, clock())
            pause = tick - clock()
            if pause > 0:
                threads[0].join(pause) if threads[0].is_alive() else time.sleep(pause)
            now = clock()
            if now >= tick:
                ticks.append((tick, now))
            self._end_overdue(now)
            if now > self.deadline + 1.0:
                break
            threads = [thread for thread in threads if thread.is_alive()] or threads[:1]
        usage = {"cpu_s": time.process_time() - cpu, "wall_s": clock() - began, "lags": [b - a for a, b in ticks]}
        records = [item if "arrivals" in item else self._record(item) for item in list(out)]
        usage["read_lags"] = self._resolve(records, lateness(ticks))
        seen = {item["index"] for item in records}
        records += [self._lost(index) for index in range(len(prepared)) if index not in seen]
        return sorted(records, key=lambda item: item["index"]), usage

    def _record(self, stream):
        return record(stream, self.api, self.asked, self.ignore_eos, self.offset)

    def _resolve(self, records, late):
        """Say of each record why its tokens cannot be told apart in time; returns the lags of all reads in seconds."""
        stepped = abs(clock_offset() - self.offset) > STEP
        for item in records:
            if stepped:
                item["reads"] = {}
            item["unresolved"] = why_not(item, late)
        return [when - there for item in records for when, there in item["reads"].items()]

    def _lost(self, index):
        """Return the record of a request that no worker finished: still waiting at the deadline, or never sent."""
        stream = {
            "index": index,
            "sent": None,
            "end": None,
            "status": None,
            "closed": None,
            "kind": "not_sent",
            "due": None,
        }
        stream["detail"] = self.given_up or "the time for the whole run was over before this request was done"
        return self._record(stream)

    def _end_overdue(self, now):
        for stream, raw in list(self.active.values()):
            limit = min(stream["sent"] + self.request_timeout, self.deadline)
            if now < limit or stream["closed"]:
                continue
            stream["closed"] = "timed_out"
            stream["detail"] = f"not done within {limit - stream['sent']:.1f} s; {len(stream['times'])} reads so far"
            sock = getattr(raw.connection, "sock", None)
            if sock is not None:
                try:
                    sock.shutdown(2)
                except OSError:
                    stream["detail"] += "; its connection was gone"
