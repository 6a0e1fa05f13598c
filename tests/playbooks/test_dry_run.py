"""``--check --diff`` of every verb, on an empty host and on a deployed one: nothing changes, the diff is whole."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from deployment import BIN, environment, extra, play, tree
from engines import make_engine, model

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERBS = sorted(path.stem for path in ROOT.glob("*.yml"))
# Verbs that need something that an empty host does not have; they say so.
NEEDS = {"rollback": "nothing to roll back to", "benchmark": "nothing to measure", "compare": "nothing to go back to"}
ASKED = {"compare": {"against": "baseline"}}


@pytest.mark.parametrize("verb", VERBS)
def test_on_an_empty_host(verb, make_node):
    """No directory appears."""
    node = make_node()
    outcome = node.run(verb, "--check", "--diff", variant="fewchan_fusion", **ASKED.get(verb, {}))
    if verb in NEEDS:
        outcome.refused(NEEDS[verb])
    else:
        outcome.succeeded()
    assert tree(node.root) is None
    assert not node.root.exists()


def shows_a_release(out):
    """Check that a diff has the three things that an operator looks for."""
    assert "site/sitecustomize.py" in out
    assert "NCCL_BUFFSIZE" in out
    assert "launch.json" in out
    assert "sglang.launch_server" in out
    assert "+++ " in out
    hunks = [line for line in out.splitlines() if line.startswith("@@")]
    assert len(hunks) >= 4, hunks
    added = [line for line in out.splitlines() if line.startswith("+")]
    assert any("_is_sm120_supported = _is_cuda and is_sm120_supported()" in line for line in added)
    assert any("_is_sm90_supported or _is_sm100_supported or _is_sm120_supported" in line for line in added)


@pytest.mark.parametrize("folder", ["", "playbooks/"])
def test_diff_of_a_deploy_shows_what_would_run(folder, make_node):
    """Both ways of calling, on an empty host."""
    node = make_node()
    outcome = node.deploy("fewchan_fusion", "--check", "--diff", folder=folder).succeeded()
    shows_a_release(outcome.out)
    assert "would switch to" in outcome.said
    assert not node.root.exists()


def test_on_a_deployed_host(make_ready):
    """The server keeps its process, no file but its own log changes, and the diff is as complete."""
    node = make_ready()
    node.deploy("baseline").succeeded()
    pid, before = node.server, tree(node.root, skip=["logs"])
    for verb in VERBS:
        outcome = node.run(verb, "--check", "--diff", variant="fewchan_fusion", **ASKED.get(verb, {}))
        if verb == "rollback":
            outcome.refused(NEEDS[verb])
        else:
            outcome.succeeded()
        assert node.server == pid, f"{verb} --check touched the server"
        assert tree(node.root, skip=["logs"]) == before, f"{verb} --check changed the root"
        if verb == "deploy":
            shows_a_release(outcome.out)


# The campaign's own command line, flag by flag.
ORIGINAL = {
    "--model-path": None,
    "--trust-remote-code": True,
    "--tp-size": "8",
    "--mem-fraction-static": "0.88",
    "--host": "0.0.0.0",
    "--port": "8000",
    "--num-continuous-decode-steps": "4",
    "--disable-custom-all-reduce": True,
}


def flags(argv):
    """Return {flag: value} of a command line; True for a bare flag."""
    found, words = {}, argv[argv.index("sglang.launch_server") + 1 :]
    for position, word in enumerate(words):
        if word.startswith("--"):
            after = words[position + 1] if position + 1 < len(words) else "--"
            found[word] = True if after.startswith("--") else after
    return found


def added_file(out, name):
    """Return the text of a new file in a unified diff."""
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("+++ ") and name in line)
    body = []
    for line in lines[start + 1 :]:
        if line.startswith("--- ") or not line.strip():
            break
        if line.startswith("+"):
            body.append(line[1:])
    return "\n".join(body)


@pytest.mark.parametrize("host", ["gpu01", "gpu02"])
def test_example_renders_the_original_launch_line(host, make_node, scratch, tmp_path):
    """Eight-GPU hosts, tried without a GPU: what needs none passes, and the launch line is the campaign's.

    The first adopts an engine, the second would build one.
    """
    folder = model(tmp_path / "kimi", present=2)
    node = make_node()
    adopted = {"sglang_engine_python": make_engine(scratch / "engine-0.5.20", "0.5.20")} if host == "gpu01" else {}
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "host_preflight_enforce": False,
        "model_files_path": folder,
        **adopted,
        "sglang_root": str(node.root),
        "variant": "baseline",
    }
    arguments = ["-i", "inventory/example", "--limit", host, "--check", "--diff"]
    outcome = play("deploy.yml", *arguments, *extra(**variables)).succeeded()
    (checked,) = outcome.results("sglang_precheck")
    errors = {item["rule"] for item in checked["findings"] if item["level"] == "error"}
    assert errors == {"gpu-missing"}
    launch = json.loads(added_file(outcome.out, "launch.json"))
    assert flags(launch["argv"]) == {**ORIGINAL, "--model-path": folder}
    built = f"{node.root}/engines/0.5.20-"
    python = launch["argv"][0]
    assert python == adopted["sglang_engine_python"] if adopted else python.startswith(built)
    assert launch["tp_size"] == 8
    assert launch["endpoint"] == "http://127.0.0.1:8000"
    assert tree(node.root) is None


def test_example_builds_an_engine_on_the_other_host():
    """The second host of the example states another way to the same engine version."""
    out = subprocess.run(
        [BIN / "ansible-inventory", "-i", "inventory/example", "--host", "gpu02"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    seen = json.loads(out)
    assert seen["sglang_engine_mode"] == "build"
    lock = ROOT / seen["sglang_engine_lock"].rpartition("}}/")[2]
    assert f"sglang=={seen['sglang_engine_version']}" in lock.read_text()


def test_a_host_is_asked_for_its_python_once(tmp_path):
    """The module of the switch is packed while the host compares; that asks nothing of the host."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("sglang: {children: {embedded: {hosts: {gpu01: {ansible_connection: local}}}}}\n")
    (tmp_path / "group_vars").symlink_to(ROOT / "group_vars")
    variables = extra(sglang_root=str(tmp_path / "root"))
    outcome = play("deploy.yml", "-i", str(inventory), "-e", "variant=baseline", "--check", "-vvvv", *variables)
    compared = outcome.out.partition("Take the lock and compare]")[2].partition("\nTASK [")[0]
    assert compared.count("Attempting python interpreter discovery") == 1
