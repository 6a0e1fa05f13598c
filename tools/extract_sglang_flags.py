#!/usr/bin/env python3
"""Write plugins/data/sglang_flags.json from the argument parsers of SGLang release packages.

    python tools/extract_sglang_flags.py WHEEL... > plugins/data/sglang_flags.json

Get the packages with ``pip download --no-deps --only-binary :all: sglang==0.5.9``. Nothing of a package is imported:
the parser's calls and the annotated fields are read from the syntax tree, so it needs neither torch nor a GPU.

Result: ``releases`` (oldest first), ``pins`` (torch and FlashInfer of each) and ``flags``: for each, without dashes,
one record for every run of releases in which it means the same:
``{since, until, kind, type, choices, alias_of, deprecated}``.
``kind`` is bare (no value), value, list (several values) or optional (with or without a value).
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile

from packaging.version import Version

SERVER_ARGS = "sglang/srt/server_args.py"
FIELDS = "sglang/srt/arg_groups/fields/"
CHOICES = "sglang/srt/arg_groups/choices.py"


def constants(tree):
    """Return module-level names bound to a literal list, tuple or set of strings."""
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and getattr(node, "value", None) is not None:
            value = literal(node.value, found)
            if isinstance(value, (list, tuple, set)):
                found[target.id] = list(value)
    return found


def literal(node, names):
    """Return the value of a literal, a known constant or a sum of both; None where only known at run time."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left, names), literal(node.right, names)
        return None if left is None or right is None else list(left) + list(right)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def record(keywords, names, kind_of_type, element="str"):
    """Return ``{kind, type, choices, deprecated}`` from the keywords of one argument.

    :param kind_of_type: scalar type of the field, ``list``, or ``str`` for an argument that has no field.
    :param element: type of one value of a list.
    """
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    nargs = literal(keywords["nargs"], names) if "nargs" in keywords else None
    parser = ast.unparse(keywords["type"]) if "type" in keywords else kind_of_type
    choices = literal(keywords["choices"], names) if "choices" in keywords else None
    if (
        "Boolean" in action
        or "store_true" in action
        or "store_false" in action
        or "StoreTrue" in action
        or "store_const" in action
    ):
        kind = "bare"
    elif action in ("DeprecatedAction", "DeprecatedStoreConstAction") and "nargs" not in keywords:
        kind = "bare"  # their own default
    elif nargs in ("+", "*") or isinstance(nargs, int):
        kind = "list"
    elif nargs == "?":
        kind = "optional"
    elif kind_of_type == "list" and "type" not in keywords:
        kind, parser = "list", element
    elif kind_of_type == "bool" and not action and "type" not in keywords:
        kind = "bare"
    else:
        kind = "value"
    text = literal(keywords["help"], names) if "help" in keywords else ""
    return {
        "kind": kind,
        "type": parser if parser in ("int", "float") else "str",
        "choices": sorted(str(item) for item in choices if item is not None) if choices else None,
        "deprecated": "Deprecated" in action or (isinstance(text, str) and "eprecated" in text[:60]),
    }


