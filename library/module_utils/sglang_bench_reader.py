"""One thread that reads every open stream: whoever has bytes is read, stamped and left alone until the next ones.

A thread a stream costs a change of threads for each token; here a wake-up serves all streams that are ready.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from ansible.module_utils.sglang_bench_resolve import SPACE, stamped

LAST = b"\r\n0\r\n\r\n"  # end of a chunk and the empty chunk that ends an answer
BLOCK = 65536

clock = time.perf_counter


def can_read(sock):
    """Return whether the reader takes this socket: one without TLS, whose bytes epoll announces."""
    return type(sock) is socket.socket and hasattr(select, "epoll")


def ended(blocks):
    """Return whether the blocks end with the empty chunk, however the end was cut."""
    tail, count = blocks[-1], 1
    while len(tail) < len(LAST) and count < len(blocks):
        count += 1
        tail = blocks[-count] + tail
    return tail.endswith(LAST)


class Reader:
    """Reads chunked answers, framing and all, into ``times``, ``blocks`` and ``stamps`` of their streams."""

    def __init__(self):
        self.epoll = select.epoll()
        self.entries = {}
        self.stop_read, self.stop_write = os.pipe()
        self.epoll.register(self.stop_read, select.EPOLLIN)
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def close(self):
        """Stop reading; streams that are still open are left to whoever waits for them."""
        os.write(self.stop_write, b"x")
        self.thread.join(5)
        self.epoll.close()
        os.close(self.stop_read)
        os.close(self.stop_write)

    def read(self, stream, sock, source):
        """Read one answer to its end; blocks the caller, not the others.

        :param stream: dict with ``times``, ``blocks``, ``stamps`` (control data of each read) and ``closed``, which
            becomes ``end`` when it is complete.
        :param sock: the plain socket, whose time-out is set back afterwards.
        :param source: the buffered file over it, which may hold the first bytes after the headers.
        :raises ConnectionError: the connection ended before the answer did.
        """
        patience = sock.gettimeout()
        sock.settimeout(0)
        stamped(sock)
        try:
            block = source.read1(BLOCK)
            if block:
                stream["times"].append(clock())
                stream["blocks"].append(block)
                stream["stamps"].append(())
            if not block or not ended(stream["blocks"]):
                done = threading.Lock()
                done.acquire()
                number = sock.fileno()
                self.entries[number] = (sock.recvmsg, stream["times"], stream["blocks"], stream["stamps"], done)
                self.epoll.register(number, select.EPOLLIN)
                done.acquire()
        finally:
            sock.settimeout(patience)
        if not (stream["blocks"] and ended(stream["blocks"])):
            raise ConnectionError("the connection was closed before the end of the answer")
        stream["closed"] = stream["closed"] or "end"

    def _loop(self):
        poll, entries, now, last = self.epoll.poll, self.entries, clock, LAST[-4:]
        while True:
            for number, _event in poll():
                entry = entries.get(number)
                if entry is None:
                    if number == self.stop_read:
                        return
                    continue
                receive, times, blocks, stamps, done = entry
                try:
                    block, control, _flags, _from = receive(BLOCK, SPACE)
                except BlockingIOError:
                    continue
                except OSError:
                    block = b""
                if block:
                    times.append(now())
                    blocks.append(block)
                    stamps.append(control)
                    if block[-4:] != last and len(block) >= 7:
                        continue
                    if not ended(blocks):
                        continue
                del entries[number]
                try:
                    self.epoll.unregister(number)
                except OSError:
                    pass  # closed under us by a time-out: the kernel has forgotten it already
                done.release()
