"""Which processes are ours, and what their titles say."""

from __future__ import annotations

import pytest
from ansible.module_utils import sglang_proc

SERVER = ["python", "-m", "sglang.launch_server", "--port", "30000"]


def marked(root, name="r1", **more):
    """Return an environment that carries the marker."""
    return dict({"SGLANG_DEPLOY_RELEASE": f"{root}/releases/{name}"}, **more)


def pids(root, proc):
    """Return the pids of a scan."""
    return [item["pid"] for item in sglang_proc.scan(str(root), str(proc))]


def test_tree_of_the_real_server(root, proc):
    proc.add(10, SERVER, marked(root), ppid=9)
    proc.add(11, ["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"], marked(root), ppid=10)
    proc.add(12, ["sglang::scheduler_TP0"], marked(root), ppid=10)
    proc.add(13, ["sglang::scheduler_TP11"], marked(root), ppid=10)
    proc.add(14, ["sglang::detokenizer"], marked(root), ppid=10)
    proc.add(15, ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], marked(root), ppid=10)
    found = sglang_proc.scan(str(root), str(proc))
    assert [(item["role"], item["tp_rank"]) for item in found] == [
        ("server", None),
        ("resource_tracker", None),
        ("scheduler", 0),
        ("scheduler", 11),
        ("detokenizer", None),
        ("other", None),
    ]
    assert found[0] == {
        "pid": 10,
        "ppid": 9,
        "pgid": 10,
        "sid": 10,
        "state": "S",
        "start": 100,
        "ticks": 0,
        "uid": found[0]["uid"],
        "comm": "python",
        "cmdline": SERVER,
        "release": f"{root}/releases/r1",
        "role": "server",
        "tp_rank": None,
    }


def test_a_fork_that_still_has_the_title_is_no_second_worker(root, proc):
    # Seen on a loaded machine: a scheduler ran a program, and the watcher took the end of the fork for a dead worker.
    proc.add(10, SERVER, marked(root))
    proc.add(12, ["sglang::scheduler_TP0"], marked(root), ppid=10)
    proc.add(13, ["sglang::scheduler_TP0"], marked(root), ppid=12)
    proc.add(14, SERVER, marked(root), ppid=10)
    roles = [item["role"] for item in sglang_proc.scan(str(root), str(proc))]
    assert roles == ["server", "scheduler", "other", "other"]


def test_any_command_of_launch_json_is_the_server(root, proc):
    (root / "releases/r1/launch.json").write_text('{"argv": ["/engine/python", "/r1/serve.py"]}')
    proc.add(10, ["/engine/python", "/r1/serve.py"], marked(root))
    assert sglang_proc.scan(str(root), str(proc))[0]["role"] == "server"


def test_another_root_and_another_prefix_are_not_ours(root, proc):
    proc.add(10, SERVER, {"SGLANG_DEPLOY_RELEASE": f"{root}2/releases/r1"})
    proc.add(11, SERVER, {"SGLANG_DEPLOY_RELEASE": f"{root}/releases"})
    proc.add(12, SERVER, {"MY_SGLANG_DEPLOY_RELEASE": f"{root}/releases/r1"})
    proc.add(13, SERVER, {"NOTE": f"SGLANG_DEPLOY_RELEASE={root}/releases/r1"})
    assert pids(root, proc) == []


def test_one_release_is_not_the_others(root, proc):
    proc.add(10, SERVER, marked(root, "r1"))
    proc.add(11, SERVER, marked(root, "r12"))
    assert pids(root, proc) == [10, 11]
    assert pids(root / "releases/r1", proc) == [10]


def test_a_root_behind_a_link(root, proc, tmp_path):
    (tmp_path / "link").symlink_to(root)
    proc.add(10, SERVER, marked(root))
    assert pids(tmp_path / "link", proc) == [10]


def test_child_without_the_variable_in_the_group(root, proc):
    proc.add(10, SERVER, marked(root))
    proc.add(11, ["sglang::scheduler"], {}, ppid=10, pgid=10)
    assert pids(root, proc) == [10, 11]


def test_child_without_the_variable_in_a_session_that_ours_leads(root, proc):
    proc.add(10, ["sglang::scheduler"], marked(root))
    proc.add(11, ["worker"], {}, ppid=10, pgid=11, sid=10)
    assert pids(root, proc) == [10, 11]


def test_the_service_manager_in_our_session_is_not_ours(root, proc):
    # supervisord leads the session of the server that it starts; a shell may lead the group of one started by hand.
    proc.add(5, ["supervisord"], {}, start=50)
    proc.add(10, SERVER, marked(root), ppid=5, pgid=10, sid=5)
    proc.add(6, ["bash", "run.sh"], {}, start=50)
    proc.add(7, ["other"], {}, ppid=6, pgid=6, start=200)
    proc.add(11, SERVER, marked(root), ppid=6, pgid=6)
    assert pids(root, proc) == [10, 11]


