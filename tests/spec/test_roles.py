"""Roles: defaults and argument specs agree, names follow the rules, every role has what a role must have."""

from __future__ import annotations

import pathlib

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
PYTHON_TYPES = {
    "str": str,
    "path": str,
    "raw": object,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "list": list,
    "dict": dict,
}
# Keywords of a block, below which further tasks lie.
BLOCKS = ("block", "rescue", "always")

pytestmark = pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)


def load(path):
    """Return the content of a YAML file, an empty dict where it is missing or empty."""
    return (yaml.safe_load(path.read_text()) if path.exists() else None) or {}


def options_of(role):
    """Return the options of the role's entry point main."""
    specs = load(role / "meta/argument_specs.yml").get("argument_specs", {})
    assert "main" in specs, f"{role.name}: meta/argument_specs.yml describes no entry point main"
    return specs["main"].get("options", {})


def tasks_of(role):
    """Return [(file, task)] of the role, those in blocks included."""

    def walk(path, tasks):
        for task in tasks or []:
            yield path, task
            for key in BLOCKS:
                yield from walk(path, task.get(key))

    folders = ("tasks", "handlers")
    files = [path for folder in folders for path in sorted((role / folder).glob("**/*.yml"))]
    return [entry for path in files for entry in walk(path, load(path))]


def is_template(value):
    """Say whether VALUE becomes something else when Ansible renders it."""
    return isinstance(value, str) and "{{" in value


def test_defaults_and_spec_agree(role):
    """Every input is in both files with the same value; one without a default is required."""
    defaults, options = load(role / "defaults/main.yml"), options_of(role)
    problems = [f"{name}: in defaults, not in the spec" for name in defaults.keys() - options.keys()]
    for name, option in options.items():
        if name not in defaults:
            if not option.get("required") or "default" in option:
                problems.append(f"{name}: in the spec, not in defaults and not required")
        elif option.get("required"):
            problems.append(f"{name}: required, yet it has a default")
        elif defaults[name] != option.get("default") or isinstance(defaults[name], bool) != isinstance(
            option.get("default"), bool
        ):
            problems.append(f"{name}: {defaults[name]!r} in defaults, {option.get('default')!r} in the spec")
    assert not problems, "\n".join(problems)


def test_default_has_the_type_of_the_spec(role):
    """A default that is no template is of the type that the spec demands."""
    problems = []
    for name, option in options_of(role).items():
        value = option.get("default")
        if value is None or is_template(value):
            continue
        wanted = PYTHON_TYPES[option.get("type", "str")]
        if not isinstance(value, wanted) or (isinstance(value, bool) and option.get("type") not in ("bool", "raw")):
            problems.append(f"{name}: default {value!r} is no {option.get('type', 'str')}")
        if "choices" in option and value not in option["choices"]:
            problems.append(f"{name}: default {value!r} is none of {option['choices']}")
    assert not problems, "\n".join(problems)


def test_every_input_is_described(role):
    """Options and their suboptions say what they are, and state their type."""

    def walk(prefix, options):
        for name, option in options.items():
            if not option.get("description"):
                yield f"{prefix}{name}: no description"
            if "type" not in option:
                yield f"{prefix}{name}: no type"
            if option.get("type") == "list" and "elements" not in option:
                yield f"{prefix}{name}: a list without elements"
            yield from walk(f"{prefix}{name}.", option.get("options", {}))

    problems = list(walk("", options_of(role)))
    assert not problems, "\n".join(problems)


def test_inputs_carry_the_name_of_the_role(role):
    """Inputs are `<role>_x`; constants in vars/ are `__<role>_x`."""
    problems = [name for name in options_of(role) if not name.startswith(f"{role.name}_")]
    problems += [name for name in load(role / "vars/main.yml") if not name.startswith(f"__{role.name}_")]
    assert not problems, problems


def test_internals_carry_the_name_of_the_role(role):
    """Registered variables, facts and loop variables are `__<role>_x`: they outlive the role."""
    problems = []
    for path, task in tasks_of(role):
        facts = task.get("ansible.builtin.set_fact", {})
        names = [task.get("register"), task.get("loop_control", {}).get("loop_var"), *facts]
        names = [name for name in names if name and name != "cacheable"]
        problems += [f"{path.name}: {name}" for name in names if not name.startswith(f"__{role.name}_")]
    assert not problems, "\n".join(problems)


def test_role_is_complete(role):
    """Metadata, a description and a scenario whose verify.yml asserts something."""
    meta = load(role / "meta/main.yml").get("galaxy_info", {})
    assert meta.get("author") == "the sglang deploy authors"
    assert meta.get("license") == "Apache-2.0"
    assert meta.get("min_ansible_version") == "2.19"
    assert (role / "README.md").is_file(), "no README.md"
    assert not load(role / "meta/main.yml").get("dependencies"), "roles do not pull in others: playbooks hold the order"


def test_every_scenario_can_fail(role):
    """Molecule passes over a playbook that is missing, and over a verify.yml that asserts nothing."""
    scenarios = [path.parent for path in role.glob("molecule/*/molecule.yml")]
    assert role / "molecule/default" in scenarios, "no scenario default"
    for scenario in scenarios:
        assert (scenario / "converge.yml").is_file(), f"{scenario.name}: no converge.yml"
        verify = scenario / "verify.yml"
        assert verify.is_file(), f"{scenario.name}: no verify.yml"
        text = verify.read_text()
        assert "ansible.builtin.assert" in text or "failed_when" in text, f"{scenario.name}: verify.yml asserts nothing"
        own = load(scenario / "molecule.yml")
        assert "test_sequence" not in own.get("scenario", {}), f"{scenario.name}: the sequence is the one of the base"
        playbooks = own.get("ansible", {}).get("playbooks", {})
        assert not playbooks.keys() & {"create", "destroy"}, (
            f"{scenario.name}: create and destroy are those of the base"
        )
        assert not (scenario / "create.yml").exists(), f"{scenario.name}: create.yml would never run"
        assert not (scenario / "destroy.yml").exists(), f"{scenario.name}: destroy.yml would never run"
