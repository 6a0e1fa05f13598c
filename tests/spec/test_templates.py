"""Templates and the expressions in YAML files are valid Jinja."""

from __future__ import annotations

import pathlib

import jinja2
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATES = sorted(ROOT.glob("roles/*/templates/**/*.j2"))
SOURCES = sorted(
    path
    for pattern in (
        "playbooks/**/*.yml",
        "roles/*/*/*.yml",
        "roles/*/molecule/*/*.yml",
        "group_vars/**/*.yml",
        "inventory/*/*.yml",
    )
    for path in ROOT.glob(pattern)
)
ENVIRONMENT = jinja2.Environment(extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"], autoescape=False)


class AnyTests(dict):
    """Ansible's own filters and tests are not known here, and the parser asks for tests and filters by name."""

    def __contains__(self, name):
        return True

    def get(self, name, default=None):
        return super().get(name, lambda *_args: None)

    def __missing__(self, name):
        return lambda *_args: None


ENVIRONMENT.filters = AnyTests(ENVIRONMENT.filters)
ENVIRONMENT.tests = AnyTests(ENVIRONMENT.tests)


def strings(value):
    """Return every string in a parsed YAML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.relative_to(ROOT)))
def test_template_parses(path):
    """A template with a syntax error is found here, not on the host."""
    ENVIRONMENT.parse(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_expressions_parse(path):
    """Every string with braces is a template, in branches that no test takes as well."""
    for text in strings(yaml.safe_load(path.read_text())):
        if "{{" in text or "{%" in text:
            ENVIRONMENT.parse(text)
