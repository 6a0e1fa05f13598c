"""sglang_release: one deploy after another, in check mode and for real."""

from __future__ import annotations

import json
import os
import pathlib
import re
import stat

import pytest
from ansible.module_utils import sglang_ledger, sglang_release_compare, sglang_watch_progress
from ansible.module_utils.sglang_release_archive import result_path

from .conftest import ENGINE, make_run


def events(host):
    return [item["event"] for item in sglang_ledger.read(host.root)[0]]


def test_first_plan_names_what_is_missing_and_takes_the_lock(host):
    plan = host.compare(engine={"present": False, "problem": "no such file"})
    assert not plan["in_sync"] and not plan["release"]["built"]
    assert plan["current"] is None and plan["previous"] is None
    assert re.fullmatch(r"\d{8}T\d{6}Z-baseline-[0-9a-f]{12}", plan["release"]["id"])
    assert plan["release"]["path"] == str(host.path(plan["release"]["id"]))
    assert "the engine is not there: no such file" in plan["reasons"]
    assert host.ok("reported")["info"]["lock"]["run"]["id"] == "run-1"


def test_second_deploy_of_the_same_inputs_is_in_sync_and_writes_no_manifest(host):
    release = host.deploy()
    manifest = host.path(release) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    result = host.ok("compared", variant="baseline", inputs={"args": {"variant": "baseline"}})
    assert result["changed"] is False
    assert result["plan"]["in_sync"] and result["plan"]["reasons"] == []
    assert result["plan"]["release"]["id"] == release
    assert manifest.stat().st_mtime_ns == before


def test_a_server_that_hangs_is_in_sync_and_is_not_said_to_serve(host, monkeypatch):
    release = host.deploy()
    monkeypatch.setattr(sglang_watch_progress, "alarm", lambda path: "no token for 45 s")
    result = host.ok("compared", variant="baseline", inputs={"args": {"variant": "baseline"}})
    assert result["plan"]["in_sync"] and result["plan"]["alarm"] == "no token for 45 s"
    assert result["msg"] == f"{release} does not serve now: no token for 45 s"
    assert result["msg"] in result["plan"]["problems"]


@pytest.mark.parametrize(
    "change",
    [{"inputs": {"args": {"tp-size": 4}}}, {"engine": {"fingerprint": "e2"}}, {"model": {"fingerprint": "m2"}}],
)
def test_whatever_determines_behaviour_changes_the_digest(host, change):
    release = host.deploy()
    plan = host.compare(**change)
    assert not plan["in_sync"]
    assert plan["release"]["digest"] != release[-12:]
    assert plan["previous"]["id"] == release


def test_digest_does_not_depend_on_the_order_of_keys(host):
    first = host.compare(inputs={"a": 1, "b": {"c": 2, "d": 3}})
    second = host.compare(inputs={"b": {"d": 3, "c": 2}, "a": 1})
    assert first["release"]["digest"] == second["release"]["digest"]


def test_live_processes_that_differ_are_drift(host, monkeypatch):
    release = host.deploy()
    monkeypatch.setattr(sglang_release_compare.sglang_proc, "drift", lambda launch, root: ["no server process runs"])
    plan = host.compare()
    assert plan["drift"] == plan["reasons"] == ["no server process runs"]
    assert not plan["in_sync"] and plan["release"]["built"] and plan["release"]["id"] == release


def test_missing_launch_json_is_named(host, monkeypatch):
    from ansible.module_utils import sglang_release_store

    release = host.deploy()
    (host.path(release) / "launch.json").unlink()
    assert any("launch.json is missing" in reason for reason in host.compare()["reasons"])
    # Drift itself says so too, where the list of files could not.
    monkeypatch.setattr(sglang_release_store, "changed_files", lambda path, manifest: [])
    assert f"launch.json of {release} cannot be read" in host.compare()["drift"][0]


