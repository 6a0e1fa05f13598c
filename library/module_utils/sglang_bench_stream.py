"""From the bytes of a streamed answer and their arrival times to one record of a request.

Reading and understanding are apart: while tokens arrive the client only keeps ``(time, bytes)``; these functions run
afterwards.
"""

from __future__ import annotations

import itertools
import json
import re

from ansible.module_utils.sglang_bench_resolve import arrival

CHANNELS = ("content", "reasoning_content", "reasoning", "tool_calls")

# Kinds of outcome; every request ends as exactly one of them.
OK = "ok"
FAILURES = ("refused", "unauthorized", "http_error", "stream_error", "truncated", "empty", "timed_out", "not_sent")


def events(times, blocks):
    """Yield ``(time, payload, whole)`` for each ``data:`` line of a stream; the last one may lack its end.

    :param times: arrival time of each block, seconds.
    :param blocks: the bytes read, cut anywhere.
    An event has the time of the block that completed its line.
    """
    rest = b""
    for when, block in zip(times, blocks):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip(), True
    if rest.startswith(b"data:"):
        yield times[-1], rest[5:].strip(), False


def dechunk(times, blocks):
    """Take HTTP's chunked framing off.

    :returns: ``(times, payloads, complete)``; a payload has the time at which its last byte was there; the answer
        is complete when its empty last chunk was read.
    """
    data = b"".join(blocks)
    ends = list(itertools.accumulate(map(len, blocks)))
    when, payloads = [], []
    at = index = 0
    while True:
        line = data.find(b"\r\n", at)
        try:
            size = int(data[at:line].partition(b";")[0], 16) if line >= 0 else -1
        except ValueError:
            size = -1
        if size <= 0:
            return when, payloads, size == 0
        stop = line + 2 + size
        while index < len(ends) - 1 and ends[index] < stop:
            index += 1
        when.append(times[index])
        payloads.append(data[line + 2 : stop])
        at = stop + 2


def _openai(event):
    """Return ``(text, channel, finished)`` of an OpenAI chat or completions event."""
    choices = event.get("choices")
    if not choices:
        return "", None, False
    choice = choices[0]
    finished = choice.get("finish_reason") is not None
    if "delta" not in choice:
        text = choice.get("text") or ""
        return text, "content" if text else None, finished
    delta = choice["delta"] or {}
    for channel in CHANNELS:
        value = delta.get(channel)
        if value:
            return value if isinstance(value, str) else json.dumps(value), channel, finished
    return "", None, finished


# The inside of a JSON string that stands for itself: no escape, no end of the string, nothing that JSON forbids there.
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]+')
_MARK = "MARK"


def shape_of(payload, text, channel):
    """Return ``(head, tail)`` around the text of an event: what differs from the next event of the same stream.

    A later event with the same head and tail and plain text between them is the same JSON but for that text, so it need
    not be parsed. That is proved by putting a mark there and parsing it. None when the text is not at one place.
    """
    quoted = b'"' + text.encode() + b'"'
    if not _PLAIN.fullmatch(quoted, 1, len(quoted) - 1) or payload.count(quoted) != 1:
        return None
    at = payload.index(quoted) + 1
    head, tail = payload[:at], payload[at + len(quoted) - 2 :]
    marked = json.loads(head + _MARK.encode() + tail)
    return (head, tail) if _openai(marked) == (_MARK, channel, False) else None


def plain_text(payload, shape):
    """Return the text of an event that has this shape, or None when it must be parsed."""
    head, tail = shape
    if not (payload.startswith(head) and payload.endswith(tail)):
        return None
    inner = _PLAIN.fullmatch(payload, len(head), len(payload) - len(tail))
    try:
        return inner.group().decode() if inner else None
    except UnicodeDecodeError:
        return None


