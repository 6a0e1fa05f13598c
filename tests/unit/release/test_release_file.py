"""sglang_release_file: inside the release only, whole or not at all, and never into a sealed one."""

from __future__ import annotations

import os
import stat

import pytest


@pytest.fixture
def write(host, run_module):
    """Return a function that writes into a release under construction; its attribute ``release`` is the directory."""
    plan = host.compare()
    host.ok("created", release=plan["release"]["id"])

    def call(path="site/a.txt", content="text\n", check=False, diff=False, **args):
        args = dict({"release": plan["release"]["path"], "path": path, "content": content}, **args)
        return run_module("sglang_release_file", args, check=check, diff=diff)

    call.release = host.path(plan["release"]["id"])
    return call


def test_written_once(write):
    first, second = write(), write()
    file = write.release / "site" / "a.txt"
    assert (first["changed"], second["changed"]) == (True, False)
    assert file.read_text() == "text\n" and stat.S_IMODE(file.stat().st_mode) == 0o644
    assert first["file"] == second["file"] == str(file)


def test_mode_and_directories_do_not_depend_on_the_umask(write):
    old = os.umask(0o077)
    try:
        write("site/new/deep/a.txt", mode="0640")
    finally:
        os.umask(old)
    assert stat.S_IMODE((write.release / "site" / "new" / "deep").stat().st_mode) == 0o755
    file = write.release / "site" / "new" / "deep" / "a.txt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert write("site/new/deep/a.txt", mode="0600")["changed"] is True
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "path", ["../a", "/etc/a", "site/../../a", "", ".", "site/..", "manifest.json", "./files.json", "out/a"]
)
def test_only_below_the_release(write, path):
    os.symlink(write.release.parent, write.release / "out")
    result = write(path)
    assert result["failed"] and result["msg"].startswith("path:")
    assert sorted(os.listdir(write.release.parent)) == [write.release.name]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [("json", '{"a": 1}', '{"a": }'), ("python", "x = 1\n", "x = = 1\n"), ("none", "x = =", None)],
)
def test_validated_before_anything_is_written(write, kind, good, bad):
    if bad:
        result = write(content=bad, validate=kind)
        assert result["failed"] and f"no valid {kind}" in result["msg"]
        assert not (write.release / "site" / "a.txt").exists()
    assert write(content=good, validate=kind)["changed"]


def test_sealed_release_is_refused_unless_nothing_changes(write, host):
    write("site/sitecustomize.py", "x = 1\n")
    write("launch.json", "{}\n")
    host.ok("built", release=write.release.name)
    assert write("launch.json", "{}\n")["changed"] is False
    for path in ("launch.json", "site/other.py"):
        result = write(path, "[]\n")
        assert result["failed"] and "is built, and a sealed release does not change" in result["msg"]
    assert write("launch.json", "[]\n", check=True)["failed"]
    assert (write.release / "launch.json").read_text() == "{}\n"


def test_check_mode_before_the_release_exists(write, tmp_path):
    missing = str(tmp_path / "root" / "releases" / "20260131T030000Z-a-0123456789ab")
    result = write(release=missing, check=True, diff=True)
    assert result["changed"] and not os.path.exists(missing)
    assert result["diff"]["before"] == "" and result["diff"]["after"] == "text\n"
    assert result["diff"]["after_header"] == missing + "/site/a.txt"
    refused = write(release=missing)
    assert refused["failed"] and "does not exist" in refused["msg"] and not os.path.exists(missing)


def test_diff_shows_before_and_after_only_on_a_change(write):
    write()
    diff = write(content="other\n", check=True, diff=True)["diff"]
    assert (diff["before"], diff["after"]) == ("text\n", "other\n")
    assert "diff" not in write(diff=True)


@pytest.mark.parametrize(("args", "name"), [({"mode": "rw"}, "mode"), ({"owner": "no-such-user"}, "owner")])
def test_bad_input_is_named(write, args, name):
    result = write(**args)
    assert result["failed"] and result["msg"].startswith(f"{name}:")
