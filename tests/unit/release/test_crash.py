"""A deploy killed before any one of its system calls leaves the old or the new state, and the next one converges."""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest
from ansible.module_utils import (
    sglang_ledger,
    sglang_lock,
    sglang_release_compare,
    sglang_release_states,
    sglang_release_step,
)
from ansible.module_utils import sglang_release_store as store
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.sglang_build_spec import LAUNCH as LAUNCH_SPEC
from ansible.module_utils.sglang_release_archive import archive_path, remove_release_directory

from .conftest import ENGINE, MODEL, make_run

LAUNCH = ArgumentSpecValidator(LAUNCH_SPEC).validate({"model_path": "/models/none", "provider": "supervisor"})
WHOLE = {"launch": LAUNCH.validated_parameters, "files": {"site/sitecustomize.py": "x = 1\n"}}
CALLS = ("open", "rename", "symlink", "fsync", "unlink", "write", "mkdir", "utime", "fchmod", "chown")


def deploy(root, variant, run, **whole):
    """Run the states of a deploy as the playbook does; return the id.

    :param whole: parameters with which the comparison builds the release; without them it is made in steps.
    """

    def state(name, **args):
        params = {
            "state": name, "root": root, "release": "", "variant": variant, "inputs": {"v": variant}, "engine": {},
            "model": {}, "run": run, "break_lock": False, "owner": "", "keep": 5, "reason": "", "record": {},
            "files": {}, "allow_rejected": False, "patches": {}, "launch": {}, "checks": {}, "tools": None,
        }  # fmt: skip
        params.update(args)
        return sglang_release_states.run_state(params, False)

    plan = state("compared", **whole)["plan"]
    release = plan["release"]["id"]
    if not plan["in_sync"]:
        if not plan["release"]["built"]:
            state("created", release=release)
            for name in sglang_release_step.REQUIRED_FILES:
                path = os.path.join(plan["release"]["path"], name)
                store.atomic_write(path, b"{}")
            state("built", release=release)
        state("active", release=release)
        state("promoted", release=release)
    state("pruned")
    state("unlocked")
    return release


def killed_before(number, work):
    """Run WORK in a child that dies, without any clean-up, before its system call NUMBER; return whether it died.

    Half of the line is written where that call is the ledger's.
    """
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), f"the deploy ended with {status} instead of dying or finishing"
        return status == 9
    count = 0
    try:

        def patch(name):
            real = getattr(os, name)

            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count > number:
                    if name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])
                    os._exit(9)
                return real(*args, **kwargs)

            setattr(os, name, call)

        for name in CALLS:
            patch(name)
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.fixture
def engine_and_model(monkeypatch):
    monkeypatch.setattr(sglang_release_compare, "describe_engine", lambda declared: dict(ENGINE))
    monkeypatch.setattr(sglang_release_compare, "describe_model", lambda declared: dict(MODEL))
    monkeypatch.setattr(sglang_release_compare.sglang_proc, "drift", lambda launch, root: [])
    # A killed process loses nothing that it wrote, so the disk is not waited for; the calls are counted all the same.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("whole", [{}, WHOLE], ids=["in-steps", "in-passing"])
@pytest.mark.parametrize("first", [True, False], ids=["empty-host", "switch"])
def test_killed_anywhere_the_next_run_converges(tmp_path, engine_and_model, first, whole):
    template = tmp_path / "template"
    template.mkdir()
    old = None if first else deploy(str(template), "old", make_run("run-0"))
    number = 0
    while True:
        root = str(tmp_path / "root")
        shutil.copytree(template, root, symlinks=True)
        died = killed_before(number, lambda root=root: deploy(root, "new", make_run("killed"), **whole))
        # What a reader sees: a whole old or new state, never a torn manifest or a link to nothing.
        manifests, problems = store.list_releases(root)
        assert all("left over from a run that was killed" in text for text in problems)
        with contextlib.suppress(FileNotFoundError):
            for manifest in os.listdir(os.path.join(root, "releases")):
                assert manifest.startswith((store.NEW, store.TRASH)) or store.ID_PATTERN.match(manifest)
        current = store.read_current(root)
        serving = [item for item in manifests if item["id"] == current]
        assert current is None or (serving and store.complete(serving[0]))
        assert old is None or current is not None
        if not died:
            break
        # The next run: takes the dead run's lock over, finishes, and leaves nothing behind.
        release = deploy(root, "new", make_run("next"), **whole)
        manifests, problems = store.list_releases(root)
        assert problems == []
        assert store.read_current(root) == release
        assert {item["id"]: item["state"] for item in manifests} == {
            **({old: "promoted"} if old else {}),
            release: "promoted",
        }
        assert sglang_lock.read(root) is None
        events, torn = sglang_ledger.read(root)
        assert len(torn) <= 1
        # Killed while it gave the lock back, the deploy itself was over: then there is nothing left to do.
        assert events[-1]["event"] == "unlocked"
        shutil.rmtree(root)
        number += 1
    assert number > 60, "the points of death must cover the whole deploy"


def test_a_kill_while_pruning_never_leaves_a_thinned_out_release(tmp_path, engine_and_model):
    root = str(tmp_path / "root")
    old = deploy(root, "old", make_run())
    path = store.release_path(root, old)

    def work():
        real = shutil.rmtree
        shutil.rmtree = lambda target: (os.rmdir(os.path.join(target, "logs")), os._exit(9))
        remove_release_directory(root, old)
        shutil.rmtree = real

    assert killed_before(10_000, work)
    assert not os.path.exists(path)
    assert store.leftovers(root) == [store.TRASH + old]
    # What the ledger names is safe before the first file is deleted, and the next run ends what this one began.
    assert os.path.isfile(os.path.join(archive_path(root, old), "manifest.json"))
    remove_release_directory(root, store.TRASH + old)
    assert store.leftovers(root) == []
