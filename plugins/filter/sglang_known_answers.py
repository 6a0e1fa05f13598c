"""What the generated tiny model must answer, computed from its recipe and not from a run of it."""

from __future__ import annotations

import pathlib

import ansible.module_utils

MODULE_UTILS = str(pathlib.Path(__file__).resolve().parents[2] / "library" / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.sglang_tiny_model import continuation, vocabulary  # noqa: E402


def tiny_answers(prompts, vocab_size, seed, length=16, min_logprob=None):
    """Return the known answers of the tiny model as ``[{prompt, text, tokens, min_logprob}]``.

    :param prompts: questions that end with a word of the model's vocabulary.
    :param vocab_size: number of tokens of the model.
    :param seed: seed of its weights.
    :param length: tokens of each answer.
    :param min_logprob: least log-probability of each token, in nats; None asks for none.
    """
    ids = {word: number for number, word in enumerate(vocabulary(int(vocab_size)))}
    known = []
    for prompt in prompts:
        words = continuation(prompt, int(length), int(vocab_size), int(seed))
        known.append(
            {
                "prompt": prompt,
                "text": " ".join(words),
                "tokens": [ids[word] for word in words],
                "min_logprob": min_logprob,
            }
        )
    return known


class FilterModule:
    """The filters by name."""

    def filters(self):
        """Return the table that Ansible reads."""
        return {"sglang_tiny_answers": tiny_answers}
