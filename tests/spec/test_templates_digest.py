"""What a release is made of counts in its digest: an edit there must make another release."""

from __future__ import annotations

import inspect
import pathlib

import pytest
from ansible.module_utils import sglang_launch_files, sglang_launcher
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
from ansible.utils.collection_loader import AnsibleCollectionConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counted():
    """Return the texts of the files whose hashes are inputs of a release."""
    if not AnsibleCollectionConfig.collection_finder:
        init_plugin_loader()
    loader = DataLoader()
    wiring = loader.load_from_file(str(ROOT / "group_vars/all/wiring.yml"), trusted_as_template=True)
    known = {"__sglang_project": str(ROOT), "__files": wiring["__sglang_template_files"]}
    return set(Templar(loader=loader, variables=known).template(known["__files"]))


@pytest.mark.parametrize("program", [*sglang_launch_files.BESIDE.values(), sglang_launcher, sglang_launch_files])
def test_every_program_of_a_release_counts_in_its_digest(counted, program):
    assert inspect.getsource(program).rstrip("\n") in counted


def test_the_sitecustomize_counts_in_the_digest(counted):
    assert (ROOT / "roles/nccl_env/templates/sitecustomize.py.j2").read_text().rstrip("\n") in counted
