"""The call that compares reads the host as well, where the plan says that something has to change."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from ansible.module_utils import sglang_ledger, sglang_precheck_run

SECRET = "hf_abc\"de'fgh"


@pytest.fixture
def checks(host):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    engine = {"mode": "build", "version": "0.5.9", "root": f"{host.root}/engines", "base_python": sys.executable}
    return {"root": host.root, "engine": engine, "port": number, "device": "cpu", "python_range": "", "engine_mb": 10}


@pytest.fixture
def asked(monkeypatch):
    """Return what the checks were asked for, as ``[(parameters, known engine)]``; the real ones run."""
    calls, real = [], sglang_precheck_run.precheck
    monkeypatch.setattr(
        sglang_precheck_run, "precheck", lambda wanted, known: calls.append((wanted, known)) or real(wanted, known)
    )
    return calls


def compared(host, checks, check=False, **args):
    args = {"variant": "baseline", "inputs": {"args": {"variant": "baseline"}}, **args}
    return host.call("compared", check=check, checks=checks, **args)


def test_host_is_read_where_something_has_to_change(host, checks, asked):
    for check in (True, False):
        result = compared(host, checks, check=check)
        found = result["checks"]
        assert found["verdict"] == {"ok": True, "failures": []} and 0 < found["elapsed"] < 5
        assert "gpu" in [item["rule"] for item in found["findings"]]
    assert len(asked) == 2 and not asked[0][0]["built"]
    release = host.build()
    # Whoever asks has no plan yet: what the plan says counts.
    compared(host, {**checks, "built": False})
    assert asked[2][0]["built"]
    host.ok("active", release=release)
    host.ok("promoted", release=release)
    result = compared(host, checks)
    assert result["plan"]["in_sync"] and result["checks"] is None and len(asked) == 3
    assert host.ok("compared", variant="other")["checks"] is None, "nobody asked for it"


def test_refusal_is_left_to_the_caller_and_the_lock_stays(host, checks):
    result = compared(host, {**checks, "user": "no-such-user"})
    assert not result.get("failed") and result["checks"]["verdict"]["failures"] == ["service-user"]
    assert host.ok("reported")["info"]["lock"]["run"]["id"] == "run-1"


def test_engine_that_the_plan_knows_is_not_asked_again(host, checks, asked):
    compared(host, checks)
    assert asked[0][1] is None, "another engine was compared"
    result = compared(host, checks, engine=checks["engine"])
    assert asked[1][1] == result["plan"]["engine"]


def test_secrets_do_not_show(host, checks):
    result = compared(host, {**checks, "env": {"HF_TOKEN": SECRET, "PIN_TOKEN": 7, "OMP_NUM_THREADS": 1}})
    shown = json.dumps(result)
    assert "abc" not in shown and '"PIN_TOKEN": "(not shown)"' in shown
    assert result["invocation"]["module_args"]["checks"]["env"]["OMP_NUM_THREADS"] == 1
    result = compared(host, {**checks, "port": "many", "env": {"HF_TOKEN": SECRET}})
    assert result["failed"] and "abc" not in json.dumps(result)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"port": "many"}, "checks: argument 'port'"),
        ({"device": "tpu"}, "checks: value of device must be one of: cuda, cpu"),
        ({"portt": 1}, "checks: portt. Supported parameters include"),
        ({"engine": None}, "checks: missing required arguments: engine"),
    ],
)
def test_wrong_checks_are_refused_before_the_lock_is_taken(change, words, host, checks):
    given = {name: value for name, value in {**checks, **change}.items() if value is not None}
    result = compared(host, given)
    assert result["failed"] and words in result["msg"], result["msg"]
    assert host.ok("reported")["info"]["lock"] is None


def test_only_the_comparison_takes_checks(host, checks):
    result = host.call("locked", checks={**checks, "env": {"HF_TOKEN": SECRET}})
    assert result["failed"] and "only compared reads the host" in result["msg"] and "abc" not in json.dumps(result)
    assert host.ok("reported")["info"]["lock"] is None


def test_comparison_that_ends_the_run_gives_the_lock_back(host):
    """Only where nothing has to change: what follows otherwise works under the lock."""
    asked = {"variant": "baseline", "inputs": {"args": {"variant": "baseline"}}, "unlock": True}
    assert not host.ok("compared", **asked)["unlocked"]
    assert host.ok("reported")["info"]["lock"]["run"]["id"] == "run-1"
    host.deploy()
    assert host.ok("compared", **asked)["unlocked"]
    events = [item["event"] for item in sglang_ledger.read(host.root)[0]]
    assert host.ok("reported")["info"]["lock"] is None and events[-2:] == ["compared", "unlocked"]
    assert not host.ok("compared", check=True, **asked)["unlocked"], "check mode holds none"
