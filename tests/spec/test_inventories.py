"""Both inventories load group_vars/, from the root and from playbooks/, and both ways reach the same verbs."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.executable).parent
VERBS = sorted(path.name for path in ROOT.glob("*.yml"))
HOSTS = {
    "inventory/local": {"localhost": ["sglang", "embedded"]},
    "inventory/example": {"gpu01": ["sglang", "pcie_gpu"], "gpu02": ["sglang", "pcie_gpu"]},
}
CASES = [(inventory, host, base) for inventory, hosts in HOSTS.items() for host in hosts for base in (".", "playbooks")]


def run(program, *arguments):
    """Run a program of this environment in the project and return its output."""
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1")
    done = subprocess.run(
        [BIN / program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(("inventory", "host", "base"), CASES)
def test_host_gets_the_variables_of_its_groups(inventory, host, base):
    """Ansible looks for group_vars beside the inventory and beside the playbook: neither may lose them."""
    seen = json.loads(run("ansible-inventory", "-i", inventory, "--playbook-dir", base, "--host", host))
    for group in ("all", *HOSTS[inventory][host]):
        for path in sorted((ROOT / "group_vars" / group).glob("*.yml")):
            names = set(yaml.safe_load(path.read_text()) or {})
            assert names <= seen.keys(), f"{path.relative_to(ROOT)}: {sorted(names - seen.keys())}"


@pytest.mark.parametrize("inventory", HOSTS)
def test_inventory_has_exactly_its_hosts(inventory):
    """The hosts that the documentation names are in the groups that the playbooks use."""
    groups = json.loads(run("ansible-inventory", "-i", inventory, "--list"))
    hosts = set(groups["_meta"]["hostvars"])
    assert hosts == set(HOSTS[inventory])
    for host, names in HOSTS[inventory].items():
        for name in names:
            members = json.loads(run("ansible-inventory", "-i", inventory, "--list", "--limit", f"{host}:&{name}"))
            assert host in members["_meta"]["hostvars"], f"{host} is not in {name}"


def test_there_are_verbs():
    """The cases below are made from this list."""
    assert {"deploy.yml", "rollback.yml", "status.yml", "stop.yml", "benchmark.yml"} <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_both_ways_of_calling_reach_the_same_plays(verb):
    """`ansible-playbook deploy.yml` and `ansible-playbook playbooks/deploy.yml` are the same verb."""

    def plays(path):
        lines = run("ansible-playbook", path, "--list-tasks").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("playbook:")]

    listed = plays(verb)
    assert any("TAGS" in line for line in listed), "no play"
    assert listed == plays(f"playbooks/{verb}")


@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_one_import(verb):
    """Whatever a verb does is in playbooks/."""
    (entry,) = yaml.safe_load((ROOT / verb).read_text())
    assert entry["ansible.builtin.import_playbook"] == f"playbooks/{verb}"
