"""A mistake in a plan is refused with its place; states come from the plan, else from the ledger, and that is said."""

from __future__ import annotations

import pytest
import yaml

pytest.importorskip("scipy", reason="only the controller has scipy")
import sglang_report_data as data
import sglang_report_plan as plan

ITEM = {"id": "a", "title": "A"}


def parsed(*items, **more):
    return plan.parse(yaml.safe_dump({"schema": 1, "interventions": list(items), **more}), "plan.yml")


def test_the_example_is_a_plan(repository):
    items = plan.parse((repository / "docs/plan.example.yml").read_text(), "plan.example.yml")
    catalogue = yaml.safe_load((repository / "group_vars/all/variants.yml").read_text())["sglang_variants"]
    assert len(items) > 10 and {item["variant"] for item in items} <= set(catalogue)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([{**ITEM, "state": "plannned"}], ["intervention 1 (a)", "'plannned'", "did you mean planned"]),
        ([{**ITEM, "varient": "x"}], ["unknown key 'varient'", "did you mean variant"]),
        ([ITEM, ITEM], ["intervention 2 (a)", "that of intervention 1"]),
        ([{"id": "a"}], ["title is missing"]),
        ([{"id": ["x"], "title": "X"}], ["intervention 1 (['x'])", "id must be text"]),
        ([{**ITEM, "runs": "r1"}], ["runs must be a list of run ids", "'r1'"]),
        ([{**ITEM, "runs": [1]}], ["runs must be a list of run ids as text"]),
        ([{**ITEM, "title": 82}], ["title must be text, not 82"]),
        (["a"], ["intervention 1 is no mapping"]),
    ],
)
def test_mistakes_are_named(items, words):
    with pytest.raises(plan.PlanError) as caught:
        parsed(*items)
    assert all(word in str(caught.value) for word in ["plan.yml", *words])


@pytest.mark.parametrize("text", ["a: [", "schema: 2\ninterventions: []\n", "- a\n", "schema: 1\n"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(plan.PlanError, match=r"plan\.yml"):
        plan.parse(text, "plan.yml")


def test_unknown_key_beside_the_list_is_named():
    with pytest.raises(plan.PlanError, match="did you mean interventions"):
        parsed(ITEM, intervention=[])


def linked(history, *items):
    return data.build({"gpu01": history}, parsed(*items))["plan"]


def test_states_come_from_the_ledger_where_the_plan_has_none(history):
    done, failed, planned, said = linked(
        history,
        {**ITEM, "variant": "fusion"},
        {"id": "b", "title": "B", "variant": "eagle3"},
        {"id": "c", "title": "C", "variant": "tree"},
        {"id": "d", "title": "D", "variant": "fusion", "state": "running"},
    )
    assert (done["state"], done["state_from"], done["rank"]) == ("done", "ledger", 1)
    assert len(done["linked"]) == 12 and done["linked"][0]["time"] > done["linked"][-1]["time"]
    assert failed["state"] == "failed" and "rejected by benchmark" in failed["notes"][0]
    assert (planned["state"], planned["linked"]) == ("planned", [])
    assert (said["state"], said["state_from"]) == ("running", "plan") and "the ledger says done" in said["notes"]


def test_early_rejections_are_refusals_and_unfinished_work_runs():
    past = {"events": [], "releases": {}, "samples": {}, "current": None, "root": "/r", "problems": [], "raw": {}}

    def state(**event):
        events = [{"time": "2026-01-01T00:00:00.000Z", "run": "r", "release": None, "variant": "v", **event}]
        return linked({**past, "events": events}, {**ITEM, "variant": "v"})[0]["state"]

    assert state(event="rejected", rung="canary", reason="") == "refused"
    assert state(event="rejected", rung="verify", reason="") == "failed"
    assert state(event="refused", rung="precheck", reason="") == "refused"
    assert state(event="activated") == "running"
    assert state(event="compared") == "planned"


def test_links_by_run_and_release_that_lead_nowhere_are_told(history):
    run = history["events"][1]["run"]
    by_run, by_release = linked(
        history,
        {**ITEM, "runs": [run, "gone"]},
        {"id": "b", "title": "B", "release": "20260101T000000Z-x-0123456789ab"},
    )
    assert [row["run"] for row in by_run["linked"]] == [run] and "run gone is in no ledger" in by_run["notes"]
    assert "is in no ledger" in by_release["notes"][0] and by_release["state"] == "planned"
