"""Edits by structure: scope, exact text, line endings, imports, undefined names."""

from __future__ import annotations

import pytest
import shapes
from ansible.module_utils.sglang_patch_edits import EditError, apply, introduced_names, parts, undefined_names

RULES = {
    "imports": [{"module": "x", "name": "new", "after": "old"}],
    "definitions": [{"name": "_new", "after": "_old", "text": "_new = new()"}],
    "edits": [{"scope": "gate", "find": "(_old)", "replace": "(_old or _new)"}],
}
BODY = "_old = old()\n\n\ndef gate():\n    return (_old)\n\n\ndef other():\n    return (_old)\n"


@pytest.mark.parametrize(
    "before, after",
    [
        ("from x import (\n    old,\n    z,\n)\n", "from x import (\n    old,\n    new,\n    z,\n)\n"),
        ("from x import (\n    a,\n    old\n)\n", "from x import (\n    a,\n    old,\n    new\n)\n"),
        ("from x import a, old\n", "from x import a, old, new\n"),
        ("from x import old  # why\n", "from x import old, new  # why\n"),
        ("from y import old\nimport z\n", "from y import old\nimport z\nfrom x import new\n"),
    ],
)
def test_import_joins_the_one_that_is_there(before, after):
    assert apply(before + BODY, RULES).startswith(after + "_old = old()\n_new = new()\n")


def test_only_the_scope_is_edited_and_the_rest_kept():
    text = apply("from x import old\n" + BODY, RULES)
    assert text.count("(_old or _new)") == 1
    assert text.endswith("def other():\n    return (_old)\n")


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_line_endings_are_kept(newline):
    source = ("from x import (\n    old,\n)\n" + BODY).replace("\n", newline)
    text = apply(source, RULES)
    assert text.replace(newline, "") == apply("from x import (\n    old,\n)\n" + BODY, RULES).replace("\n", "")
    assert "\n" not in text.replace(newline, "")


def test_a_form_feed_is_no_line_end():
    text = apply("from x import old\n\x0c\n# a\x0cb\n" + BODY, RULES)
    assert text.count("(_old or _new)") == 1


def test_applying_twice_changes_nothing():
    once = apply("from x import old\n" + BODY, RULES)
    assert apply(once, RULES) == once
    assert set(parts(once, RULES).values()) == {"done"}


@pytest.mark.parametrize(
    "body, message",
    [
        (BODY.replace("def gate", "def moved"), "gate is defined 0 times"),
        (BODY + "\n\ndef gate():\n    return (_old)\n", "gate is defined 2 times"),
        (BODY.replace("return (_old)", "return (_old) and (_old)"), "occurs 2 times in gate"),
        (BODY.replace("return (_old)", "return _old"), "occurs 0 times in gate"),
        (BODY.replace("_old = old()", "_old = old()\n_old = None"), "_old is assigned 2 times"),
        (BODY.replace("_old = old()\n", ""), "_old is assigned 0 times"),
    ],
)
def test_a_place_that_is_not_there_once_is_an_error(body, message):
    with pytest.raises(EditError, match=message):
        apply("from x import old\n" + body, RULES)


def test_two_edits_of_one_scope_are_both_made():
    edits = [{"scope": "gate", "find": text, "replace": f"{text}.new"} for text in ("second()", "first()")]
    text = "import x\n\n\ndef gate():\n    return first() or second()\n"
    after = apply(text, {"edits": edits})
    assert after == text.replace("first() or second()", "first().new or second().new")
    assert apply(after, {"edits": edits}) == after


def test_two_edits_of_one_place_are_an_error():
    edits = [{"scope": "gate", "find": text, "replace": "done"} for text in ("first() or", "or second()")]
    with pytest.raises(EditError, match="change the same place"):
        apply("import x\n\n\ndef gate():\n    return first() or second()\n", {"edits": edits})


def test_undefined_names_are_found_where_compiling_finds_none():
    text = shapes.guard(shapes.FUNCTIONS).replace(
        "(_is_sm90_supported or _is_sm100_supported)", "(_is_sm90_supported or _is_sm120_supported)"
    )
    compile(text, "x", "exec")
    assert undefined_names(text) == {"_is_sm120_supported"}


def test_names_that_python_finds_are_not_reported():
    text = (
        "import os.path\nfrom a import b as c\n\n\nclass K:\n    x = 1\n    y = x\n\n\n"
        "def f(a, *args, key=None, **more):\n    global late\n    late = [i for i in args if i]\n"
        "    return os, c, K, a, key, more, __file__, __name__, len, later\n\n\nlater = 1\nprint(late)\n"
    )
    assert undefined_names(text) == set()


def test_introduced_names_are_those_of_the_texts():
    assert introduced_names(RULES) >= {"_old", "_new", "new"}
