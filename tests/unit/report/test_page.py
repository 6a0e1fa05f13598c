"""The page is one file that needs nothing else, survives hostile text, and says what it leaves out."""

from __future__ import annotations

import copy
import csv
import html.parser
import importlib.util
import io
import json
import re

import past
import pytest

pytest.importorskip("matplotlib", reason="only the controller has matplotlib")
pytest.importorskip("scipy", reason="only the controller has scipy")
import sglang_report_data as data
import sglang_report_page as page
import sglang_report_plan as plan

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&\"'$x^2$ {{ 7 * 7 }}"


class Reader(html.parser.HTMLParser):
    """Collects the elements of a page; :raises AssertionError: a tag is not closed where it must be."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.ids, self.links = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def items(repository):
    return plan.parse((repository / "docs/plan.example.yml").read_text(), "plan.example.yml")


@pytest.fixture(scope="module")
def files(history, items, repository):
    return page.files(data.build({"gpu01": history}, items, ["gpu02"]), repository / "plugins/data")


def test_page_needs_nothing_else(files):
    reader = Reader(files["report.html"])
    assert all(link.startswith("#") for link in reader.links)
    assert len(reader.ids) == len(set(reader.ids))
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert not re.search(r"@import|url\((?!#)", files["report.html"])
    policy = next(attrs["content"] for tag, attrs in reader.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "'unsafe-eval'" not in policy


def test_every_plot_has_a_name_and_a_table(files):
    reader = Reader(files["report.html"])
    plots = [attrs for tag, attrs in reader.tags if tag == "svg"]
    assert len(plots) == 4 + 1 + 6 + 1 and all(attrs["aria-labelledby"] in reader.ids for attrs in plots)
    assert sum(tag == "table" for tag, _attrs in reader.tags) >= len(plots)


def test_page_tells_what_it_must(files):
    text = files["report.html"]
    for words in (
        "gpu02 was not read",
        "from the ledger",
        "Tree for every collective",
        "interaction",
        "rank",
        "96 runs",
    ):
        assert words in text, words
    assert "NCCL_MAX_NCHANNELS" in text and "Shown are 40 of 72 decisions" in text


def test_json_and_csv_hold_everything(files):
    report = json.loads(files["report.json"])
    assert len(report["runs"]) == 96 and len(report["decisions"]) == 72 and report["schema"] == 1
    rows = list(csv.DictReader(io.StringIO(files["runs.csv"])))
    assert len(rows) == 96 and float(rows[0]["decode_tok_s_p50"]) > 70 and rows[0]["host"] == "gpu01"


def test_prefill_has_its_column_where_it_ranks(history, repository, files):
    more = copy.deepcopy(history)
    for event in more["events"]:
        if event["event"] == "run" and event["workload"]["concurrency"] == 1:
            event["workload"].update(kind="prefill", output_tokens=1)
            event["metrics"].update(prefill_tok_s_p50=4321.0, decode_tok_s_p50=None)
    made = page.files(data.build({"gpu01": more}), repository / "plugins/data")
    assert made["report.html"].count(">prefill tok/s</th>") == 1 and "4,321" in made["report.html"]
    assert ">prefill tok/s</th>" not in files["report.html"]
    rows = list(csv.DictReader(io.StringIO(made["runs.csv"])))
    assert {row["prefill_tok_s_p50"] for row in rows} == {"4321.0", ""}


def test_page_says_by_which_spread_and_how_many_runs(history, repository):
    more = copy.deepcopy(history)
    for event in [item for item in history["events"] if item["event"] == "run" and item["variant"] == "fusion"]:
        more["events"].append({**event, "flags": ["client_bottleneck"]})
    both = {"gpu01": more, "gpu02": history}
    text = page.files(data.build(both, spreads={"gpu02": 0.2}), repository / "plugins/data")["report.html"]
    assert text.count("a spread of 0.3% (gpu01) and 20% (gpu02) from start to start") == 2
    assert ">3 of 6</td>" in text and "client_bottleneck (3)" in text
    assert "a spread of 20% from" in page.intervals(data.build({"gpu02": history}, spreads={"gpu02": 0.2}))


@pytest.mark.parametrize("value", ["wide", None, -0.1, "nan", "inf"])
def test_a_spread_that_is_no_share_is_named(repository, value):
    path = repository / "plugins" / "action" / "sglang_report.py"
    spec = importlib.util.spec_from_file_location("sglang_report_action", path)
    action = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(action)
    assert action.spreads_of({"gpu01": "0.2", "gpu02": 0}) == {"gpu01": 0.2, "gpu02": 0.0}
    with pytest.raises(ValueError, match="of gpu01 is no share of 0 or more; set sglang_decision_start_spread"):
        action.spreads_of({"gpu01": value})


def test_hostile_text_stays_text(history, repository):
    bad = copy.deepcopy(history)
    for event in bad["events"]:
        if event["variant"] == "fusion":
            event["variant"] = HOSTILE
        if event["event"] == "rejected":
            event["reason"] = HOSTILE
    for release in bad["releases"].values():
        release["args"]["title"] = HOSTILE
        release["nccl"][HOSTILE] = HOSTILE
    bad["problems"] = [HOSTILE]
    item = {"id": "x", "title": HOSTILE, "why": HOSTILE, "variant": "fewchan"}
    text = page.files(data.build({HOSTILE: bad}, [item], [HOSTILE]), repository / "plugins/data")["report.html"]
    reader = Reader(text)
    assert not [tag for tag, _attrs in reader.tags if tag == "img"]
    assert sum(tag == "script" for tag, _attrs in reader.tags) == 2
    assert "alert(1)</script>" not in text and "49" not in re.findall(r"\$x\^2\$ (\S+)", text)
    block = re.search(r'id="releases">(.*?)</script>', text, re.DOTALL).group(1)
    assert HOSTILE in next(iter(json.loads(block).values())).values()


def test_formulas_stay_text_in_a_spreadsheet(history):
    bad = copy.deepcopy(history)
    bad["events"][1]["variant"] = "=cmd()"
    rows = page.table(data.build({"gpu01": bad}))
    assert "'=cmd()" in rows and ",=cmd()" not in rows


def test_difference_of_two_releases(history):
    releases = data.build({"gpu01": history})["releases"]
    one, two = (page.facts(releases[f"gpu01: {past.release_of(name)}"]) for name in ("baseline", "fewchan_fusion"))
    rows = page.difference(one, two)
    assert ["nccl NCCL_MAX_NCHANNELS", "not set", "2"] in rows
    assert ["patches", "none", "flashinfer_sm120_gate"] in rows and "fingerprint" not in {row[0] for row in rows}
    assert page.difference(one, one) == [["no difference", "", ""]]
    other = dict(one, **{"0 fingerprint": "x"}, **{"7 patches": "y"})
    assert [row[0] for row in page.difference(one, other)] == ["fingerprint", "patches"]


def test_probes_and_comparisons_have_their_tables(history, repository):
    more = copy.deepcopy(history)
    common = {"time": "2026-02-01T00:00:00.000Z", "run": "r", "user": "u", "release": None, "variant": "fewchan"}
    tried = {
        "name": "NCCL_MAX_NCHANNELS=2",
        "outcome": "ok",
        "predicted": {"decode": 4.125, "prefill": None},
        "message": "",
        "note": "NCCL took LL",
    }
    more["events"] += [
        {**common, "event": "probe", "verdict": "passed", "results": [tried], "elapsed": 9.5},
        {**common, "event": "canary", "verdict": "no_room", "room": {"free": 100, "needed": 900}},
        {
            **common,
            "event": "decision",
            "verdict": "worse",
            "outcome": "rollback",
            "against": None,
            "reason": "slow",
            "lines": ["decode_tok_s_p50: -5.1 % (-6.0 to -4.2)"],
        },
    ]
    text = page.files(data.build({"gpu01": more}), repository / "plugins/data")["report.html"]
    for words in (
        "NCCL_MAX_NCHANNELS=2",
        "decode 4.125; prefill –",
        "NCCL took LL",
        "no_room",
        "needed&#34;: 900",
        "elapsed: 9.5",
        "worse: rollback",
        "decode_tok_s_p50: -5.1 %",
    ):
        assert words in text, words
    Reader(text)


def test_empty_report_is_a_page(repository):
    text = page.files(data.build({}, unread=["gpu01"]), repository / "plugins/data")["report.html"]
    Reader(text)
    assert "gpu01 was not read" in text and "No usable run is recorded" in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.0, "0"), (93.351, "93.35"), (12345.6, "12,346"), (0.00123, "0.00123")]
)
def test_numbers(value, text):
    assert page.number(value) == text


def test_same_past_gives_the_same_files(history, items, repository, files):
    assert page.files(data.build({"gpu01": history}, items, ["gpu02"]), repository / "plugins/data") == files
