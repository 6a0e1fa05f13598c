"""Whether what was asked is what runs: the rules, and the module against a scripted server."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils import sglang_activation_rules as rules

INFO = {
    "tp_size": 8,
    "attention_backend": "flashinfer",
    "disable_custom_all_reduce": True,
    "disable_cuda_graph": False,
    "enable_flashinfer_allreduce_fusion": False,
    "flashinfer_allreduce_fusion_backend": None,
    "mem_fraction_static": 0.88,
    "speculative_algorithm": "EAGLE3",
    "internal_states": [{"avg_spec_accept_length": 2.4}],
}


def launch(**args):
    """Return a launch description that asks for these flags."""
    return {
        "tp_size": 8,
        "expect": {"env": {"NCCL_ALGO": "Ring"}, "args": {k.replace("_", "-"): v for k, v in args.items()}},
    }


def names(found):
    """Return (rule, level) of findings."""
    return [(item["rule"], item["level"]) for item in found]


def test_what_is_in_force_gives_no_finding_however_it_is_written():
    asked = launch(tp="8", mem_fraction_static="0.88", disable_custom_all_reduce=True, attention_backend="flashinfer")
    assert rules.judge(asked, INFO, ["Capture cuda graph end."], "cuda") == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"tp_size": 4}, ("tp-size", "error")),
        ({"attention_backend": "triton"}, ("attention-backend", "error")),
        ({"enable_flashinfer_allreduce_fusion": True}, ("allreduce-fusion", "error")),
        ({"flashinfer_allreduce_fusion_backend": "auto"}, ("allreduce-fusion", "error")),
        ({"mem_fraction_static": 0.9}, ("argument-changed", "warning")),
    ],
)
def test_a_feature_that_is_not_active_fails_by_its_own_name(args, expected):
    assert names(rules.arguments(launch(**args), INFO)) == [expected]


@pytest.mark.parametrize("chosen", ["auto", "trtllm"])
def test_whatever_the_engine_chooses_is_auto(chosen):
    info = dict(INFO, flashinfer_allreduce_fusion_backend=chosen)
    assert rules.arguments(launch(flashinfer_allreduce_fusion_backend="auto"), info) == []


def test_what_the_server_does_not_report_is_never_taken_for_active():
    asked = launch(prefill_attention_backend="triton", schedule_policy="fcfs")
    assert names(rules.arguments(asked, INFO)) == [("argument-unseen", "warning"), ("argument-unseen", "info")]


def test_speculation_is_proven_by_its_accept_length_only():
    asked = launch(speculative_algorithm="EAGLE3")
    assert rules.speculation(asked, INFO) == []
    assert names(rules.speculation(asked, dict(INFO, internal_states=[{"avg_spec_accept_length": 1.0}]))) == [
        ("speculation", "error")
    ]
    assert names(rules.speculation(asked, dict(INFO, internal_states=[]))) == [("speculation", "error")]


def test_a_flag_left_out_is_not_compared():
    assert rules.arguments(launch(disable_custom_all_reduce=False, attention_backend=None), INFO) == []


def test_a_cpu_never_passes_what_it_cannot_run():
    found = rules.judge(launch(), INFO, [], "cpu")
    assert names(found) == [("not-exercised", "info")] * 3
    assert "NCCL_ALGO" in found[0]["evidence"]


def test_the_log_shows_what_the_arguments_do_not():
    line = "Setup Custom allreduce failed with CUDART error: peer access is not supported"
    found = rules.from_log(dict(INFO, disable_custom_all_reduce=False), [line])
    assert names(found) == [("graph-capture", "warning"), ("custom-all-reduce", "warning")]


def test_one_start_is_recorded_once_and_without_keys(start, health, run_module):
    release = start({}, flags=["--api-key", "a-key-of-the-test"])
    assert health(release, api_key="a-key-of-the-test", generations=1)["ready"]
    args = {"release": str(release.path), "device": "cpu", "api_key": "a-key-of-the-test", "evidence": {"seen": 1}}
    assert run_module("sglang_activation", args, check=True)["changed"]
    assert not (release.path / "results").exists()
    first = run_module("sglang_activation", args)
    again = run_module("sglang_activation", args)
    assert (first["changed"], again["changed"], again["record"]) == (True, False, first["record"])
    text = (release.path / "results").glob("verify-*.json").__next__().read_text()
    assert "a-key-of-the-test" not in text
    assert json.loads(text)["seen"] == 1


def test_an_error_refuses_the_release_with_every_finding(start, health, run_module):
    release = start({"server_info": {"tp_size": 1}})
    assert health(release, generations=1)["ready"]
    earlier = {
        "rung": "verify",
        "rule": "env",
        "level": "error",
        "message": "NCCL_PROTO is missing.",
        "evidence": "",
        "advice": "",
    }
    result = run_module("sglang_activation", {"release": str(release.path), "device": "cpu", "findings": [earlier]})
    assert result["failed"]
    assert "NCCL_PROTO is missing." in result["msg"] and "[verify/tp-size]" in result["msg"]
