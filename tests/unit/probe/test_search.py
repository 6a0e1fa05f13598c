"""The search finds what a made-up machine rewards, within its bounds; the lint keeps out what cannot work."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import yaml
from ansible.module_utils import sglang_nccl_search as search
from ansible.module_utils import sglang_nccl_tuning as tuning
from ansible.module_utils.sglang_nccl_plan import make_plan
from ansible.module_utils.sglang_nccl_session import ProbeError

BASE = {"name": "baseline", "variables": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}}
ROOT = pathlib.Path(__file__).resolve().parents[3]


def machine(fails=()):
    """Return a ``measure`` whose best setting is PROTO=LL,Simple with eight channels."""

    def measure(setting, _effort):
        values, time = setting["variables"], 1.0
        time *= {"LL,Simple": 0.8, "Simple": 1.4}.get(values.get("NCCL_PROTO"), 1.0)
        time *= 0.9 if values.get("NCCL_MIN_CTAS") == "8" else 1.0
        outcome = "hung" if any(values.get(name) == value for name, value in fails) else "ok"
        predicted = dict.fromkeys(("decode", "decode_many", "verify", "prefill"), time)
        return {"outcome": outcome, "message": "", "seconds": 1.0, "predicted": predicted if outcome == "ok" else {}}

    return measure


def run(measure, **more):
    """Return a search that has run."""
    found = search.Search(search.candidates(), BASE, search.PROFILES["mixed"], measure, **more)
    return found, found.run()


def test_finds_the_best_within_its_trials():
    """100 trials of 810 settings find it, the last ones at full length; 60 settings or more are seen."""
    found, rows = run(machine())
    assert found.done <= 100
    assert len(rows) >= 60
    assert rows[0]["score"] == pytest.approx(0.72)
    assert rows[0]["effort"] == 2
    assert rows[0]["variables"]["NCCL_PROTO"] == "LL,Simple"


def test_extensions_keep_algorithm_and_protocol():
    """Of NCCL's own choice, which is a part of every other setting, only further changes are tried."""
    allowed = search.candidates()
    own = next(item for item in allowed if item["variables"] == {})
    found = [item["variables"] for item in search.extensions(own, allowed)]
    assert found
    assert not any({"NCCL_ALGO", "NCCL_PROTO"} & values.keys() for values in found)
    assert {"NCCL_P2P_LEVEL", "NCCL_MIN_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"} <= {key for v in found for key in v}


def test_two_modes_of_small_messages_are_noise():
    """On two H200 the same setting takes 1.51 or 1.63 ms from one process to the next: no gain follows from that."""
    trials = iter(range(10**6))

    def measure(setting, _effort):
        mode = 1.51 if next(trials) % 3 == 0 else 1.63
        prefill = 62.4 if setting["variables"].get("NCCL_PROTO") == "LL" else 26.9
        predicted = {"decode": mode, "decode_many": mode * 1.2, "verify": mode, "prefill": prefill}
        return {"outcome": "ok", "message": "", "seconds": 1.0, "predicted": predicted}

    found, rows = run(measure)
    spread = found.spread()
    assert spread["decode"] == pytest.approx(0.0795, abs=1e-3)
    assert spread["prefill"] == 0
    assert found.noise() == pytest.approx(0.8 * 0.0795, abs=1e-3)
    assert rows[0]["variables"] == {}, "as good as the best, and the simplest"
    found, rows = search.Search(search.candidates(), BASE, {"decode": 1.0}, measure), None
    rows = found.run()
    assert rows[0]["score"] > 1 - max(tuning.NOISE, found.noise()), "decode alone: nothing is better"


@pytest.mark.parametrize("effort", [1, 2])
def test_a_base_too_slow_to_measure_at_length_loses_nothing(effort):
    """Seen with two ranks on one H200: the base took 22 s of its 30 briefly, and more at length."""
    quick = machine()

    def measure(setting, wanted):
        if setting is BASE and wanted >= effort:
            return {"outcome": "slow", "message": "no result within the limit", "seconds": 30.0, "predicted": {}}
        return quick(setting, wanted)

    found, rows = run(measure)
    assert "baseline was measured briefly only: no result within the limit" in found.stopped
    assert rows[0]["score"] == pytest.approx(0.8 if effort == 1 else 0.72) and rows[0]["effort"] == effort - 1
    with pytest.raises(ValueError, match="does not work"):
        run(lambda setting, _effort: measure(setting, 2))