def test_file_edited_in_a_sealed_release_makes_a_new_release(host):
    release = host.deploy()
    (host.path(release) / "site" / "sitecustomize.py").write_text("x = 2\n")
    (host.path(release) / "site" / "torch.py").write_text("")
    plan = host.compare()
    assert not plan["release"]["built"]
    assert "sitecustomize.py was edited" in plan["reasons"][0] and "site/torch.py was added" in plan["reasons"][0]


def test_files_the_service_writes_and_touched_files_are_no_edit(host):
    release = host.deploy()
    path = host.path(release)
    (path / "logs" / "server.log").write_text("x")
    (path / "site" / "__pycache__").mkdir()
    (path / "site" / "__pycache__" / "sitecustomize.cpython-311.pyc").write_bytes(b"x")
    os.utime(path / "site" / "sitecustomize.py")
    assert host.compare()["in_sync"]


def test_switch_and_back(host):
    first, second = host.deploy("baseline"), host.deploy("fewchan")
    assert os.readlink(os.path.join(host.root, "current")) == f"releases/{second}"
    found = host.ok("target")
    assert found["plan"]["release"]["python"] == host.compare()["release"]["python"] == "/opt/engine/bin/python3"
    assert found["release"]["id"] == first and found["plan"]["previous"]["id"] == second
    host.ok("active", release=first)
    host.ok("promoted", release=first)
    host.ok("retired", release=second, reason="slower")
    states = {item["id"]: item["state"] for item in host.ok("reported")["info"]["releases"]}
    assert states == {first: "promoted", second: "retired"}
    refused = host.call("target")
    assert refused["failed"] and second in refused["msg"] and "nothing to roll back to" in refused["msg"]


@pytest.mark.parametrize(("mode", "warns"), [("adopt", True), ("build", False)])
def test_a_target_on_an_adopted_engine_that_changed_is_taken_with_a_warning(host, monkeypatch, mode, warns):
    now = dict(ENGINE, mode=mode)
    monkeypatch.setattr(sglang_release_compare, "describe_engine", lambda declared: dict(now))
    first = host.compare(mode)["release"]["id"]
    host.ok("created", release=first, record={"engine": dict(now)})
    host.fill(first)
    for state in ("built", "active", "promoted"):
        host.ok(state, release=first)
    host.deploy("b")
    text = f"changed since {first} was built"
    assert text not in str(host.ok("target", check=True)["warnings"])
    now["fingerprint"] = "e2"
    found = host.ok("target", check=True)
    assert found["release"]["id"] == first
    assert (f"{text}: a package" in str(found["warnings"])) is warns
    now.update(fingerprint=None, problem="the interpreter is gone")
    assert (f"{text}: the interpreter is gone" in str(host.ok("target", check=True)["warnings"])) is warns


def test_release_in_judgement_after_a_rollback_stays_a_target(host):
    first, second = host.deploy("baseline"), host.deploy("fewchan")
    host.ok("active", release=first)
    third = host.build("fusion")
    host.ok("active", release=third)
    assert host.compare("fusion")["previous"]["id"] == second
    host.ok("retired", release=second)
    assert host.compare("fusion")["previous"]["id"] == first


def test_a_rollback_that_fails_brings_back_what_served_promoted_or_not(host):
    first = host.deploy("baseline")
    experiment = host.build("fewchan")
    host.ok("active", release=experiment)
    previous = host.ok("target", release=first)["plan"]["previous"]
    assert previous["id"] == experiment and previous["promoted"] is None
    assert host.compare("baseline")["previous"] is None, "a deploy goes by what is promoted"
    host.ok("rejected", release=experiment, reason="wrong answers")
    assert host.ok("target", release=first)["plan"]["previous"] is None


def test_failed_release_is_never_the_one_to_restore(host):
    release = host.deploy()
    assert host.compare()["previous"] is None
    host.ok("rejected", release=release, reason="crash at start")
    plan = host.compare()
    assert plan["reasons"] == [f"{release} is rejected, not promoted"] and plan["previous"] is None


