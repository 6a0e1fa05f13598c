"""NCCL settings that no variant knows of, each with both outcomes."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_precheck_leftovers import LEFTOVER_CHECKS
from ansible.module_utils.sglang_prechecks import run_checks

from .hosts import SITE, FakeHost

WANTED = {"engine": {"mode": "adopt", "python": "/opt/ml-env/bin/python3"}, "user": "sglang", "env": {}}
UNIT = "/etc/systemd/system/kimi.service"
START = "[Service]\nExecStart=/opt/ml-env/bin/python3 -m sglang.launch_server\n"


def run(host, **change):
    """Return ``{rule: [finding]}``; nothing of this refuses a host."""
    findings, verdict = run_checks({**WANTED, **change}, host, LEFTOVER_CHECKS)
    assert verdict["ok"]
    return {rule: [item for item in findings if item["rule"] == rule] for rule in {item["rule"] for item in findings}}


def test_units_that_start_sglang_with_nccl_settings():
    host = FakeHost()
    host.files[UNIT] = START
    host.files["/etc/systemd/system/other.service"] = "[Service]\nEnvironment=NCCL_ALGO=Tree\nExecStart=/bin/train\n"
    assert "unit-nccl" not in run(host)
    host.files[UNIT] = START + "# NCCL_DEBUG=INFO\nEnvironment=NCCL_ALGO=Ring NCCL_PROTO=LL\n"
    found = run(host)["unit-nccl"]
    assert [item["evidence"] for item in found] == ["NCCL_ALGO=Ring; NCCL_PROTO=LL"]
    assert UNIT in found[0]["message"] and "wins over the variant" in found[0]["advice"]


def test_drop_ins_environment_files_and_supervisor():
    host = FakeHost()
    host.files[UNIT] = START + "EnvironmentFile=-/etc/kimi.env\n"
    host.files["/etc/kimi.env"] = "NCCL_P2P_LEVEL=SYS\n"
    host.files[f"{UNIT}.d/10-nccl.conf"] = "[Service]\nEnvironment=NCCL_DEBUG=INFO\n"
    host.files["/etc/supervisor/conf.d/kimi.conf"] = "[program:sglang]\nenvironment=NCCL_BUFFSIZE=131072\n"
    assert {item["message"].split()[0] for item in run(host)["unit-nccl"]} == {
        "/etc/kimi.env",
        f"{UNIT}.d/10-nccl.conf",
        "/etc/supervisor/conf.d/kimi.conf",
    }


@pytest.mark.parametrize(
    "line",
    [
        "Environment=NCCL_DEBUG=INFO HF_TOKEN=s3cret",
        "Environment=HF_TOKEN=s3cret 'NCCL_DEBUG=INFO' X=s3cret",
        'environment=HF_TOKEN="s3cret",NCCL_DEBUG="INFO",X="s3cret"',
        "ExecStart=/usr/bin/env NCCL_DEBUG=INFO HF_TOKEN=s3cret python3 -m sglang.launch_server --api-key s3cret",
    ],
)
def test_nothing_but_nccl_is_shown_of_a_line(line):
    host = FakeHost()
    host.files[UNIT] = START + line + "\n"
    assert [item["evidence"] for item in run(host)["unit-nccl"]] == ["NCCL_DEBUG=INFO"]


def test_environment():
    host = FakeHost()
    host.environ["NCCL_VERSION"] = "2.28.3-1"
    assert "nccl-environment" not in run(host)
    host.environ["NCCL_DEBUG"] = "INFO"
    host.files["/etc/environment"] = "PATH=/bin\nNCCL_ALGO=Ring\n"
    found = run(host)["nccl-environment"]
    assert [item["evidence"] for item in found] == ["NCCL_DEBUG=INFO", "NCCL_ALGO=Ring"]


def test_nccl_files():
    host = FakeHost()
    host.files["/etc/nccl.conf"] = "# nothing\n\n"
    assert "nccl-conf" not in run(host)
    host.files["/etc/nccl.conf"] += "NCCL_ALGO=Tree\n"
    assert run(host)["nccl-conf"][0]["evidence"] == "NCCL_ALGO=Tree"


def test_start_files_of_the_interpreter():
    host = FakeHost()
    found = run(host)
    assert found["sitecustomize"][0]["evidence"] == "/usr/lib/python3.11/sitecustomize.py"
    assert "sitecustomize-nccl" not in found
    host.files["/usr/lib/python3.11/sitecustomize.py"] += (
        'import os\n# NCCL_X\nos.environ.setdefault("NCCL_ALGO", "Ring")\n'
    )
    host.files[f"{SITE}/nccl.pth"] = 'import os; os.environ["NCCL_PROTO"] = "LL"\n'
    found = run(host)["sitecustomize-nccl"]
    assert [item["message"].split()[0] for item in found] == [
        "/usr/lib/python3.11/sitecustomize.py",
        f"{SITE}/nccl.pth",
    ]
    assert found[0]["evidence"] == "NCCL_ALGO=Ring"
    host.state["present"] = False
    assert "sitecustomize" not in run(host)
    build = {"mode": "build", "base_python": "/usr/bin/python3"}
    assert "sitecustomize-nccl" in run(host, engine=build), "a build stands on that interpreter"
    host.places = SiteError("boom")
    assert run(host, engine=build)["sitecustomize"][0]["level"] == "warning"
