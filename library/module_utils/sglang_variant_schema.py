"""The shape of a catalogue entry, and what is wrong with one that has another shape.

Pure functions for the controller. Every refusal is a finding (``sglang_findings``) that names the key.
"""

from __future__ import annotations

import difflib
import json
import re

from ansible.module_utils.sglang_findings import finding, summary
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
# What rules need to know about the launch and the host. Nothing declared is null, empty or 0.
LAUNCH = {
    "host": {"type": "str"},
    "port": {"type": "raw"},
    "model_path": {"type": "str"},
    "has_api_key": {"type": "bool"},
    "api_key_problem": {"type": "str", "no_log": False},
    "gpu_count": {"type": "int"},
    "compute_capability": {"type": "str"},
    "interconnect": {"type": "str", "choices": ["pcie", "nvlink"]},
    "gpu_memory_gib": {"type": "float"},
    "nccl_version": {"type": "str"},
    "server_env": {"type": "list", "elements": "str"},
    "allow_experimental": {"type": "bool"},
}
# The arguments of the action, and of the module file that documents it.
ARGUMENTS = {
    "name": {"type": "raw", "required": True},
    "catalogue": {"type": "dict", "required": True},
    "base": {"type": "dict", "default": {}},
    "host": {"type": "dict", "default": {}},
    "overrides": {"type": "dict", "default": {}},
    "patch_dir": {"type": "path"},
    "engine_version": {"type": "str", "required": True},
    "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
    "tp_size": {"type": "int", "required": True},
    "launch": {"type": "dict", "default": {}, "options": LAUNCH},
    "force": {"type": "bool", "default": False},
    "against": {"type": "str"},
    "explain": {"type": "bool", "default": False},
}
TYPES = {"str": str, "dict": dict, "list": list}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]\Z")
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
    return finding("lint", rule, "error", message, evidence, advice)


def near(word, known):
    """Return advice that offers the nearest known word, whatever its case; empty where none is near."""
    lower = {item.lower(): item for item in known}
    hits = difflib.get_close_matches(str(word).lower(), lower, n=1, cutoff=0.6)
    return f"the nearest is {lower[hits[0]]!r}" if hits else ""


def matches(engine, specifier):
    """Return whether an engine version lies in a range such as ``>=0.5.10,<0.5.14``; an empty range holds all."""
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
        values = sections.get(section) if isinstance(sections, dict) else None
        for key, value in values.items() if isinstance(values, dict) else ():
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


def check_given(where, given):
    """Return every finding for host base or the operator's single values."""
    return check_options(where, given, VALUES) + check_values(where, given)


def check_launch(launch, tp_size):
    """Return every finding for what is declared about the launch, beyond its types."""
    found = []
    if tp_size < 1:
        advice = "give the number of GPUs that the model is spread over"
        found.append(refuse("tp-size", "sglang_server_tp_size is less than 1", str(tp_size), advice))
    if any(not NAME.match(name) for name in launch.get("server_env") or []):
        found.append(
            refuse(
                "env-name", "sglang_server_env must be a dict of names and values", advice="see group_vars/all/main.yml"
            )
        )
    capability = launch.get("compute_capability") or ""
    if capability and not CAPABILITY.match(capability):
        advice = "write it as nvidia-smi does, for example 12.0, or leave it empty where it is not known"
        found.append(refuse("compute-capability", "sglang_compute_capability is none", repr(capability), advice))
    if (launch.get("gpu_memory_gib") or 0) < 0:
        seen, advice = str(launch["gpu_memory_gib"]), "give the GiB of one GPU, or 0 where it is not known"
        found.append(refuse("gpu-memory", "sglang_gpu_memory_gib is negative", seen, advice))
    if launch.get("nccl_version"):
        try:
            Version(launch["nccl_version"])
        except InvalidVersion:
            advice = (
                "write it as NCCL prints it, for example 2.29.7, or leave it empty for the one that the engine pins"
            )
            found.append(refuse("nccl-version", "sglang_nccl_version is no version", launch["nccl_version"], advice))
    return found


def check_dotted(names, known):
    """Return a finding for each variable whose name has a dot after the name of a dict, which nothing would read.

    :param names: of all variables. :param known: ``known(name)`` tells whether a variable is a dict.
    """
    found = []
    for name in sorted(str(item) for item in names):
        head, *keys = re.split(r"[.\[]", name)
        if not keys or not known(head):
            continue
        value = "..."
        for key in reversed(keys):
            value = {key.strip("]'\""): value}
        advice = f"write -e '{json.dumps({head: value})}'"
        found.append(
            refuse("dotted-name", f"-e {name}=... sets nothing: a dot does not reach into {head}", advice=advice)
        )
    return found


def check_entry(name, entry):
    """Return every finding for one catalogue entry."""
    found = check_options(name, entry, ENTRY) + check_values(name, entry)
    if isinstance(entry, dict):
        parts = entry.get("by_engine")
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            found += check_values(f"{name}.by_engine[{index}]", part)
        if not (entry.get("factor") or entry.get("parts")):
            advice = "name what it changes or combines"
            found.append(refuse("variant-required", f"{name} lacks 'factor' or 'parts'", advice=advice))
    return found
