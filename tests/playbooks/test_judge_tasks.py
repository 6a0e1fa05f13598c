"""What the tasks of a judgement ask of the roles that they include."""

from __future__ import annotations

import json

from deployment import extra, play


def test_history_is_asked_for_with_the_last_measurement_only(tmp_path, repository):
    """And that one reaches the decision."""
    roles = {
        "sglang_benchmark": {"ansible.builtin.set_fact": {
            "asked": "{{ asked + [sglang_benchmark_history] }}",
            "__sglang_benchmark_result": {"history": "{{ sglang_benchmark_history or none }}"},
        }},
        "sglang_decision": {"ansible.builtin.debug": {"msg": "{{ {'asked': asked, 'read': sglang_decision_read} }}"}},
    }  # fmt: skip
    for name, task in roles.items():
        (tmp_path / "roles" / name / "tasks").mkdir(parents=True)
        (tmp_path / "roles" / name / "tasks" / "main.yml").write_text(json.dumps([{"name": "Tell", **task}]))
    book = {"name": "Try", "hosts": "localhost", "connection": "local", "gather_facts": False}
    book["vars"] = {"sglang_decision_release": "new", "sglang_decision_against": "old", "asked": []}
    book["tasks"] = [{"include_tasks": str(repository / "playbooks/tasks/judge.yml")}]
    (tmp_path / "play.yml").write_text(json.dumps([book]))
    done = play(tmp_path / "play.yml", "-i", "localhost,", *extra(repeats=3)).succeeded()
    (told,) = done.results("ansible.builtin.debug")
    wanted = {"releases": ["new", "old"], "metrics": []}
    assert told["msg"] == {"asked": [{}, {}, wanted], "read": wanted}
