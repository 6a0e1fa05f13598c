"""Modules: documentation, argument spec and examples say the same."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import ansible
import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "library"
ACTIONS = ROOT / "plugins/action"
MODULES = sorted(path.stem for path in LIBRARY.glob("*.py"))
# What is no complaint about this project: it is not under the GPL, its authors are not a GitHub account, and its
# modules are called by bare names.
NOT_OURS = re.compile(r"missing-gplv3-license|Invalid author|is not a FQCN|must be of format `<namespace>")

each_module = pytest.mark.parametrize("name", MODULES)


class Captured(BaseException):
    """Carries the arguments of AnsibleModule(); no module's `except Exception` can swallow it."""


def spec_of(name, monkeypatch):
    """Return the keyword arguments that main() of module NAME gives to AnsibleModule."""

    def capture(_self, argument_spec, **keywords):
        raise Captured(dict(keywords, argument_spec=argument_spec))

    module = importlib.import_module(name)
    monkeypatch.setattr(basic.AnsibleModule, "__init__", capture)
    with patch_module_args({}), pytest.raises(Captured) as caught:
        module.main()
    return caught.value.args[0]


def documentation(name, part="DOCUMENTATION"):
    """Return one documentation block of module NAME, parsed."""
    text = getattr(importlib.import_module(name), part, None)
    assert text, f"{name} has no {part}"
    return yaml.safe_load(text)


def test_there_are_modules():
    """The tests below are made from this list."""
    assert MODULES


@each_module
def test_documentation_names_the_module_and_describes_everything(name):
    """The name is that of the file; every option and every attribute is described."""

    def walk(prefix, options):
        for key, option in (options or {}).items():
            if not option.get("description"):
                yield prefix + key
            yield from walk(f"{prefix}{key}.", option.get("suboptions"))

    text = documentation(name)
    assert text["module"] == name
    assert text["short_description"] and text["description"]
    assert not list(walk("", text.get("options")))
    assert {"check_mode", "diff_mode"} <= text["attributes"].keys()


@each_module
def test_check_mode_is_supported_as_documented(name, monkeypatch):
    """A module that refuses check mode makes the whole dry run worthless."""
    assert spec_of(name, monkeypatch).get("supports_check_mode") is True
    assert documentation(name)["attributes"]["check_mode"]["support"] == "full"


@each_module
def test_results_are_documented(name):
    """Each returned key has a description, a condition and a type. `run_module` refuses a result with any other key."""
    for key, entry in documentation(name, "RETURN").items():
        assert entry.get("description") and entry.get("returned") and entry.get("type"), key


@each_module
def test_examples_use_the_options_that_exist(name, monkeypatch):
    """Examples are tasks with names, known options, legal choices, and every required option."""
    spec = spec_of(name, monkeypatch)["argument_spec"]
    calls = [task for task in documentation(name, "EXAMPLES") if name in task]
    assert calls, "no example calls the module"

    def check(where, given, options):
        assert given.keys() <= options.keys(), f"{where}: unknown {given.keys() - options.keys()}"
        missing = {key for key, option in options.items() if option.get("required")} - given.keys()
        assert not missing, f"{where}: required {missing}"
        for key, value in given.items():
            if isinstance(value, str) and "{{" in value:
                continue
            for item in value if isinstance(value, list) else [value]:
                if options[key].get("choices"):
                    assert item in options[key]["choices"], f"{where}: {key}={item!r}"
                if options[key].get("options"):
                    check(f"{where}: {key}", item, options[key]["options"])

    for task in calls:
        assert task.get("name"), "an example without a name"
        check(task["name"], task[name] or {}, spec)


def test_ansible_accepts_the_modules(tmp_path):
    """Run validate-modules of ansible-test: the documented options are the argument spec, down to suboptions."""
    sanity = pathlib.Path(ansible.__file__).parents[1] / "ansible_test/_util/controller/sanity/validate-modules"
    collection = tmp_path / "ansible_collections/sglang/deploy"
    modules = collection / "plugins/modules"
    modules.mkdir(parents=True)
    for name in MODULES:
        shutil.copy(LIBRARY / f"{name}.py", modules)  # of a link it takes the name of the target for an alias
    # It asks git which files there are, and imports the modules in its own process.
    subprocess.run(["git", "init", "--quiet"], cwd=collection, check=True)
    program = (
        "import sys, ansible.module_utils as utils; utils.__path__.append(sys.argv.pop(1));"
        "from validate_modules.main import main; main()"
    )
    files = [f"plugins/modules/{name}.py" for name in MODULES]
    command = [sys.executable, "-c", program, str(LIBRARY / "module_utils"), "--arg-spec", "--format", "json"]
    environment = dict(os.environ, PYTHONPATH=str(sanity), ANSIBLE_COLLECTIONS_PATH=str(tmp_path))
    done = subprocess.run(
        [*command, "--collection", "ansible_collections/sglang/deploy", *files],
        cwd=collection,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    complaints = [
        f"{pathlib.Path(path).name}:{error['line']}: {error['code']}: {error['msg']}"
        for path, entry in report.items()
        for error in entry["errors"]
    ]
    complaints = [line for line in complaints if not NOT_OURS.search(line)]
    # Every module draws the licence complaint, so this shows that every module was looked at.
    assert len(report) == len(MODULES), sorted(report)
    assert not complaints, "\n".join(complaints)


def test_action_plugins_have_documentation():
    """An action is documented, and its arguments are checked by lint, through a module file of the same name."""
    actions = {path.stem for path in ACTIONS.glob("*.py")}
    assert actions
    assert actions <= set(MODULES)
