"""The module with a scripted server: verdicts, what the live server is spared, and that nothing is left."""

from __future__ import annotations

import json
import os
import pathlib
import pwd
import signal
import subprocess
import sys
import threading
import time

import pytest
from ansible.module_utils import sglang_canary_live, sglang_proc
from ansible.module_utils.sglang_canary_run import Canary


def nothing_left(root, result):
    """Check that a canary has no process, port or file any more; the log of a failed one is no trace."""
    assert not [item for item in sglang_proc.scan(str(root.path / "canary")) if sglang_proc.alive(item["state"])]
    assert not sglang_proc.listeners(result["port"])
    folder = root.path / "canary"
    assert [path.name for path in folder.iterdir()] == ["failed.log"] if result["log"] else not folder.exists()
    assert "trace" not in [item["rule"] for item in result["findings"]]


def test_passes_and_leaves_no_trace(root, canary):
    """Few layers, ports of its own, its own marker; the release has no file more than before."""
    release = root.release("aaaa1111")
    before = sorted(str(path) for path in release.rglob("*"))
    result = canary(release)
    assert result["verdict"] == "passed", result
    assert (result["layers"], result["live"], result["changed"]) == (2, None, False)
    assert [item["tokens"] for item in result["generations"]] == [8, 8, 8]
    assert sorted(str(path) for path in release.rglob("*")) == before
    nothing_left(root, result)
    (event,) = root.ledger()
    assert (event["event"], event["verdict"], event["release"]) == ("canary", "passed", release.name)


def test_live_server_is_measured_and_goes_on(root, canary):
    """Before, during and after; its process and its latency stay."""
    pid = root.serve(root.release("aaaa1111"))
    result = canary(root.release("bbbb2222"))
    assert result["verdict"] == "passed", result
    live = result["live"]
    assert live["failures"] == [] and all(live[phase]["requests"] > 0 for phase in ("before", "during", "after"))
    assert sglang_proc.alive(sglang_proc.stat_of(pid, "/proc")["state"])
    nothing_left(root, result)


@pytest.mark.parametrize(
    ("script", "rule", "words"),
    [
        ({"crash": {"phase": "imports", "log": "bad_flag"}}, "bad_flag", "no-such-flag"),
        ({"crash": {"phase": "distributed", "log": "undefined_name"}}, "undefined_name", "NameError"),
        ({"die": {"phase": "warmup", "rank": 0}}, "worker_died", "died"),
        ({"hang": {"phase": "weights", "rank": 0}}, "stalled", "phase weights"),
        ({"generation": {"mode": "silent"}}, "generation_dead", "phase"),
        ({"served_model_name": "other"}, "wrong_model", "other"),
    ],
)
def test_refuses_by_name(root, canary, script, rule, words):
    """The cause is a finding of rung canary, the log is kept, and nothing runs on."""
    silence = {"weights": 1.5} if "hang" in script else {}
    result = canary(root.release("aaaa1111", script), phase_silence=silence, generation_timeout=2)
    assert result["failed"] and result["verdict"] == "refused"
    (found,) = [item for item in result["findings"] if item["level"] == "error"]
    assert (found["rung"], found["rule"]) == ("canary", rule)
    assert words in result["msg"] and pathlib.Path(result["log"]).read_text()
    assert result["log_tail"]
    nothing_left(root, result)


def test_silence_without_work_takes_less_patience(root, canary):
    """Two ranks that wait for a third have used no CPU time; one that computes is not taken for hung."""
    result = canary(root.release("aaaa1111", {"hang": {"phase": "weights", "rank": 0}}), idle_silence=1.5)
    assert result["cause"]["signature"] == "stalled" and "no process works; limit for both 1.5 s" in result["msg"]
    assert result["elapsed"] < 10
    nothing_left(root, result)
    working = root.release("bbbb2222", {"hang": {"phase": "weights", "rank": 0, "works": 4}})
    assert canary(working, idle_silence=1.5)["verdict"] == "passed"


def test_proof_of_activation_refuses(root, canary):
    """A variable that the workers do not hold, and an argument that is not in force."""
    wanted = root.release(
        "aaaa1111",
        {"server_info": {"attention_backend": "other"}},
        flags=["--attention-backend", "torch_native"],
        args={"attention-backend": "torch_native"},
        env={"A": "2"},
    )
    result = canary(wanted)
    rules = {item["rule"] for item in result["findings"] if item["level"] == "error"}
    assert rules == {"env-different", "attention-backend"}
    nothing_left(root, result)


