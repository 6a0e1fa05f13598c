"""Which release a deploy is compared with: an expression of group_vars/all/wiring.yml."""

from __future__ import annotations

import jinja2
import pytest
import yaml


@pytest.mark.parametrize(
    ("current", "state", "rival"),
    [
        ("b", "promoted", ""),  # only started again
        ("b", "active", "a"),  # of -e promote=false, or of a run that was killed: never judged to an end
        ("a", "built", "a"),
        ("a", "promoted", "a"),
        (None, None, "a"),
    ],
)
def test_only_a_promoted_release_that_is_current_has_no_rival(repository, current, state, rival):
    wiring = yaml.safe_load((repository / "group_vars/all/wiring.yml").read_text())
    target = {"id": "b", "state": state}
    plan = {"current": {"id": current} if current else None, "previous": {"id": "a"}, "release": target}
    rendered = jinja2.Environment().from_string(wiring["sglang_decision_against"])
    assert rendered.render(__sglang_release_plan=plan, sglang_target=target).strip() == rival
