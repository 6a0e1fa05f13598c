"""Catalogue entries of source patches: their shape, their versions, and the verdict on a pristine package.

An entry is a dict, one YAML file of the role ``sglang_patches``::

    name, edition, summary, package, distribution, evidence: [str], experimental: bool, requires: [entry name],
    accepts: [state], ways_out: [str],
    families: [{name, versions, upstream: bool, refused: str, ways_out: [str],
                files: [{path, imports, definitions, edits, gates}], watch: [{path, what, ...gate}]}]

``imports`` are ``{module, name, after}``, ``definitions`` ``{name, after, text}``, ``edits``
``{scope, find, replace}``, ``gates`` what :func:`sglang_patch_gate.admitted` takes plus ``pristine``, the hosts that an
unpatched file admits. ``refused`` says why these releases do not work on SM120 even with the edit. ``watch`` are gates
that look like the entry's and are none of it, which a patch by hand may have hit; ``what`` says what they open.
A patch may add the host 12.0 to a gate and must leave every other host as it was.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re

from ansible.module_utils.sglang_patch_edits import EditError, apply, introduced_names, parts, undefined_names
from ansible.module_utils.sglang_patch_gate import BROKEN, HOSTS, TARGET, GateError, admitted, parse

#: States that let a variant go on; an entry may accept more with ``accepts``.
GOOD = ("applied", "already_applied")
BOM = "\ufeff"
STATES = GOOD + ("upstream", "not_applicable", "not_exercised", "refused", "conflict", "absent")

_SHAPES = {
    "entry": (
        {"name": str, "edition": int, "summary": str, "package": str, "distribution": str, "families": list},
        {"evidence": list, "experimental": bool, "requires": list, "accepts": list, "ways_out": list},
    ),
    "family": (
        {"name": str, "versions": str, "files": list},
        {"upstream": bool, "refused": str, "ways_out": list, "watch": list},
    ),
    "file": ({"path": str, "edits": list, "gates": list}, {"imports": list, "definitions": list}),
    "import": ({"module": str, "name": str}, {"after": str}),
    "definition": ({"name": str, "after": str, "text": str}, {}),
    "edit": ({"scope": str, "find": str, "replace": str}, {}),
    "gate": ({"scope": str, "kind": str, "pristine": list}, {"text": str, "test": str}),
    "watch": ({"path": str, "what": str, "scope": str, "kind": str, "pristine": list}, {"text": str, "test": str}),
}
_CHILDREN = {
    "entry": {"families": "family"},
    "family": {"files": "file", "watch": "watch"},
    "file": {"imports": "import", "definitions": "definition", "edits": "edit", "gates": "gate"},
}


class EntryError(ValueError):
    """A catalogue entry is malformed; the text names the key."""


def _check(value, shape, where):
    required, optional = _SHAPES[shape]
    if not isinstance(value, dict):
        raise EntryError(f"{where} must be a mapping")
    unknown = sorted(set(value) - set(required) - set(optional))
    if unknown:
        raise EntryError(f"{where} has the unknown key {unknown[0]}; known are {', '.join({**required, **optional})}")
    for key, kind in {**required, **optional}.items():
        if key in value and (not isinstance(value[key], kind) or (kind is int and isinstance(value[key], bool))):
            raise EntryError(f"{where}.{key} must be of type {kind.__name__}")
        if key in required and not value.get(key) and key not in ("pristine", "replace"):
            raise EntryError(f"{where}.{key} is missing or empty")
        if key in required and key not in value:
            raise EntryError(f"{where}.{key} is missing")
    for key, child in _CHILDREN.get(shape, {}).items():
        for index, item in enumerate(value.get(key, [])):
            _check(item, child, f"{where}.{key}[{index}]")


def validate(entry):
    """Check the shape of an entry.

    :raises EntryError: a key is missing, unknown or of the wrong type, a version range cannot be read, or a path
        leaves the package.
    """
    if not isinstance(entry, dict):
        raise EntryError("a patch must be a mapping")
    name = entry.get("name", "?")
    _check({key: value for key, value in entry.items() if key != "digest"}, "entry", f"patch {name}")
    for family in entry["families"]:
        covers(family["versions"], "0")
        for path in paths(family):
            if os.path.isabs(path) or ".." in path.split("/"):
                raise EntryError(f"patch {name}: the path {path} leaves the package")


def digest(entry):
    """Return the content digest of an entry (16 hex digits); its own key ``digest`` does not count."""
    content = {key: value for key, value in entry.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def load_entry(path):
    """Read one catalogue file (controller only: needs PyYAML) and return the entry with its ``digest``.

    :raises EntryError: the file cannot be read or is malformed.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as handle:
            entry = yaml.safe_load(handle)
    except (OSError, yaml.YAMLError) as error:
        raise EntryError(f"patch file {path}: {error}") from error
    validate(entry)
    return {**entry, "digest": digest(entry)}


