"""Sizes follow from the model's configuration and the launch's flags."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_nccl_plan import PlanError, bus_bandwidth, make_plan

KIMI = {"text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}, "torch_dtype": "bfloat16"}


def sizes(plan, collective):
    """Return ``[(phase, tokens, bytes)]`` of one collective."""
    return [(s["phase"], s["tokens"], s["bytes"]) for s in plan["steps"] if s["collective"] == collective]


def test_kimi():
    """The figures of Kimi-K2.5: 14,336 bytes for a token, 122 all-reduces in a step."""
    plan = make_plan(KIMI, {}, 8)
    assert sizes(plan, "all_reduce") == [
        ("decode", 1, 14336), ("verify", 4, 57344), ("decode", 32, 458752), ("prefill", 512, 7340032),
        ("prefill", 4096, 58720256),
    ]  # fmt: skip
    assert sizes(plan, "all_gather") == [
        ("decode", 1, 327680), ("verify", 4, 1310720), ("decode", 32, 10485760),
    ]  # fmt: skip
    assert plan["counts"]["decode"] == {"all_reduce": 122, "all_gather": 1}
    assert all(step["modes"] == ["eager", "graph"] for step in plan["steps"])


def test_flags():
    """Draft tokens, chunk and data type of the launch; values from -e are text."""
    args = {"speculative-num-draft-tokens": "8", "chunked-prefill-size": "256", "dtype": "float32"}
    plan = make_plan(KIMI, args, 2, batches=[2])
    assert sizes(plan, "all_reduce") == [
        ("decode", 2, 2 * 7168 * 4), ("verify", 8, 8 * 7168 * 4), ("prefill", 256, 256 * 7168 * 4),
    ]  # fmt: skip
    assert make_plan(KIMI, {"chunked-prefill-size": -1}, 2)["steps"][-1]["tokens"] == 4096


def test_attention_data_parallelism_adds_collectives():
    """With attention split by requests, reduce-scatter and all-gather carry hidden states."""
    plan = make_plan(KIMI, {"enable-dp-attention": True}, 8)
    assert ("prefill", 4096, 4096 * 7168 * 2) in sizes(plan, "reduce_scatter")
    assert ("prefill", 4096, 4096 * 7168 * 2) in sizes(plan, "all_gather")


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [({"hidden_size": 8}, {}, "num_hidden_layers, vocab_size"), (KIMI, {"dtype": "int8"}, "int8")],
)
def test_unusable(config, args, words):
    """What cannot be planned names the key or the type."""
    with pytest.raises(PlanError, match=words):
        make_plan(config, args, 2)


def test_bus_bandwidth():
    """As nccl-tests has it: 58.7 MB in 232 microseconds on two GPUs is 253 GB/s."""
    assert bus_bandwidth("all_reduce", 58720256, 2, 232) == pytest.approx(253.1, abs=0.1)
    assert bus_bandwidth("all_gather", 8000, 8, 7) == pytest.approx(1.0)