def test_stops_where_it_hurts(root, canary):
    """An answer may take no time at all: the canary is ended long before it is ready."""
    root.serve(root.release("aaaa1111"))
    slow = root.release("bbbb2222", {"phases": {"weights": 60}})
    result = canary(slow, live_floor=0.0001, live_factor=0.001)
    assert result["verdict"] == "disturbed" and result["elapsed"] < 40
    assert "[canary/live-hurt]" in result["msg"]
    nothing_left(root, result)


def test_a_live_server_that_dies_by_itself_is_named(root, canary):
    """A live server may die of its own while a canary runs; whoever reads the refusal learns which process."""
    root.serve(root.release("aaaa1111"))
    (worker,) = [item for item in sglang_proc.scan(str(root.path)) if item["role"] == "scheduler"]

    def kill():
        end = time.monotonic() + 20
        while not (root.path / "canary").exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(worker["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    result = canary(root.release("bbbb2222"))
    thread.join()
    assert result["failed"] and result["verdict"] in ("disturbed", "refused")
    (found,) = [item for item in result["findings"] if item["rule"] == "live-died"]
    assert found["evidence"] == sglang_proc.describe(worker)
    assert "[canary/live-died]" in result["msg"]
    nothing_left(root, result)


def test_live_server_that_does_not_answer_is_not_watched(root, canary):
    """It cannot be hurt; the operator is told."""
    root.serve(root.release("aaaa1111", {"generation": {"mode": "error"}}))
    result = canary(root.release("bbbb2222"))
    assert result["verdict"] == "passed" and result["live"] is None
    assert [item["rule"] for item in result["findings"] if item["level"] == "warning"] == ["live-silent"]


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ({"generation": {"mode": "silent"}}, [], "0 of 5 requests for 4 tokens were answered within 1 s"),
        ({"token_seconds": 0.1}, [], "too slow to measure"),
        ({}, ["--api-key", "a-key-of-the-test"], "asks for another API key"),
    ],
)
def test_live_server_that_cannot_be_measured_keeps_its_protection(root, canary, monkeypatch, script, flags, words):
    """The busiest server is the one that is hurt first; nothing is started beside it."""
    monkeypatch.setattr(sglang_canary_live, "LIMIT", 1.0)
    root.serve(root.release("aaaa1111", script, flags=flags))
    result = canary(root.release("bbbb2222"), live_interval=0.1)
    assert result["failed"] and result["verdict"] == "refused" and result["port"] is None
    assert "[canary/live-unmeasured]" in result["msg"] and words in result["msg"]
    assert not (root.path / "canary").exists()


def test_no_room(root, canary):
    """Refused with the figure, or reported; nothing is started."""
    release = root.release("aaaa1111")
    result = canary(release, keep_mb=10**9)
    assert result["failed"] and result["verdict"] == "no_room" and "free MiB" in result["msg"]
    assert result["port"] is None
    reported = canary(release, keep_mb=10**9, no_room="report")
    assert "failed" not in reported and reported["verdict"] == "no_room" and not reported["room"]["fits"]


def test_check_mode_looks_and_starts_nothing(root, canary):
    """Also where the release is not built yet."""
    release = root.release("aaaa1111")
    result = canary(release, check=True)
    assert result["verdict"] == "planned" and result["room"]["fits"]
    assert canary(root.path / "releases" / "none", check=True)["verdict"] == "planned"
    assert not (root.path / "ledger.jsonl").exists() and not (root.path / "canary").exists()


def test_one_part_of_several_is_not_exercised(root, canary):
    """A server over two hosts cannot be tried on one."""
    result = canary(root.release("aaaa1111", args={"nnodes": 2}))
    assert result["verdict"] == "not_exercised" and result["findings"][0]["level"] == "info"


def test_what_a_killed_canary_left_is_removed(root, canary):
    """Files and processes of an earlier one go before the next one starts."""
    left = root.path / "canary" / "releases" / "old"
    left.mkdir(parents=True)
    (left / "launch.json").write_text("{}")
    result = canary(root.release("aaaa1111"))
    assert result["verdict"] == "passed"
    nothing_left(root, result)


MODULE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import conftest, sglang_canary
from ansible.module_utils import basic
with conftest.patched_arguments(basic, json.loads(sys.argv[2])):
    sglang_canary.main()
"""


def living(root):
    """Return the living processes of a root's canary."""
    return [item for item in sglang_proc.scan(str(root.path / "canary")) if sglang_proc.alive(item["state"])]


