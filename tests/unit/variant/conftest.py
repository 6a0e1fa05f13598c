"""The real catalogue, as an operator's playbook would hand it over."""

from __future__ import annotations

import jinja2
import pytest
import yaml


def rendered(value, inputs):
    """Return a catalogue with its expressions filled in from the operator's inputs."""
    if isinstance(value, dict):
        return {key: rendered(item, inputs) for key, item in value.items()}
    if isinstance(value, list):
        return [rendered(item, inputs) for item in value]
    return jinja2.Template(value).render(inputs) if isinstance(value, str) else value


@pytest.fixture(scope="session")
def catalogue(repository):
    """Return the variants of group_vars/all/variants.yml with a draft model and a graph file set."""
    text = (repository / "group_vars/all/variants.yml").read_text(encoding="utf-8")
    inputs = {"sglang_draft_model_own": "/models/draft", "sglang_nccl_graph_file": "/etc/sglang/graph.xml"}
    return rendered(yaml.safe_load(text)["sglang_variants"], inputs)


@pytest.fixture
def make():
    """Return ``make(**keys)``, a small valid catalogue entry."""

    def entry(**keys):
        return {
            "summary": "s",
            "purpose": "p",
            "factor": "f",
            "expect": {"effect": "e", "source": "s"},
            "rungs": ["lint"],
            **keys,
        }

    return entry