def load_entries(names, directory):
    """Return the entries of the named patches in order, each with its ``digest`` (controller only).

    :raises EntryError: a name is not in the catalogue, or a patch that another one requires is not named.
    """
    known = sorted(item[: -len(".yml")] for item in os.listdir(directory) if item.endswith(".yml"))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise EntryError(f"unknown patch {name!r}: the catalogue has {', '.join(known)}{hint}")
    entries = [load_entry(os.path.join(directory, f"{name}.yml")) for name in names]
    check_requires(entries)
    return entries


def check_requires(entries):
    """Refuse a set of entries in which one requires another that is not in the set, or one occurs twice.

    :raises EntryError: naming both.
    """
    names = [entry["name"] for entry in entries]
    for entry in entries:
        if names.count(entry["name"]) > 1:
            raise EntryError(f"patch {entry['name']} is named twice")
        for other in entry.get("requires", []):
            if other not in names:
                raise EntryError(f"patch {entry['name']} requires {other}: name both in the variant's patches")


def version_key(version):
    """Return a sortable key of a version such as ``0.5.10.post1`` or ``0.5.9.dev3+gabc``, in plain order.

    A local part (``+gabc``) does not count.

    :raises EntryError: the text is no version.
    """
    match = re.fullmatch(
        r"v?(\d+(?:\.\d+)*)(?:[-_.]?(a|b|c|rc)\.?(\d*))?(?:[-.]?(?:post|r)(\d+))?(?:[-_.]?dev(\d*))?(?:\+.*)?",
        str(version).strip(),
    )
    if not match:
        raise EntryError(f"{version!r} is not a version")
    numbers = [int(item) for item in match.group(1).split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    _release, pre, pre_number, post, dev = match.groups()
    stage = ({"a": 0, "b": 1, "c": 2, "rc": 2}[pre], int(pre_number or 0)) if pre else (3, 0)
    if dev is not None and not pre and post is None:
        stage = (-1, 0)
    return numbers, stage, -1 if post is None else int(post), float("inf") if dev is None else int(dev or 0)


def covers(specifier, version):
    """Tell whether a version lies in a range such as ``>=0.5.8,<0.5.10``.

    :raises EntryError: either cannot be read.
    """
    key = version_key(version)
    tests = {
        "==": lambda other: key == other,
        "!=": lambda other: key != other,
        ">=": lambda other: key >= other,
        "<=": lambda other: key <= other,
        ">": lambda other: key > other,
        "<": lambda other: key < other,
    }
    verdict = True
    for clause in specifier.split(","):
        match = re.fullmatch(r"\s*(==|!=|>=|<=|>|<)\s*(\S+)\s*", clause)
        if not match:
            raise EntryError(f"{specifier!r} is not a version range: write for example '>=0.5.8,<0.5.10'")
        verdict = tests[match.group(1)](version_key(match.group(2))) and verdict
    return verdict


def family_of(entry, version):
    """Return the family that covers the version, or None."""
    return next((family for family in entry["families"] if covers(family["versions"], version)), None)


def paths(family):
    """Return the files of a package that a family's verdict depends on, each once."""
    return list(dict.fromkeys(item["path"] for item in [*family["files"], *family.get("watch", [])]))


def result(entry, state, message="", **more):
    """Return one result in the shape that the module reports."""
    return {
        "name": entry["name"],
        "edition": entry["edition"],
        "digest": digest(entry),
        "state": state,
        "package": entry["package"],
        "version": None,
        "origin": None,
        "family": None,
        "files": [],
        "hunks": "",
        "admitted": [],
        "gates": [],
        "message": message,
        "ways_out": [],
        "versions_covered": [family["versions"] for family in entry["families"]],
        "experimental": bool(entry.get("experimental")),
        "ok": state in GOOD or state == "absent" or state in entry.get("accepts", []),
        **more,
    }


def not_applicable(entry, version):
    """Return the result for a version that no family covers."""
    covered = "; ".join(family["versions"] for family in entry["families"])
    return result(
        entry, "not_applicable", f"{entry['package']} {version} is not covered; covered are {covered}", version=version
    )


def _gate_lists(text, rules):
    """Return for each gate of a file (gate, admitted hosts, does a host meet an undefined name)."""
    verdicts = [admitted(text, gate) for gate in rules["gates"]]
    return [
        (gate, [host for host in HOSTS if verdict[host] is True], BROKEN in verdict.values())
        for gate, verdict in zip(rules["gates"], verdicts)
    ]


def _wanted(gate):
    return [host for host in HOSTS if host in gate["pristine"] or host == TARGET]


def _judge_file(text, rules):
    """Return (state, new text, note) of one file: ``pending``, ``done``, ``partial`` or ``upstream``.

    :raises EditError, GateError, SyntaxError: the file is none of them.
    """
    try:
        progress = parts(text, rules)
    except EditError:
        # Another wording: only a gate that already gives the wanted answer on every host makes it a fix.
        gates = _gate_lists(text, rules)
        if all(hosts == _wanted(gate) and not broken for gate, hosts, broken in gates):
            return "upstream", text, "already admits SM120 in other words"
        raise
    missing = [part for part, state in progress.items() if state == "pending"]
    if not missing:
        return "done", text, ""
    edits_pending = any(part.startswith("edit ") for part in missing)
    if edits_pending:
        gates = _gate_lists(text, rules)
        if all(hosts == _wanted(gate) and not broken for gate, hosts, broken in gates):
            return "upstream", text, "already admits SM120 in other words"
    untouched = all(state == "pending" for part, state in progress.items() if part.startswith("edit "))
    new = apply(text, rules)
    if untouched:
        return "pending", new, ""
    return "partial", new, "was patched by hand and incomplete: added " + ", ".join(missing)


def _check_result(old, new, rules):
    """Check the text after the edits.

    :raises EditError: it does not compile, a name is undefined, or a gate changed for another host than SM120.
    """
    compile(parse(new), rules["path"], "exec", dont_inherit=True)
    undefined = undefined_names(new)
    bad = undefined and (undefined - undefined_names(old)) | (undefined & introduced_names(rules))
    if bad:
        raise EditError(f"undefined names after patching: {', '.join(sorted(bad))}")
    reports = []
    for (gate, before, _broken), (_gate, after, still_broken) in zip(_gate_lists(old, rules), _gate_lists(new, rules)):
        if still_broken or after != _wanted(gate):
            raise EditError(
                f"the gate in {gate['scope']} would admit {', '.join(after) or 'nothing'}"
                f"{' and meet an undefined name' if still_broken else ''}, expected {', '.join(_wanted(gate))}"
            )
        reports.append(
            {"path": rules["path"], "scope": gate["scope"], "kind": gate["kind"], "before": before, "after": after}
        )
    return reports


def _stray(text, gate):
    """Say how a watched place differs from the release, or return ``""``. A place that is not there has no edit."""
    try:
        [(_gate, hosts, broken)] = _gate_lists(text, {"gates": [gate]})
    except GateError:
        return ""
    if hosts == gate["pristine"] and not broken:
        return ""
    seen = (", ".join(hosts) or "nothing") + " and meets an undefined name" * broken
    text = f"edited by hand in {gate['scope']}, which {gate['what']} and is no part of this patch: it admits {seen}"
    return f"{text}, as released {', '.join(gate['pristine'])}"


def judge(entry, version, texts):
    """Judge an entry against the files of one package and return (result, ``{path: new text}``).

    :param texts: ``{path: text | None}`` with at least the :func:`paths` of the family; None = no such file.
        All-or-nothing: unless the state is ``applied`` the dict returned is empty.
    """
    family = family_of(entry, version)
    if family is None:
        return not_applicable(entry, version), {}
    states, notes, changes, reports, path = {}, [], {}, [], ""
    # Python reads a file with this mark, ast does not read a text with it.
    marks = {name: BOM if (text or "").startswith(BOM) else "" for name, text in texts.items()}
    texts = {name: text and text[len(marks[name]) :] for name, text in texts.items()}
    try:
        for rules in family["files"]:
            path, old = rules["path"], texts.get(rules["path"])
            if old is None:
                raise EditError("no such file in the package")
            states[path], new, note = _judge_file(old, rules)
            notes += [f"{path} {note}"] if note else []
            reports += _check_result(old, new, rules)
            if new != old:
                changes[path] = new
        for gate in family.get("watch", []):
            path = gate["path"]
            stray = _stray(texts.get(path) or "", gate)
            if stray:  # the copy would carry it on, and baseline runs with it as well
                out = ["take that edit back in the engine", f"install {entry['distribution']} {version} anew"]
                text = "; ".join([f"{entry['package']}/{path}: {stray}", *notes]) + f". Ways out: {'; or '.join(out)}"
                return result(entry, "conflict", text, version=version, family=family["name"], ways_out=out), {}
    except (EditError, GateError, SyntaxError) as error:
        return result(
            entry, "conflict", f"{entry['package']}/{path}: {error}", version=version, family=family["name"]
        ), {}
    state = "applied"
    if not changes:
        upstream = family.get("upstream") or "upstream" in states.values()
        state = "upstream" if upstream else "already_applied"
        notes = notes or [
            "this release does it itself" if upstream else "patched by hand before, complete; nothing to change"
        ]
    hunks = "".join(hunk(entry["package"], path, texts[path], new) for path, new in changes.items())
    doors = [report["after"] for report in reports if report["kind"] != "bypass"]
    return result(
        entry,
        state,
        "; ".join(notes),
        version=version,
        family=family["name"],
        files=sorted(changes),
        hunks=hunks,
        gates=reports,
        admitted=[host for host in HOSTS if all(host in door for door in doors)],
    ), {name: marks[name] + text for name, text in changes.items()}


def hunk(package, path, old, new):
    """Return the unified diff of one file, its line endings shown as ``\\n``."""
    sides = [[line + "\n" for line in re.split(r"\r\n|\n|\r", text)] for text in (old, new)]
    return "".join(difflib.unified_diff(*sides, f"pristine/{package}/{path}", f"site/{package}/{path}"))


def declared(entry, version):
    """Return the result for an engine that is not there yet: the family's texts, labelled as declared."""
    family = family_of(entry, version)
    if family is None:
        return not_applicable(entry, version)
    lines = []
    for rules in family["files"]:
        lines.append(f"--- declared for {entry['package']} {version}: {entry['package']}/{rules['path']}")
        for item in rules.get("imports", []):
            lines.append(f"+from {item['module']} import {item['name']}")
        for item in rules.get("definitions", []):
            lines += [f"@@ below {item['after']}"] + [f"+{line}" for line in item["text"].splitlines()]
        for edit in rules["edits"]:
            lines.append(f"@@ {edit['scope']}")
            lines += [f"-{line}" for line in edit["find"].splitlines()]
            lines += [f"+{line}" for line in edit["replace"].splitlines()]
    return result(
        entry,
        "applied",
        "declared: the engine is not installed yet, nothing was compared",
        version=version,
        family=family["name"],
        files=[rules["path"] for rules in family["files"]],
        hunks="\n".join(lines) + "\n",
    )
