"""Can the time between the tokens of an answer be told, or did the client read them too late for that?

The kernel says when the last byte of each read had come (``SO_TIMESTAMPNS``). Where it does not, what counts is how
late the client's own ticks were at that time. A server that sends everything in one event is told apart: nothing is
late there, and there is nothing to measure either.
"""

from __future__ import annotations

import bisect
import socket
import struct
import time

TICK = 0.01  # seconds between two looks at the client's own lateness
STAMP = 35  # SO_TIMESTAMPNS of Linux, which Python does not name
SPACE = 64  # bytes of control data that hold a stamp
ERROR = 0.2  # largest share by which the time from the first to the last token may be wrong
MOST = 0.25  # share of unresolved answers above which the others are no fair sample of all


def stamped(sock):
    """Let the kernel stamp what a socket receives; where it cannot, reads have no stamp."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, STAMP, 1)
    except OSError:
        pass


def clock_offset():
    """Return the time of day less ``time.perf_counter``, seconds; the quickest of some looks, as one may be held up."""
    looks = []
    for _ in range(8):
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        looks.append((after - before, now - before))
    return min(looks)[1]


def arrival(control, offset):
    """Return when the last byte of a read had come, or None where the kernel did not say.

    :param control: control data of ``recvmsg``. :param offset: time of day less the client's clock, seconds.
    """
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == STAMP and len(data) == 16:
            seconds, nanoseconds = struct.unpack("qq", data)
            return seconds - offset + nanoseconds / 1e9 if seconds else None
    return None


def lateness(ticks):
    """Return ``late(when)``: the most seconds by which a tick about that time was late.

    :param ticks: ``(due, seen)`` in the order of time.
    """
    seen = [now for _due, now in ticks]

    def late(when):
        worst = 0.0
        for due, now in ticks[bisect.bisect_left(seen, when - TICK) :]:
            if due > when + TICK:
                break
            worst = max(worst, now - due)
        return worst

    return late


def one_event(item):
    """Return whether the server sent all tokens of an answer in one event."""
    return len(item["arrivals"]) == 1 and item["tokens"] > 1


def why_not(item, late):
    """Return why the time from first to last token of a record cannot be told, or None where it can.

    :param item: record with ``arrivals`` (time at which each event was read), ``shares``, ``tokens`` and ``reads``
        (time of a read to the arrival of its last byte). :param late: function of a time, see :func:`lateness`.
    Tokens that had come before the first one was read are missing at the front of that time; a last token that was
    read late lengthens it.
    """
    arrivals, further = item["arrivals"], (item["tokens"] or 0) - 1
    if further < 1 or not arrivals:
        return None
    if one_event(item):
        return f"the server sent {further + 1} tokens in one event"
    first, last, reads = arrivals[0], arrivals[-1], item["reads"]
    allowed = late(first)
    behind = 0.0
    for when, share in zip(arrivals[1:], item["shares"][1:]):
        there = reads.get(when)
        if when == first or (when - first <= allowed if there is None else there <= first):
            behind += share
    if behind > ERROR * further:
        return f"{behind:.0f} of {further + 1} tokens had come before the first one was read"
    there = reads.get(last)
    lag = late(last) if there is None else last - there
    if lag > ERROR * (last - first):
        return f"the last token was read {1e3 * lag:.1f} ms late, {1e3 * (last - first):.1f} ms after the first one"
    return None


def share(done):
    """Return the share of unresolved answers among those whose tokens came in several events; None without any."""
    streamed = [item for item in done if item["tokens"] > 1 and not one_event(item)]
    return sum(bool(item.get("unresolved")) for item in streamed) / len(streamed) if streamed else None


def resolved(done):
    """Return the completed records whose tokens can be told apart in time; none where too many others cannot."""
    if (share(done) or 0.0) > MOST:
        return []
    return [item for item in done if item["arrivals"][-1] > item["arrivals"][0] and not item.get("unresolved")]