def test_what_fails_is_not_chosen():
    """A setting that hangs ranks last and is not extended."""
    _found, rows = run(machine(fails=[("NCCL_PROTO", "LL,Simple")]))
    assert rows[0]["variables"].get("NCCL_PROTO") != "LL,Simple"
    assert rows[-1]["score"] is None


def test_time_runs_out():
    """No trial starts after the limit; what is known is ranked and its best measured at length."""
    now = iter(range(0, 10000, 10))
    found, rows = run(machine(), clock=lambda: next(now), limit=200.0)
    assert found.done <= 22
    assert rows
    assert found.over()


def test_base_that_does_not_work():
    """Nothing can be compared with a base that fails."""
    with pytest.raises(ValueError, match="baseline"):
        run(machine(fails=[("NCCL_ALGO", "Ring")]))


def test_score():
    """A weighted ratio; a missing figure with weight gives none."""
    one = {"decode": 1.0, "verify": 2.0}
    assert search.score(one, {"decode": 2.0, "verify": 2.0}, {"decode": 1, "verify": 1}) == 0.75
    assert search.score(one, {"decode": 2.0}, {"decode": 1, "verify": 1}) is None
    assert search.score(one, {"decode": 2.0}, {"decode": 1, "verify": 0}) == 0.5


def test_brief_trials_leave_out_what_has_no_weight():
    """Only phases with weight, once each; the last round is the whole plan."""
    plan = make_plan({"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8}, {}, 2)
    less, _budget = search.brief(plan, search.PROFILES["single"], 0)
    assert {(step["phase"], *step["modes"]) for step in less["steps"]} == {("decode", "graph"), ("prefill", "eager")}
    assert search.brief(plan, search.PROFILES["single"], 2)[0] == plan


@pytest.mark.parametrize("profile", ["fast", {"speed": 1}, {"decode": 0}, {"decode": "x"}])
def test_profile_is_checked(profile):
    """A profile that is not known, or weighs nothing, names what there is."""
    with pytest.raises(ProbeError, match="profile: "):
        tuning.weights(profile)


def test_variant_claims_what_was_measured():
    """The entry is one that the catalogue takes, names its evidence, and promises no server speed."""
    times = {"decode": 1.0, "decode_many": 2.0, "verify": 1.5, "prefill": 30.0}
    less = {"decode": 0.95, "decode_many": 1.5, "verify": 1.2, "prefill": 10.0}
    best = {"name": "n", "variables": {"NCCL_PROTO": "LL,Simple"}, "score": 0.8, "predicted": less, "base": times}
    found = {"gpus": ["NVIDIA H200, GPU-1, 580.1"], "nccl": {"version": "2.28.9"}, "trials": 58, "noise": 0.04,
             "spread": {"decode": 0.09}, "beside": True}  # fmt: skip
    entry = tuning.entry({"tp_size": 2, "profile": "mixed", "setting": BASE}, best, found)
    variant = entry["tuned_mixed"]
    assert variant["nccl"] == {"NCCL_PROTO": "LL,Simple"}
    assert "2 x NVIDIA H200, NCCL 2.28.9, 58 trials" in variant["expect"]["source"]
    assert variant["expect"]["source"].endswith("noise 4%, beside a live server")
    assert "decode 1.000 to 0.950 (within the noise); decode_many 2.000 to 1.500; " in variant["expect"]["effect"]
    assert "whether a server gains is not known" in variant["purpose"]
    known = yaml.safe_load((ROOT / "group_vars/all/variants.yml").read_text())["sglang_variants"]["baseline"].keys()
    assert variant.keys() <= known | {"extends", "parts"}


def test_lint_keeps_out_what_cannot_work():
    """On PCIe LL128 alone is refused, and no candidate touches NVLS or an algorithm without AllGather."""
    path = ROOT / "plugins" / "filter" / "sglang_tune.py"
    spec = importlib.util.spec_from_file_location("sglang_tune", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    variant = {"name": "baseline", "nccl": {"NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring"}, "env": {}, "args": {},
               "origins": {}, "patches": [], "engines": ""}  # fmt: skip
    allowed = module.candidates(variant, "0.5.20", "cuda", "8", {})
    assert allowed
    assert all(item["variables"]["NCCL_IB_DISABLE"] == "1" for item in allowed)
    assert not any(item["variables"].get("NCCL_ALGO", "").lower() in ("tree", "nvls") for item in allowed)
    assert not any(name.startswith("NCCL_NVLS") for item in allowed for name in item["variables"])
