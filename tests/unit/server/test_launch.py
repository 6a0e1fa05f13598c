"""What is written into a release to start its server."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shlex
import stat
import subprocess
import sys

import pytest
from ansible.module_utils import sglang_launch_files, sglang_launcher

KIMI = {
    "trust-remote-code": True,
    "mem-fraction-static": 0.88,
    "num-continuous-decode-steps": 4,
    "disable-custom-all-reduce": True,
}
PROGRAMS = ["launch.json", "launch.py", "watch.py", "policy.py", "probe.py", "newlog.py", "signatures.py"]
ORIGINAL = (
    "-m sglang.launch_server --model-path /shared/kimi-k2.5-int4 --trust-remote-code --tp-size 8 "
    "--mem-fraction-static 0.88 --host 0.0.0.0 --port 8000 --num-continuous-decode-steps 4 --disable-custom-all-reduce"
)


@pytest.fixture
def launch(run_module, tmp_path):
    """Return ``launch(check=False, diff=False, **params)``, which runs the module for one release of a root."""

    def run(check=False, diff=False, **params):
        args = {
            "root": str(tmp_path),
            "release": str(tmp_path / "releases" / "r1"),
            "provider": "supervisor",
            "python": "/opt/ml-env/bin/python3",
            "model_path": "/shared/kimi-k2.5-int4",
            "host": "0.0.0.0",
            "port": "8000",
            "tp_size": "8",
            "args": KIMI,
        }
        return run_module("sglang_launch", dict(args, **params), check=check, diff=diff)

    run.release = tmp_path / "releases" / "r1"
    run.root = tmp_path
    return run


def content(launch):
    """Return launch.json."""
    return json.loads((launch.release / "launch.json").read_text())


def test_the_original_line_comes_out_exactly(launch):
    result = launch()
    assert shlex.join(result["argv"][1:]) == ORIGINAL
    assert content(launch)["argv"] == result["argv"]
    assert result["endpoint"] == "http://127.0.0.1:8000"


def test_served_name_only_where_it_is_set(launch):
    assert "--served-model-name kimi" in shlex.join(launch(served_model_name="kimi")["argv"])
    assert content(launch)["served_model_name"] == "kimi"
    launch()
    assert content(launch)["served_model_name"] == "/shared/kimi-k2.5-int4"


@pytest.mark.parametrize(
    "args, flags",
    [
        ({"a": True, "b": False, "c": None}, ["--a"]),
        ({"a": [1, "two"]}, ["--a", "1", "two"]),
        ({"a": "two words 'q'"}, ["--a", "two words 'q'"]),
        ({"a": ""}, ["--a", ""]),
        ({"a": 0}, ["--a", "0"]),
        ({"a": {"x": [1, True]}}, ["--a", '{"x": [1, true]}']),
        ({"a": "true"}, ["--a", "true"]),
    ],
)
def test_flag_values(args, flags):
    assert sglang_launch_files.flag_list(args) == flags


@pytest.mark.parametrize(
    "args, message",
    [
        ({"--tp-size": 8}, "without leading dashes"),
        ({"mem_fraction_static": 0.8}, "without leading dashes"),
        ({"tp-size": 8}, "use sglang_server_tp_size"),
        ({"tp": 8}, "use sglang_server_tp_size"),
        ({"api-key": "x"}, "use sglang_server_api_key"),
        ({"config": "/etc/sglang.yaml"}, "not for sglang_server_args"),
        ({"stop": []}, "empty list"),
    ],
)
def test_bad_flags_are_named_and_nothing_is_written(launch, args, message):
    result = launch(args=args)
    assert result["failed"] and message in result["msg"]
    assert not launch.release.exists()


@pytest.mark.parametrize("env, message", [({"A-B": "1"}, "not a variable name"), ({"A": "x\0y"}, "NUL")])
def test_bad_variables(launch, env, message):
    result = launch(env=env)
    assert result["failed"] and "sglang_server_env" in result["msg"] and message in result["msg"]


@pytest.mark.parametrize(
    "host, url",
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_endpoint(host, url):
    assert sglang_launch_files.endpoint(host, "8000") == url


def test_our_variables_cannot_be_taken_away(launch):
    launch(env={"PYTHONPATH": "/elsewhere", "SPT_NOENV": "", "SGLANG_DEPLOY_RELEASE": "/x", "OMP_NUM_THREADS": 1})
    assert content(launch)["env"] == {
        "PYTHONPATH": f"{launch.release}/site",
        "SPT_NOENV": "1",
        "SGLANG_DEPLOY_RELEASE": str(launch.release),
        "OMP_NUM_THREADS": "1",
    }


def test_check_mode_diff_and_idempotence(launch):
    dry = launch(check=True, diff=True)
    assert dry["changed"] and dry["written"] == [*PROGRAMS, "supervisor.conf"]
    assert not launch.release.exists()
    wet = launch(diff=True)
    assert wet == dry
    again = launch(diff=True)
    assert not again["changed"] and again["written"] == [] and again["diff"] == []
    changed = launch(diff=True, port=8001)
    assert changed["written"] == ["launch.json"]
    assert '"8000"' in changed["diff"][0]["before"] and '"8001"' in changed["diff"][0]["after"]


def test_a_release_outside_the_root_is_refused(launch, tmp_path):
    result = launch(release=str(tmp_path / "elsewhere" / "r1"))
    assert result["failed"] and "sglang_server_release_path" in result["msg"]


def test_an_unknown_account_is_refused(launch):
    result = launch(user="no-such-account")
    assert result["failed"] and "sglang_server_user" in result["msg"]


def test_tokens_of_the_environment_are_not_shown(launch):
    result = launch(diff=True, env={"HF_TOKEN": "hf_abcdefgh"})
    assert "hf_abcdefgh" not in json.dumps(result)
    launch(env={"HF_TOKEN": "hf_of_yesterday"})
    assert "hf_of_yesterday" not in json.dumps(launch(diff=True, env={"HF_TOKEN": "hf_abcdefgh"}))
    assert content(launch)["env"]["HF_TOKEN"] == "hf_abcdefgh"
    assert stat.S_IMODE(os.stat(launch.release / "launch.json").st_mode) == 0o640


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "abcdefgh/ijklmnop",
    "DB_PASSWD": "hunter2",
    "SSH_PRIVATE_KEY": 'line 1\nof "quotes" and \\backslashes',
    "PIN_TOKEN": 7,
}


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_in_the_diff_whatever_its_form(launch, name):
    value = str(SECRETS[name])
    result = launch(check=True, diff=True, env={name: SECRETS[name], "OMP_NUM_THREADS": 1})
    (text,) = [item["after"] for item in result["diff"] if item["after_header"].endswith("launch.json")]
    shown = json.loads(text)["env"]
    assert shown["OMP_NUM_THREADS"] == "1" and shown[name] == "(not shown)"
    if len(value) > 1:
        assert value not in json.dumps(result) and json.dumps(value)[1:-1] not in text


def test_a_message_holds_no_secret_in_either_form(launch):
    value = SECRETS["SSH_PRIVATE_KEY"]
    for form in (value, json.dumps(value)[1:-1]):
        result = launch(env={"SSH_PRIVATE_KEY": value}, args={form: True})
        assert result["failed"] and "quotes" not in result["msg"]


def test_api_key_is_in_its_file_alone(launch):
    key = "correct-horse-battery"
    result = launch(diff=True, api_key=key)
    (key_file,) = (launch.root / "secrets").iterdir()
    assert key_file.name == "api_key-" + hashlib.sha256(key.encode()).hexdigest()[:12]
    assert result["changed"] and key not in json.dumps(result)
    assert result["argv"][:2] == ["/opt/ml-env/bin/python3", f"{launch.release}/serve.py"]
    assert key_file.read_text() == key + "\n" and stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert content(launch)["env"]["SGLANG_DEPLOY_API_KEY_FILE"] == str(key_file)
    assert all(key not in path.read_text() for path in launch.release.iterdir() if path.is_file())
    assert not launch(api_key=key)["changed"]
    assert launch(api_key=key + "2")["changed"]


def test_two_releases_with_two_keys_start_with_their_own(launch):
    """A later release with another key, served or not, leaves the key of the one before as it is."""
    keys = {"r1": "correct-horse-battery", "r2": "battery-horse-correct"}
    for name, key in keys.items():
        assert not launch(release=str(launch.root / "releases" / name), api_key=key).get("failed")
    (launch.root / "engine" / "sglang").mkdir(parents=True)
    (launch.root / "engine" / "sglang" / "launch_server.py").write_text("import sys; print(sys.argv[-2:])\n")
    for name, key in keys.items():
        release = launch.root / "releases" / name
        env = dict(json.loads((release / "launch.json").read_text())["env"], PYTHONPATH=str(launch.root / "engine"))
        done = subprocess.run(
            [sys.executable, release / "serve.py"], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"['--api-key', '{key}']\n"


@pytest.mark.parametrize(
    "params, message",
    [
        ({"api_key": "short"}, "16 or more"),
        ({"api_key": "has a space in it, long"}, "16 or more"),
        ({"api_key": "correct-horse-battery\n"}, "line ends"),
        ({"api_key": "correct-horse-battery", "api_key_file": "/run/key"}, "exclude each other"),
    ],
)
def test_bad_keys(launch, params, message):
    result = launch(**params)
    assert result["failed"] and message in result["msg"]


def test_serve_gives_the_key_and_redacts_it(tmp_path):
    key = "correct-horse-battery"
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "import sys, logging\n"
        "if __name__ == '__main__':\n"
        "    logging.basicConfig()\n"
        "    logging.warning('args=%s', sys.argv)\n"
        "    logging.warning('%s of %d', 'plain', 2)\n"
        "    print(len(sys.argv), sys.argv[-2], sys.argv[-1] == open(sys.argv[1]).read().strip())\n"
    )
    (tmp_path / "key").write_text(key + "\n")
    (tmp_path / "serve.py").write_text(sglang_launcher.SERVE_PY)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "serve.py"), str(tmp_path / "key")],
        env={"SGLANG_DEPLOY_API_KEY_FILE": str(tmp_path / "key")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "4 --api-key True\n"
    assert key not in done.stderr and "********" in done.stderr and "plain of 2" in done.stderr


def test_launcher_gives_exactly_the_environment(tmp_path):
    value = "100% \"of\" 'it', a=b;c $HOME\nsecond line ä"
    argv = [sys.executable, "-I", "-c", "import os, json; print(json.dumps([dict(os.environ), os.getcwd()]))"]
    (tmp_path / "launch.py").write_text(sglang_launcher.LAUNCH_PY)
    (tmp_path / "launch.json").write_text(json.dumps({"argv": argv, "env": {"AWKWARD": value}, "cwd": str(tmp_path)}))
    command = [sys.executable, "-I", "-S", str(tmp_path / "launch.py")]
    out = subprocess.run(command, env={"LEAK": "1", "PYTHONPATH": "/leak"}, capture_output=True, text=True, check=True)
    env, cwd = json.loads(out.stdout)
    assert cwd == str(tmp_path) and env["AWKWARD"] == value
    assert set(env) - {"LC_CTYPE"} == {"AWKWARD", "PATH", "HOME", "USER", "LANG"}
    assert env["PATH"].split(":")[0] == str(pathlib.Path(sys.executable).parent)


@pytest.fixture
def awkward():
    """Return a launch whose paths hold what the two file formats treat specially."""
    return {
        "argv": ["/opt/my engine/bin/python"],
        "cwd": "/opt/50% sglang/releases/r1",
        "log": "/opt/50% sglang/releases/r1/logs/server.log",
        "release": "r1",
        "user": "sglang",
    }


def test_systemd_unit(awkward):
    unit = sglang_launcher.systemd_unit("sglang-server", awkward, 90)
    lines = unit.splitlines()
    for line in (
        'ExecStart="/opt/my engine/bin/python" "-I" "-S" "/opt/50%% sglang/releases/r1/watch.py"',
        "WorkingDirectory=/opt/50%% sglang/releases/r1",
        "Type=exec",
        "# watch.py keeps the ledger and starts the server as sglang.",
        "Restart=on-abnormal",
        'ExecStopPost=-"/opt/my engine/bin/python" "-I" "-S" "/opt/50%% sglang/releases/r1/watch.py" tell',
        "OOMPolicy=continue",
        "KillMode=mixed",
        "SendSIGKILL=yes",
        "TimeoutStopSec=90",
        "LimitMEMLOCK=infinity",
        "StandardOutput=append:/opt/50%% sglang/releases/r1/logs/server.log",
    ):
        assert line in lines
    assert "as sglang" not in sglang_launcher.systemd_unit("sglang-server", dict(awkward, user=None), 90)


def test_systemd_accepts_the_unit(launch):
    result = launch(provider="systemd", install_unit=True, python=sys.executable)
    assert result["files"] == [*PROGRAMS, "sglang-server.service"]
    assert not result.get("failed"), result


def test_systemd_without_the_operators_word_is_refused_before_the_release_is_used(launch):
    result = launch(provider="systemd", unit="sglang-of-this-test", python=sys.executable)
    assert result["failed"] and "sglang_server_install_unit: true" in result["msg"]


def test_supervisor_program_is_read_back_as_written(awkward):
    import configparser

    text = sglang_launcher.supervisor_program("sglang-server", awkward, 90, 5, 100)
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    program = {name: value.replace("%%", "%") for name, value in parser["program:sglang-server"].items()}
    assert shlex.split(program["command"]) == sglang_launcher.command(awkward["argv"][0], awkward["cwd"])
    assert program["directory"] == awkward["cwd"] and program["stdout_logfile"] == awkward["log"]
    assert (program["autorestart"], program["startretries"], program["killasgroup"]) == ("unexpected", "0", "true")
    assert program["exitcodes"].split(",") == [str(code) for code in range(256)] and program["startsecs"] == "1"
    assert "user" not in program  # launch.py changes it, watch.py keeps the ledger
