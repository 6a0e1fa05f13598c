"""Bad input: one clear error that names the input, the rule and the way out, before anything is touched."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys

import pytest
import yaml
from deployment import BIN, ROOT, environment, extra, play, tree
from engines import model

SUMMARY = {"summary": "s", "purpose": "p", "expect": {"effect": "e", "source": "s"}, "rungs": ["lint"]}

# What is refused on the controller: arguments after deploy.yml, words of the message. FILE stands for a variables file.
ON_THE_CONTROLLER = {
    "no variant": ([], ["variant is empty", "give one of:", "fewchan_fusion"]),
    "an empty variant": (["-e", "variant="], ["variant is empty", "give one of:", "fewchan_fusion"]),
    "an unknown variant": (["-e", "variant=qqqq"], ["'qqqq' is not in the catalogue", "known: "]),
    "a misspelt variant": (["-e", "variant=fewchan_fuson"], ["the nearest is 'fewchan_fusion'"]),
    "a variant in capitals": (["-e", "variant=Fewchan_Fusion"], ["nearest is 'fewchan_fusion'"]),
    "Tree for every collective": (["-e", "variant=tree"], ["NCCL_ALGO", "Tree", "AllGather"]),
    "Tree, with force as the text false": (["-e", "variant=tree", "-e", "sglang_force=false"], ["NCCL_ALGO"]),
    "a force that is no boolean": (
        ["-e", "variant=baseline", "-e", "sglang_force=perhaps"],
        ["sglang_force", "true or false, not perhaps"],
    ),
    "ranks in words": (["-e", "variant=baseline", "-e", "sglang_server_tp_size=eight"], ["tp_size", "eight"]),
    "an unknown flag": (
        ["-e", "variant=baseline", *extra(sglang_variant_overrides={"args": {"mem-fraction-statik": 0.5}})],
        ["mem-fraction-statik", "mem-fraction-static"],
    ),
    "a variable of the deployment": (
        ["-e", "variant=baseline", *extra(sglang_variant_overrides={"env": {"PYTHONPATH": "/x"}})],
        ["PYTHONPATH", "is set by the deployment", "leave PYTHONPATH out"],
    ),
    "an unknown key of a variant": (
        ["-e", "variant=mine", "-e", "@FILE"],
        ["unknown key 'envs' in mine", "the nearest is 'env'"],
    ),
    "a misspelt switch": (["-e", "variant=baseline", "-e", "canary=ture"], ["canary", "true or false, not ture"]),
    "a switch in a list": (["-e", "variant=baseline", "-e", '{"promote": []}'], ["promote", "true or false"]),
    "no measurement": (["-e", "variant=baseline", "-e", "repeats=0"], ["repeats", "1 or more, not 0"]),
    "repeats in words": (["-e", "variant=baseline", "-e", "repeats=five"], ["repeats", "not five"]),
    "an unknown policy": (["-e", "variant=baseline", "-e", "on_inconclusive=stay"], ["keep or rollback, not stay"]),
    "a short API key": (
        ["-e", "variant=baseline", "-e", "sglang_server_api_key=qzxwv-short"],
        ["lint/api-key", "sglang_server_api_key needs 16 or more"],
    ),
    "an API key that is a number": (
        ["-e", "variant=baseline", "-e", '{"sglang_server_api_key": 73737373}'],
        ["lint/api-key", "sglang_server_api_key needs 16 or more"],
    ),
    "an API key with a line end": (
        ["-e", "variant=baseline", *extra(sglang_server_api_key="qzxwv-qzxwv-qzxwv-qzxwv\n")],
        ["lint/api-key", "line ends"],
    ),
    "an API key twice": (
        ["-e", "variant=baseline", *extra(sglang_server_api_key="qzxwv-" * 4, sglang_server_api_key_file="/run/key")],
        ["lint/api-key", "exclude each other"],
    ),
    "an unknown patch": (
        ["-e", "variant=baseline", *extra(sglang_variant_overrides={"patches": ["sm120_fusion"]})],
        ["sm120_fusion"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_THE_CONTROLLER)
def test_refused_before_a_host_is_touched(case, tmp_path):
    """The root is not even created."""
    arguments, words = ON_THE_CONTROLLER[case]
    file = tmp_path / "variables.yml"
    file.write_text(yaml.safe_dump({"sglang_variants": {"mine": {**SUMMARY, "factor": "f", "envs": {"A": "1"}}}}))
    root = tmp_path / "root"
    arguments = [argument.replace("FILE", str(file)) for argument in arguments]
    outcome = play("deploy.yml", *extra(sglang_root=str(root)), *arguments)
    outcome.refused(*words)
    assert len(outcome.failures) == 1, "one error, not several"
    assert outcome.recap["failures"] == 1
    assert not root.exists()
    # Nothing of a key, which the cases give.
    assert "qzxwv" not in outcome.out + outcome.error and "73737373" not in outcome.out + outcome.error


@pytest.mark.parametrize(
    "name, words",
    [
        ("sglang_server_restart_limit", ["launch:", "restart_limit", "'three'"]),
        ("sglang_server_restart_on_hang", ["launch:", "restart_on_hang", "'three'"]),
        ("host_preflight_margin_mb", ["checks:", "margin_mb", "'three'"]),
        ("host_preflight_enforce", ["enforce", "'three'"]),
    ],
)
def test_a_word_is_not_taken_for_zero_or_false(name, words, tmp_path):
    """A filter would make a valid value of it; what the server and the checks are given is refused by its own call."""
    root = tmp_path / "root"
    outcome = play("deploy.yml", "--check", "-e", "variant=baseline", *extra(sglang_root=str(root), **{name: "three"}))
    outcome.refused(*words)
    assert len(outcome.failures) == 1 and not root.exists()


def test_probe_of_what_lint_refuses(tmp_path):
    """Of several variants those refused are left out; where none is left, the message says so."""
    outcome = play("probe.yml", *extra(sglang_root=str(tmp_path / "root"), variants="tree, tree"))
    outcome.refused("refuses all of tree, tree", "explain.yml says why")


@pytest.mark.parametrize(
    "content", ["sglang:\n  hosts: {}\n", "other:\n  hosts: {gpu01: {}}\n"], ids=["empty", "other"]
)
def test_inventory_without_hosts_is_refused(content, tmp_path):
    """A play without hosts would end well and do nothing."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(content)
    outcome = play("deploy.yml", "-i", str(inventory), "-e", "variant=baseline")
    outcome.refused("at least one host in the group sglang", "found 0 hosts", "-i inventory/example")
    assert len(outcome.failures) == 1


