"""Resolve a variant: catalogue entry, parents, the host's base and the operator's single values become one flat dict.

Runs on the controller only. Pure functions: no file, no host, no Ansible. The reasons of a refusal are collected and
raised together as :class:`VariantError`.
"""

from __future__ import annotations

from ansible.module_utils.sglang_findings import errors
from ansible.module_utils.sglang_variant_flags import FlagTable
from ansible.module_utils.sglang_variant_schema import (
    SECTIONS,
    VariantError,
    check_entry,
    check_given,
    matches,
    near,
    refuse,
)
from packaging.version import InvalidVersion, Version


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
        found = check_entry(item, catalogue[item])
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


def agree(path, one, other, flags):
    """Return whether two values of a path are one: as text, and those of a flag after the casts of the engine."""
    section, key = path.split(".", 1)
    return flags.same(key, one, other) if section == "args" and flags else str(one) == str(other)


def compose(name, catalogue, engine, flags=None):
    """Return ({path: (value, origin)}, {patch: origin}) of a variant with its parents.

    :param flags: :class:`sglang_variant_flags.FlagTable` of the engine; without it values are compared as texts.
    :raises VariantError: two parents give different values and the variant itself sets none.
    """
    entry = catalogue[name]
    own, own_patches = layer(entry, engine)
    merged, patches, found = {}, {}, []
    for parent in entry.get("extends") or []:
        values, more = compose(parent, catalogue, engine, flags)
        for patch, origin in more.items():
            patches.setdefault(patch, origin)
        for path, (value, origin) in values.items():
            if path in merged and path not in own and not agree(path, merged[path][0], value, flags):
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
    for patch in own_patches:
        patches.setdefault(patch, name)
    return merged, patches


def engine_version(text):
    """Return the engine's version; :raises VariantError: it is no version."""
    try:
        return Version(str(text)).public
    except InvalidVersion:
        advice = "declare the engine as its package says, for example 0.5.9"
        raise VariantError([refuse("engine-version", "engine_version is no version", repr(text), advice)]) from None


def resolve(name, catalogue, base, overrides, engine, host=None, table=None):
    """Return ``(variant, unset)``: the dict of docs/architecture.md, and {path: origin} of what a null took away.

    :param base: ``{nccl, env, args, patches}`` of the group; the variant wins over it.
    :param overrides: the same shape, from ``-e``; wins over everything.
    :param engine: declared SGLang version.
    :param host: the same shape, of one host; wins over the base and not over the variant.
    :param table: of plugins/data/sglang_flags.json, by which parents that write one value differently agree.
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
    base, host, overrides = base or {}, host or {}, overrides or {}
    found = check_given("base", base) + check_given("host", host) + check_given("override", overrides)
    if found:
        raise VariantError(found)
    final, patches = {}, []
    for origin, given in (("base", base), ("host", host)):
        values, more = layer(given, engine)
        final.update({path: (value, origin) for path, value in values.items()})
        patches += [(patch, origin) for patch in more]
    composed, more = compose(name, catalogue, engine, FlagTable(table, engine) if table else None)
    final.update(composed)
    patches += more.items()
    values, last = layer(overrides, engine)
    patches += [(patch, "override") for patch in last]
    final.update({path: (value, "override") for path, value in values.items()})
    entry = catalogue[name]
    ranges = dict.fromkeys(catalogue[item]["engines"] for item in names if catalogue[item].get("engines"))
    variant = {
        "name": name,
        "summary": entry["summary"],
        "nccl": {},
        "env": {},
        "args": {},
        "patches": list(dict.fromkeys(patch for patch, _origin in patches)),
        "engines": ",".join(ranges),
        # Of a patch that several name, the first.
        "origins": {f"patches.{patch}": origin for patch, origin in reversed(patches)},
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


def settle(variant, unset):
    """Return ``(variant, unset)`` without the flags that are left out: the command line has no word for them."""
    out = {flag for flag, value in variant["args"].items() if value is False}
    origins = variant["origins"]
    unset = {**unset, **{f"args.{flag}": origins[f"args.{flag}"] for flag in out}}
    args = {flag: value for flag, value in variant["args"].items() if flag not in out}
    origins = {path: origin for path, origin in origins.items() if path not in unset}
    return {**variant, "args": args, "origins": origins}, dict(sorted(unset.items()))


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
    """Return the findings after the operator's explicit override, which turns lint errors into warnings."""
    if not force or not errors(findings):
        return findings
    return [
        {**item, "level": "warning", "message": item["message"] + " Overridden by force."}
        if item["level"] == "error"
        else item
        for item in findings
    ]
