"""What a measurement means for speculative decoding: when does a verify step pay?

One step of speculation costs the time of verifying (and drafting) and yields ``accept_length`` tokens, the one that the
target model adds itself included. Without speculation one token takes ``1000 / baseline_tok_s`` milliseconds.
"""

from __future__ import annotations

# All-reduces of one forward pass of Kimi-K2.5 under tensor parallelism: two for each of 61 layers.
ALL_REDUCES = 122


def verify_ms(allreduce_us, compute_ms, all_reduces=ALL_REDUCES):
    """Return the time of a verify step in ms: all-reduces of ``allreduce_us`` each, and ``compute_ms`` for the rest."""
    return all_reduces * allreduce_us / 1000.0 + compute_ms


def expected_tok_s(accept_length, step_ms):
    """Return tokens a second of one stream with ``accept_length`` tokens a step of ``step_ms``."""
    return 1000.0 * accept_length / step_ms


def step_ms_of(accept_length, tok_s):
    """Return the time of a step in ms, drafting included, that a measured speed and accept length amount to."""
    return 1000.0 * accept_length / tok_s


def break_even(step_ms, baseline_tok_s):
    """Return the accept length at which speculation is as fast as plain decoding."""
    return step_ms * baseline_tok_s / 1000.0


def allreduce_budget_us(accept_length, compute_ms, baseline_tok_s, all_reduces=ALL_REDUCES):
    """Return how long one all-reduce may take, in us, for speculation to break even.

    Negative where the compute alone is too slow.
    """
    return 1000.0 * (1000.0 * accept_length / baseline_tok_s - compute_ms) / all_reduces


def assess(accept_length, tok_s, baseline_tok_s, allreduce_us=None, all_reduces=ALL_REDUCES):
    """Return what measured figures say, or None where one of the first three is missing.

    :param accept_length: mean tokens a step. :param tok_s: speed with speculation, one stream.
    :param baseline_tok_s: speed without.
    :param allreduce_us: measured latency of an all-reduce of the verify step's size.
    :returns: ``{accept_length, tok_s, baseline_tok_s, step_ms, break_even_accept_length, expected_tok_s, pays,
        allreduce_ms, compute_ms, allreduce_budget_us}``; the last three are None without a latency. ``expected_tok_s``
        maps accept lengths of 1 to 4 to the speed that a step of this length gives.
    """
    if not accept_length or not tok_s or not baseline_tok_s:
        return None
    step = step_ms_of(accept_length, tok_s)
    need = break_even(step, baseline_tok_s)
    wire = None if not allreduce_us else all_reduces * allreduce_us / 1000.0
    rest = None if wire is None else step - wire
    return {
        "accept_length": accept_length,
        "tok_s": tok_s,
        "baseline_tok_s": baseline_tok_s,
        "step_ms": round(step, 4),
        "break_even_accept_length": round(need, 4),
        "expected_tok_s": {str(length): round(expected_tok_s(length, step), 2) for length in (1, 2, 3, 4)},
        "pays": accept_length > need,
        "allreduce_ms": wire,
        "compute_ms": rest,
        "allreduce_budget_us": None
        if rest is None
        else round(allreduce_budget_us(accept_length, rest, baseline_tok_s, all_reduces), 2),
    }
