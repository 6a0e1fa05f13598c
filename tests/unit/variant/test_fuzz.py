"""A thousand seeded malformed variants: each is refused, and the message names the key that is wrong."""

from __future__ import annotations

import copy
import json
import random
import string

import pytest
from ansible.module_utils import sglang_lint, sglang_variant_resolve
from ansible.module_utils.sglang_findings import errors, summary
from ansible.module_utils.sglang_variant_schema import ENTRY, VariantError

ENGINES = ("0.5.9", "0.5.13.post1", "0.5.20", "0.5.23")


def word(rng, low=3, high=12):
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(low, high)))


def typo(rng, text):
    """Return the text with one letter dropped, doubled or in the wrong place: never the text itself."""
    while True:
        index = rng.randrange(len(text))
        changed = rng.choice(
            (
                text[:index] + text[index + 1 :],
                text[:index] + text[index] * 2 + text[index + 1 :],
                text[::-1],
                text + "x",
            )
        )
        if changed and changed != text:
            return changed


def wrong_key(rng, entry):
    name = typo(
        rng, rng.choice([item for item in ENTRY if item not in ("summary", "purpose", "expect", "rungs", "factor")])
    )
    while name in ENTRY:
        name += "x"
    entry[name] = {}
    return name


def wrong_section_type(rng, entry):
    name = rng.choice(("nccl", "env", "args", "patches", "extends", "by_engine", "rungs", "expect"))
    entry[name] = rng.choice((word(rng), 7, True, 1.5))
    return name


def wrong_name(rng, entry):
    name = rng.choice((word(rng) + "=" + word(rng), "9" + word(rng), "a b", "a-b", "A\0B", "é" + word(rng)))
    section = rng.choice(("nccl", "env"))
    entry[section] = {**entry.get(section, {}), name: "1"}
    return name if name.isascii() and "\0" not in name else section


def wrong_value(rng, entry):
    name = rng.choice(("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_DEBUG"))
    value = rng.choice((True, False, [], ["Ring"], {}, {"a": 1}, 1.25, "a\0b", "\ud800"))
    entry["nccl"] = {**entry.get("nccl", {}), name: value}
    return name


def unknown_variable(rng, entry):
    name = "NCCL_" + word(rng, 5).upper() + "_Q"
    entry["nccl"] = {**entry.get("nccl", {}), name: "1"}
    return name


def unknown_element(rng, entry):
    name, good = rng.choice((("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")))
    entry["nccl"] = {
        **entry.get("nccl", {}),
        name: rng.choice((typo(rng, good) + "q", "allredoce:ring", "ring;ring", "")),
    }
    return name


def unknown_level(rng, entry):
    entry["nccl"] = {
        **entry.get("nccl", {}),
        "NCCL_P2P_LEVEL": rng.choice(("sys", "Sys", "phb", "SYSX", "", word(rng))),
    }
    return "NCCL_P2P_LEVEL"


def wrong_number(rng, entry):
    name, values = rng.choice(
        (
            ("NCCL_NTHREADS", (0, 1, 63, 96, 1024, "many")),
            ("NCCL_MAX_CTAS", (0, 65, -1, "x")),
            ("NCCL_MIN_NCHANNELS", (0, 65, 1000, "8x")),
            ("NCCL_BUFFSIZE", ("4M", "4e6", "", -1, 0, 1 << 31)),
            ("NCCL_P2P_DISABLE", ("yes", 2, "true")),
            ("NCCL_CUMEM_ENABLE", (7, "on", -1)),
            ("NCCL_DEBUG", ("VERBOSE", "debug", 1)),
        )
    )
    entry["nccl"] = {**entry.get("nccl", {}), name: rng.choice(values)}
    return name


def unknown_flag(rng, entry):
    name = rng.choice(("x", "q")) + word(rng) + "-" + word(rng)
    entry["args"] = {**entry.get("args", {}), name: True}
    return name


