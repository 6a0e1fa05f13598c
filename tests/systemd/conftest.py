"""A host with a real systemd, reached over ssh, and roots on it that adopt the scripted or a real engine."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import tempfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
from booted_host import ACCOUNT, Host  # noqa: E402
from container import Container, UnavailableError, alone, cached_root, check_machine  # noqa: E402
from deployment import ROOT  # noqa: E402
from engines import fill_engine  # noqa: E402

# Where the built root is kept; a machine that tests many checkouts names one place for all.
CACHE = pathlib.Path(os.environ.get("SGLANG_SYSTEMD_CACHE") or ROOT / ".cache" / "systemd")
# A directory of engines that were built before, as for the integration tests; the container sees it read-only.
ENGINES = os.environ.get("SGLANG_TEST_ENGINES", "")


@pytest.fixture(scope="session")
def pristine():
    """Return the built root, for this session alone; where there can be none, skip the tests with the reason."""
    try:
        check_machine()
        with alone():
            # What a killed run left; nobody else is here.
            for pattern in ("run-*", "boot-*", "building-*"):
                for folder in CACHE.glob(pattern):
                    shutil.rmtree(folder, ignore_errors=True)
            yield cached_root(CACHE)
    except UnavailableError as error:
        pytest.skip(f"no real systemd here: {error}")


@pytest.fixture(scope="session")
def scratch(pristine):
    """Return a directory that the container shares at the same path."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def real_engine():
    """Return ``{path, python, prefix}`` of a built engine of the embedded node's version, None where there is none.

    ``prefix`` is where the Python below its virtual environment is installed.
    """
    for marker in sorted(pathlib.Path(ENGINES).glob("0.5.9-*/engine.json")) if ENGINES else []:
        path = os.path.realpath(marker.parent)
        base = pathlib.Path(json.loads(marker.read_text())["base"])
        return {"path": path, "python": f"{path}/bin/python3", "prefix": str(base.parent.parent)}
    return None


@pytest.fixture(scope="session")
def container(pristine, scratch, real_engine):
    """Return the booted container."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="boot-", dir=CACHE))
    readonly = [real_engine["path"], real_engine["prefix"]] if real_engine else []
    # The container has a /usr of its own.
    container = Container(pristine, folder, scratch, [path for path in readonly if path != "/usr"])
    try:
        container.boot()
        container.ssh("useradd", "--system", "--create-home", ACCOUNT)
        yield container
    except UnavailableError as error:
        pytest.skip(f"no real systemd here: {error}")
    finally:
        container.halt()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def engine(container, scratch):
    """Return the interpreter of a fake engine of the embedded node's version, made with the container's Python."""
    folder = scratch / "engine"
    container.ssh("python3", "-m", "venv", "--without-pip", str(folder))
    return fill_engine(folder, "0.5.9", "/usr/lib/python3/dist-packages")


@pytest.fixture(scope="session")
def inventory(container, scratch):
    """Return the inventory that reaches the container as an operator reaches a host."""
    folder = scratch.parent / f"{scratch.name}-inventory"
    folder.mkdir()
    (folder / "group_vars").symlink_to(ROOT / "group_vars")
    variables = {
        "ansible_connection": "ssh",
        "ansible_host": "127.0.0.1",
        "ansible_port": container.port,
        "ansible_user": "root",
        "ansible_ssh_common_args": " ".join(container.ssh_arguments),
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_pipelining": True,
    }
    tree = {"sglang": {"children": {"embedded": {"hosts": {"booted": variables}}}}}
    (folder / "hosts.json").write_text(json.dumps(tree))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def make_host(container, engine, inventory, scratch):
    """Return ``make(**variables)``, which gives an empty root in the container that adopts the fake engine."""
    hosts = []

    def make(**variables):
        root = pathlib.Path(tempfile.mkdtemp(dir=scratch, prefix="r"))
        root.chmod(0o755)
        settings = {
            "sglang_engine_mode": "adopt",
            "sglang_engine_python": engine,
            "sglang_server_provider": "systemd",
            "sglang_server_unit": "sglang-server",
            "sglang_server_install_unit": True,
            "sglang_server_user": ACCOUNT,
            "sglang_server_tp_size": 1,
            "sglang_server_stop_timeout": 10,
            "sglang_verify_timeout": 60,
            # The scripted server knows none.
            "sglang_verify_known_answers": [],
            "sglang_benchmark_requests": 4,
            "sglang_benchmark_warmup": 1,
            "sglang_benchmark_output_tokens": 8,
        }
        host = Host(container, inventory, root / "n", **{**settings, **variables})
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.destroy()
