"""What a release is made of counts in its digest: an edit there must make another release."""

from __future__ import annotations

import inspect
import json
import pathlib
import subprocess
import sys

import pytest
from ansible.module_utils import sglang_launch_files, sglang_launcher

ROOT = pathlib.Path(__file__).resolve().parents[2]
# In a process of its own: the controller's side of Ansible changes how modules in this one give their warnings.
SCRIPT = """
import json, sys
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
init_plugin_loader()
loader = DataLoader()
wiring = loader.load_from_file(sys.argv[1] + "/group_vars/all/wiring.yml", trusted_as_template=True)
known = {"__sglang_project": sys.argv[1]}
print(json.dumps(Templar(loader=loader, variables=known).template(wiring["__sglang_template_files"])))
"""


@pytest.fixture(scope="module")
def counted():
    """Return the texts of the files whose hashes are inputs of a release."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, ROOT], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("program", [*sglang_launch_files.BESIDE.values(), sglang_launcher, sglang_launch_files])
def test_every_program_of_a_release_counts_in_its_digest(counted, program):
    assert inspect.getsource(program).rstrip("\n") in counted


def test_the_sitecustomize_counts_in_the_digest(counted):
    assert (ROOT / "roles/nccl_env/templates/sitecustomize.py.j2").read_text().rstrip("\n") in counted
