"""A release is built whole in one call: by the state built, or in passing by the call that compares."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from ansible.module_utils import sglang_ledger, sglang_release_build, sglang_release_compare
from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_patching import load_entries

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "patches"))
import shapes  # noqa: E402

from .conftest import ENGINE, MODEL  # noqa: E402

CATALOGUE = pathlib.Path(__file__).parents[3] / "roles/sglang_patches/files"
GUARD = "site/sglang/srt/layers/communicator.py"
NAMES = ["sm120_allreduce_fusion", "flashinfer_sm120_gate"]
KEY, TOKEN = "sk-0123456789abcdefghij", "hf_0123456789abcdefghij"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return the declared engine: a real interpreter that finds a package of SGLang's shape."""
    root = tmp_path / "engine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    (site,) = (root / "lib").glob("python3*/site-packages")
    shapes.write(site, "sglang", "0.5.9", shapes.SGLANG["0.5.9"])
    info = site / "sglang-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")
    known = {**ENGINE, "python": str(root / "bin/python3"), "site": str(site)}
    for module in (sglang_release_compare, sglang_release_build):
        monkeypatch.setattr(module, "describe_engine", lambda declared: dict(known, **declared))
        monkeypatch.setattr(module, "describe_model", lambda declared: dict(MODEL, **declared))
    return known


@pytest.fixture
def whole(engine):
    """Return the parameters of a release that is built whole."""
    patches = {"entries": load_entries(NAMES, CATALOGUE), "engine_version": "0.5.9"}
    launch = {"provider": "supervisor", "model_path": "/models/none", "port": 31999, "tp_size": 2, "api_key": KEY}
    launch["env"] = {"HF_TOKEN": TOKEN}
    return {
        "engine": {"mode": "adopt"}, "model": {"source": "existing"}, "record": {"variant": {"name": "baseline"}},
        "files": {"site/sitecustomize.py": "x = 1\n"}, "patches": patches, "launch": launch,
    }  # fmt: skip


def asked(host):
    """Return the id that a release of this host's variant would get."""
    return host.compare()["release"]["id"]


def events(host):
    return [item["event"] for item in sglang_ledger.read(host.root)[0]]


def test_one_call_makes_patches_writes_and_seals(host, engine, whole):
    release = asked(host)
    done = host.ok("built", release=release, diff=True, **whole)
    path = host.path(release)
    assert done["changed"] and done["release"]["state"] == "built"
    assert "_is_sm120_supported" in (path / GUARD).read_text()
    launch = json.loads((path / "launch.json").read_text())
    assert launch["argv"][0] == engine["python"] and launch["release"] == release
    assert launch["expect"]["packages"] == {"sglang": f"{path}/site/sglang"}
    manifest = store.read_manifest(str(path))
    assert manifest["record"]["engine"]["version"] == "0.5.9" and manifest["record"]["variant"] == {"name": "baseline"}
    assert store.changed_files(str(path), manifest) == []
    assert [item["state"] for item in done["patches"]] == ["applied", "not_exercised"]
    assert events(host) == ["compared", "created", "built"]
    headers = [str(item.get("after_header", item.get("prepared", "")[:3])) for item in done["diff"]]
    assert headers[:3] == [str(path), f"{path}/site/sitecustomize.py", "---"]
    assert f"{path}/launch.json" in headers
    again = host.ok("built", release=release, **whole)
    assert not again["changed"] and "sealed already" in again["msg"]


def test_secrets_come_back_nowhere(host, whole):
    release = asked(host)
    done = host.ok("built", release=release, diff=True, **whole)
    assert KEY not in json.dumps(done) and TOKEN not in json.dumps(done)
    assert done["invocation"]["module_args"]["patches"]["entries"] == NAMES
    kept = [item for item in pathlib.Path(host.root).rglob("*") if item.is_file() and KEY.encode() in item.read_bytes()]
    assert [item.parent.name for item in kept] == ["secrets"] and kept[0].stat().st_mode & 0o777 == 0o600
    assert host.path(release).joinpath("launch.json").stat().st_mode & 0o777 == 0o640
    refused = host.call("built", release=release, **{**whole, "launch": {**whole["launch"], "port": "x"}})
    assert refused["failed"] and "port" in refused["msg"] and KEY not in json.dumps(refused)