def test_target_refusals_name_the_candidates(host):
    first, second = host.deploy("baseline"), host.deploy("fewchan")
    third = host.deploy("fusion")
    host.ok("rejected", release=second, reason="wrong answers")
    assert "wrong answers" in host.call("target", release=second)["msg"]
    assert host.ok("target", release=second, allow_rejected=True)["release"]["id"] == second
    assert "current release already" in host.call("target", release=third)["msg"]
    missing = host.call("target", release="20260101T000000Z-baseline-0123456789ab")["msg"]
    assert "does not exist" in missing and first in missing
    assert "no release id" in host.call("target", release="../../etc")["msg"]
    building = host.compare("both")["release"]["id"]
    host.ok("created", release=building)
    assert "never finished" in host.call("target", release=building)["msg"]


def test_failed_compare_and_target_give_a_fresh_lock_back(host):
    assert host.call("target")["failed"]
    assert host.ok("reported")["info"]["lock"] is None
    assert host.call("compared", variant="a/b")["failed"]
    assert host.ok("reported")["info"]["lock"] is None


def test_unfinished_release_cannot_serve(host):
    release = host.compare()["release"]["id"]
    host.ok("created", release=release)
    refused = host.call("active", release=release)
    assert refused["failed"] and "never finished" in refused["msg"]
    refused = host.call("built", release=release)
    assert "lacks site/sitecustomize.py and launch.json" in refused["msg"]
    assert "does not exist" in host.call("active", release="20260101T000000Z-baseline-0123456789ab")["msg"]


def test_only_the_active_release_is_promoted(host):
    release = host.build()
    assert "built and the current release is None" in host.call("promoted", release=release)["msg"]


def test_a_promotion_outlives_a_start(host):
    """What a comparison has started and left is promoted as before; what was never promoted is not."""
    first, second = host.deploy("baseline"), host.deploy("fewchan")
    third = host.build("manychan")
    for release in (first, third, second):
        host.ok("active", release=release)
    plan = host.compare("baseline")
    assert plan["release"]["state"] == "active" and plan["release"]["promoted"]
    for release in (first, second):
        assert host.ok("promoted", release=release)["release"]["state"] == "promoted"
    assert plan["previous"]["id"] == host.compare("baseline")["previous"]["id"] == second
    assert "its promotion stands" in host.call("promoted", release=third)["msg"]


def test_rejection_of_a_release_that_was_never_created_reaches_the_ledger(host):
    release = host.compare()["release"]["id"]
    result = host.ok("rejected", release=release, reason="patch refused")
    assert result["changed"] is False
    assert sglang_ledger.read(host.root)[0][-1]["reason"] == "patch refused"


def test_a_verdict_carries_its_decision(host):
    """It comes first, once, and only with a verdict on its own release; a refused promotion writes none."""
    release = host.build()
    decision = {"release": release, "variant": "baseline", "verdict": "first", "look": 1, "lines": ["first: {{ x }}"]}
    assert host.call("promoted", release=release, decision=decision)["failed"]
    assert "decision" not in events(host)
    host.ok("active", release=release)
    assert host.ok("promoted", release=release, decision=decision, check=True)["changed"]
    for state, about in (("promoted", "20260101T000000Z-x-0123456789ab"), ("retired", release)):
        refused = host.call(state, release=release, decision=dict(decision, release=about))
        assert f"decision: it is about {about} and came with state={state}" in refused["msg"]
    assert "decision" not in events(host)
    host.ok("promoted", release=release, decision=decision)
    assert events(host)[-2:] == ["decision", "promoted"]
    line = sglang_ledger.read(host.root)[0][-2]
    assert {**line, **decision, "run": "run-1", "user": "operator"} == line
    # As after a promotion that stopped half-way: its decision is not written again.
    host.ok("rejected", release=release, reason="disk full", decision=decision)
    assert events(host)[-3:] == ["decision", "promoted", "rejected"]
    host.ok("rejected", release=release, reason="slow", decision=dict(decision, look=2, verdict="worse"))
    assert events(host)[-2:] == ["decision", "rejected"]