VERBS = ("benchmark", "canary", "compare", "deploy", "explain", "precheck", "probe", "prune", "report", "rollback")
VERBS += ("status", "stop", "tune")


def test_every_verb_is_guarded_with_a_limit_too(repository):
    """--limit leaves localhost out: a play over it alone would be skipped, and the check with it."""
    files = sorted((repository / "playbooks").glob("*.yml"))
    assert [item.stem for item in files] == sorted(VERBS)
    for file in files:
        first = yaml.safe_load(file.read_text())[0]
        assert (first["hosts"], first["run_once"]) == ("localhost, all", True), file.name
        imported = [task.get("ansible.builtin.import_tasks") for task in first["tasks"]]
        assert imported.count("tasks/guard.yml") == 1, file.name


@pytest.mark.parametrize(
    ("content", "verb"),
    [
        ("other:\n  hosts: {gpu01: {}}\n", "deploy"),
        ("other:\n  hosts: {gpu01: {}}\nsglang:\n  hosts: {gpu02: {}}\n", "status"),
    ],
    ids=["no group", "a host of another group"],
)
def test_a_limit_that_leaves_no_host_is_refused(content, verb, tmp_path):
    """No play would have a host, and the run would end well without having done anything."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(content)
    outcome = play(f"{verb}.yml", "-i", str(inventory), "--limit", "gpu01", "-e", "variant=baseline")
    outcome.refused("at least one host in the group sglang", "found 0 hosts with --limit gpu01", "-i inventory/example")
    assert len(outcome.failures) == 1


def test_a_precheck_that_the_guard_refuses_leaves_no_earlier_verdict(tmp_path):
    inventory, verdict = tmp_path / "hosts.yml", tmp_path / "verdict.json"
    inventory.write_text("sglang:\n  hosts: {gpu02: {}}\nother:\n  hosts: {gpu01: {}}\n")
    verdict.write_text('{"ok": true}')
    arguments = ["-i", str(inventory), "--limit", "gpu01", *extra(host_preflight_verdict_file=str(verdict))]
    play("precheck.yml", *arguments).refused("found 0 hosts with --limit gpu01")
    assert not verdict.exists()


def test_a_limit_that_leaves_a_host_passes_the_guard():
    outcome = play("deploy.yml", "-i", "inventory/example", "--limit", "gpu02", "-e", "variant=qqqq")
    outcome.refused("'qqqq' is not in the catalogue")
    assert "guard | Refuse a call" in outcome.out
    assert "gpu01" not in outcome.out


def on_the_host(tmp_path):
    """Return {case: (variables, words of the message)} of what only the host can refuse."""
    not_python = tmp_path / "not-python"
    not_python.write_text("#!/bin/sh\necho hello\n")
    not_python.chmod(0o755)
    existing = {"model_files_source": "existing"}
    return {
        "no model": (
            {**existing, "model_files_path": str(tmp_path / "none")},
            [f"{tmp_path}/none does not exist", "model_files_path"],
        ),
        "a missing shard": (
            {**existing, "model_files_path": model(tmp_path / "missing")},
            ["model-2.safetensors", "missing"],
        ),
        "a git-LFS pointer": (
            {**existing, "model_files_path": model(tmp_path / "lfs", pointer=True, present=2)},
            ["model-1.safetensors", "git-LFS pointer", "git lfs pull"],
        ),
        "an adopted program that is no Python": (
            {"sglang_engine_python": str(not_python)},
            [str(not_python), "sglang_engine_python"],
        ),
        "an adopted Python without sglang": (
            {"sglang_engine_python": sys.executable},
            [sys.executable, "no importable package sglang", "sglang_engine_python"],
        ),
        "an adopted interpreter that is not there": (
            {"sglang_engine_python": "/nowhere/bin/python3"},
            ["/nowhere/bin/python3 does not exist", "sglang_engine_python"],
        ),
        "another version than declared": (
            {"sglang_engine_version": "0.5.20"},
            ["sglang 0.5.9", "0.5.20", "sglang_engine_version"],
        ),
        "a port out of range": ({"sglang_server_port": 70000}, ["sglang_server_port", "1 to 65535", "70000"]),
        "a service user that is not there": (
            {"sglang_server_user": "nobody-such"},
            ["nobody-such does not exist", "sglang_server_user"],
        ),
    }


HOST_CASES = [
    "no model",
    "a missing shard",
    "a git-LFS pointer",
    "an adopted program that is no Python",
    "an adopted Python without sglang",
    "an adopted interpreter that is not there",
    "another version than declared",
    "a port out of range",
    "a service user that is not there",
]


def untouched(node, outcome):
    """Check that a refused deploy has left nothing but the record of the refusal."""
    assert len(outcome.failures) == 1, [event["task"] for event in outcome.failures]
    left = set(os.listdir(node.root)) if node.root.exists() else set()
    assert left <= {"ledger.jsonl", ".lock.guard"}, f"left on the host: {left}"
    assert not node.servers()


@pytest.mark.parametrize("case", HOST_CASES)
def test_refused_by_the_host(case, tmp_path, make_node):
    """Nothing is built, staged or started, and the lock is given back."""
    variables, words = on_the_host(tmp_path)[case]
    node = make_node(**variables)
    outcome = node.deploy("baseline")
    outcome.refused(*words)
    untouched(node, outcome)
    (told,) = node.ledger("refused")
    assert told["rung"] == "precheck" and told["variant"] == "baseline"
    assert all(word in told["reason"] for word in words)


def test_port_of_another_program_is_refused_by_name(make_node):
    """The holder is named, and it is left alone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = make_node()
        node.variables["sglang_server_port"] = port = listener.getsockname()[1]
        outcome = node.deploy("baseline")
        outcome.refused(f"port {port} is taken", str(os.getpid()), "sglang_server_port")
        untouched(node, outcome)


