"""The two service managers behind one small interface: ``prepare``, ``start``, ``pid``, ``settle``, ``close``.

``run`` everywhere is a callable ``run(argv) -> (rc, stdout, stderr)``, so that a test records the commands.
"""

from __future__ import annotations

import glob
import http.client
import os
import pwd
import re
import resource
import socket
import tempfile
import time
import xmlrpc.client

from ansible.module_utils import sglang_launcher

# sockaddr_un holds 108 bytes with the final NUL, and supervisord binds to "<socket>.<pid>" before it renames.
_MAX_SOCKET = 107 - 8


class ProviderError(Exception):
    """The service manager cannot do what is asked; the message says why and what to do."""


def detect():
    """Return ``systemd`` where it is PID 1 (the directory of sd_booted(3)), else ``supervisor``."""
    return "systemd" if os.path.isdir("/run/systemd/system") else "supervisor"


def write_if_changed(path, text, mode=0o644):
    """Replace a file by rename when its content differs; return whether it did."""
    try:
        with open(path, encoding="utf-8") as handle:
            if handle.read() == text:
                return False
    except OSError:
        pass
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(text)
    os.chmod(temporary, mode)
    os.replace(temporary, path)
    return True


class _Transport(xmlrpc.client.Transport):
    """XML-RPC over a unix socket."""

    def __init__(self, path, timeout):
        super().__init__()
        self._path, self._timeout = path, timeout

    def make_connection(self, host):
        connection = http.client.HTTPConnection("localhost", timeout=self._timeout)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(self._timeout)
        connection.sock.connect(self._path)
        return connection


