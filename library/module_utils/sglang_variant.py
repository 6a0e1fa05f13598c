"""Resolve a variant: catalogue entry, its parents, the host's base and the operator's single values become one flat dict.

Runs on the controller only. Pure functions: no file, no host, no Ansible. Every refusal is a finding (``sglang_findings``), and all of
them are collected before :class:`VariantError` is raised.
"""

from __future__ import annotations

import difflib
import re

from ansible.module_utils.sglang_findings import errors, finding, summary
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

SECTIONS = ("nccl", "env", "args")
RUNGS = ("lint", "precheck", "probe", "canary", "load", "verify", "benchmark")
EXPECT = {"effect": {"type": "str", "required": True}, "source": {"type": "str", "required": True}}
# The shape of host base, of the operator's single values and of one by_engine part.
VALUES = {
    "nccl": {"type": "dict"},
    "env": {"type": "dict"},
    "args": {"type": "dict"},
    "patches": {"type": "list", "elements": "str"},
}
# One catalogue entry, in the words of an Ansible argument spec. docs/variants.md shows it; an unknown key fails.
ENTRY = {
    "summary": {"type": "str", "required": True},
    "purpose": {"type": "str", "required": True},
    "factor": {"type": "str"},
    "parts": {"type": "list", "elements": "str"},
    "extends": {"type": "list", "elements": "str"},
    **VALUES,
    "by_engine": {
        "type": "list",
        "elements": "dict",
        "options": {"engines": {"type": "str", "required": True}, **VALUES},
    },
    "engines": {"type": "str"},
    "expect": {"type": "dict", "required": True, "options": EXPECT},
    "rungs": {"type": "list", "elements": "str", "choices": RUNGS, "required": True},
}
TYPES = {"str": str, "dict": dict, "list": list}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
# Set by the deployment itself; another value would break how releases and processes are found.
RESERVED = {
    "PYTHONPATH": "it puts the release first on Python's path",
    "PYTHONHOME": "it would hide the engine's own packages",
    "SPT_NOENV": "verify reads the workers' environment",
    "SGLANG_DEPLOY_RELEASE": "it marks the processes of a release",
}


class VariantError(ValueError):
    """A variant that cannot be resolved. ``findings`` holds every reason."""

    def __init__(self, findings):
        super().__init__(summary(findings))
        self.findings = findings


def refuse(rule, message, evidence="", advice=""):
    """Return an error finding of the lint rung."""
    return finding("lint", rule, "error", f"{message}.", evidence, advice)


def near(word, known):
    """Return advice that offers the nearest known word, whatever its case; empty where none is near."""
    lower = {item.lower(): item for item in known}
    hits = difflib.get_close_matches(str(word).lower(), lower, n=1, cutoff=0.6)
    return f"the nearest is {lower[hits[0]]!r}" if hits else ""


def matches(engine, specifier):
    """Return whether an engine version lies in a range such as ``>=0.5.10,<0.5.14``. An empty range holds every version."""
    return SpecifierSet(specifier or "").contains(Version(engine).public, prereleases=True)


def check_options(where, value, options):
    """Return findings for one dict against nested options: unknown key, missing key, wrong type, wrong choice."""
    found = []
    if not isinstance(value, dict):
        return [refuse("variant-type", f"{where} must be a dict, not {type(value).__name__}", repr(value))]
    for key, item in value.items():
        if key not in options:
            hint = near(key, options) or f"known keys: {', '.join(options)}"
            found.append(refuse("variant-key", f"unknown key {key!r} in {where}", advice=hint))
            continue
        found += check_option(f"{where}.{key}", item, options[key])
    for key, option in options.items():
        if option.get("required") and value.get(key) in (None, "", [], {}):
            found.append(refuse("variant-required", f"{where} lacks {key!r}", advice=f"give {where}.{key}"))
    return found


def check_option(where, item, option):
    """Return findings for one value against its option."""
    if item is None:
        return []
    if not isinstance(item, TYPES[option["type"]]):
        kind = type(item).__name__
        return [
            refuse(
                "variant-type", f"{where} must be a {option['type']}, not {kind}", repr(item), "see docs/variants.md"
            )
        ]
    found = []
    if "options" in option:
        parts = item if isinstance(item, list) else [item]
        for index, part in enumerate(parts):
            name = f"{where}[{index}]" if isinstance(item, list) else where
            found += check_options(name, part, option["options"])
    elif option.get("elements") == "str":
        for index, part in enumerate(item):
            if not isinstance(part, str) or not part:
                found.append(refuse("variant-type", f"{where}[{index}] must be a non-empty str", repr(part)))
            elif part not in option.get("choices", (part,)):
                hint = near(part, option["choices"]) or f"one of {', '.join(option['choices'])}"
                found.append(refuse("variant-choice", f"{where}[{index}] is unknown", repr(part), hint))
    if where.endswith("engines") and isinstance(item, str):
        try:
            SpecifierSet(item)
        except InvalidSpecifier:
            found.append(
                refuse(
                    "variant-engines",
                    f"{where} is no version range",
                    repr(item),
                    "write for example '>=0.5.10,<0.5.14'",
                )
            )
    return found


