"""A client that was kept from reading publishes no time between tokens, and says so."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import pytest
from ansible.module_utils import sglang_bench_resolve as resolve
from ansible.module_utils import sglang_bench_stats as stats

TESTS = pathlib.Path(__file__).resolve().parents[2]
SERVER = TESTS / "scripted_server" / "scripted_server.py"
PACE = 5.0  # milliseconds a token of the server below
TOKENS = 40


def answer(arrivals, reads=None, tokens=None, shares=None):
    """Return the record of a completed request that was sent at 0."""
    tokens = tokens or len(arrivals)
    shares = shares or [1] + [(tokens - 1) / max(len(arrivals) - 1, 1)] * (len(arrivals) - 1)
    item = {"kind": "ok", "sent": 0.0, "end": arrivals[-1], "arrivals": arrivals, "shares": shares, "tokens": tokens}
    item.update(reads=reads or {}, text="", input_tokens=9, cached_tokens=None, usage_missing=False, due=None)
    return item


def reason(item, ticks=()):
    """Return why an answer is unresolved."""
    return resolve.why_not(item, resolve.lateness(list(ticks)))


STEADY = [0.1 + 0.005 * number for number in range(20)]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        # Each read at once; a burst of four at the front is a fifth of 19, and no more.
        (answer(STEADY, {when: when - 1e-4 for when in STEADY}), None),
        (answer([0.1] * 4 + STEADY[4:]), None),
        # All in one read; nearly all in the first read; two reads one after the other with all there before.
        (answer([0.3] * 20), "19 of 20 tokens had come before"),
        (answer([0.3] * 15 + [0.3002] * 5), "14 of 20 tokens had come before"),
        (answer([0.3] + [0.3002] * 19, {0.3002: 0.29}), "19 of 20 tokens had come before"),
        # The first was read in time, the rest when it was all over: 90 ms were really 60.
        (answer([0.1] + [0.19] * 19, {0.19: 0.16}), "the last token was read 30.0 ms late"),
        # The same with the last byte only just there.
        (answer([0.1] + [0.19] * 19, {0.19: 0.1899}), None),
        # Several tokens an event: what counts is tokens, not events.
        (answer([0.1, 0.1, 0.2], tokens=41, shares=[1, 20, 20]), "20 of 41 tokens had come before"),
        (answer([0.1, 0.2, 0.3], tokens=41), None),
        (answer([0.1], tokens=41), "the server sent 41 tokens in one event"),
        (answer([0.1]), None),
    ],
)
def test_the_kernels_times_tell_what_was_read_late(item, why):
    found = reason(item)
    assert (found is None) if why is None else found.startswith(why)


def test_without_the_kernels_times_the_clients_own_lateness_counts():
    """A tick that was due at 0.1 and came at 0.3: what was read then and just after may have waited as long."""
    stopped = [(0.09, 0.0901), (0.1, 0.3), (0.31, 0.3101)]
    late = answer([0.3005] + [0.301] * 19)
    assert reason(late) is None
    assert reason(late, stopped) == "19 of 20 tokens had come before the first one was read"
    assert "the last token was read 200.0 ms late" in reason(answer([0.01] + [0.3005] * 19), stopped)
    assert reason(answer([0.5 + when for when in STEADY]), stopped) is None


def test_stamps_are_read_and_their_absence_is_no_error():
    packed = struct.pack("qq", 100, 500_000_000)
    assert resolve.arrival([(socket.SOL_SOCKET, resolve.STAMP, packed)], 40.0) == 60.5
    assert resolve.arrival([(socket.SOL_SOCKET, resolve.STAMP, struct.pack("qq", 0, 0))], 40.0) is None
    assert resolve.arrival([(socket.SOL_SOCKET, 1, packed)], 0.0) is resolve.arrival((), 0.0) is None
    assert abs(resolve.clock_offset() - (time.time() - time.perf_counter())) < 0.1


def test_unresolved_answers_are_counted_and_enter_no_figure():
    """One of eight: the others tell. One of two: the rest is no fair sample, and there is no figure."""
    good, bad = answer(STEADY), answer([0.3] * 15 + [0.3002] * 5)
    for item in (good, bad):
        item["unresolved"] = reason(item)
    numbers = stats.metrics([good] * 7 + [bad])
    assert numbers["tpot_ms_mean"] == numbers["tpot_ms_p99"] == numbers["itl_ms_mean"] == pytest.approx(5.0)
    assert numbers["decode_tok_s_mean"] == pytest.approx(200.0)
    assert numbers["ttft_ms_p50"] == 100 and numbers["output_tokens_total"] == 160
    numbers = stats.metrics([good, bad])
    spread = [name for name in stats.METRICS if name.startswith(("tpot", "itl", "decode"))]
    assert len(spread) == 18 and {numbers[name] for name in spread} == {None}
    assert numbers["ttft_ms_mean"] == 200 and numbers["output_tok_s"] > 0
    assert resolve.share([good, bad]) == 0.5
    cost = {"cpu_s": 0.0, "wall_s": 1.0, "lags": [0.0], "read_lags": [0.001]}
    assert stats.client(cost, 40, 0.5)["bottleneck"] and not stats.client(cost, 40, 0.2)["bottleneck"]
    assert stats.client({**cost, "read_lags": [0.02]}, 40)["bottleneck"]


def test_an_answer_in_one_event_is_the_servers_doing():
    alone = answer([0.1], tokens=16)
    alone["unresolved"] = reason(alone)
    tally = stats.counts([alone, answer(STEADY)])
    assert tally["one_event"] == 1 and tally["unresolved"] == 0
    assert resolve.share([alone]) is None and stats.metrics([alone])["tpot_ms_p50"] is None


@pytest.fixture
def apart(tmp_path):
    """Return the URL of a scripted server in a process of its own."""
    place = tmp_path / "server.json"
    script = json.dumps({"ttft_ms": 20, "rate": 1000 / PACE})
    subprocess.run([sys.executable, str(SERVER), "--background", str(place), "--script", script], check=True)
    yield json.loads(place.read_text())["url"]
    subprocess.run([sys.executable, str(SERVER), "--stop", str(place)], check=True)


def told(url):
    """Return the server's own record of the measured requests; probes have one token."""
    with urllib.request.urlopen(url + "/truth", timeout=10) as reply:
        return json.load(reply)["requests"]


