"""Where prompts come from: made up to a number of tokens, or read from a file; each its own in every run."""

from __future__ import annotations

import hashlib
import json
import os
import random

from ansible.module_utils import sglang_bench_prompts as prompts
from ansible.module_utils.sglang_bench_workload import InputError

ROUNDS = 30  # of fitting a text to a number of tokens; two are usual
FILL = 16  # missing tokens that are filled with single letters, which are one token everywhere


def load_tokenizer(path):
    """Return ``count(text)`` of the tokenizer in a model directory, None where there is none that can be read.

    Only ``tokenizer.json`` is read, by the package ``tokenizers`` of the engine: nothing of the model is run.
    """
    name = os.path.join(path, "tokenizer.json") if path else ""
    if not os.path.isfile(name):
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(name)
    except Exception:
        # The package is missing, or it raises its own bare Exception for a file of another version.
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _turn(item):
    """Return the first question of one entry, None where it has none."""
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        return None
    for key in ("prompt", "question", "text"):
        if isinstance(item.get(key), str):
            return item[key]
    for turn in item.get("conversations") or item.get("conversation") or item.get("messages") or []:
        if turn.get("from", turn.get("role")) in ("human", "user"):
            value = turn.get("value", turn.get("content"))
            return value if isinstance(value, str) else None
    return None


def read_prompts(path):
    """Return ``(source, [text])`` of a file of prompts.

    JSON with conversations is ``sharegpt``: of each the first question is taken. Else ``file``: JSON strings or objects
    with ``prompt``, as a list or a line each, or plain text with one prompt a line.

    :raises InputError: the file holds no prompt or cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts_file must be readable UTF-8 text: {path}: {error}.") from None
    try:
        items = json.loads(text)
        items = items if isinstance(items, list) else [items]
    except ValueError:
        items = []
        for line in filter(str.strip, text.splitlines()):
            try:
                items.append(json.loads(line) if line.lstrip()[0] in '{"' else line)
            except ValueError:
                items.append(line)
    shared = any(isinstance(item, dict) and (item.get("conversations") or item.get("conversation")) for item in items)
    found = [turn for turn in map(_turn, items) if turn and turn.strip()]
    if not found:
        raise InputError(
            f"prompts_file holds no prompt: {path}. Rule: ShareGPT JSON, JSON strings or objects with prompt, or one "
            "prompt a line."
        )
    return "sharegpt" if shared else "file", found


class Prompts:
    """Texts for the requests of a run.

    :param seed: seed of the run; equal seeds give equal texts.
    :param path: file of prompts, or None for synthetic ones.
    :param unique: put random letters in front of each text of a file, so that none is in the server's cache.
    :param count: ``count(text)`` of the model's tokenizer, or None.
    """

    def __init__(self, seed, path=None, unique=True, count=None):
        self.seed, self.unique, self.count = seed, unique, count
        self.source, self.texts, self.sha256 = "synthetic", [], None
        self.words, self.extra, self.how = None, None, None
        if path:
            self.source, self.texts = read_prompts(path)
            self.sha256 = hashlib.sha256("\0".join(self.texts).encode()).hexdigest()
            random.Random(f"{seed}/order").shuffle(self.texts)
            self.how = "as in the file"

    def fit(self, wanted, short, long):
        """Learn how long a synthetic text must be.

        :param wanted: prompt tokens as the server counts them, chat template included.
        :param short, long: ``(words, tokens)`` as the server counted two texts of :meth:`probe`; tokens may be None.
        """
        if self.texts:
            return
        self.words = prompts.fit(short, long, wanted)
        if None in (short[1], long[1]):
            self.how = "assumed: one token a word, since the server counted nothing"
            return
        self.how = "calibrated: words fitted to the server's own count of two probes"
        if self.count:
            # What the server adds: chat template, special tokens.
            self.extra = short[1] - self.count(self.probe(short[0]))
            self.how = "tokenizer: each prompt counted, and the server's own count of a probe for what it adds"
        self.wanted = wanted

    def probe(self, words):
        """Return the text of a probe."""
        return prompts.prompt(words, self.seed, f"probe {words}")

    def text(self, name, number):
        """Return the text of a request.

        :param name: name of the request within the run. :param number: place in the file's order.
        """
        if self.texts:
            text = self.texts[number % len(self.texts)]
            return prompts.prompt(prompts.PREFIX, self.seed, name) + "\n" + text if self.unique else text
        text = prompts.prompt(self.words, self.seed, name)
        return text if self.extra is None else self._exact(text.split(), name)

    def _exact(self, words, name):
        """Return a text of exactly the wanted number of tokens, as far as the tokenizer lets one."""
        more = iter(prompts.prompt(2 * len(words) + 64, self.seed, name + " more").split()[prompts.PREFIX :])
        for _ in range(ROUNDS):
            off = self.wanted - self.extra - self.count(" ".join(words))
            if off == 0 or len(words) + off < 1:
                break
            if off < 0:
                del words[off:]  # a word is at least one token, so this may take too much, which the next round adds
            elif off > FILL:
                words += [word for word, _ in zip(more, range(off // 2))]
            else:
                words += ["a"] * off
        return " ".join(words)

    def describe(self):
        """Return ``prompts`` of the result file's workload."""
        return {
            "source": self.source,
            "sha256": self.sha256,
            "count": len(self.texts) or None,
            "unique": self.unique or not self.texts,
            "length": self.how,
            "words": self.words,
        }