class Supervisor:
    """The supervisord of one root, installed below ``<root>/service`` and spoken to over its socket."""

    def __init__(self, root, unit, run, python, lock):
        self.dir = os.path.join(root, "service")
        self.unit, self.run, self.python, self.lock = unit, run, python, lock
        self.socket = os.path.join(self.dir, "supervisor.sock")

    def _proxy(self):
        return xmlrpc.client.ServerProxy("http://localhost", transport=_Transport(self.socket, 10)).supervisor

    def _up(self):
        try:
            return self._proxy().getState()["statename"] == "RUNNING"
        except (OSError, http.client.HTTPException):
            return False

    def install(self):
        """Install the pinned supervisor where it is missing; return whether it was missing."""
        wanted = re.search(r"^supervisor==(\S+)", self.lock, re.M).group(1)
        venv = os.path.join(self.dir, "venv")
        if glob.glob(f"{glob.escape(venv)}/lib/python*/site-packages/supervisor-{wanted}.dist-info"):
            return False
        os.makedirs(self.dir, exist_ok=True)
        lock = os.path.join(self.dir, "supervisor.lock")
        write_if_changed(lock, self.lock)
        pip = [self.python, "-I", "-m", "pip", "--disable-pip-version-check", "--python", f"{venv}/bin/python"]
        for command in (
            [self.python, "-I", "-m", "venv", "--without-pip", "--clear", venv],
            [*pip, "install", "--quiet", "--require-hashes", "--requirement", lock],
        ):
            rc, out, err = self.run(command)
            if rc:
                raise ProviderError(
                    f"supervisor {wanted} could not be installed into {venv}: '{' '.join(command)}' ended with {rc}: "
                    f"{(err or out).strip()[-600:]} Way out: give sglang_server_python an interpreter with "
                    "venv and pip that reaches a package index, or use sglang_server_provider: systemd."
                )
        return True

    def prepare(self, release):
        """Install and start supervisord where it does not run, and load the release's program; return nothing.

        :raises ProviderError: the root's path is too long for a socket, or supervisord cannot be had or does not start.
        """
        if len(os.fsencode(self.socket)) > _MAX_SOCKET:
            raise ProviderError(
                f"sglang_server_root is too long: the socket {self.socket} may have {_MAX_SOCKET} bytes at most. "
                "Way out: a shorter root."
            )
        self.install()
        with open(os.path.join(release, "supervisor.conf"), encoding="utf-8") as handle:
            write_if_changed(os.path.join(self.dir, "program.conf"), handle.read())
        if not self._up():
            self._start_daemon()
            return
        proxy = self._proxy()
        added, changed, removed = proxy.reloadConfig()[0]
        for name in changed + removed:
            proxy.stopProcessGroup(name)
            proxy.removeProcessGroup(name)
        for name in added + changed:
            proxy.addProcessGroup(name)

    def _start_daemon(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        user = pwd.getpwuid(0).pw_name if os.geteuid() == 0 else ""
        conf = os.path.join(self.dir, "supervisord.conf")
        write_if_changed(conf, sglang_launcher.supervisord_conf(self.dir, user, files))
        # Nothing of the caller's environment goes along: supervisord outlives the play and starts later releases too.
        clean = ["env", "-i", "-C", self.dir, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "LANG=C.UTF-8"]
        rc, out, err = self.run([*clean, f"{self.dir}/venv/bin/supervisord", "-c", conf])
        end = time.monotonic() + 10
        while not rc and not self._up() and time.monotonic() < end:
            time.sleep(0.05)
        if rc or not self._up():
            raise ProviderError(f"supervisord does not start (rc {rc}): {(err or out).strip()[-600:]} See {self.dir}.")

    def permit(self, release, planned=False):
        """Return true: everything that supervisor needs lies below the root."""
        return True

    def start(self):
        """Start the program; a command that cannot be run at all raises ProviderError."""
        try:
            self._proxy().startProcess(self.unit, False)
        except xmlrpc.client.Fault as fault:
            raise ProviderError(f"supervisor could not start {self.unit}: {fault.faultString}") from fault

    def pid(self):
        """Return ``(pid or None, state as text)`` of the program."""
        info = self._proxy().getProcessInfo(self.unit)
        return info["pid"] or None, f"{info['statename']} {info['spawnerr'] or info['description']}".strip()

    def settle(self):
        """Stop the program, whose watch may still be there when the server is gone."""
        if self._up():
            try:
                self._proxy().stopProcess(self.unit)
            except xmlrpc.client.Fault:
                pass  # it does not run, or supervisor does not know it yet

    def close(self, check_mode=False):
        """End supervisord, which without a server has no work; return whether one ran."""
        if check_mode or not self._up():
            return self._up()
        with open(os.path.join(self.dir, "supervisord.pid"), encoding="ascii") as handle:
            pid = int(handle.read())
        self._proxy().shutdown()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
                    if handle.read().rsplit(")", 1)[1].split()[0] == "Z":
                        return True
            except OSError:
                return True
            time.sleep(0.02)
        raise ProviderError(f"supervisord, pid {pid}, does not end after its shutdown command. See {self.dir}.")


class Systemd:
    """A unit of the host's systemd. The unit file lies in the release; linking it is a change of the host."""

    def __init__(self, root, unit, run, install, unit_dir="/etc/systemd/system"):
        self.root, self.unit, self.run, self.install = root, f"{unit}.service", run, install
        self.link = os.path.join(unit_dir, self.unit)

    def _systemctl(self, *arguments, check=True):
        rc, out, err = self.run(["systemctl", *arguments])
        if rc and check:
            raise ProviderError(f"'systemctl {' '.join(arguments)}' ended with {rc}: {(err or out).strip()[-600:]}")
        return out

    def _ours(self):
        """Return whether the host's unit is a link into this root: two roots may use one name."""
        inside = os.path.join(os.path.realpath(self.root), "")
        return os.path.islink(self.link) and os.path.realpath(self.link).startswith(inside)

    def permit(self, release, planned=False):
        """Check that the host's unit is, or may become, that of a release; return whether it is.

        :param planned: the release becomes the current one first; a link through ``<root>/current`` will then be right.
        :raises ProviderError: it is somebody else's, or the operator did not ask for the change.
        """
        target = os.path.join(release, self.unit)
        if planned and os.path.islink(self.link) and os.readlink(self.link) == f"{self.root}/current/{self.unit}":
            return True
        if os.path.islink(self.link) and os.path.realpath(self.link) == os.path.realpath(target):
            return True
        if os.path.exists(self.link) and not self._ours():
            what = f"points to {os.path.realpath(self.link)}" if os.path.islink(self.link) else "is a file"
            raise ProviderError(
                f"{self.link} {what}, which is not of this root and stays as it is. Way out: another name in "
                "sglang_server_unit, or move it away."
            )
        if not self.install:
            raise ProviderError(
                f"{self.link} must point to {target}, which changes the host outside the root. Way out: "
                "sglang_server_install_unit: true, or sglang_server_provider: supervisor."
            )
        return False

    def prepare(self, release):
        """Point the host's unit to the release's unit file and make systemd read it.

        :raises ProviderError: see :meth:`permit`.
        """
        if not self.permit(release):
            temporary = f"{self.link}.new"
            if os.path.lexists(temporary):
                os.unlink(temporary)
            os.symlink(os.path.join(release, self.unit), temporary)
            os.replace(temporary, self.link)
        self._systemctl("daemon-reload")

    def start(self):
        """Start the unit; Type=exec makes systemctl report a command that cannot be run."""
        self._systemctl("start", self.unit)

    def pid(self):
        """Return ``(pid or None, state as text)`` of the unit."""
        out = self._systemctl("show", "--property=MainPID,ActiveState,SubState,Result", self.unit)
        show = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        state = f"{show.get('ActiveState')}/{show.get('SubState')}, result {show.get('Result')}"
        return int(show.get("MainPID") or 0) or None, state

    def settle(self):
        """Let systemd clear what is left in the unit's cgroup, and forget a failed state (a clean stop is rc -9)."""
        if not self._ours():
            return
        # systemd does not know a unit whose file is gone with its release, unless it is still loaded.
        self._systemctl("stop", self.unit, check=os.path.exists(self.link))
        self._systemctl("reset-failed", self.unit, check=False)

    def close(self, check_mode=False):
        """Nothing to end: systemd is the host's."""
        return False
