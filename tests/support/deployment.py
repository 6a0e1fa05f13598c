"""Run the verbs as an operator does, and look at a root with own eyes: no module of the project has a say here.

Shared by the playbook tests, the integration tests and ``tools/bench_deploy.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.executable).parent
MARKER = b"SGLANG_DEPLOY_RELEASE="


class Outcome:
    """What one ansible-playbook run did: ``rc``, ``out``, ``events``, ``wall`` (seconds)."""

    def __init__(self, rc, out, events, wall):
        self.rc, self.out, self.events, self.wall = rc, out, events, wall

    @property
    def recap(self):
        """Return ``{ok, changed, failures, ...}`` of the host that was worked on."""
        recap = dict(self.events[-1]["recap"])
        if len(recap) > 1:
            recap.pop("localhost", None)
        return next(iter(recap.values()))

    @property
    def failures(self):
        """Return the events of tasks that failed, in order; a rescued one is among them."""
        return [event for event in self.events if event["status"] in ("failed", "unreachable")]

    @property
    def error(self):
        """Return the message of the last failed task."""
        return str(self.failures[-1]["result"].get("msg", "")) if self.failures else ""

    @property
    def said(self):
        """Return the last message that a debug task showed, as one text."""
        shown = [
            event["result"]["msg"] for event in self.events if "debug" in event.get("action", "") and "result" in event
        ]
        last = shown[-1] if shown else ""
        return last if isinstance(last, str) else "\n".join(map(str, last))

    def results(self, action):
        """Return the results of the tasks of a module that ran."""
        return [
            event["result"]
            for event in self.events
            if event.get("action") == action and event["status"] in ("ok", "changed", "failed")
        ]

    def succeeded(self):
        """Return self; :raises AssertionError: the run failed, with its whole output."""
        assert self.rc == 0, self.out
        return self

    def refused(self, *words):
        """Return the message; :raises AssertionError: the run did not fail, or the message lacks one of the words."""
        assert self.rc != 0, self.out
        missing = [word for word in words if word not in self.error]
        assert self.error and not missing, f"the message lacks {missing}\n{self.error or self.out}"
        return self.error


def environment(events=None):
    """Return the environment of an ansible-playbook run, with nothing of the caller's Ansible settings."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "SGLANG_", "FAKE_"))}
    clean.update(ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1", PATH=f"{BIN}:{os.environ['PATH']}")
    if events:
        clean.update(
            ANSIBLE_CALLBACK_PLUGINS=str(ROOT / "tests/support/callbacks"),
            ANSIBLE_CALLBACKS_ENABLED="sglang_events",
            EVENTS_PATH=str(events),
        )
    return clean


def parents():
    """Return ``{pid: pid of its parent}`` of all processes."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(entry.parent.name)] = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


class Run:
    """A running ansible-playbook, in a session of its own so that no signal reaches the tests."""

    def __init__(self, playbook, *arguments):
        self.folder = tempfile.mkdtemp(prefix="sg-run-")
        self.events_path = pathlib.Path(self.folder, "events")
        self.out_path = pathlib.Path(self.folder, "out")
        self.began = time.monotonic()
        with open(self.out_path, "wb") as out:
            self.process = subprocess.Popen(
                [BIN / "ansible-playbook", playbook, *arguments],
                cwd=ROOT,
                env=environment(self.events_path),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def events(self):
        """Return the events so far."""
        try:
            lines = self.events_path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1]]

    def kill(self, group):
        """Kill the controller at once; with ``group`` its forks as well, which have sessions of their own."""
        forks = [pid for pid, parent in parents().items() if parent == self.process.pid] if group else []
        self.process.kill()
        for pid in forks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout):
        """Return the :class:`Outcome`; :raises AssertionError: it ran longer than ``timeout`` seconds."""
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"still running after {timeout} s:\n{self.out_path.read_text()}") from None
        wall = time.monotonic() - self.began
        outcome = Outcome(rc, self.out_path.read_text(encoding="utf-8"), self.events(), wall)
        shutil.rmtree(self.folder)
        return outcome


def play(playbook, *arguments, timeout=300):
    """Run a playbook to its end; ``timeout`` in seconds."""
    return Run(playbook, *arguments).wait(timeout)


def extra(**variables):
    """Return the arguments that give variables with their types, as JSON."""
    return ["-e", json.dumps(variables)]


def free_port():
    """Return a port that is free now and not in the range from which the kernel gives ports to clients."""
    # Test runs side by side have neighbouring pids: a hundred ports lie between their first ones.
    for port in range(21000 + os.getpid() * 101 % 8000, 30000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise AssertionError("no port is free")


_GIVEN = set()


def marked(root):
    """Return ``{pid: parent pid}`` of the living processes that carry the marker of a release below ``root``."""
    wanted = MARKER + os.fsencode(f"{root}/releases/")
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = pathlib.Path("/proc", name, "environ").read_bytes().split(b"\0")
            fields = pathlib.Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and any(item.startswith(wanted) for item in variables):
            found[int(name)] = int(fields[1])
    return found


def variables_of(pid):
    """Return the environment that a process was started with."""
    pairs = pathlib.Path(f"/proc/{pid}/environ").read_text(errors="surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def tree(path, skip=()):
    """Return a digest over names, kinds, modes, owners and contents below a path; None where it does not exist.

    :param skip: names of directories that are left out.
    """
    if not os.path.lexists(path):
        return None
    total = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(set(folders) - set(skip))
        for name in [".", *sorted(folders + files)]:
            full = os.path.join(folder, name)
            status = os.lstat(full)
            total.update(f"{full} {status.st_mode:o} {status.st_uid}\n".encode())
            if stat.S_ISREG(status.st_mode):
                total.update(pathlib.Path(full).read_bytes())
            elif stat.S_ISLNK(status.st_mode):
                total.update(os.fsencode(os.readlink(full)))
    return total.hexdigest()


class Node:
    """One root on this machine, driven through the verbs.

    :param root: directory of the deployment; short, because sockets lie below it.
    :param variables: what every run gets as JSON, with types.
    """

    def __init__(self, root, **variables):
        self.root = pathlib.Path(root)
        self.port = free_port()
        self.variables = {"sglang_root": str(self.root), "sglang_server_port": self.port, **variables}

    def start(self, verb, *arguments, folder="", **variables):
        """Start a verb and return the :class:`Run`."""
        return Run(f"{folder}{verb}.yml", *extra(**self.variables), *arguments, *extra(**variables))

    def run(self, verb, *arguments, timeout=300, folder="", **variables):
        """Run a verb to its end; ``variables`` win over those of the node."""
        return self.start(verb, *arguments, folder=folder, **variables).wait(timeout)

    def deploy(self, variant, *arguments, **variables):
        """Deploy a variant."""
        return self.run("deploy", *arguments, variant=variant, **variables)

    @property
    def current(self):
        """Return the id that the link points to, None where there is none."""
        link = self.root / "current"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else None

    def manifest(self, release):
        """Return the manifest of a release."""
        return json.loads((self.root / "releases" / release / "manifest.json").read_text())

    def state(self, release):
        """Return the state of a release."""
        return self.manifest(release)["state"]

    def launch(self):
        """Return launch.json of the current release."""
        return json.loads((self.root / "current" / "launch.json").read_text())

    def ledger(self, event=None):
        """Return the events of the ledger, all or those of one kind."""
        lines = (self.root / "ledger.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if event in (None, line["event"])]

    def servers(self):
        """Return the pids of server processes: those marked whose parent is not."""
        processes = marked(self.root)
        return sorted(pid for pid, parent in processes.items() if parent not in processes)

    @property
    def server(self):
        """Return the pid of the one server; :raises AssertionError: there is none, or more than one."""
        pids = self.servers()
        assert len(pids) == 1, f"{len(pids)} servers run: {pids}"
        return pids[0]

    def workers(self):
        """Return the pids of the scheduler processes."""
        found = []
        for pid in marked(self.root):
            if b"sglang::scheduler" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        return sorted(found)

    def port_is_free(self):
        """Return whether nobody listens on the port."""
        with socket.socket() as probe:
            probe.settimeout(2)
            return probe.connect_ex(("127.0.0.1", self.port)) != 0

    def chat(self, timeout=60):
        """Return the answer of a chat completion."""
        body = {"model": self.launch()["served_model_name"], "max_tokens": 8, "temperature": 0}
        body["messages"] = [{"role": "user", "content": "w1 w2"}]
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def serves(self, release):
        """Check that a release is current, its one server runs from it, and it answers; return the server's pid."""
        assert self.current == release
        pid = self.server
        assert variables_of(pid)["SGLANG_DEPLOY_RELEASE"] == str(self.root / "releases" / release)
        assert self.chat()["choices"][0]["message"]["content"]
        return pid

    def destroy(self):
        """End what runs below the root, by pid, and remove it."""
        for _ in range(3):
            for pid in marked(self.root):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        note = self.root / "service" / "supervisord.pid"
        try:
            pid = int(note.read_text())
            if str(self.root).encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGTERM)
        except (OSError, ValueError):
            pass  # no supervisord was started, or it has ended
        shutil.rmtree(self.root, ignore_errors=True)


def wait_for(condition, what, timeout=30):
    """Return what CONDITION returns as soon as it is true; :raises AssertionError: not within ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout} s")