@pytest.fixture
def killed(root, repository):
    """Return ``killed(number, script)``: a canary whose workers wait was there when a signal ended its module."""

    def kill(number, script):
        release = root.release("aaaa1111", {"phases": {"weights": 60}, **script})
        given = {"root": str(root.path), "release": str(release), "device": "cpu", "overhead_mb": 50, "keep_mb": 50}
        command = [sys.executable, "-c", MODULE, str(repository / "tests"), json.dumps(given)]
        module = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + 30
        while "scheduler" not in [item["role"] for item in living(root)]:
            assert time.monotonic() < end and module.poll() is None
            time.sleep(0.02)
        os.killpg(module.pid, number)
        return module.wait(20)

    return kill


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_module_that_is_told_to_end_cleans_up(root, killed, number):
    """As when its controller dies: also workers that set themselves apart, and no file is left but the log."""
    assert killed(number, {"orphans": True, "setsid": True}) == 128 + number
    assert not living(root)
    assert [path.name for path in (root.path / "canary").iterdir()] == ["failed.log"]


def test_module_that_is_killed_takes_the_canary_along(root, killed, canary):
    """Also a worker that has not asked the kernel yet to end with its parent."""
    assert killed(signal.SIGKILL, {"orphans": True}) == -signal.SIGKILL
    end = time.monotonic() + 10
    while living(root):
        assert time.monotonic() < end, living(root)
        time.sleep(0.02)
    assert canary(root.release("bbbb2222"))["verdict"] == "passed"


def test_stop_ends_what_is_left_of_a_canary(root, killed, run_module):
    """Workers that left the group of a killed one are known by their marker."""
    killed(signal.SIGKILL, {"orphans": True, "setsid": True})
    left = {item["pid"] for item in living(root) if item["role"] == "scheduler"}
    given = {"state": "stopped", "root": str(root.path), "provider": "supervisor"}
    assert left <= set(run_module("sglang_service", given, check=True)["stopped"]) and living(root)
    result = run_module("sglang_service", given)
    assert result["changed"] and left <= set(result["stopped"]) and not living(root)
    assert not run_module("sglang_service", given)["changed"]


def test_room_that_an_earlier_canary_takes_is_got_back_first(root, killed, canary):
    """A refusal for want of room would keep it for ever."""
    killed(signal.SIGKILL, {"orphans": True, "setsid": True})
    assert living(root)
    canary(root.release("bbbb2222"), keep_mb=10**9, no_room="report")
    assert not living(root)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"layers": 0}, "sglang_canary_layers"), ({"max_tokens": 1}, "sglang_canary_max_tokens")],
)
def test_inputs_that_make_no_sense(root, canary, given, words):
    """The message names the input and the rule."""
    result = canary(root.release("aaaa1111"), **given)
    assert result["failed"] and words in result["msg"] and "at least" in result["msg"]


@pytest.mark.parametrize("text", ["{}", '{"num_hid'])
def test_model_that_does_not_count_its_layers(root, canary, text):
    """It cannot be made small, so it is not tried; the message names the file."""
    (root.path / "model" / "config.json").write_text(text)
    result = canary(root.release("aaaa1111"))
    assert result["failed"] and result["verdict"] == "refused" and "config.json" in result["msg"]


@pytest.mark.parametrize("user", [None, "nobody"])
def test_launch_of_a_canary_is_not_for_everybody(root, user):
    """As that of a release: its environment may hold a token."""
    if user and os.geteuid():
        pytest.skip("another account needs root")
    tried = Canary(str(root.path), str(root.path / "releases" / "x-aaaa1111"))
    tried.prepare(user)
    launch = {"argv": ["/bin/true"], "env": {}, "cwd": tried.path, "user": user, "log": f"{tried.path}/log"}
    try:
        tried.start(launch, 0)
        seen = os.stat(f"{tried.path}/launch.json")
        assert seen.st_mode & 0o777 == 0o640
        assert seen.st_uid == (pwd.getpwnam(user).pw_uid if user else os.geteuid())
    finally:
        tried.sweep()


def test_root_that_is_too_long_for_sockets(root, canary, monkeypatch):
    """SGLang's sockets lie below the run directory; a path that they cannot have is refused before the start."""
    from ansible.module_utils import sglang_canary_run

    monkeypatch.setattr(sglang_canary_run, "_MAX_TMP", len(os.fsencode(str(root.path))))
    result = canary(root.release("aaaa1111"))
    assert result["failed"] and "too long" in result["msg"]
    assert not (root.path / "canary").exists()
