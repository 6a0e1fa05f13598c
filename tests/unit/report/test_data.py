"""The report compares what compares, with the statistics of decisions, and leaves nothing out silently."""

from __future__ import annotations

import copy

import past
import pytest

pytest.importorskip("scipy", reason="only the controller has scipy")
import sglang_attribution
import sglang_report_data as data


@pytest.fixture(scope="module")
def report(history):
    return data.build({"gpu01": history}, unread=["gpu02"])


def group_of(report, load):
    return next(group for group in report["groups"] if group["asked"].startswith(f"concurrency {load},"))


def test_variants_are_ranked_within_their_group(report):
    assert len(report["groups"]) == 4 and sum(group["runs"] for group in report["groups"]) == 96
    single = group_of(report, 1)
    assert single["ranked_by"] == "decode_tok_s_p50" and group_of(report, 16)["ranked_by"] == "output_tok_s"
    names = [item["variant"] for item in single["variants"]]
    assert names[:2] == ["pcie_ipc", "fewchan_fusion"] and names[-2:] == ["eagle3", "ngram"]
    best = single["variants"][0]["metrics"]["decode_tok_s_p50"]
    assert best["low"] < best["center"] < best["high"] and best["runs"] == 3
    change = next(item for item in single["variants"] if item["variant"] == "ngram")["against"]
    assert change["low"] < -0.5 + 0.03 and change["low"] < change["effect"] < change["high"] < -0.4


def test_interval_is_that_of_decisions():
    values = [80.0, 82.0, 81.0, 83.0]
    center, low, high = data.interval(values, [1, 1, 1, 2])
    found = sglang_attribution.contrast(
        [[data.math.log(value) for value in values]], [[1, 1, 1, 2]], (1.0,), data.BETWEEN, 0.95
    )
    assert (center - 1, low - 1, high - 1) == pytest.approx(tuple(found[key] for key in ("effect", "low", "high")))
    assert 79 < low < 80 < center < 83 < high < 84
    assert data.interval([80.0], [1]) == (80.0, None, None) and data.interval([], []) == (None, None, None)


def test_attribution_of_fewchan_and_fusion(report):
    effects = group_of(report, 1)["attribution"]
    assert effects["fewchan alone"]["effect"] == pytest.approx(84.5 / 82 - 1, abs=0.03)
    assert effects["fusion alone"]["effect"] == pytest.approx(88 / 82 - 1, abs=0.03)
    assert abs(effects["interaction"]["effect"]) < 0.04


def test_missing_cell_is_named(history):
    without = copy.deepcopy(history)
    without["events"] = [item for item in without["events"] if item["variant"] != "fusion"]
    group = group_of(data.build({"gpu01": without}), 1)
    assert group["attribution"] == {} and any(text.startswith("fusion: 0") for text in group["attribution_missing"])


def test_curves_cover_the_concurrencies(report):
    (curve,) = report["curves"]
    assert [point["concurrency"] for point in curve["variants"][0]["points"]] == [1, 4, 16, 64]
    assert curve["variants"][0]["variant"] == "pcie_ipc" and curve["variants"][0]["points"][0]["runs"] == 3


def test_levels_of_a_sweep_are_points(history):
    one = copy.deepcopy(next(item for item in history["events"] if item["event"] == "run"))
    one["workload"]["kind"] = "sweep"
    one["levels"] = [
        {"level": 0, "concurrency": 2, "output_tok_s": 100.0, "failure": None},
        {"level": 1, "concurrency": 8, "output_tok_s": 300.0, "failure": None},
        {"level": 2, "concurrency": 32, "output_tok_s": None, "failure": "all refused"},
    ]
    (curve,) = data.curves(data.rows("h", {"events": [one]}))
    points = [(point["concurrency"], point["center"], point["low"]) for point in curve["variants"][0]["points"]]
    assert points == [(2, 100.0, None), (8, 300.0, None)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"prompts": {"source": "sharegpt", "sha256": "ab" * 32, "unique": True}},
            "sharegpt prompts abababababab, 256 out",
        ),
        ({"prompts": {"source": "file", "sha256": "ab" * 32, "unique": False}}, "abababababab, in the cache"),
        ({"ignore_eos": False}, "ended by the model"),
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"flush_cache": True}, "cache flushed"),
    ],
)
def test_another_load_is_another_curve(history, other, words):
    runs = [item for item in history["events"] if item["event"] == "run" and item["variant"] == "baseline"]
    changed = copy.deepcopy(runs)
    for item in changed:
        item["workload"].update(other)
    curves = data.curves(data.rows("h", {"events": runs + changed}))
    assert [[point["runs"] for point in curve["variants"][0]["points"]] for curve in curves] == [[3] * 4] * 2
    (shape,) = {curve["shape"] for curve in curves} - {"512 tokens in, 256 out, chat"}
    assert words in shape


def test_a_restart_is_a_start(history):
    """Runs before and after it do not share the luck of one start."""
    run = next(item for item in history["events"] if item["event"] == "run")
    events = [{**run, "event": name} for name in ("start", "run", "restart", "run", "stop", "run")]
    rows = data.rows("h", {"events": events})
    assert [row["start"] for row in rows] == [row["whole"]["start"] for row in rows] == [1, 2, 2]