def _error_text(event):
    error = event.get("error")
    if error is None and event.get("object") == "error":
        error = event.get("message")
    if error is None:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def fold(api, times, blocks):
    """Read a whole stream.

    :param api: ``chat``, ``completions`` or ``generate``.
    :returns: dict with ``arrivals`` (seconds, one for each event that carried output), ``counts`` (completion tokens
        so far at each
        arrival where the server tells, else empty), ``text``, ``channels``, ``finished``, ``done`` (``[DONE]``
        seen), ``cut`` (the stream ended inside an event), ``usage``
        (``{completion_tokens, prompt_tokens, cached_tokens}``; a value that the server did not tell is None),
        ``error``.
    """
    arrivals, counts, texts, channels = [], [], [], []
    usage = {"completion_tokens": None, "prompt_tokens": None, "cached_tokens": None}
    finished = done = cut = False
    error = shape = None
    for when, payload, whole in events(times, blocks):
        if shape:
            text = plain_text(payload, shape)
            if text is not None:
                arrivals.append(when)
                texts.append(text)
                continue
        if payload == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            if whole:
                error = "an event is not JSON: " + payload[:120].decode("utf-8", "replace")
            cut = not whole
            continue
        if not isinstance(event, dict):
            error = "an event is no JSON object: " + payload[:120].decode("utf-8", "replace")
            continue
        error = _error_text(event) or error
        if api == "generate":
            meta = event.get("meta_info") or {}
            told = meta
            text, now = event.get("text") or "", meta.get("completion_tokens")
            finished = finished or meta.get("finish_reason") is not None
            grown = now > (counts[-1] if counts else 0) if now is not None else text != (texts[-1] if texts else "")
            if grown:
                arrivals.append(when)
                if now is not None:
                    counts.append(now)
                channels.append("content")
            texts = [text] if text else texts
        else:
            told = event.get("usage") or {}
            text, channel, ended = _openai(event)
            finished = finished or ended
            if channel:
                arrivals.append(when)
                texts.append(text)
                if channel not in channels:
                    channels.append(channel)
                if told.get("completion_tokens"):
                    counts.append(told["completion_tokens"])
                elif not (ended or told or error):
                    shape = shape_of(payload, text, channel)
        for key in ("completion_tokens", "prompt_tokens"):
            usage[key] = told.get(key, usage[key])
        cached = told.get("cached_tokens", (told.get("prompt_tokens_details") or {}).get("cached_tokens"))
        usage["cached_tokens"] = cached if cached is not None else usage["cached_tokens"]
    return {
        "arrivals": arrivals,
        "counts": counts if len(counts) == len(arrivals) else [],
        "text": "".join(texts),
        "channels": sorted(set(channels)),
        "finished": finished,
        "done": done,
        "cut": cut,
        "usage": usage,
        "error": error,
    }


def shares(tokens, arrivals, counts):
    """Return how many tokens each event stands for.

    :param tokens: tokens of the whole answer.
    :param arrivals: one time for each event.
    :param counts: tokens so far at each event, or empty when the server does not tell.
    Without counts the first event stands for one token and the rest is shared evenly, so shares may be fractions.
    """
    if counts:
        return [now - before for before, now in zip([0] + counts[:-1], counts)]
    if len(arrivals) < 2:
        return [tokens] * len(arrivals)
    return [1] + [(tokens - 1) / (len(arrivals) - 1)] * (len(arrivals) - 1)


def judge(stream, folded, asked, ignore_eos):
    """Return ``(kind, detail)`` of a stream that the server began with status 200.

    :param stream: dict with ``closed`` (``end`` | ``broken`` | ``timed_out``) and ``detail``.
    :param asked: tokens asked for.
    """
    if folded["error"]:
        return "stream_error", folded["error"]
    if stream["closed"] == "timed_out":
        return "timed_out", stream["detail"]
    if stream["closed"] == "broken":
        return "truncated", stream["detail"]
    if folded["cut"]:
        return "truncated", "the stream ended inside an event"
    if not (folded["done"] or folded["finished"]):
        return "truncated", "the stream ended without [DONE] and without a finish reason"
    if not folded["arrivals"]:
        return "empty", "the stream carried no token in any channel"
    told = folded["usage"]["completion_tokens"]
    if ignore_eos and told is not None and told < asked:
        return "truncated", f"{told} of {asked} tokens came although the end-of-sequence token was to be ignored"
    return OK, ""


def record(stream, api, asked, ignore_eos, offset=0.0):
    """Return the record of one request, times in seconds from the clock of ``stream``.

    :param stream: what the client kept: dict ``{index, sent, end, status, closed, detail, times, blocks, stamps,
        framed}``; ``kind`` is set when no stream began. :param offset: time of day less that clock, seconds.
    """
    out = {
        "index": stream["index"],
        "kind": stream["kind"],
        "detail": stream["detail"],
        "status": stream["status"],
        "sent": stream["sent"],
        "due": stream.get("due"),
        "end": stream["end"],
        "tokens": None,
        "input_tokens": None,
        "cached_tokens": None,
        "usage_missing": None,
        "arrivals": [],
        "shares": [],
        "reads": {},
        "unresolved": None,
        "channels": [],
        "text": "",
    }
    if stream["kind"] is not None:
        return out
    times, blocks = stream["times"], stream["blocks"]
    stamps = ((when, arrival(control, offset)) for when, control in zip(times, stream.get("stamps") or []))
    out["reads"] = {when: there for when, there in stamps if there is not None}
    if stream.get("framed"):
        times, blocks, complete = dechunk(times, blocks)
        if not complete and stream["closed"] == "end":
            stream = {**stream, "closed": "broken", "detail": "the answer ended inside its chunked framing"}
    folded = fold(api, times, blocks)
    out["kind"], out["detail"] = judge(stream, folded, asked, ignore_eos)
    told = folded["usage"]["completion_tokens"]
    out["usage_missing"] = told is None
    out["tokens"] = len(folded["arrivals"]) if told is None else told
    out["input_tokens"] = folded["usage"]["prompt_tokens"]
    out["cached_tokens"] = folded["usage"]["cached_tokens"]
    out["arrivals"] = folded["arrivals"]
    out["shares"] = shares(out["tokens"], folded["arrivals"], folded["counts"])
    out["channels"] = folded["channels"]
    out["text"] = folded["text"]
    return out