def check_values(where, sections):
    """Return findings for names and values of nccl, env and args that no engine could take."""
    found = []
    for section in SECTIONS:
        for key, value in (sections.get(section) or {}).items():
            name = f"{where}.{section}.{key}"
            found += check_flag(name, key, value) if section == "args" else check_variable(name, section, key, value)
    return found


def check_variable(name, section, key, value):
    """Return findings for one environment variable."""
    if not isinstance(key, str) or not NAME.match(key):
        return [
            refuse(
                "env-name", f"{name}: {key!r} is no name of an environment variable", advice="use letters, digits and _"
            )
        ]
    if section == "nccl" and not key.startswith("NCCL_"):
        hint = near(key, ("NCCL_" + key.upper(),)) or f"move {key} to env"
        return [refuse("env-section", f"{name}: the nccl section takes names that start with NCCL_", key, hint)]
    if section == "env" and key.startswith("NCCL_"):
        return [
            refuse("env-section", f"{name}: an NCCL variable belongs in the nccl section", key, f"move {key} to nccl")
        ]
    if key in RESERVED:
        return [refuse("env-reserved", f"{name} is set by the deployment: {RESERVED[key]}", advice=f"leave {key} out")]
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        kind = type(value).__name__
        return [
            refuse(
                "env-value",
                f"{name} must be a text or an integer, not {kind}",
                repr(value),
                "quote it, write 1 or 0 for on or off",
            )
        ]
    if "\0" in str(value):
        return [
            refuse("env-value", f"{name} holds a NUL byte, which no environment can hold", repr(value), "remove it")
        ]
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return [refuse("env-value", f"{name} is not valid UTF-8 text", ascii(value), "remove the lone surrogate")]
    return []


def check_flag(name, key, value):
    """Return findings for one launch flag: its spelling and the kind of its value."""
    if not isinstance(key, str) or not FLAG.match(key):
        plain = re.sub(r"[^a-z0-9]+", "-", str(key).lower()).strip("-")
        return [
            refuse("flag-name", f"{name}: {key!r} is no flag name", advice=f"write {plain!r}, without dashes in front")
        ]
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(value, list) and (isinstance(item, (bool, list, dict)) or item is None):
            return [
                refuse(
                    "flag-value", f"{name}: a list holds texts and numbers only", repr(value), "give each as one text"
                )
            ]
        if isinstance(item, str) and "\0" in item:
            return [
                refuse("flag-value", f"{name} holds a NUL byte, which no argument can hold", repr(item), "remove it")
            ]
        if not isinstance(item, (str, int, float, bool, dict, type(None))):
            return [
                refuse(
                    "flag-value",
                    f"{name} cannot be a {type(item).__name__}",
                    repr(item),
                    "give text, number or boolean",
                )
            ]
    return []


def check_name(name, catalogue, what="variant"):
    """Raise VariantError where the name is empty or not in the catalogue, with the nearest name and the list."""
    names = ", ".join(sorted(catalogue))
    if not isinstance(name, str) or not name.strip():
        raise VariantError([refuse("variant-name", f"{what} is empty", repr(name), f"give one of: {names}")])
    if name not in catalogue:
        hint = "; ".join(part for part in (near(name, catalogue), f"known: {names}") if part)
        raise VariantError([refuse("variant-name", f"{what} {name!r} is not in the catalogue", advice=hint)])


def lineage(name, catalogue):
    """Return the names that a variant is made of, parents first, each once.

    :raises VariantError: a parent is unknown, the chain has a circle, or an entry has a wrong shape.
    """
    order = []

    def visit(item, trail):
        if item in trail:
            circle = " -> ".join([*trail[trail.index(item) :], item])
            raise VariantError(
                [refuse("variant-circle", f"{item}.extends runs in a circle", circle, "remove one extends")]
            )
        if item in order:
            return
        found = check_options(item, catalogue[item], ENTRY)
        if not found:
            found = check_values(item, catalogue[item])
            for index, part in enumerate(catalogue[item].get("by_engine") or []):
                found += check_values(f"{item}.by_engine[{index}]", part)
            if not (catalogue[item].get("factor") or catalogue[item].get("parts")):
                found.append(
                    refuse(
                        "variant-required",
                        f"{item} lacks 'factor' or 'parts'",
                        advice="name what it changes or combines",
                    )
                )
        if found:
            raise VariantError(found)
        for parent in catalogue[item].get("extends") or []:
            check_name(parent, catalogue, f"{item}.extends:")
            visit(parent, [*trail, item])
        order.append(item)

    visit(name, [])
    return order