def test_spread_is_that_by_which_the_host_decides(history):
    narrow, wide = (
        group_of(data.build({"gpu01": history, "gpu02": history}, spreads={"gpu02": spread}), 1)
        for spread in (0.0, 0.2)
    )
    assert narrow["host"] == wide["host"] == "gpu01" and narrow == wide
    report = data.build({"gpu01": history, "gpu02": history}, spreads={"gpu02": 0.2})
    one, two = (
        next(
            group for group in report["groups"] if group["host"] == host and group["asked"].startswith("concurrency 1,")
        )
        for host in ("gpu01", "gpu02")
    )
    figures = [
        [group["variants"][0]["metrics"]["decode_tok_s_p50"], group["variants"][-1]["against"],
         group["attribution"]["fusion alone"]]
        for group in (one, two)
    ]  # fmt: skip
    assert all(after["high"] - after["low"] > 0.2 + before["high"] - before["low"] for before, after in zip(*figures))
    curves = [curve["variants"][0]["points"][0] for curve in report["curves"]]
    assert curves[1]["high"] - curves[1]["low"] > 10 + curves[0]["high"] - curves[0]["low"]
    assert {host["name"]: host["start_spread"] for host in report["hosts"]} == {"gpu01": data.BETWEEN, "gpu02": 0.2}


def test_runs_whose_client_was_the_limit_are_left_out_as_in_decisions(history):
    """All count where too few others remain."""
    more = copy.deepcopy(history)
    runs = [item for item in more["events"] if item["event"] == "run" and item["workload"]["concurrency"] == 1]
    for item in [run for run in runs if run["variant"] in ("baseline", "ngram")]:
        slow = copy.deepcopy(item)
        slow["metrics"]["decode_tok_s_p50"] /= 2
        slow["flags"] = ["client_bottleneck"]
        more["events"].append(slow)
    for item in [run for run in runs if run["variant"] == "eagle3"][:1]:
        item["flags"] = ["client_bottleneck"]
    before, after = (group_of(data.build({"gpu01": past}), 1) for past in (history, more))
    old, new = ({item["variant"]: item for item in group["variants"]} for group in (before, after))
    for name in ("baseline", "ngram"):
        assert new[name]["metrics"]["decode_tok_s_p50"] == old[name]["metrics"]["decode_tok_s_p50"]
        assert (new[name]["used"], new[name]["runs"], new[name]["flags"]) == (3, 6, {"client_bottleneck": 3})
    assert new["ngram"]["against"] == old["ngram"]["against"]
    assert new["eagle3"]["used"] == new["eagle3"]["runs"] == 3


def test_prefill_is_ranked_by_its_own_speed(history):
    runs = [copy.deepcopy(item) for item in history["events"] if item["event"] == "run"]
    runs = [item for item in runs if item["workload"]["concurrency"] == 1]
    for item in runs:
        item["workload"].update(kind="prefill", output_tokens=1)
        item["metrics"].update(prefill_tok_s_p50=5000 if item["variant"] == "ngram" else 4000, decode_tok_s_p50=None)
    (group,) = data.build({"gpu01": {**history, "events": runs}})["groups"]
    assert group["ranked_by"] == "prefill_tok_s_p50" and group["variants"][0]["variant"] == "ngram"
    assert group["variants"][0]["against"]["effect"] == pytest.approx(0.25)


def test_different_fingerprints_and_unusable_runs_do_not_mix(history):
    changed = copy.deepcopy(history)
    runs = [item for item in changed["events"] if item["event"] == "run"]
    runs[0]["fingerprint"] = dict(past.FINGERPRINT, driver="590.1", digest="other0000000")
    runs[8]["valid"] = False
    runs[16]["metrics"] = dict.fromkeys(runs[16]["metrics"])
    del runs[24]["fingerprint"], runs[24]["workload_digest"]
    report = data.build({"gpu01": changed})
    assert sum(group["runs"] for group in report["groups"]) == 94 and len(report["groups"]) == 6
    assert sum(not row["usable"] for row in report["runs"]) == 2
    assert "no fingerprint recorded" in {group["fingerprint_text"] for group in report["groups"]}


def test_distributions_say_how_much_they_saw(report):
    entry = group_of(report, 1)["distributions"]["ttft_ms"][0]
    assert (entry["variant"], entry["runs_read"], entry["runs"], entry["requests"]) == ("baseline", 2, 3, 128)
    assert entry["p5"] < entry["p50"] < entry["p99"]


def test_time_line_has_the_decisions(report):
    kinds = {item["event"] for item in report["decisions"]}
    assert kinds == {"activated", "promoted", "rejected"} and len(report["decisions"]) == 72
    assert report["as_of"] == max(row["time"] for row in report["runs"])
    rejected = next(item for item in report["decisions"] if item["event"] == "rejected")
    assert rejected["text"] == "by benchmark: 1 finding(s) refuse this release: decode 57 tok/s"


def test_other_events_are_told_in_words():
    event = {
        "variant": None,
        "release": past.release_of("fusion"),
        "run": "r",
        "user": "u",
        "time": "2026-01-01T00:00:00.000Z",
    }
    against = {"release": "x", "variant": "baseline"}
    events = [
        {**event, "event": "decision", "verdict": "worse", "outcome": "rollback", "against": against, "reason": "slow"},
        {**event, "event": "rollback", "previous": "p"},
        {**event, "event": "worker_died", "dead": [{"title": "sglang::schedul", "pid": 7}]},
        {**event, "event": "probe", "verdict": "refused", "latency_us": {"8192": 40.5}},
    ]
    hosts = {"h": {"events": events}}
    assert [item["text"] for item in data.decisions(hosts)] == [
        "worse: rollback, against baseline. slow", "from p", "sglang::schedul (pid 7)",
    ]  # fmt: skip
    assert {item["variant"] for item in data.decisions(hosts)} == {"fusion"}
    (trial,) = data.trials(hosts)
    assert trial["verdict"] == "refused" and trial["told"]["latency_us"] == {"8192": 40.5}


def test_empty_report_can_be_built():
    report = data.build({}, unread=["gpu01"])
    assert report["groups"] == report["runs"] == [] and report["as_of"] == ""