def wrong_flag_spelling(rng, entry):
    name = rng.choice(("--tp-size", "tp_size", "TP-size", "-tp", "tp-size ", "tp--size"))
    entry["args"] = {**entry.get("args", {}), name: 8}
    return name


def wrong_flag_value(rng, entry):
    name, values = rng.choice(
        (
            ("mem-fraction-static", ("much", "90%", [0.8], True, 0, 1, -0.5, "nan", 88)),
            ("chunked-prefill-size", ("8k", 1.5, "", [1, 2])),
            ("speculative-num-steps", (0, "-1")),
            ("trust-remote-code", ("maybe", 7, [True])),
            ("attention-backend", ("flashinfre", "Triton", True)),
            ("enable-metrics", ("on please", 2.5)),
        )
    )
    entry["args"] = {**entry.get("args", {}), name: rng.choice(values)}
    return name


def reserved(rng, entry):
    name = rng.choice(("PYTHONPATH", "SPT_NOENV", "SGLANG_DEPLOY_RELEASE", "PYTHONHOME"))
    entry["env"] = {**entry.get("env", {}), name: word(rng)}
    return name


def managed(rng, entry):
    name = rng.choice(("model-path", "host", "port", "api-key", "tp-size", "served-model-name"))
    entry["args"] = {**entry.get("args", {}), name: rng.randint(1, 9)}
    return name


def wrong_parent(rng, entry):
    name = typo(rng, "parent") + "z"
    entry["extends"] = [name]
    return name


def wrong_range(rng, entry):
    text = rng.choice(("0.5.9", "newer", ">=", "=> 0.5", "~0.5"))
    if rng.random() < 0.5:
        entry["engines"] = text
    else:
        entry["by_engine"] = [{"engines": text, "args": {}}]
    return "engines"


def missing_key(rng, entry):
    name = rng.choice(("summary", "purpose", "expect", "rungs", "factor"))
    entry[name] = rng.choice((None, ""))
    return name


def wrong_rung(rng, entry):
    entry["rungs"] = ["lint", word(rng) + "q"]
    return "rungs[1]"


MUTATIONS = (
    wrong_key,
    wrong_section_type,
    wrong_name,
    wrong_value,
    unknown_variable,
    unknown_element,
    unknown_level,
    wrong_number,
    unknown_flag,
    wrong_flag_spelling,
    wrong_flag_value,
    reserved,
    managed,
    wrong_parent,
    wrong_range,
    missing_key,
    wrong_rung,
)


@pytest.fixture(scope="module")
def tables(repository):
    """Return the two tables that lint reads."""
    folder = repository / "plugins/data"
    return {
        "flags": json.loads((folder / "sglang_flags.json").read_text()),
        "nccl": json.loads((folder / "nccl_variables.json").read_text()),
    }


def verdict(entry, engine, parent, tables):
    """Return the refusal's text, or None where the variant passes."""
    try:
        variant, _unset = sglang_variant_resolve.resolve("v", {"v": entry, "parent": parent}, {}, {}, engine)
    except VariantError as error:
        return str(error)
    context = sglang_lint.Context(engine, "cuda", 8, {}, **tables)
    return summary(errors(sglang_lint.lint(variant, [], context)[1])) or None


def test_a_thousand_malformed_variants_are_refused_by_name(make, tables):
    rng = random.Random(20261129)
    parent = make(nccl={"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"})
    plain = make(nccl={"NCCL_DEBUG": "WARN", "NCCL_BUFFSIZE": "4194304"}, args={"trust-remote-code": True})
    for engine in ENGINES:
        assert verdict(plain, engine, parent, tables) is None, "the entry is sound before it is damaged"
    failures = []
    for number in range(1000):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        entry = copy.deepcopy(plain)
        named = mutate(rng, entry)
        text = verdict(entry, rng.choice(ENGINES), parent, tables)
        if text is None or named not in text:
            failures.append((number, mutate.__name__, named, entry, text))
    assert failures == []