def test_transitions_are_in_the_ledger_and_repeat_unchanged(host):
    release = host.deploy()
    host.ok("unlocked")
    assert events(host) == ["compared", "created", "built", "activated", "promoted", "unlocked"]
    for state in ("created", "built", "promoted"):
        assert host.ok(state, release=release)["changed"] is False
    assert host.ok("unlocked")["changed"] is False


def test_skeleton_is_readable_and_owned_by_the_service(host):
    release = host.compare()["release"]["id"]
    old = os.umask(0o077)
    try:
        host.ok(
            "created", release=release, owner="nobody", record={"variant": {"env": {"API_KEY": "s3cret", "A": "b"}}}
        )
    finally:
        os.umask(old)
    path = host.path(release)
    owners = {name: (path / name).stat().st_uid for name in ("site", "logs", "run", "results")}
    nobody = owners.pop("logs")
    assert owners == {"site": os.getuid(), "run": nobody, "results": nobody} and nobody != os.getuid()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((path / "manifest.json").stat().st_mode) == 0o644
    assert "s3cret" not in (path / "manifest.json").read_text()
    refused = host.call("created", release="20260101T000000Z-x-0123456789ab", owner="no-such-user")
    assert "no user 'no-such-user'" in refused["msg"]


def test_check_mode_writes_nothing_and_has_the_same_keys(host):
    def tree():
        return sorted(os.path.join(a, n) for a, d, f in os.walk(host.root) for n in d + f)

    release = host.ok("compared", check=True, variant="baseline")["plan"]["release"]["id"]
    assert not os.path.exists(host.root)
    keys = set(host.ok("reported"))
    for state in ("created", "built", "active", "promoted", "retired", "rejected", "pruned", "unlocked", "locked"):
        result = host.ok(state, check=True, release=release)
        assert set(result) == keys, state
        assert result["changed"] is (state in ("created", "built", "active", "promoted")), state
    assert not os.path.exists(host.root)
    deployed = host.deploy()
    host.ok("unlocked")
    before = tree()
    for state in ("compared", "built", "active", "rejected", "retired", "pruned", "unlocked", "locked"):
        host.ok(state, check=True, release=deployed, variant="baseline")
    assert tree() == before


def test_diff_shows_link_and_manifest(host):
    first = host.deploy("baseline")
    second = host.build("fewchan")
    diff = host.ok("active", release=second, diff=True)["diff"][0]
    assert diff["before"].startswith(f"current -> {first}\n") and diff["after"].startswith(f"current -> {second}\n")
    assert '"state": "active"' in diff["after"]


def test_prune_keeps_what_serves_and_what_a_rollback_needs(host, monkeypatch):
    built = [host.deploy(name) for name in ("a", "b", "c", "d", "e")]
    for release in built[1:4]:
        host.ok("active", release=built[0])
        host.ok("retired", release=release)
    host.ok("promoted", release=built[0])
    unfinished = host.compare("f")["release"]["id"]
    host.ok("created", release=unfinished)
    os.mkdir(os.path.join(host.root, "releases", ".trash-x"))
    dry = host.ok("pruned", keep=1, check=True)
    assert set(dry["removed"]) == {*built[1:4], unfinished, ".trash-x"} and dry["msg"].startswith("would remove: ")
    monkeypatch.setattr(
        sglang_release_compare.sglang_proc, "scan", lambda root: [{"release": str(host.path(built[1]))}]
    )
    assert host.ok("pruned", keep=1)["msg"].startswith("removed: ")
    left = set(os.listdir(os.path.join(host.root, "releases")))
    assert left == {built[0], built[1], built[4]}
    assert host.ok("pruned", keep=1)["changed"] is False


