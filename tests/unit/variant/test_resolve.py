"""A variant resolves to one flat dict, and every refusal names the key."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils import sglang_variant_resolve
from ansible.module_utils.sglang_variant_schema import VariantError, check_dotted, matches


def resolve(name, catalogue, base=None, overrides=None, engine="0.5.9", host=None):
    return sglang_variant_resolve.resolve(name, catalogue, base or {}, overrides or {}, engine, host)


def reasons(name, catalogue, **given):
    """Return {rule: text} of a refusal."""
    with pytest.raises(VariantError) as caught:
        resolve(name, catalogue, **given)
    return {item["rule"]: f"{item['message']} {item['evidence']} {item['advice']}" for item in caught.value.findings}


def test_campaigns_variant_holds_both_parts_with_their_origins(catalogue):
    variant, unset = resolve("fewchan_fusion", catalogue, base={"args": {"mem-fraction-static": 0.88}})
    assert variant == {
        "name": "fewchan_fusion",
        "summary": "fewchan and fusion together",
        "nccl": {
            "NCCL_ALGO": "Ring",
            "NCCL_BUFFSIZE": "131072",
            "NCCL_MAX_NCHANNELS": "2",
            "NCCL_MIN_NCHANNELS": "1",
            "NCCL_NTHREADS": "64",
            "NCCL_P2P_LEVEL": "SYS",
            "NCCL_PROTO": "LL",
        },
        "env": {},
        "args": {"enable-flashinfer-allreduce-fusion": True, "mem-fraction-static": 0.88},
        "patches": ["sm120_allreduce_fusion", "flashinfer_sm120_gate"],
        "engines": ">=0.5.8,>=0.5.9",
        "origins": {
            "args.enable-flashinfer-allreduce-fusion": "fusion",
            "args.mem-fraction-static": "base",
            "nccl.NCCL_ALGO": "baseline",
            "nccl.NCCL_BUFFSIZE": "fewchan",
            "nccl.NCCL_MAX_NCHANNELS": "fewchan",
            "nccl.NCCL_MIN_NCHANNELS": "fewchan",
            "nccl.NCCL_NTHREADS": "fewchan",
            "nccl.NCCL_P2P_LEVEL": "baseline",
            "nccl.NCCL_PROTO": "baseline",
            "patches.flashinfer_sm120_gate": "fusion",
            "patches.sm120_allreduce_fusion": "fusion",
        },
    }
    assert unset == {}


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("0.5.9", "enable-flashinfer-allreduce-fusion"),
        ("0.5.13.post1", "enable-flashinfer-allreduce-fusion"),
        ("0.5.14", "flashinfer-allreduce-fusion-backend"),
        ("0.5.23", "flashinfer-allreduce-fusion-backend"),
    ],
)
def test_fusion_takes_the_flag_of_the_engine(catalogue, engine, flag):
    assert list(resolve("fusion", catalogue, engine=engine)[0]["args"]) == [flag]


def test_later_layers_win_and_null_takes_away(make):
    catalogue = {
        "a": make(nccl={"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}),
        "b": make(extends=["a"], nccl={"NCCL_ALGO": None}),
    }
    base = {"nccl": {"NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO"}, "env": {"TZ": "UTC"}}
    variant, unset = resolve("b", catalogue, base=base, overrides={"nccl": {"NCCL_DEBUG": "WARN"}, "env": {"TZ": None}})
    assert variant["nccl"] == {"NCCL_PROTO": "LL", "NCCL_DEBUG": "WARN"}
    assert variant["env"] == {}
    assert variant["origins"] == {"nccl.NCCL_PROTO": "a", "nccl.NCCL_DEBUG": "override"}
    assert unset == {"nccl.NCCL_ALGO": "b", "env.TZ": "override"}


def test_a_patch_has_the_origin_that_named_it_first(make):
    catalogue = {"a": make(patches=["one", "two"]), "b": make(extends=["a"], patches=["two", "three", "base"])}
    given = {"base": {"patches": ["base"]}, "host": {"patches": ["host"]}, "overrides": {"patches": ["one", "last"]}}
    variant, _unset = resolve("b", catalogue, **given)
    assert variant["patches"] == ["base", "host", "one", "two", "three", "last"]
    origins = {"base": "base", "host": "host", "one": "a", "two": "a", "three": "b", "last": "override"}
    assert variant["origins"] == {f"patches.{patch}": origin for patch, origin in origins.items()}


def test_a_host_adds_to_its_group_and_yields_to_the_variant(make):
    catalogue = {"v": make(nccl={"NCCL_ALGO": "Ring"})}
    base = {"nccl": {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree"}, "args": {"max-running-requests": 4}}
    host = {"nccl": {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "NVLS"}, "args": {"max-running-requests": None}}
    variant, unset = resolve("v", catalogue, base=base, host=host)
    assert (variant["nccl"], variant["args"]) == ({"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}, {})
    assert variant["origins"] == {"nccl.NCCL_DEBUG": "host", "nccl.NCCL_ALGO": "v"}
    assert unset == {"args.max-running-requests": "host"}


def test_two_parents_that_disagree_are_refused_unless_the_child_decides(make):
    catalogue = {
        "a": make(nccl={"NCCL_PROTO": "LL"}),
        "b": make(nccl={"NCCL_PROTO": "Simple"}),
        "both": make(extends=["a", "b"]),
        "decided": make(extends=["a", "b"], nccl={"NCCL_PROTO": "LL128"}),
    }
    text = reasons("both", catalogue)["variant-conflict"]
    assert "nccl.NCCL_PROTO" in text
    assert "a: 'LL'" in text
    assert "b: 'Simple'" in text
    assert resolve("decided", catalogue)[0]["nccl"] == {"NCCL_PROTO": "LL128"}


def test_parents_that_agree_are_no_conflict(make):
    catalogue = {
        "a": make(nccl={"NCCL_NTHREADS": 64}),
        "b": make(nccl={"NCCL_NTHREADS": "64"}),
        "c": make(extends=["a", "b"]),
    }
    assert resolve("c", catalogue)[0]["nccl"] == {"NCCL_NTHREADS": "64"}


@pytest.mark.parametrize(
    ("flag", "one", "other", "agree"),
    [
        ("mem-fraction-static", 0.9, "0.90", True),
        ("mem-fraction-static", 0.9, "0.91", False),
        ("trust-remote-code", True, "true", True),
        ("trust-remote-code", "yes", "True", True),
        ("trust-remote-code", True, "false", False),
        ("max-running-requests", "4", 4, True),
        ("max-running-requests", 0, False, False),
        ("max-running-requests", None, 4, False),
        ("max-running-requests", None, None, True),
        ("max-running-requests", "many", 4, False),
        ("served-model-name", "0.9", "0.90", False),
        ("cuda-graph-bs", [1, "2"], ["1", 2], True),
        ("cuda-graph-bs", [1], 1, True),
        ("cuda-graph-bs", [1, 2], [2, 1], False),
        ("no-such-flag", "1", 1, True),
        ("no-such-flag", "true", True, False),
    ],
)
def test_parents_are_compared_after_the_casts_of_the_engine(make, repository, flag, one, other, agree):
    catalogue = {
        "a": make(args={flag: one}),
        "b": make(args={flag: other}),
        "c": make(extends=["a", "b"]),
        "d": make(extends=["c", "a"]),
    }
    table = json.loads((repository / "plugins/data/sglang_flags.json").read_text())
    for name in ("c", "d"):
        if agree:
            sglang_variant_resolve.resolve(name, catalogue, {}, {}, "0.5.9", table=table)
            continue
        with pytest.raises(VariantError) as caught:
            sglang_variant_resolve.resolve(name, catalogue, {}, {}, "0.5.9", table=table)
        assert f"args.{flag}" in caught.value.findings[0]["message"]


@pytest.mark.parametrize("name", ["", "  ", None, 8, ["fewchan"]])
def test_an_empty_name_is_refused_with_the_list(catalogue, name):
    text = reasons(name, catalogue)["variant-name"]
    assert "variant is empty" in text
    assert "fewchan_fusion" in text


@pytest.mark.parametrize(
    ("name", "near"),
    [("Fewchan_Fusion", "fewchan_fusion"), ("fewchn", "fewchan"), ("BASELINE", "baseline"), ("tre", "tree")],
)
def test_a_misspelt_name_is_refused_with_the_nearest(catalogue, name, near):
    text = reasons(name, catalogue)["variant-name"]
    assert repr(name) in text
    assert f"the nearest is '{near}'" in text
    assert "known: baseline" in text


def test_an_unknown_parent_and_a_circle_are_refused(make):
    assert "a.extends: 'bb'" in reasons("a", {"a": make(extends=["bb"]), "b": make()})["variant-name"]
    circle = {"a": make(extends=["b"]), "b": make(extends=["a"])}
    assert "a -> b -> a" in reasons("a", circle)["variant-circle"]


@pytest.mark.parametrize(
    ("keys", "rule", "named"),
    [
        ({"ncl": {}}, "variant-key", "'ncl' in v"),
        ({"by_engine": [{"engines": ">=0.5", "arg": {}}]}, "variant-key", "'arg' in v.by_engine[0]"),
        ({"expect": {"effect": "e", "sources": "s"}}, "variant-key", "'sources' in v.expect"),
        ({"nccl": ["NCCL_ALGO"]}, "variant-type", "v.nccl"),
        ({"patches": "p"}, "variant-type", "v.patches"),
        ({"summary": ""}, "variant-required", "'summary'"),
        ({"factor": None}, "variant-required", "'factor'"),
        ({"rungs": ["lint", "lode"]}, "variant-choice", "v.rungs[1]"),
        ({"engines": "0.5.9"}, "variant-engines", "v.engines"),
        ({"nccl": {"NCCL_ALGO": True}}, "env-value", "v.nccl.NCCL_ALGO"),
        ({"nccl": {"NCCL_ALGO": {"a": 1}}}, "env-value", "v.nccl.NCCL_ALGO"),
        ({"nccl": {"NCCL_ALGO": ["Ring"]}}, "env-value", "v.nccl.NCCL_ALGO"),
        ({"nccl": {"NCCL_NTHREADS": 1.5}}, "env-value", "v.nccl.NCCL_NTHREADS"),
        ({"nccl": {"NCCL_ALGO": "Ring\0"}}, "env-value", "v.nccl.NCCL_ALGO"),
        ({"nccl": {"ALGO": "Ring"}}, "env-section", "v.nccl.ALGO"),
        ({"env": {"NCCL_ALGO": "Ring"}}, "env-section", "v.env.NCCL_ALGO"),
        ({"env": {"A=B": "1"}}, "env-name", "v.env.A=B"),
        ({"env": {"1A": "1"}}, "env-name", "v.env.1A"),
        ({"env": {"": "1"}}, "env-name", "v.env."),
        ({"env": {"A": "\ud800"}}, "env-value", "v.env.A"),
        ({"env": {"PYTHONPATH": "/x"}}, "env-reserved", "v.env.PYTHONPATH"),
        ({"env": {"SGLANG_DEPLOY_RELEASE": "/x"}}, "env-reserved", "v.env.SGLANG_DEPLOY_RELEASE"),
        ({"args": {"--tp-size": 8}}, "flag-name", "v.args.--tp-size"),
        ({"args": {"tp_size": 8}}, "flag-name", "v.args.tp_size"),
        ({"args": {"lora-paths": [None]}}, "flag-value", "v.args.lora-paths"),
        ({"args": {"chat-template": "a\0b"}}, "flag-value", "v.args.chat-template"),
    ],
)
def test_each_malformed_key_is_named(make, keys, rule, named):
    found = reasons("v", {"v": make(**keys)})
    assert rule in found
    assert named in found[rule]


def test_misspelt_keys_are_answered_with_the_nearest(make):
    assert "the nearest is 'nccl'" in reasons("v", {"v": make(ncl={})})["variant-key"]
    assert "write 'tp-size'" in reasons("v", {"v": make(args={"tp_size": 8})})["flag-name"]


@pytest.mark.parametrize("where", ["base", "host", "overrides"])
def test_base_and_overrides_are_checked_alike(catalogue, where):
    label = where.removesuffix("s")
    assert f"'nccle' in {label}" in reasons("baseline", catalogue, **{where: {"nccle": {}}})["variant-key"]
    assert (
        f"{label}.nccl.NCCL_ALGO"
        in reasons("baseline", catalogue, **{where: {"nccl": {"NCCL_ALGO": False}}})["env-value"]
    )


def test_overrides_may_ask_for_a_patch(catalogue):
    variant, _unset = resolve("baseline", catalogue, overrides={"patches": ["flashinfer_sm120_gate"]})
    assert variant["patches"] == ["flashinfer_sm120_gate"]


def test_an_engine_that_is_no_version_is_refused(catalogue):
    assert "'latest'" in reasons("baseline", catalogue, engine="latest")["engine-version"]


def test_all_reasons_are_given_at_once(make):
    found = reasons("v", {"v": make(ncl={}, patches="p")})
    assert set(found) == {"variant-key", "variant-type"}


@pytest.mark.parametrize(
    ("engine", "held"),
    [("0.5.9", True), ("0.5.10.post1", True), ("0.5.13.post1", True), ("0.5.14", False), ("0.5.8", False)],
)
def test_a_range_holds_post_releases(engine, held):
    assert matches(engine, ">=0.5.9,<0.5.14") is held


def test_values_keep_any_text(make):
    text = "quote ' \" back\\slash\nline {{ x }} é"
    variant, _unset = resolve("v", {"v": make(env={"A": text, "B": ""})})
    assert variant["env"] == {"A": text, "B": ""}


def test_difference_names_both_sides(catalogue):
    one, _unset = resolve("fewchan", catalogue)
    other, _unset = resolve("baseline", catalogue)
    assert sglang_variant_resolve.difference(one, other) == {
        "nccl.NCCL_BUFFSIZE": {"fewchan": "131072", "baseline": None},
        "nccl.NCCL_MAX_NCHANNELS": {"fewchan": "2", "baseline": None},
        "nccl.NCCL_MIN_NCHANNELS": {"fewchan": "1", "baseline": None},
        "nccl.NCCL_NTHREADS": {"fewchan": "64", "baseline": None},
    }
    assert sglang_variant_resolve.difference(one, one) == {}
    fused, _unset = resolve("fusion", catalogue)
    assert "patches" in sglang_variant_resolve.difference(fused, other)


def test_force_turns_errors_into_warnings_and_says_so():
    findings = [
        {"level": "error", "message": "A.", "rule": "r", "rung": "lint", "evidence": "", "advice": ""},
        {"level": "info", "message": "B.", "rule": "r", "rung": "lint", "evidence": "", "advice": ""},
    ]
    assert sglang_variant_resolve.refused(findings, False) == findings
    forced = sglang_variant_resolve.refused(findings, True)
    assert [item["level"] for item in forced] == ["warning", "info"]
    assert forced[0]["message"] == "A. Overridden by force."


def test_dots_and_brackets_after_the_name_of_a_dict_are_found():
    names = ["sglang_variant_overrides[nccl]['NCCL_ALGO']", "sglang_variant_base.args", "ansible_eth0.100", "plain", 7]
    found = check_dotted(names, {"sglang_variant_overrides": {}, "sglang_variant_base": {}, "plain": 1}.__contains__)
    assert [item["rule"] for item in found] == ["dotted-name"] * 2
    assert """'{"sglang_variant_base": {"args": "..."}}'""" in found[0]["advice"]
    assert """'{"sglang_variant_overrides": {"nccl": {"NCCL_ALGO": "..."}}}'""" in found[1]["advice"]
