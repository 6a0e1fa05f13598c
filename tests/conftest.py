"""What every test shares: the modules of library/ are importable, and `run_module` runs one for real."""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
import sys

import ansible.module_utils
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "library"

# The same two names that ansible.cfg gives to Ansible: modules, and `ansible.module_utils.sglang_*`.
sys.path.insert(0, str(LIBRARY))
ansible.module_utils.__path__.append(str(LIBRARY / "module_utils"))

# What Ansible itself defines in a result.
COMMON_RESULTS = {"changed", "failed", "msg", "diff", "invocation", "warnings", "deprecations", "exception", "skipped"}


@functools.cache
def documented_results(name):
    """Return the keys that the module NAME promises in RETURN."""
    return set(yaml.safe_load(importlib.import_module(name).RETURN) or {})


def call_module(name, args, capsys, *, check=False, diff=False):
    """Run ``main()`` of the module NAME and return its result dict.

    :param name: module in library/, for example ``sglang_release``.
    :param args: its arguments, as a task would give them.
    :param capsys: the pytest fixture that holds the output.
    :param check: run in check mode.
    :param diff: ask for a diff.
    :raises AssertionError: the module printed no result, did not exit, or returned a key that RETURN does not have.
    """
    from ansible.module_utils import basic

    arguments = dict(args, _ansible_check_mode=check, _ansible_diff=diff)
    module = importlib.import_module(name)
    capsys.readouterr()
    with patched_arguments(basic, arguments):
        try:
            module.main()
        except SystemExit:
            pass
        else:
            raise AssertionError(f"{name}.main() returned instead of calling exit_json or fail_json")
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert len(lines) == 1, f"{name} printed {len(lines)} results: {output!r}"
    result = json.loads(lines[0])
    undocumented = result.keys() - COMMON_RESULTS - documented_results(name)
    assert not undocumented, f"{name} returned {sorted(undocumented)}, which its RETURN does not document"
    return result


def patched_arguments(basic, arguments):
    """Return the context in which AnsibleModule finds ARGUMENTS, for every ansible-core that the tests run with."""
    try:
        from ansible.module_utils.testing import patch_module_args
    except ImportError:  # ansible-core before 2.19, which serves the older Pythons
        from unittest import mock

        return mock.patch.object(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode())
    return patch_module_args(arguments)


@pytest.fixture
def run_module(capsys):
    """Return ``run(name, args, check=False, diff=False)`` which gives the result dict of a module."""

    def run(name, args, *, check=False, diff=False):
        return call_module(name, args, capsys, check=check, diff=diff)

    return run


@pytest.fixture(scope="session")
def repository():
    """Return the root of the repository as a path."""
    return ROOT