def test_prune_deletes_the_keys_that_no_release_names(host):
    built = [host.build(name) for name in ("a", "b", "c")]
    secrets = pathlib.Path(host.root) / "secrets"
    secrets.mkdir()
    for release, name in zip(built, ("api_key-a", "api_key-b", "api_key")):
        (secrets / name).write_text("correct-horse-battery\n")
        text = json.dumps({"schema": 1, "env": {"SGLANG_DEPLOY_API_KEY_FILE": str(secrets / name)}})
        (host.path(release) / "launch.json").write_text(text)
    (secrets / "api_key-stale").write_text("battery-horse-correct\n")
    (secrets / "tls.pem").write_text("of the operator\n")
    gone = [built[0], "secrets/api_key-a", "secrets/api_key-stale"]
    assert host.ok("pruned", keep=2, check=True)["removed"] == gone
    assert len(list(secrets.iterdir())) == 5
    assert host.ok("pruned", keep=2)["removed"] == gone
    assert sorted(path.name for path in secrets.iterdir()) == ["api_key", "api_key-b", "tls.pem"]
    (host.path(built[1]) / "launch.json").write_text("{torn")
    assert host.ok("pruned", keep=2)["changed"] is False


def test_prune_moves_what_the_ledger_names_to_the_archive(host):
    built = [host.deploy(name) for name in ("a", "b", "c", "d")]
    result = os.path.join(str(host.path(built[0])), "results", "bench-1.json")
    with open(result, "w", encoding="utf-8") as handle:
        handle.write("{}")
    host.ok("pruned", keep=1)
    kept = os.path.join(host.root, "archive", built[0])
    assert sorted(os.listdir(kept)) == ["launch.json", "manifest.json", "results"]
    assert result_path(host.root, result) == os.path.join(kept, "results", "bench-1.json")
    assert result_path(host.root, os.path.join(host.root, "releases", built[0], "results", "none.json")) is None


def test_refusals_and_rollbacks_are_in_the_ledger_with_their_rung(host):
    first, second = host.deploy("a"), host.deploy("b")
    host.ok("target")
    host.ok("rejected", release=second, reason="wrong answers", rung="verify")
    host.ok("unlocked", release=first, variant="a", reason="no room", rung="precheck")
    events = sglang_ledger.read(host.root)[0][-4:]
    assert [(item["event"], item["release"], item.get("rung")) for item in events] == [
        ("rollback", first, None),
        ("rejected", second, "verify"),
        ("refused", first, "precheck"),
        ("unlocked", None, None),
    ]
    assert events[0]["previous"] == second and events[2]["reason"] == "no room"
    # A run that holds no lock any more has nothing to refuse.
    host.ok("unlocked", release=first, reason="no room", rung="precheck")
    assert len(sglang_ledger.read(host.root)[0]) == sglang_ledger.read(host.root)[0].index(events[-1]) + 1


def test_created_removes_what_a_killed_run_left_of_the_same_digest(host):
    killed = host.compare()["release"]["id"]
    host.ok("created", release=killed)
    plan = host.compare()
    assert plan["unfinished"] == [killed] and not plan["release"]["built"]
    release = plan["release"]["id"]
    assert release != killed
    assert host.ok("created", release=release)["removed"] == [killed]
    assert not host.path(killed).exists()