def stopped(url, before):
    """Measure with a client that is stopped for 0.3 s again and again; returns its document and the server's record."""
    wanted = {"url": url, "model": "scripted", "workload": "decode", "requests": 6, "output_tokens": TOKENS}
    wanted.update(input_tokens=16, warmup=0, raw=True)
    program = f"import sys; sys.path.insert(0, {str(TESTS / 'support')!r}); import measure; {before}"
    command = [sys.executable, "-c", f"{program}; measure.main(sys.argv[1])", json.dumps([wanted])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        until = time.monotonic() + 30
        while client.poll() is None and not told(url):
            assert time.monotonic() < until, "the client sent nothing"
        # Longer than an answer takes, which begins now before the stop and now in it.
        for pause in itertools.cycle((0.01, 0.04)):
            if client.poll() is not None:
                break
            time.sleep(pause)
            os.kill(client.pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(client.pid, signal.SIGCONT)
        document = json.loads(client.communicate()[0])
    return document, [item for item in told(url) if item["tokens"] == TOKENS]


# A kernel that stamps nothing.
DEAF = """
import socket

class Deaf(socket.socket):
    def setsockopt(self, level, name, *value):
        if name == 35:
            raise OSError("not here")
        return super().setsockopt(level, name, *value)

socket.socket = Deaf
"""


@pytest.mark.parametrize("stamps", [True, False])
def test_a_client_that_is_stopped_publishes_no_absurd_figure(apart, stamps):
    """What it publishes is the server's, within the error that it allows itself."""
    document, truth = stopped(apart, "pass" if stamps else f"exec({DEAF!r})")
    raw = document["raw_records"]
    assert len(raw) == len(truth) == 6 and document["failure"] is None
    seen = [(item["event_ms"][-1] - item["event_ms"][0], item.get("unresolved")) for item in raw]
    real = [1e3 * (item["last"] - item["first"]) for item in truth]
    ratios = [(span / true, why) for (span, why), true in zip(seen, real)]
    for ratio, why in ratios:
        assert why or 0.7 < ratio < 1.35, ratios
    unresolved = sum(bool(why) for _ratio, why in ratios)
    assert document["counts"]["unresolved"] == unresolved > 0, ratios
    assert "unresolved" in document["flags"]
    if unresolved > 1:
        assert document["metrics"]["tpot_ms_p50"] is document["metrics"]["decode_tok_s_mean"] is None
        assert "client_bottleneck" in document["flags"]
        (finding,) = [item for item in document["findings"] if item["rule"] == "unresolved"]
        assert finding["evidence"].startswith(f"{unresolved} of 6 answers, first: ")
    assert (document["client"]["read_lag_ms_max"] is not None) == stamps
