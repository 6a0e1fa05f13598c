"""The reader of a host's past takes everything that is whole and names what is not."""

from __future__ import annotations

import gzip
import json

import past
import pytest
from ansible.module_utils import sglang_history_read as reader
from ansible.module_utils import sglang_release_archive


def test_everything_comes_through(run_module, root):
    result = run_module("sglang_history", {"root": str(root)})
    assert result["counts"] == {"events": 168, "runs": 96, "releases": 8, "raw_read": 64, "raw_missing": 32}
    assert result["problems"] == [] and not result["changed"]
    history = reader.unpack(result["history"])
    assert history["current"] == past.release_of("fewchan_fusion")
    assert history["releases"][history["current"]]["nccl"]["NCCL_MAX_NCHANNELS"] == "2"
    sample = next(iter(history["samples"].values()))
    assert len(sample["ttft_ms"]) == len(sample["tpot_ms"]) == 64
    assert run_module("sglang_history", {"root": str(root)}, check=True)["counts"] == result["counts"]


def test_a_root_that_is_not_there_has_no_past(run_module, tmp_path):
    result = run_module("sglang_history", {"root": str(tmp_path / "none")})
    assert result["counts"] == {"events": 0, "runs": 0, "releases": 0, "raw_read": 0, "raw_missing": 0}


@pytest.mark.parametrize(("args", "word"), [({"root": "here"}, "root"), ({"root": "/x", "raw": -1}, "raw")])
def test_bad_input_is_named(run_module, args, word):
    result = run_module("sglang_history", args)
    assert result["failed"] and word in result["msg"]


def test_torn_lines_bad_results_and_foreign_paths_are_problems(run_module, tmp_path):
    past.write_root(tmp_path, 16, raw=16)
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    runs = [event for event in events if event["event"] == "run"]
    with open(runs[3]["result"], "w") as handle:
        handle.write("{ torn")
    outside = tmp_path.parent / "outside.json"
    outside.write_text(json.dumps(past.raw_result(runs[0], past.random.Random(1))))
    with open(tmp_path / "ledger.jsonl", "a") as handle:
        handle.write(json.dumps({**runs[0], "result": str(outside)}) + "\n" + '{"event": "ru')
    result = run_module("sglang_history", {"root": str(tmp_path)})
    assert result["counts"]["raw_read"] == 15 and result["counts"]["runs"] == 17
    text = "\n".join(result["problems"])
    assert "is torn and is skipped" in text and runs[3]["result"] in text and f"not below {tmp_path}" in text
    assert len(result["problems"]) == 3


def test_results_of_a_deleted_release_are_read_from_the_archive(run_module, tmp_path):
    past.write_root(tmp_path, 16, raw=16)
    sglang_release_archive.remove_release_directory(str(tmp_path), past.release_of("baseline"))
    result = run_module("sglang_history", {"root": str(tmp_path)})
    assert result["counts"]["raw_read"] == 16 and result["counts"]["raw_missing"] == 0
    release = reader.unpack(result["history"])["releases"][past.release_of("baseline")]
    assert release["deleted"] and release["args"]["tp-size"] == 8


def test_raw_records_beside_the_result_are_read_for_the_headline_level(tmp_path):
    records = [
        {"level": level, "kind": kind, "tokens": 3, "event_ms": [10.0 * (level + 1), 20.0, 40.0]}
        for level in (0, 1)
        for kind in ("ok", "refused")
    ]
    with gzip.open(tmp_path / "bench-1.requests.jsonl.gz", "wt") as handle:
        handle.write("".join(json.dumps(item) + "\n" for item in records))
    (tmp_path / "bench-1.json").write_text(
        json.dumps({"schema": 2, "headline": 1, "records": {"file": "bench-1.requests.jsonl.gz"}})
    )
    assert reader._figures(str(tmp_path / "bench-1.json")) == {"ttft_ms": [20.0], "tpot_ms": [10.0]}


@pytest.mark.parametrize(("median", "expected"), [(10.0, [15.0]), (None, [])])
def test_times_that_the_client_could_not_tell_are_not_shown(tmp_path, median, expected):
    records = [{"level": 0, "kind": "ok", "tokens": 3, "event_ms": [10.0, 20.0, 40.0]} for _ in range(2)]
    records[1]["unresolved"] = "the last token was read 100.0 ms late, 30.0 ms after the first one"
    document = {"schema": 2, "metrics": {"tpot_ms_p50": median}, "requests": records}
    (tmp_path / "bench-1.json").write_text(json.dumps(document))
    assert reader._figures(str(tmp_path / "bench-1.json")) == {"ttft_ms": [10.0, 10.0], "tpot_ms": expected}


def test_the_newest_of_each_variant_come_first(tmp_path):
    past.write_root(tmp_path, 32, raw=32)
    history = reader.read(str(tmp_path), 8)
    runs = {event["result"]: event for event in history["events"] if event["event"] == "run"}
    assert len({runs[name]["variant"] for name in history["samples"]}) == 8
    assert history["raw"] == {"named": 32, "read": 8, "missing": 0}


@pytest.mark.parametrize("text", ["", "no base64!", "aGVsbG8=", reader.pack({"schema": 99})])
def test_what_is_no_history_is_refused(text):
    with pytest.raises(ValueError, match="no history"):
        reader.unpack(text)