@pytest.mark.parametrize("start, ours", [(100, True), (150, True), (50, False)])
def test_group_whose_leader_died(root, proc, start, ours):
    proc.add(11, ["sglang::detokenizer"], marked(root), pgid=10, start=100)
    proc.add(12, ["sglang::scheduler"], {}, pgid=10, start=start)
    assert (12 in pids(root, proc)) is ours


def test_zombie_is_found_by_its_group_and_named_by_comm(root, proc):
    proc.add(10, SERVER, marked(root))
    proc.add(11, [], {}, state="Z", ppid=10, pgid=10, comm="sglang::schedul")
    zombie = sglang_proc.scan(str(root), str(proc))[1]
    assert (zombie["state"], zombie["role"], zombie["cmdline"]) == ("Z", "scheduler", [])
    assert not sglang_proc.alive(zombie["state"])


def test_name_with_spaces_and_parentheses(root, proc):
    proc.add(10, SERVER, marked(root), comm="a) S 1 (b")
    assert sglang_proc.scan(str(root), str(proc))[0]["comm"] == "a) S 1 (b"


def test_kernel_threads_and_vanishing_processes(root, proc):
    proc.add(3, [], {}, ppid=2)
    (proc.path / "77").mkdir()
    assert pids(root, proc) == []


def test_is_ours(root, proc):
    proc.add(10, SERVER, marked(root))
    proc.add(11, [], {}, ppid=10, pgid=10)
    proc.add(12, [], {})
    assert [sglang_proc.is_ours(pid, str(root), str(proc)) for pid in (10, 11, 12, 13)] == [True, True, False, False]


def test_environ_keeps_any_value(proc):
    proc.add(10, [], {"A": "x=y", "B": "", "C": "ä\n"})
    assert sglang_proc.environ(10, str(proc)) == {"A": "x=y", "B": "", "C": "ä\n"}
    assert sglang_proc.environ(11, str(proc)) == {}


def test_title_is_padded_with_nul(root, proc):
    proc.add(10, ["sglang::scheduler", "", "", ""], marked(root))
    assert sglang_proc.scan(str(root), str(proc))[0]["cmdline"] == ["sglang::scheduler"]


def test_listeners(root, proc):
    proc.add(10, SERVER, marked(root))
    proc.add(11, ["nginx"], {})
    proc.listen(10, 30000, 501)
    proc.listen(11, 30000, 502, "0" * 32, "tcp6")
    proc.listen(None, 30000, 503, "0200007F")
    found = sglang_proc.listeners(30000, str(proc))
    assert [(item["pid"], item["address"], item["release"]) for item in found] == [
        (10, "127.0.0.1", f"{root}/releases/r1"),
        (11, "::", None),
        (None, "127.0.0.2", None),
    ]
    assert found[2]["uid"] == 1000
    assert sglang_proc.listeners(30001, str(proc)) == []
    assert "uid 1000" in sglang_proc.describe(found[2])


def test_a_command_line_is_described_without_its_secrets():
    words = [
        "python",
        "--api-key",
        "hunter2",
        "--admin-api-key=hunter2",
        "--tokenizer-path",
        "/t",
        "--max-total-tokens",
        "8",
    ]
    text = sglang_proc.describe({"pid": 7, "uid": 0, "cmdline": words})
    assert text == "pid 7 (uid 0) python --api-key *** --admin-api-key=*** --tokenizer-path /t --max-total-tokens 8"
    assert "hunter2" not in sglang_proc.describe({"pid": 7, "uid": 0, "cmdline": ["sh", "-c", "HF_TOKEN=hunter2 x"]})


def test_listeners_of_this_machine():
    import os
    import socket

    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as server:
            server.bind((address, 0))
            server.listen()
            found = sglang_proc.listeners(server.getsockname()[1])
            assert [(item["pid"], item["address"]) for item in found] == [(os.getpid(), address)]


def test_no_secret_hides_behind_a_flag_without_a_value_or_inside_one_argument():
    words = ["docker", "run", "--rm", "--token", "s3cret", "--env", "HF_TOKEN=s3cret", "-e", "DB_PASSWD=s3cret"]
    words += ["sh", "-c", "AWS_SECRET_ACCESS_KEY=s3cret serve --skip-tokenizer-init --api-key s3cret"]
    text = sglang_proc.without_secrets(" ".join(words))
    assert "s3cret" not in text and text.count("***") == 5 and "--skip-tokenizer-init --api-key" in text
