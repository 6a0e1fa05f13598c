"""Synthetic prompts of a wanted number of tokens, different for each request, and the bodies that carry them."""

from __future__ import annotations

import random
import string

# Frequent words: one token each in practically every vocabulary, text that a router of experts has seen before.
WORDS = (
    "the of and to in is was for that it with as on be at by this had not are but from or have an they which one "
    "you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over "
    "such our man me even most made after also did many off before must well back through years much where your "
    "way down should because long each just state those people too world"
).split()
# Single letters are one token each everywhere; so many random ones in front make a prompt's prefix its own.
PREFIX = 8
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/generate"}


def prompt(words, seed, name):
    """Return a text of ``words`` words; equal ``seed`` and ``name`` give the equal text, others share no prefix.

    :param words: number of words, at least 1.
    :param seed: seed of the run.
    :param name: name of the request within the run.
    """
    rng = random.Random(f"{seed}/{name}")
    head = [rng.choice(string.ascii_letters) for _ in range(min(words, PREFIX))]
    return " ".join(head + rng.choices(WORDS, k=words - len(head)))


def body(api, model, text, tokens, temperature, ignore_eos):
    """Return the request body (dict) that asks for ``tokens`` output tokens as a stream.

    :param api: a key of :data:`PATHS`.
    """
    if api == "generate":
        params = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": ignore_eos}
        return {"text": text, "sampling_params": params, "stream": True}
    out = {
        "model": model,
        "max_tokens": tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": ignore_eos,
    }
    if api == "chat":
        out["messages"] = [{"role": "user", "content": text}]
    else:
        out["prompt"] = text
    return out


def fit(short, long, wanted):
    """Return the number of words that gives ``wanted`` prompt tokens.

    :param short: ``(words, tokens)`` as the server counted a short prompt.
    :param long: the same for a longer one.
    Falls back to one word a token when the server told nothing or its counts make no line.
    """
    if short[1] is None or long[1] is None or long[1] <= short[1]:
        return max(1, wanted)
    slope = (long[1] - short[1]) / (long[0] - short[0])
    return max(1, round((wanted - short[1]) / slope) + short[0])