def test_check_mode_shows_all_and_writes_nothing(host, whole):
    release = host.call("compared", check=True, variant="baseline", inputs={"v": 1})["plan"]["release"]["id"]
    dry = host.call("built", check=True, diff=True, release=release, **whole)
    text = json.dumps(dry["diff"])
    assert (
        dry["changed"] and "site/sitecustomize.py" in text and "launch.json" in text and "_is_sm120_supported" in text
    )
    assert not pathlib.Path(host.root).exists()


def test_refused_patch_names_its_rung_and_the_next_try_starts_anew(host, engine, whole):
    guard = pathlib.Path(engine["site"]) / "sglang/srt/layers/communicator.py"
    before = guard.read_text()
    guard.write_text(before.replace("_is_sm90_supported", "_is_sm91_supported"))
    release = asked(host)
    refused = host.call("built", release=release, **whole)
    assert refused["failed"] and refused["rung"] == "patches" and "No patch was applied" in refused["msg"]
    assert host.compare()["unfinished"] == [release]
    guard.write_text(before)
    (host.path(release) / "site/left.py").write_text("")
    host.ok("built", release=release, **whole)
    assert not (host.path(release) / "site/left.py").exists()


def test_secrets_go_into_no_log_of_the_host(host, whole, monkeypatch):
    logged = []
    monkeypatch.setattr(AnsibleModule, "log", lambda module, *args, **named: logged.append(str((args, named))))
    host.ok("built", release=asked(host), **whole)
    assert not [text for text in logged if KEY in text or TOKEN in text]


@pytest.mark.parametrize("bad", [{"checks": {"port": "x"}}, {"patches": {}, "keep": 0}, {"patches": {"env": {}}}])
def test_what_is_refused_first_does_not_show_the_secrets_of_the_rest(host, whole, bad):
    refused = host.call("compared", variant="baseline", inputs={"v": 1}, **{**whole, **bad})
    assert refused["failed"] and KEY not in json.dumps(refused) and TOKEN not in json.dumps(refused)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"launch": {"model_path": "/m", "args": {"tp-size": 2}}}, "sglang_server_tp_size"),
        ({"launch": {"model_path": "/m", "user": "no-such-user"}}, "no account 'no-such-user'"),
        ({"launch": {}}, "patches: they need launch"),
        ({"engine": {}}, "launch: it needs engine and model"),
        ({"files": {"site/sitecustomize.py": "x ="}}, "no valid python"),
    ],
)
def test_bad_input_is_refused_by_name(host, whole, change, words):
    refused = host.call("built", release=asked(host), **{**whole, **change})
    assert refused["failed"] and words in refused["msg"]


def test_only_two_states_take_what_builds(host, whole):
    refused = host.call("active", release="20260101T000000Z-x-0123456789ab", launch=whole["launch"])
    assert refused["failed"] and "it came with state=active" in refused["msg"] and KEY not in json.dumps(refused)


def compared(host, whole, check=False, **args):
    """Compare with everything that builds; return the result, which did not fail."""
    args = {"variant": "baseline", "inputs": {"v": 1}, **whole, **args}
    result = host.call("compared", check=check, diff=True, **args)
    assert not result.get("failed"), result["msg"]
    return result


def test_comparison_builds_in_passing_once(host, whole):
    first = compared(host, whole)
    plan = first["plan"]
    assert first["changed"] and plan["release"]["built"] and plan["release"]["state"] == "built" and not plan["in_sync"]
    assert f"{plan['release']['path']}/launch.json" in json.dumps(first["diff"]) and KEY not in json.dumps(first)
    assert host.ok("reported")["info"]["lock"]["run"]["id"] == "run-1", "the lock stays with the run"
    second = compared(host, whole)
    assert not second["changed"] and second["plan"]["release"]["id"] == plan["release"]["id"]
    assert events(host).count("built") == 1


def test_comparison_leaves_to_the_build_what_stands_in_the_way(host, engine, whole):
    checks = {"root": host.root, "engine": {"mode": "adopt", "python": engine["python"]}, "port": 31999}
    checks.update(device="cpu", user="no-such-user", python_range="")
    for reason in (
        {"check": True},
        {"checks": checks},
        {"engine": {"mode": "adopt", "present": False}},
        {"launch": {**whole["launch"], "args": {"tp-size": 2}}},
    ):
        result = compared(host, whole, **reason)
        assert not result["changed"] and not result["plan"]["release"]["built"], reason
    refused = host.call("built", release=result["plan"]["release"]["id"], **{**whole, **reason})
    assert refused["failed"] and "sglang_server_tp_size" in refused["msg"]
