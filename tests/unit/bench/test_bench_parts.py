"""The pure functions: reading streams, shares of tokens, statistics."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from ansible.module_utils import sglang_bench_prompts as prompts
from ansible.module_utils import sglang_bench_server as server
from ansible.module_utils import sglang_bench_stats as stats
from ansible.module_utils import sglang_bench_stream as stream


def chat(**delta):
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


def test_a_stream_reads_the_same_however_it_is_cut():
    whole = (
        chat(role="assistant", content="")
        + b"".join(chat(content=f" w\u00e9{n}") for n in range(20))
        + b"data: [DONE]\n\n"
    )
    rng = random.Random(1)
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(whole)), 12))
        blocks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
        folded = stream.fold("chat", list(range(len(blocks))), blocks)
        assert len(folded["arrivals"]) == 20
        assert folded["done"]
        assert folded["text"].split() == [f"w\u00e9{n}" for n in range(20)]


def test_chunked_framing_comes_off_however_it_is_cut():
    parts = [b"one\r\n0\r\n", b"two", b"three" * 50]
    whole = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    for cut in range(1, len(whole) - 1):
        times, payloads, complete = stream.dechunk([1.0, 2.0], [whole[:cut], whole[cut:]])
        assert payloads == parts
        assert complete
        assert times[-1] == (2.0 if cut < len(whole) - 7 else 1.0)
    assert stream.dechunk([1.0], [whole[:-6]])[2] is False
    assert stream.dechunk([], []) == ([], [], False)


def test_an_event_has_the_time_at_which_its_line_was_complete():
    one = chat(content="x")
    assert stream.fold("chat", [1.0, 2.0], [one[:20], one[20:]])["arrivals"] == [2.0]


def test_thinking_with_null_content_counts_and_the_budget_may_end_there():
    blocks = [chat(content=None, reasoning_content="a"), chat(content=None, reasoning="b")]
    blocks.append(b'data: {"choices":[{"delta":{"content":null},"finish_reason":"length"}]}\n\n')
    blocks.append(b'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens":3}}\n\ndata: [DONE]\n\n')
    kept = {"index": 0, "kind": None, "detail": "", "status": 200, "sent": 0.0, "end": 5.0, "closed": "end"}
    record = stream.record({**kept, "times": [1.0, 2.0, 3.0, 4.0], "blocks": blocks}, "chat", 2, True)
    assert record["kind"] == "ok"
    assert record["tokens"] == 2
    assert record["arrivals"] == [1.0, 2.0]
    assert record["channels"] == ["reasoning", "reasoning_content"]


@pytest.mark.parametrize(
    "payload", [b'{"error":{"message":"boom"}}', b'{"object":"error","message":"boom","code":400}', b'{"error":"boom"}']
)
def test_an_error_object_in_a_good_stream_is_seen(payload):
    folded = stream.fold("chat", [1.0], [b"data: " + payload + b"\n\ndata: [DONE]\n\n"])
    assert folded["error"] == "boom"


@pytest.mark.parametrize("payload", [b"7", b"[1]", b"{", b"null"])
def test_an_event_that_is_no_object_is_an_error(payload):
    assert stream.fold("chat", [1.0], [b"data: " + payload + b"\n\n"])["error"].startswith("an event is ")


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize(
    ("closed", "kind"), [("timed_out", "timed_out"), ("broken", "truncated"), ("end", "truncated")]
)
def test_an_answer_that_ends_inside_an_event_is_no_error_of_the_server(framed, closed, kind):
    whole, cut = chat(content="a"), chat(content="b")[:-9]
    blocks = [b"%x\r\n%s\r\n" % (len(whole), whole), b"%x\r\n%s" % (len(cut) + 9, cut)] if framed else [whole, cut]
    kept = {"index": 0, "kind": None, "detail": "why", "status": 200, "sent": 0.0, "end": 5.0, "closed": closed}
    record = stream.record({**kept, "times": [1.0, 2.0], "blocks": blocks, "framed": framed}, "chat", 2, True)
    assert record["kind"] == kind and "JSON" not in record["detail"]
    assert record["arrivals"] == [1.0]


def test_what_follows_the_last_whole_event_is_seen_where_the_answer_seems_finished():
    last = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    kept = {"index": 0, "kind": None, "detail": "", "status": 200, "sent": 0.0, "end": 5.0, "closed": "end"}
    kept.update(times=[1.0, 2.0])
    cut = stream.record({**kept, "blocks": [chat(content="a") + last, b'data: {"usa']}, "chat", 1, True)
    assert (cut["kind"], cut["detail"]) == ("truncated", "the stream ended inside an event")
    done = stream.record({**kept, "blocks": [chat(content="a") + last, b"data: [DONE]"]}, "chat", 1, True)
    assert done["kind"] == "ok"


def test_the_word_error_in_an_answer_is_none():
    folded = stream.fold("chat", [1.0], [chat(content='{"error": "x"}')])
    assert folded["error"] is None


def test_shares_follow_the_server_or_are_even():
    assert stream.shares(9, [1, 2, 3], [1, 5, 9]) == [1, 4, 4]
    assert stream.shares(9, [1, 2, 3], []) == [1, 4, 4]
    assert stream.shares(5, [1], []) == [5]
    assert stream.shares(0, [], []) == []


def test_gaps_are_per_token():
    item = {"arrivals": [0.0, 4.0, 8.0], "shares": [1, 4, 4]}
    assert stats.gaps(item) == [1.0] * 8
    fractional = {"arrivals": [0.0, 1.0, 2.0, 3.0, 4.0], "shares": [1, 2.5, 2.5, 2.5, 2.5]}
    assert len(stats.gaps(fractional)) == 10
    assert sum(stats.gaps(fractional)) == pytest.approx(4.0)


def test_percentiles_agree_with_the_standard_library():
    rng = random.Random(3)
    values = [rng.expovariate(1.0) for _ in range(101)]
    spread = stats.spread(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for point in (50, 90, 95, 99):
        assert spread[f"p{point}"] == pytest.approx(cuts[point - 1], abs=1e-4)
    assert spread["std"] == pytest.approx(statistics.pstdev(values), abs=1e-4)
    assert set(stats.spread([]).values()) == {None}


def test_single_token_answers_have_no_rate_between_tokens():
    item = {"kind": "ok", "sent": 0.0, "end": 1.0, "arrivals": [0.5], "shares": [1], "tokens": 1, "text": "x"}
    numbers = stats.metrics([{**item, "input_tokens": 1, "cached_tokens": None}])
    assert numbers["ttft_ms_mean"] == 500
    assert numbers["tpot_ms_mean"] is None
    assert numbers["output_tok_s"] == 2.0


def test_answers_too_short_to_repeat_themselves_hide_no_others():
    item = {"kind": "ok", "sent": 0.0, "end": 1.0, "arrivals": [0.5], "shares": [1], "tokens": 1}
    item.update(input_tokens=1, cached_tokens=None)
    answers = ["same words " * 20] + [" ".join(f"word{n}" for n in range(20))] + ["short"] * 18

    def share(texts):
        return stats.metrics([{**item, "text": text} for text in texts])["degenerate_share"]

    assert share(answers) == 0.5
    assert share(["short"]) == 0.0


def test_a_busy_client_says_so():
    assert stats.client({"cpu_s": 0.95, "wall_s": 1.0, "lags": [0.0]})["bottleneck"]
    assert stats.client({"cpu_s": 0.1, "wall_s": 1.0, "lags": [0.02] * 10})["bottleneck"]
    assert not stats.client({"cpu_s": 0.1, "wall_s": 1.0, "lags": [0.001] * 10})["bottleneck"]


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 5), (1.3, 0), (1.0, 40)])
def test_the_prompt_length_is_fitted(slope, offset):
    def count(words):
        return round(words * slope + offset)

    words = prompts.fit((12, count(12)), (500, count(500)), 500)
    assert count(words) == pytest.approx(500, abs=1)


def test_without_counts_a_word_is_a_token():
    assert prompts.fit((12, None), (44, None), 70) == 70
    assert prompts.fit((12, 100), (44, 132), 10) == 1


def test_metrics_text_is_summed_over_labels():
    text = '# TYPE x gauge\nsglang:gen_throughput{tp_rank="0"} 2.5\nsglang:gen_throughput{tp_rank="1"} 1e1\nother 3\n'
    assert server.parse_metrics(text) == {"gen_throughput": 12.5}


@pytest.mark.parametrize(
    ("name", "told"),
    [("token_usage", 0.75), ("cache_hit_rate", 0.75), ("spec_accept_length", 0.75), ("num_queue_reqs", 1.5)],
)
def test_shares_and_lengths_of_several_ranks_have_a_mean(name, told):
    text = f'sglang:{name}{{dp_rank="0"}} 0.5\nsglang:{name}{{dp_rank="1"}} 1.0\n'
    assert server.parse_metrics(text) == {name: told}