def layer(entry, engine):
    """Return {path: value} that one entry sets itself for an engine version, and the patches."""
    values, patches = {}, []
    parts = [entry, *(part for part in entry.get("by_engine") or [] if matches(engine, part["engines"]))]
    for part in parts:
        for section in SECTIONS:
            values.update({f"{section}.{key}": value for key, value in (part.get(section) or {}).items()})
        patches += part.get("patches") or []
    return values, patches


def compose(name, catalogue, engine):
    """Return ({path: (value, origin)}, patches) of a variant with its parents.

    :raises VariantError: two parents give different values and the variant itself sets none.
    """
    entry = catalogue[name]
    own, own_patches = layer(entry, engine)
    merged, patches, found = {}, [], []
    for parent in entry.get("extends") or []:
        values, more = compose(parent, catalogue, engine)
        patches += more
        for path, (value, origin) in values.items():
            if path in merged and str(merged[path][0]) != str(value) and path not in own:
                seen = f"{merged[path][1]}: {merged[path][0]!r}, {origin}: {value!r}"
                found.append(
                    refuse(
                        "variant-conflict",
                        f"{name} combines two values of {path}",
                        seen,
                        f"set {path} in {name} itself",
                    )
                )
            merged[path] = (value, origin)
    if found:
        raise VariantError(found)
    merged.update({path: (value, name) for path, value in own.items()})
    return merged, list(dict.fromkeys(patches + own_patches))


def engine_version(text):
    """Return the engine's version; :raises VariantError: it is no version."""
    try:
        return Version(str(text)).public
    except InvalidVersion:
        advice = "declare the engine as its package says, for example 0.5.9"
        raise VariantError([refuse("engine-version", "engine_version is no version", repr(text), advice)]) from None


def resolve(name, catalogue, base, overrides, engine):
    """Return ``(variant, unset)``: the dict of docs/architecture.md, and {path: origin} of what a null took away.

    :param base: ``{nccl, env, args}`` of the host or group; the variant wins over it.
    :param overrides: the same shape, from ``-e``; wins over everything.
    :param engine: declared SGLang version.
    :raises VariantError: with every reason found.
    """
    if not isinstance(catalogue, dict) or not catalogue:
        raise VariantError(
            [
                refuse(
                    "variant-type", "the catalogue must be a dict of variants", advice="see group_vars/all/variants.yml"
                )
            ]
        )
    engine = engine_version(engine)
    check_name(name, catalogue)
    names = lineage(name, catalogue)
    found = []
    for where, given in (("base", base), ("override", overrides)):
        wrong = check_options(where, given or {}, VALUES)
        found += wrong or check_values(where, given or {})
    if found:
        raise VariantError(found)
    values, patches = layer(base or {}, engine)
    final = {path: (value, "base") for path, value in values.items()}
    composed, more = compose(name, catalogue, engine)
    final.update(composed)
    values, last = layer(overrides or {}, engine)
    final.update({path: (value, "override") for path, value in values.items()})
    entry = catalogue[name]
    ranges = dict.fromkeys(catalogue[item]["engines"] for item in names if catalogue[item].get("engines"))
    variant = {
        "name": name,
        "summary": entry["summary"],
        "nccl": {},
        "env": {},
        "args": {},
        "patches": list(dict.fromkeys(patches + more + last)),
        "engines": ",".join(ranges),
        "origins": {},
    }
    unset = {}
    for path in sorted(final):
        value, origin = final[path]
        section, key = path.split(".", 1)
        if value is None:
            unset[path] = origin
            continue
        variant[section][key] = value if section == "args" else str(value)
        variant["origins"][path] = origin
    return variant, unset


def difference(one, other):
    """Return {path: {name of one: value, name of other: value}} for what differs; null stands for "not set".

    Patches appear under the path ``patches``.
    """
    left, right = one["name"], other["name"] if other["name"] != one["name"] else other["name"] + " (against)"
    result = {}
    for section in SECTIONS:
        for key in sorted({*one[section], *other[section]}):
            pair = one[section].get(key), other[section].get(key)
            if pair[0] != pair[1]:
                result[f"{section}.{key}"] = {left: pair[0], right: pair[1]}
    if one["patches"] != other["patches"]:
        result["patches"] = {left: one["patches"], right: other["patches"]}
    return result


def refused(findings, force=False):
    """Return the findings as they stand after the operator's explicit override, which turns lint errors into warnings."""
    if not force or not errors(findings):
        return findings
    return [
        {**item, "level": "warning", "message": item["message"] + " Overridden by force."}
        if item["level"] == "error"
        else item
        for item in findings
    ]