def test_long_root_is_refused(tmp_path, make_node):
    """The socket below it could not be bound."""
    node = make_node()
    node.root = tmp_path / ("r" * 90)
    node.variables["sglang_root"] = str(node.root)
    outcome = node.deploy("baseline")
    outcome.refused("sglang_root", "80", "shorter path")
    untouched(node, outcome)


def test_full_disk_is_refused(tmp_path, make_node):
    """A file system of 4 MB has no room for a release and its margin."""
    libc = ctypes.CDLL(None, use_errno=True)
    small = tmp_path / "small"
    small.mkdir()
    if libc.mount(b"none", bytes(small), b"tmpfs", 0, b"size=4m"):
        pytest.skip(f"no small file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        node = make_node()
        node.root = small / "n"
        node.variables["sglang_root"] = str(node.root)
        outcome = node.deploy("baseline")
        outcome.refused("a release with its margin needs", str(small), "MB free", "move sglang_root")
        untouched(node, outcome)
    finally:
        assert libc.umount2(bytes(small), 2) == 0


def test_relative_and_unknown_things_of_a_rollback(make_node):
    """A rollback on an empty host, and one to a name that is a path."""
    node = make_node()
    node.run("rollback").refused("nothing to roll back to", "Way out")
    node.run("rollback", release="../../etc").refused("../../etc", "Way out")
    node.run("rollback", release="20260131T030000Z-baseline-0123456789ab").refused("does not exist on this host")
    assert not node.servers()


def test_text_is_taken_for_what_it_says(make_node):
    """-e gives strings: the plan is the same as with typed values, and false is false."""
    node = make_node()
    typed = node.deploy("baseline", "--check", sglang_server_tp_size=2, sglang_force=False, sglang_verify_timeout=900)
    texts = ["sglang_server_tp_size=2", "sglang_force=false", "sglang_verify_timeout=900", "promote=false"]
    texts += [f"sglang_server_port={node.port}", "sglang_server_stop_timeout=10", "sglang_break_lock=no"]
    given = node.deploy("baseline", "--check", *(part for text in texts for part in ("-e", text)))
    plans = [
        outcome.succeeded().results("sglang_release")[0]["plan"]["release"]["digest"] for outcome in (typed, given)
    ]
    assert plans[0] == plans[1]
    assert tree(node.root) is None


def test_where_no_host_answers_the_verdict_says_so_and_no_earlier_one_stays(tmp_path):
    verdict = tmp_path / "verdict.json"
    verdict.write_text('{"ok": true, "failures": [], "hosts": {}}')
    closed = extra(ansible_host="127.0.0.1", ansible_port=9, host_preflight_verdict_file=str(verdict))
    outcome = play("precheck.yml", "-i", "inventory/example", "--limit", "gpu01", *closed)
    assert outcome.rc != 0, outcome.out
    found = json.loads(verdict.read_text())
    assert (found["ok"], found["failures"], list(found["hosts"])) == (False, ["not-checked"], ["gpu01"])


@pytest.mark.parametrize("verb", sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml")))
def test_a_call_from_elsewhere_is_told_where_the_configuration_is(verb, tmp_path):
    """Roles are looked for before the first task runs: playbooks/roles is a link for this message alone."""
    env = {**environment(), "HOME": str(tmp_path)}
    del env["ANSIBLE_CONFIG"]
    command = [
        BIN / "ansible-playbook",
        "-i",
        ROOT / "inventory/example",
        ROOT / f"{verb}.yml",
        "-e",
        "variant=baseline",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode and "localhost" in done.stdout
    assert "run it in the checkout, or set ANSIBLE_CONFIG=<checkout>/ansible.cfg" in done.stdout + done.stderr
    assert "gpu01" not in done.stdout
