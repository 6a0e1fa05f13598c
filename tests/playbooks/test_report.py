"""report.yml: reads hosts, changes none, writes on the controller what is new, and says which host it lacks."""

from __future__ import annotations

import json
import pathlib
import sys

import yaml
from deployment import extra, play, tree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import past  # noqa: E402

FILES = ["report.html", "report.json", "runs.csv"]


def test_report_of_a_host(tmp_path):
    """A dry run writes nothing, the first run three files, a second one has nothing new; the host stays as it is."""
    root, target = tmp_path / "root", tmp_path / "out" / "report"
    past.write_root(root, 32, raw=8)
    before = tree(root)
    plan = tmp_path / "plan.yml"
    plan.write_text(yaml.safe_dump({"schema": 1, "interventions": [{"id": "x", "title": "X", "variant": "fusion"}]}))
    variables = extra(sglang_root=str(root), sglang_report_dir=str(target), sglang_report_plan=str(plan))
    dry = play("report.yml", "--check", *variables).succeeded()
    assert "would write" in dry.said and not target.exists()
    variables += extra(sglang_decision_start_spread="0.2")
    first = play("report.yml", *variables).succeeded()
    assert first.recap["changed"] == 1 and "32 runs, 8 variants" in first.said
    assert sorted(item.name for item in target.iterdir()) == FILES
    report = json.loads((target / "report.json").read_text())
    assert [item["state"] for item in report["plan"]] == ["done"] and report["hosts"][0]["runs"] == 32
    assert report["hosts"][0]["start_spread"] == 0.2
    kept = tree(target)
    again = play("report.yml", *variables).succeeded()
    assert again.recap["changed"] == 0 and "nothing new in" in again.said
    assert tree(target) == kept and tree(root) == before


def test_report_without_a_host_that_does_not_answer(tmp_path):
    """The other one is reported, and the page says what it lacks."""
    past.write_root(tmp_path / "root", 8, raw=0)
    inventory = tmp_path / "hosts.yml"
    hosts = {
        "alive": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
        "away": {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_common_args": "-o ConnectTimeout=2"},
    }
    inventory.write_text(yaml.safe_dump({"sglang": {"hosts": hosts}}))
    (tmp_path / "group_vars").symlink_to(pathlib.Path(__file__).resolve().parents[2] / "group_vars")
    variables = extra(sglang_root=str(tmp_path / "root"), sglang_report_dir=str(tmp_path / "out"))
    outcome = play("report.yml", "-i", str(inventory), *variables)
    assert outcome.rc == 4, outcome.out
    text = (tmp_path / "out" / "report.html").read_text()
    assert "away was not read" in text and "alive" in text


def test_bad_plan_is_refused_and_nothing_is_written(tmp_path):
    """The message names file, place and the nearest word."""
    plan = tmp_path / "plan.yml"
    plan.write_text(yaml.safe_dump({"schema": 1, "interventions": [{"id": "x", "title": "X", "state": "dun"}]}))
    variables = extra(
        sglang_root=str(tmp_path / "none"), sglang_report_dir=str(tmp_path / "out"), sglang_report_plan=str(plan)
    )
    play("report.yml", *variables).refused(str(plan), "intervention 1 (x)", "state 'dun' is unknown", "done")
    assert not (tmp_path / "out").exists()
