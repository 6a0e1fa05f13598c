"""The action itself, in a real playbook run that contacts no host."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml
from ansible.release import __version__ as ansible_version
from packaging.version import Version

# Older ones serve the unit tests of modules under old Pythons; playbooks refuse them.
pytestmark = pytest.mark.skipif(Version(ansible_version) < Version("2.19"), reason="a controller has ansible-core 2.19")

PATCHES = "roles/sglang_patches/files"
STRICT = {
    "summary": "s",
    "purpose": "p",
    "factor": "f",
    "expect": {"effect": "e", "source": "s"},
    "rungs": ["lint"],
    "nccl": {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL"},
}
# What each case gives to the action on top of COMMON.
COMMON = {
    "name": "fewchan_fusion",
    "catalogue": "{{ sglang_variants }}",
    "patch_dir": "{{ lookup('ansible.builtin.env', 'REPOSITORY') }}/" + PATCHES,
    "engine_version": "0.5.9",
    "device": "cpu",
    "tp_size": "2",
    "launch": {"host": "127.0.0.1"},
}
CASES = {
    "good": {},
    "strings": {
        "overrides": {"args": {"enable-metrics": "false", "chunked-prefill-size": "8", "trust-remote-code": "yes"}},
        "force": "false",
    },
    "unknown": {"name": "Fewchan_Fusion"},
    "empty": {"name": ""},
    "tree": {"name": "tree"},
    "forced": {"name": "tree", "force": "true"},
    "malformed": {"overrides": {"nccl": {"NCCL_ALGO": True}, "arg": {}}, "force": True},
    "no_patch": {"overrides": {"patches": ["sm120_alreduce_fusion"]}},
    "no_folder": {"patch_dir": "/nonexistent"},
    "gpu": {"device": "cuda", "tp_size": 8},
    "against": {"against": "fewchan", "explain": True},
    "against_unknown": {"against": "fewchn"},
    "against_empty": {"against": ""},
    "host": {"base": {"nccl": {"NCCL_DEBUG": "WARN"}}, "host": {"nccl": {"NCCL_DEBUG": "INFO"}}, "explain": True},
    "secret": {
        "overrides": {"env": {"HF_TOKEN": "hunter2"}, "args": {"api-key": "hunter2"}},
        "against": "fewchan",
        "explain": True,
    },
    "outside": {"launch": {"server_env": ["NCCL_ALGO", "HF_TOKEN"]}},
    "no_dict": {"launch": {"server_env": list("NCCL_ALGO=Tree")}},
    "no_version": {"launch": {"nccl_version": "latest"}},
    "sm_120": {"launch": {"compute_capability": "120"}},
    "no_ranks": {"tp_size": "0", "force": True},
    "less_ranks": {"tp_size": -1},
    "negative": {"launch": {"gpu_memory_gib": "-1"}},
    "interconnect": {"launch": {"interconnect": "infiniband"}},
    "launch_key": {"launch": {"gpus": 8}},
    "strict": {"name": "v", "catalogue": {"v": STRICT}, "device": "cuda", "launch": {"nccl_version": "2.31.1"}},
}


@pytest.fixture(scope="module")
def outcome(repository, tmp_path_factory):
    """Return ``{case: result}`` of one playbook run on a host that does not exist."""
    folder = tmp_path_factory.mktemp("action")
    tasks = []
    for case, given in CASES.items():
        tasks.append({"sglang_variant": {**COMMON, **given}, "register": f"case_{case}", "ignore_errors": True})
    results = ", ".join(f"'{case}': case_{case}" for case in CASES)
    content = "{{ {" + results + "} | to_json }}"
    tasks.append(
        {
            "ansible.builtin.copy": {"content": content, "dest": f"{folder}/results.json", "mode": "0600"},
            "delegate_to": "localhost",
            "check_mode": False,
            "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
        }
    )
    variants = str(repository / "group_vars/all/variants.yml")
    play = {"hosts": "nowhere.invalid", "gather_facts": False, "vars_files": [variants], "tasks": tasks}
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    command = [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "--check", "-i", "nowhere.invalid,"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(repository / "ansible.cfg"), "REPOSITORY": str(repository)}
    done = subprocess.run(
        [*command, str(folder / "play.yml")], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def test_a_good_variant_has_all_parts_of_the_contract(outcome):
    result = outcome["good"]
    assert result["failed"] is False
    assert result["changed"] is False
    assert set(result["variant"]) == {"name", "summary", "nccl", "env", "args", "patches", "engines", "origins"}
    assert result["variant"]["nccl"]["NCCL_MAX_NCHANNELS"] == "2"
    assert [item["name"] for item in result["patches"]] == result["variant"]["patches"]
    assert all(item["digest"] and item["families"] for item in result["patches"])
    assert {item["level"] for item in result["findings"]} <= {"info", "warning"}
    assert "difference" not in result
    assert "explanation" not in result


def test_the_run_names_the_playbooks_own_process(outcome):
    # A refusal is shown whole, below its reason: the processes of the controller are none of it.
    assert {"run" in result for result in outcome.values() if result["failed"]} == {False}
    runs = [result["run"] for result in outcome.values() if not result["failed"]]
    assert len(runs) >= 2
    keys = {"id", "time", "controller", "machine_id", "boot_id", "pid_ns", "pid", "pid_start", "user", "alive"}
    assert all(set(run) == keys for run in runs)
    assert all(run["pid_ns"] and [run["pid"], run["pid_start"]] in run["alive"] for run in runs)
    assert len({run["id"] for run in runs}) == len(runs)
    assert len({(run["pid"], run["pid_start"]) for run in runs}) == 1
    assert runs[0]["pid_start"] > 0


def test_strings_are_cast_to_what_the_flag_declares(outcome):
    variant = outcome["strings"]["variant"]
    fused = {"enable-flashinfer-allreduce-fusion": True}
    assert variant["args"] == {**fused, "chunked-prefill-size": 8, "trust-remote-code": True}
    assert outcome["strings"]["unset"] == {"args.enable-metrics": "override"}
    assert "args.enable-metrics" not in variant["origins"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ["'Fewchan_Fusion'", "the nearest is 'fewchan_fusion'", "known: baseline"]),
        ("empty", ["variant is empty", "fewchan_fusion"]),
        ("tree", ["lint/nccl-algo-collective", "AllGather", "ring;allreduce:tree"]),
        ("malformed", ["override.nccl.NCCL_ALGO", "unknown key 'arg' in override", "the nearest is 'args'"]),
        ("no_patch", ["sm120_alreduce_fusion", "sm120_allreduce_fusion"]),
        ("no_folder", ["patch_dir", "/nonexistent"]),
        ("gpu", ["lint/fusion-gate", "FlashInfer 0.6.3", "pcie_ipc"]),
        ("against_unknown", ["against 'fewchn'", "the nearest is 'fewchan'"]),
        ("against_empty", ["against is empty"]),
        ("outside", ["lint/env-outside", "sets NCCL_ALGO, which", "sglang_variant_overrides"]),
        ("no_dict", ["sglang_server_env must be a dict"]),
        ("no_version", ["sglang_nccl_version is no version", "latest", "2.29.7"]),
        ("sm_120", ["sglang_compute_capability is none", "'120'", "12.0"]),
        ("no_ranks", ["sglang_server_tp_size is less than 1", "0"]),
        ("less_ranks", ["sglang_server_tp_size is less than 1", "-1"]),
        ("negative", ["sglang_gpu_memory_gib is negative"]),
        ("strict", ["lint/nccl-algo-collective", "2.31"]),
    ],
)
def test_a_refusal_is_one_message_with_the_way_out(outcome, case, words):
    result = outcome[case]
    assert result["failed"] is True
    assert result["changed"] is False
    assert [word for word in words if word not in result["msg"]] == []
    assert any(item["level"] == "error" for item in result["findings"])


def test_the_launch_is_typed(outcome):
    assert "interconnect must be one of: pcie, nvlink" in outcome["interconnect"]["msg"]
    assert "gpus" in outcome["launch_key"]["msg"]


def test_group_and_host_are_told_apart(outcome):
    result = outcome["host"]
    assert result["variant"]["nccl"]["NCCL_DEBUG"] == "INFO"
    assert result["variant"]["origins"]["nccl.NCCL_DEBUG"] == "host"
    assert ["nccl.NCCL_DEBUG", "INFO", "host"] in [line.split() for line in result["explanation"].splitlines()]


def test_a_dot_in_a_name_is_answered_with_the_right_words(repository):
    name = "sglang_variant_overrides.nccl.NCCL_ALGO"
    command = [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "explain.yml", "-e", "variant=fewchan"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(repository / "ansible.cfg")}
    done = subprocess.run(
        [*command, "-e", f"{name}=Tree"],
        env=environment,
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"-e {name}=... sets nothing" in done.stderr + done.stdout
    assert """-e '{"sglang_variant_overrides": {"nccl": {"NCCL_ALGO": "..."}}}'""" in done.stderr + done.stdout


def test_force_lets_lint_errors_pass_and_keeps_them_as_warnings(outcome):
    result = outcome["forced"]
    assert result["failed"] is False
    hit = next(item for item in result["findings"] if item["rule"] == "nccl-algo-collective")
    assert hit["level"] == "warning"
    assert hit["message"].endswith("Overridden by force.")


def test_a_secret_in_a_refused_variant_is_shown_nowhere(outcome):
    result = outcome["secret"]
    assert {item["rule"] for item in result["findings"] if item["level"] == "error"} == {"env-secret", "flag-secret"}
    assert "hunter2" not in json.dumps(result)
    assert result["variant"]["env"]["HF_TOKEN"] == "(not shown)"
    assert "args.api-key" in result["explanation"] and "--api-key '(not shown)'" in result["explanation"]


def test_against_gives_the_difference_and_explain_the_text(outcome):
    result = outcome["against"]
    assert set(result["difference"]) == {"args.enable-flashinfer-allreduce-fusion", "patches"}
    lines = result["explanation"].splitlines()
    assert lines[0] == "fewchan_fusion: fewchan and fusion together"
    columns = [line.split() for line in lines]
    assert ["nccl.NCCL_ALGO", "Ring", "baseline"] in columns
    assert ["nccl.NCCL_NTHREADS", "64", "fewchan"] in columns
    assert ["--enable-flashinfer-allreduce-fusion"] in columns
    assert ["fewchan", "not", "set"] in columns
    assert any(line.startswith("  sm120_allreduce_fusion") for line in lines)
    assert any("[lint/nccl-deprecated]" in line for line in lines)


def test_explain_shows_a_refused_variant_and_then_fails(repository):
    command = [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "explain.yml", "-e", "variant=tree"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(repository / "ansible.cfg")}
    done = subprocess.run(
        command, env=environment, cwd=repository, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nccl.NCCL_ALGO" in done.stdout
    assert "error: [lint/nccl-algo-collective]" in done.stdout