def calls(tree, names):
    """Yield (flags, record) of every add_argument call in add_cli_args."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name != "add_cli_args":
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                flags = [literal(item, names) for item in node.args]
                flags = [item for item in flags if isinstance(item, str) and item.startswith("--")]
                if flags:
                    keywords = {item.arg: item.value for item in node.keywords}
                    yield negated(flags, keywords), record(keywords, names, "str")


def negated(flags, keywords):
    """Return the flags, with ``--no-x`` for each where the action makes both."""
    if "BooleanOptionalAction" not in ast.unparse(keywords.get("action", ast.Constant(""))):
        return flags
    return flags + [f"--no-{item[2:]}" for item in flags]


def field_type(node):
    """Return (scalar type or ``list``, element type, literal choices) of an annotation such as Optional[List[int]]."""
    text = re.sub(r"^Optional\[(.*)\]$|^(.*?) \| None$", lambda m: m.group(1) or m.group(2), ast.unparse(node))
    if text.startswith("Literal["):
        values = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
        values = [item for item in values if item is not None]
        return type(values[0]).__name__, "str", values
    listed = re.fullmatch(r"[Ll]ist\[(.*)\]", text)
    return ("list", listed.group(1), None) if listed else (text, "str", None)


def fields(tree, names):
    """Yield (flags, record) of every annotated field that the parser is derived from."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        note = node.annotation
        if not isinstance(note, ast.Subscript) or ast.unparse(note.value) not in ("A", "Annotated"):
            continue
        items = note.slice.elts if isinstance(note.slice, ast.Tuple) else [note.slice]
        arg = next((item for item in items[1:] if isinstance(item, ast.Call) and ast.unparse(item.func) == "Arg"), None)
        if arg is None and not any(isinstance(item, (ast.Constant, ast.JoinedStr, ast.BinOp)) for item in items[1:]):
            continue
        keywords = {item.arg: item.value for item in arg.keywords} if arg else {}
        if "no_cli" in keywords and literal(keywords["no_cli"], names):
            continue
        kind, element, choices = field_type(items[0])
        if isinstance(keywords.get("action_kwargs"), ast.Dict):
            more = keywords.pop("action_kwargs")
            keywords.update({literal(key, names): value for key, value in zip(more.keys, more.values)})
        if "type_parser" in keywords:
            keywords["type"] = keywords.pop("type_parser")
        name = (
            literal(keywords["cli_name"], names) if "cli_name" in keywords else "--" + node.target.id.replace("_", "-")
        )
        aliases = literal(keywords["aliases"], names) if "aliases" in keywords else []
        result = record(keywords, names, kind, element)
        if choices and "choices" not in keywords:
            result["choices"] = sorted(map(str, choices))
        yield negated([name, *(aliases or [])], keywords), result


def read_wheel(path):
    """Return (version, pins, {flag: record}) of one release package."""
    with zipfile.ZipFile(path) as wheel:
        members = wheel.namelist()
        metadata = wheel.read(next(item for item in members if item.endswith(".dist-info/METADATA"))).decode()
        sources = {SERVER_ARGS: wheel.read(SERVER_ARGS).decode()}
        for item in members:
            if item == CHOICES or (item.startswith(FIELDS) and item.endswith(".py")):
                sources[item] = wheel.read(item).decode()
    version = re.search(r"^Version: (.+)$", metadata, re.M).group(1).strip()
    pins = {}
    for name, key in (("torch", "torch"), ("flashinfer.python", "flashinfer")):
        hit = re.search(rf"^Requires-Dist: {name}(?:\[[^\]]*\])?\s*\(?==\s*([\w.+]+)", metadata, re.M)
        pins[key] = hit.group(1) if hit else None
    trees = {name: ast.parse(text) for name, text in sources.items()}
    names = {}
    for tree in trees.values():
        names.update(constants(tree))
    found = {}
    for tree in trees.values():
        for flags, result in [*fields(tree, names), *calls(tree, names)]:
            for flag in flags:
                alias = None if flag == flags[0] else flags[0][2:]
                found[flag[2:]] = {**result, "alias_of": alias}
    return version, pins, found


def merge(wheels):
    """Return the whole table: consecutive releases with the same record share one."""
    wheels = sorted(wheels, key=lambda item: Version(item[0]))
    flags = {}
    for index, (version, _pins, found) in enumerate(wheels):
        for flag, item in sorted(found.items()):
            runs = flags.setdefault(flag, [])
            same = runs and {**runs[-1], "since": 0, "until": 0} == {**item, "since": 0, "until": 0}
            if same and runs[-1]["until"] == wheels[index - 1][0]:
                runs[-1]["until"] = version
            else:
                runs.append({"since": version, "until": version, **item})
    compact = {
        flag: [{key: value for key, value in run.items() if value not in (None, False)} for run in runs]
        for flag, runs in sorted(flags.items())
    }
    return {"releases": [item[0] for item in wheels], "pins": {item[0]: item[1] for item in wheels}, "flags": compact}


def main(paths):
    """Print the table as JSON, one flag a line."""
    table = merge([read_wheel(path) for path in paths])
    lines = [f"  {json.dumps(flag)}: {json.dumps(runs)}" for flag, runs in table["flags"].items()]
    print('{"releases": ' + json.dumps(table["releases"]) + ",")
    print('"pins": ' + json.dumps(table["pins"]) + ",")
    print('"flags": {\n' + ",\n".join(lines) + "\n}}")


if __name__ == "__main__":
    main(sys.argv[1:])
