"""Lint rules about launch flags: known, of the right kind, not set twice, not without effect."""

from __future__ import annotations

import json

from ansible.module_utils.sglang_api_key import names_secret
from ansible.module_utils.sglang_lint_rules import rule
from ansible.module_utils.sglang_managed_flags import MANAGED
from ansible.module_utils.sglang_variant_flags import cast
from ansible.module_utils.sglang_variant_schema import near

# Declared and parsed, read nowhere, in every release of the table.
IGNORED = {"num-continuous-decode-steps": "is parsed and read nowhere in SGLang 0.5.8 to 0.5.23"}
RENAMED = {
    "cuda-graph-max-bs": ("cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill"),
    "cuda-graph-bs": ("cuda-graph-bs-decode", "cuda-graph-bs-prefill"),
    "enable-flashinfer-allreduce-fusion": ("flashinfer-allreduce-fusion-backend",),
    "flashinfer-allreduce-fusion-backend": ("enable-flashinfer-allreduce-fusion",),
    "speculative-draft-model": ("speculative-draft-model-path",),
}
# What the parsers take and the server dies of, or reads as something else.
LEAST = {
    **dict.fromkeys(("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"), 1),
    **dict.fromkeys(("max-running-requests", "max-total-tokens", "max-prefill-tokens", "context-length"), 1),
    **dict.fromkeys(("cuda-graph-max-bs", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill"), 1),
    **dict.fromkeys(("dp-size", "pp-size", "ep-size", "page-size", "stream-interval"), 1),
    "chunked-prefill-size": -1,
    "num-continuous-decode-steps": 1,
}
# Greater than the first, less than the second.
BETWEEN = {
    "mem-fraction-static": (0, 1),
    "schedule-conservativeness": (0, float("inf")),
    "watchdog-timeout": (0, float("inf")),
}


def cast_flags(args, table):
    """Return the flags with each value cast to its declared type; false, null and what cannot be cast stay as given."""
    result = {}
    for flag, value in args.items():
        record = table.get(flag)
        try:
            result[flag] = cast(value, record) if record else value
        except ValueError:
            result[flag] = value
        if isinstance(result[flag], dict):
            result[flag] = json.dumps(result[flag], sort_keys=True)
    return result


def given(variant):
    """Yield (flag, value) of what reaches the command line."""
    for flag, value in variant["args"].items():
        if value is not False and value is not None:
            yield flag, value


def origin(variant, flag):
    """Return where a flag's value came from."""
    return variant["origins"].get(f"args.{flag}", "unknown")


@rule("flag-unknown", "error", "The engine's release has no such flag.")
def unknown(variant, _patches, context):
    """A flag that no name of this release matches and that was not renamed."""
    for flag, _value in given(variant):
        if context.flags.get(flag) or successors(flag, context):
            continue
        span = context.flags.span(flag)
        where = f"known from {span[0]} to {span[1]}" if span else "known in no release"
        advice = near(flag, context.flags.names()) or f"remove args.{flag}"
        message = f"--{flag} is no flag of SGLang {context.engine}, set by {origin(variant, flag)}"
        yield message, f"{where}; read from the parser of {context.flags.release}", advice


def successors(flag, context):
    """Return the names that took over from a flag and that this release has."""
    return [item for item in RENAMED.get(flag, ()) if context.flags.get(item)]


@rule("flag-renamed", "error", "The engine's release has the flag under another name.")
def renamed(variant, _patches, context):
    """A flag that this release lacks, whose successor it has."""
    for flag, _value in given(variant):
        if not context.flags.get(flag) and successors(flag, context):
            names = " or ".join(successors(flag, context))
            span = context.flags.span(flag)
            seen = f"known from {span[0]} to {span[1]}" if span else "known in no release"
            message = f"--{flag} has another name in SGLang {context.engine}, set by {origin(variant, flag)}"
            yield message, seen, f"write {names}"


@rule("flag-value", "error", "The value has the wrong kind or type, or is none of the flag's choices.")
def wrong_value(variant, _patches, context):
    """A value that the release's own parser would refuse."""
    for flag, value in variant["args"].items():
        record = context.flags.get(flag)
        if not record:
            continue
        try:
            cast(value, record)
        except ValueError as error:
            yield f"args.{flag}: --{flag} {error}", f"{value!r}, set by {origin(variant, flag)}", "see docs/variants.md"


@rule("flag-range", "error", "The number is outside of what the flag can mean, although the parser takes it.")
def out_of_range(variant, _patches, context):
    """From 0.5.10 on some of these flags take texts such as 8k, which are left alone."""
    for flag, value in given(variant):
        flag_name = (context.flags.get(flag) or {}).get("alias_of", flag)
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if flag_name in LEAST and not number >= LEAST[flag_name]:
            wanted = f"give {LEAST[flag_name]} or more"
        elif flag_name in BETWEEN and not BETWEEN[flag_name][0] < number < BETWEEN[flag_name][1]:
            low, high = BETWEEN[flag_name]
            wanted = f"give a number above {low}" + (f" and below {high}" if high != float("inf") else "")
        else:
            continue
        yield f"args.{flag} is out of range", f"{value!r}, set by {origin(variant, flag)}", wanted


@rule("flag-deprecated", "warning", "The engine's release still takes the flag and warns.")
def deprecated(variant, _patches, context):
    """A flag marked deprecated in this release's parser."""
    for flag, _value in given(variant):
        record = context.flags.get(flag)
        if record and record.get("deprecated"):
            names = successors(flag, context)
            advice = f"write {' or '.join(names)}" if names else "see the release's own help"
            yield f"--{flag} is deprecated in SGLang {context.engine}", f"set by {origin(variant, flag)}", advice


@rule("flag-ignored", "warning", "The flag is parsed and has no effect.")
def ignored(variant, _patches, _context):
    """A flag that cannot be the reason of any measured difference."""
    for flag, _value in given(variant):
        if flag in IGNORED:
            yield f"--{flag} has no effect: it {IGNORED[flag]}", f"set by {origin(variant, flag)}", "leave it out"


@rule("flag-managed", "error", "The flag is an input of the deployment and not of a variant.")
def managed(variant, _patches, _context):
    """A flag that the deployment renders itself; a secret has a rule of its own."""
    for flag, _value in given(variant):
        if flag in MANAGED and not names_secret(flag):
            yield f"args.{flag} is set by the deployment", f"set by {origin(variant, flag)}", f"use {MANAGED[flag]}"


@rule("flag-secret", "error", "A secret on the command line can be read by every user of the host.")
def secret(variant, _patches, _context):
    """A secret among the flags; its value is not shown."""
    for flag, _value in given(variant):
        if names_secret(flag):
            yield (
                f"args.{flag} would show a secret in the process list",
                f"set by {origin(variant, flag)}",
                "give it as a file",
            )


@rule("flag-twice", "error", "Two names of one flag are set.")
def twice(variant, _patches, context):
    """Two spellings of the same flag; the parser takes the last one in silence."""
    seen = {}
    for flag, value in given(variant):
        record = context.flags.get(flag) or {}
        name = record.get("alias_of", flag)
        if name in seen:
            yield (
                f"args.{flag} and args.{seen[name]} are the same flag",
                f"the second is {value!r}",
                f"keep {name} only",
            )
        seen[name] = flag
