"""The real SGLang under a real systemd: what the scripted server cannot vouch for. Needs SGLANG_TEST_ENGINES."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
from deployment import variables_of, wait_for


@pytest.fixture
def host(real_engine, make_host):
    """Return a root whose server is the real one, run by root and not by an account."""
    if real_engine is None:
        pytest.skip("no engine to adopt: SGLANG_TEST_ENGINES names no directory with a built SGLang 0.5.9")
    host = make_host(
        sglang_engine_python=real_engine["python"],
        sglang_server_user="",
        sglang_server_tp_size=2,
        sglang_server_unit="sglang-real",
        sglang_server_stop_timeout=60,
        sglang_verify_timeout=180,
    )
    # The real model has its known answers.
    del host.variables["sglang_verify_known_answers"]
    return host


def test_life_of_a_real_server(host):
    """Deploy, deploy again, kill a scheduler, restart, stop: one release, named workers, nothing left."""
    host.run("deploy", variant="fewchan_fusion", timeout=280).succeeded()
    release = host.current
    pid = host.serves(release)
    assert len(host.workers()) == 2
    for worker in host.workers():
        assert host.launch()["expect"]["env"].items() <= variables_of(worker).items()
        assert os.stat(f"/proc/{worker}").st_uid == 0
    outcome = host.run("deploy", variant="fewchan_fusion").succeeded()
    assert outcome.recap["changed"] == 0 and host.serves(release) == pid

    # As the OOM killer does: the parent lives on and answers nobody, or the other rank's failure ends it.
    os.kill(host.workers()[0], signal.SIGKILL)
    event = wait_for(lambda: host.ledger("restart"), "it is started again", 40)[-1]
    assert event["process"].startswith(("sglang::scheduler", "server")) and event["reason"]
    wait_for(lambda: not host.port_is_free(), "it listens", 120)
    assert host.serves(release) != pid and host.unit("NRestarts") == "0"

    # The port is open before the warm-up is over.
    log = pathlib.Path(host.root, "current", "logs", "server.log")
    ready = "The server is fired up and ready to roll!"
    wait_for(lambda: ready in log.read_text(errors="replace"), "the ready line of the restarted server", 60)
    host.run("stop").succeeded()
    host.nothing_runs()
