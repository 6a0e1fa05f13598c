"""A Debian with a real systemd: its root built once by debootstrap, booted by systemd-nspawn, reached over ssh.

The container has a file system, process table, host name and boot identifier of its own and shares the network, so
that the tests reach its ports. The root of a deployment lies at the same path inside and outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUITE = "bookworm"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# requests is for the interpreter of the scripted engine, the two libraries are for the real one.
PACKAGES = (
    "systemd,systemd-sysv,dbus,libpam-systemd,openssh-server,python3,python3-requests,iproute2,procps,libnuma1,libgomp1"
)
NAME = "sglang-systemd-test"


class UnavailableError(Exception):
    """No such container can be had on this machine; the message says what is missing."""


def sources():
    """Return ``(URI, [suite])`` of each enabled package source of this machine, deb822 files and one-line lists."""
    found = []
    for path in sorted(pathlib.Path("/etc/apt/sources.list.d").glob("*.sources")):
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            lines = (line.partition(":") for line in block.splitlines() if not line.startswith(("#", " ")))
            fields = {name.strip().lower(): value.split() for name, _, value in lines}
            if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
                found += [(uri, fields.get("suites", [])) for uri in fields.get("uris", [])]
    for path in [pathlib.Path("/etc/apt/sources.list"), *pathlib.Path("/etc/apt/sources.list.d").glob("*.list")]:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            words = line.partition("]")[2].split() if "[" in line else line.split()[1:]
            if line.startswith("deb ") and len(words) > 1:
                found.append((words[0], [words[1]]))
    return found


def mirror():
    """Return the URI from which this machine itself has the suite's packages.

    :raises UnavailableError: none of its sources has the suite.
    """
    for uri, suites in sources():
        if SUITE in suites and uri.startswith(("http://", "https://", "file:")):
            return uri
    raise UnavailableError(f"no package source of this machine has Debian {SUITE}")


def check_machine():
    """:raises UnavailableError: the account or a program does not allow a container."""
    if os.geteuid() != 0:
        raise UnavailableError("only root can build and boot a container")
    needed = {
        "debootstrap": "debootstrap",
        "systemd-nspawn": "systemd-container",
        "ssh": "openssh-client",
        "ssh-keygen": "openssh-client",
    }
    missing = sorted({package for program, package in needed.items() if not shutil.which(program)})
    if missing:
        raise UnavailableError(f"missing packages: {', '.join(missing)}")


def cached_root(cache):
    """Return the pristine root in a cache directory; the first call builds it, in about a minute.

    :raises UnavailableError: it cannot be built; the message ends with what debootstrap said.
    """
    key = hashlib.sha256(f"{SUITE} {PACKAGES}".encode()).hexdigest()[:12]
    root = pathlib.Path(cache) / f"{SUITE}-{key}"
    if root.exists():
        return root
    uri = mirror()
    root.parent.mkdir(parents=True, exist_ok=True)
    # Renamed only when whole: a build that was killed is none.
    building = pathlib.Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    # In a mount namespace of its own, so that the /proc that it mounts is never seen, or deleted, from here.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
    if os.path.exists(KEYRING):
        command.append(f"--keyring={KEYRING}")
    try:
        done = subprocess.run(
            [*command, SUITE, building, uri],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise UnavailableError(f"debootstrap {SUITE} from {uri} ended with {done.returncode}: {done.stdout[-400:]}")
        shutil.rmtree(building / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(building / "var/lib/apt/lists", ignore_errors=True)
        building.chmod(0o755)
        building.rename(root)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"debootstrap {SUITE} from {uri} took longer than {error.timeout:.0f} s") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return root


@contextlib.contextmanager
def alone(timeout=300):
    """Hold the machine's one place for a container: two would share a control group.

    :raises UnavailableError: another test run holds it for longer than ``timeout`` seconds.
    """
    path = os.path.join(tempfile.gettempdir(), f"{NAME}.lock")
    with open(path, "w", encoding="ascii") as handle:
        end = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UnavailableError(f"another test run holds {path} for more than {timeout} s") from None
                time.sleep(0.5)
        yield


class Container:
    """One booted container.

    :param pristine: root of :func:`cached_root`, which is copied. :param folder: scratch directory of this container.
    :param shared: directory that inside and outside share at the same path, writable.
    :param readonly: directories that it sees at the same path, read-only.
    """

    def __init__(self, pristine, folder, shared, readonly=()):
        self.folder, self.shared, self.readonly = pathlib.Path(folder), pathlib.Path(shared), readonly
        self.root = self.folder / "root"
        self.key, self.console = self.folder / "key", self.folder / "console.log"
        self.process = None
        subprocess.run(["cp", "-a", "--reflink=auto", pristine, self.root], check=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = f"Port {self.port}\nListenAddress 127.0.0.1\nPasswordAuthentication no\nUseDNS no\n"
        (self.root / "etc/ssh/sshd_config.d/test.conf").write_text(settings)
        (self.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        (self.root / "root/.ssh/authorized_keys").write_text((self.folder / "key.pub").read_text())
        (self.root / "etc/hostname").write_text(NAME + "\n")

    @property
    def ssh_arguments(self):
        """Return the arguments of ssh that reach it, for a command of ours and for Ansible alike."""
        return [
            f"-oUserKnownHostsFile={self.folder}/known_hosts",
            "-oStrictHostKeyChecking=no",
            "-oLogLevel=ERROR",
            "-oConnectTimeout=5",
            f"-oIdentityFile={self.key}",
            "-oIdentitiesOnly=yes",
        ]

    def boot(self, timeout=90):
        """Boot it and return when systemd has started everything.

        :raises UnavailableError: it ends, or is not up within ``timeout`` seconds; the message ends with its console.
        """
        # It ends with the tests, however they end.
        command = ["setpriv", "--pdeathsig", "TERM", "systemd-nspawn", "--quiet", "--boot", "--register=no"]
        command += [f"--directory={self.root}", f"--machine={NAME}", "--console=pipe", f"--bind={self.shared}"]
        if not os.path.isdir("/run/systemd/system"):
            command.append("--keep-unit")  # nobody here could give it a scope of its own
        command += [f"--bind-ro={path}" for path in self.readonly]
        with open(self.console, "ab") as console:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            state = self.ssh("systemctl", "is-system-running", check=False).stdout.strip()
            if state in ("running", "degraded"):
                return
            time.sleep(0.2)
        said = self.console.read_text(errors="replace")[-400:]
        self.halt()
        raise UnavailableError(f"systemd-nspawn does not boot the root: {said}")

    def ssh(self, *command, check=True):
        """Run a command inside and return the finished process with its text."""
        line = ["ssh", *self.ssh_arguments, f"-p{self.port}", "root@127.0.0.1", *command]
        done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def halt(self, timeout=30):
        """Shut it down in order; where that takes longer than ``timeout`` seconds, kill it."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None
