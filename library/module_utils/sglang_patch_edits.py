"""Edits of one Python source text by structure: the scope by its name, the text exact and once within it.

Nothing here knows line numbers. Formatting and line endings of the file are kept. All functions are pure.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import symtable

from ansible.module_utils.sglang_patch_gate import GateError, find_scope, parse

_MODULE_NAMES = {"__file__", "__name__", "__doc__", "__spec__", "__package__", "__loader__", "__path__", "__builtins__"}
_MODULE_NAMES |= {"__annotations__", "WindowsError"}


@functools.lru_cache(maxsize=16)
def _symbols(text):
    return symtable.symtable(text, "<module>", "exec")


class EditError(ValueError):
    """The file is not as the entry expects it; the text names the place."""


def newline_of(text):
    """Return the line ending that the text uses first, ``\\n`` for a text of one line."""
    match = re.search(r"\r\n|\n|\r", text)
    return match.group() if match else "\n"


@functools.lru_cache(maxsize=16)
def _line_ends(text):
    """Return where each line ends, by the line ends that Python counts and only those; 0 before the first."""
    return [0, *(match.end() for match in re.finditer(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+$", text))]


def _span(text, node):
    """Return (start, end) offsets of the whole lines of a node, its decorators included."""
    if isinstance(node, ast.Module):
        return 0, len(text)
    first = min([node.lineno] + [item.lineno for item in getattr(node, "decorator_list", [])])
    ends = _line_ends(text)
    return ends[first - 1], ends[node.end_lineno]


def _in_file(text, fragment):
    """Give a fragment of the catalogue the line endings of the file."""
    return fragment.rstrip("\n").replace("\n", newline_of(text))


def edit_state(text, tree, edit):
    """Return ``pending`` or ``done`` for one ``{scope, find, replace}``.

    :raises EditError: the scope is missing or ambiguous, or neither text occurs exactly once in it.
    """
    try:
        start, end = _span(text, find_scope(tree, edit["scope"]))
    except GateError as error:
        raise EditError(str(error)) from error
    body = text[start:end]
    find, replace = _in_file(text, edit["find"]), _in_file(text, edit["replace"])
    old, new = body.count(find), body.count(replace)
    if new == 1 and old == replace.count(find):
        return "done"
    if new == 0 and old == 1:
        return "pending"
    raise EditError(f"the text {edit['find'].strip()!r} occurs {old} times in {edit['scope']}, expected once")


def _edit(text, tree, edit):
    """Return the changes ``[(start, end, new)]`` that one edit makes."""
    if edit_state(text, tree, edit) == "done":
        return []
    start, end = _span(text, find_scope(tree, edit["scope"]))
    find = _in_file(text, edit["find"])
    place = text.index(find, start, end)
    return [(place, place + len(find), _in_file(text, edit["replace"]))]


def bound_names(text):
    """Return the names that the module level binds."""
    table = _symbols(text)
    return {item.get_name() for item in table.get_symbols() if item.is_assigned() or item.is_imported()}


def _binds(text, name):
    """Return whether the module level binds a name; without the word in it a text is not looked at further."""
    return name in text and name in bound_names(text)


def _import(text, tree, item):
    """Return the changes that put ``{module, name, after}`` into the from-import of that module, or into a new one."""
    if _binds(text, item["name"]):
        return []
    newline = newline_of(text)
    same = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == item["module"]]
    for node in same:
        start, end = _span(text, node)
        statement = text[start:end]
        head = statement.index(" import ") + len(" import ")
        match = re.search(rf"(?:(?<=[\r\n])([ \t]+))?\b{re.escape(item.get('after', ''))}\b(?! as)", statement[head:])
        if item.get("after") and match:
            glue = f",{newline}{match.group(1)}" if match.group(1) else ", "
            place = start + head + match.end()
            return [(place, place, glue + item["name"])]
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    if not imports:
        raise EditError(f"no import at module level to put {item['name']} after")
    _start, end = _span(text, (same or imports)[-1])
    return [(end, end, f"from {item['module']} import {item['name']}{newline}")]


def _definition(text, tree, item):
    """Return the changes that put ``{name, after, text}`` below the module-level assignment of ``after``."""
    if _binds(text, item["name"]):
        return []
    anchors = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == item["after"] for target in node.targets)
    ]
    if len(anchors) != 1:
        raise EditError(f"{item['after']} is assigned {len(anchors)} times at module level, expected once")
    _start, end = _span(text, anchors[0])
    return [(end, end, _in_file(text, item["text"]) + newline_of(text))]


def parts(text, rules):
    """Return ``{part: "pending" | "done"}`` for the imports, definitions and edits of one file of an entry.

    :raises EditError: an edit's place is not there.
    """
    tree, result = parse(text), {}
    for kind in ("imports", "definitions"):
        for item in rules.get(kind, []):
            result[f"{kind[:-1]} of {item['name']}"] = "done" if _binds(text, item["name"]) else "pending"
    for edit in rules["edits"]:
        result[f"edit in {edit['scope']}"] = edit_state(text, tree, edit)
    return result


def apply(text, rules):
    """Return the text with every part of the rules in it. All places are found in the text as it is.

    :raises EditError: a place is missing or ambiguous, or two places overlap.
    """
    tree, changes = parse(text), []
    for kind, place in (("edits", _edit), ("definitions", _definition), ("imports", _import)):
        for item in rules.get(kind, []):
            changes += place(text, tree, item)
    new, done = "", 0
    for start, end, part in sorted(changes, key=lambda change: change[:2]):
        if start < done:
            raise EditError(f"two parts of the patch change the same place, {text[start:end].strip()!r}")
        new, done = new + text[done:start] + part, end
    return new + text[done:]


def undefined_names(text):
    """Return the names that the module reads as globals and nothing in it, nor the builtins, defines."""
    table = _symbols(text)
    known = bound_names(text) | set(dir(builtins)) | _MODULE_NAMES
    missing = set()

    def visit(scope):
        for item in scope.get_symbols():
            name = item.get_name()
            if item.is_declared_global() and item.is_assigned():
                known.add(name)
            outer = item.is_global() or scope.get_type() == "module"
            if outer and item.is_referenced():
                missing.add(name)
        for child in scope.get_children():
            visit(child)

    visit(table)
    return missing - known


def introduced_names(rules):
    """Return every identifier in the texts that the rules write."""
    texts = [edit["replace"] for edit in rules["edits"]] + [item["text"] for item in rules.get("definitions", [])]
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join(texts)))