def test_torn_manifest_is_named_and_not_used(host):
    first, second = host.deploy("baseline"), host.deploy("fewchan")
    (host.path(first) / "manifest.json").write_text('{"schema": 1, "id"')
    (host.path(second) / "manifest.json").write_text(json.dumps({"schema": 9, "id": second}))
    (host.path("junk")).mkdir()
    problems = host.ok("reported")["info"]["problems"]
    assert len(problems) == 4
    assert any(first in text and "torn" in text for text in problems)
    assert any("schema 1" in text for text in problems) and any("junk" in text for text in problems)
    assert any(text.startswith(f"current points to {second}") for text in problems)
    assert host.call("target")["failed"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("retired", [False, True])
def test_a_killed_rollback_is_gone_on_with(retired, named, host):
    """Killed after the link was moved: the next one does not lead back to what was to be left."""
    good, bad = host.deploy("baseline"), host.deploy("fewchan")
    host.ok("unlocked")
    host.run = make_run("run-2")
    host.ok("target")
    host.ok("active", release=good)
    if retired:
        host.ok("retired", release=bad)
    pathlib.Path(host.root, "lock").unlink()
    host.run = make_run("run-3")
    result = host.ok("target", release=good if named else "")
    plan = result["plan"]
    assert (plan["release"]["id"], plan["current"]["id"]) == (good, bad)
    assert plan["previous"]["id"] == bad and "as run" in result["msg"]
    host.ok("active", release=good)
    host.ok("retired", release=bad)
    host.ok("promoted", release=good, unlock=True)
    assert "nothing to roll back to" in host.call("target")["msg"]


def test_a_killed_deploy_is_left_by_a_rollback(host):
    """The same state on disk, brought about by a deploy."""
    good, bad = host.deploy("baseline"), host.deploy("fewchan")
    host.compare("baseline")
    host.ok("active", release=good)
    assert host.ok("target")["plan"]["release"]["id"] == bad


@pytest.mark.parametrize("state", ["compared", "locked", "target"])
def test_problems_of_a_plan_are_warnings_of_the_task(host, state):
    torn, _kept, _current = host.deploy("baseline"), host.deploy("fewchan"), host.deploy("fusion")
    args = {"variant": "fusion", "inputs": {"args": {"variant": "fusion"}}}
    assert host.root not in str(host.ok(state, **args).get("warnings"))
    (host.path(torn) / "manifest.json").write_text('{"schema": 1, "id"')
    result = host.ok(state, **args)
    problems = result["plan"]["problems"]
    assert len(problems) == 1 and torn in problems[0]
    assert any(problems[0] in str(text) for text in result["warnings"])
    assert not result["plan"]["drift"]


def test_link_that_is_none_of_ours(host):
    release = host.build()
    os.symlink("/etc", os.path.join(host.root, "current"))
    assert any("no release" in text for text in host.ok("reported")["info"]["problems"])
    host.ok("active", release=release)
    os.unlink(os.path.join(host.root, "current"))
    os.mkdir(os.path.join(host.root, "current"))
    assert "not a link" in host.call("active", release=release)["msg"]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"state": "compared", "run": {}}, "run"),
        ({"state": "active"}, "release"),
        ({"state": "reported", "root": "relative"}, "root"),
        ({"state": "pruned", "keep": 0}, "keep"),
        ({"state": "created", "release": "x"}, "release"),
        ({"state": "compared", "variant": ""}, "variant"),
    ],
)
def test_bad_input_is_named(host, args, name):
    result = host.call(**args)
    if name == "root":
        # A relative path is made absolute by the type 'path' only where it begins with ~ or $.
        assert "absolute" in result["msg"]
    assert result["failed"] and result["msg"].startswith(f"{name}:")


def test_a_release_appears_with_the_files_it_begins_with(host):
    plan = host.compare()["release"]
    files = {"site/sitecustomize.py": "x = 1\n", "notes/a.txt": "{{ no template }} ä"}
    wrong = host.call("created", release=plan["id"], files={"site/sitecustomize.py": "x ="})
    assert wrong["failed"] and "no valid python" in wrong["msg"] and not host.path(plan["id"]).exists()
    outside = host.call("created", release=plan["id"], files={"../x": "x"})
    assert outside["failed"] and "is not a file below" in outside["msg"] and not host.path(plan["id"]).exists()
    dry = host.call("created", check=True, diff=True, release=plan["id"], files=files)
    shown = {item["after_header"]: item["after"] for item in dry["diff"]}
    assert shown[f"{host.path(plan['id'])}/site/sitecustomize.py"] == "x = 1\n" and not host.path(plan["id"]).exists()
    made = host.ok("created", release=plan["id"], files=files)
    assert made["changed"]
    for name, text in files.items():
        assert (host.path(plan["id"]) / name).read_text() == text
    assert not [item for item in os.listdir(f"{host.root}/releases") if item.startswith(".")]
