"""The process of a canary: started in a directory of its own, watched, and gone without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time

from ansible.module_utils import sglang_canary_plan, sglang_proc, sglang_terminate
from ansible.module_utils.sglang_launcher import LAUNCH_PY
from ansible.module_utils.sglang_watch_wait import Watch

# Ends the canary with the module that started it, however that ends, then becomes the launcher of every release.
START_PY = """\
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the canary's parent is gone")
os.nice(int(sys.argv[2]))
runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py"), run_name="__main__")
"""
# Its standard input ends with the module, however that ends: then nothing of the server's group may outlive it either.
GUARD_PY = """\
import os, signal, sys
sys.stdin.read()
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""
# A path of sockets below it: 107 bytes, of which SGLang's temporary names take eleven.
_MAX_TMP = 107 - 12


class CanaryError(Exception):
    """The canary cannot be started, or leaves something behind; the message says what and what to do."""


class Disturbed(Exception):  # noqa: N818 - no error of the canary: the live server comes first
    """The canary hurts the live server; the message says how."""


class CanaryWatch(Watch):
    """The watch of a start that also looks at the live server; ``live`` is a LiveProbe or None."""

    live = None

    def look(self):
        """Look at the live server first: it comes first.

        :raises Disturbed: the canary hurts it.
        """
        hurt = self.live.hurt() if self.live else ""
        if hurt:
            raise Disturbed(hurt)
        super().look()


@contextlib.contextmanager
def ended_in_order():
    """Let SIGTERM and SIGHUP end the block by SystemExit, so that it cleans up; Ansible ends a module by a signal."""

    def end(number, _frame):
        for again in before:
            signal.signal(again, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Canary:
    """The run directory and the process of one canary.

    :param root: the deployment's root.
    :param release: absolute path of the release that is tried.
    """

    def __init__(self, root, release):
        self.base = sglang_canary_plan.canary_root(root)
        self.path = sglang_canary_plan.canary_path(root, release)
        self.process = self.guard = None

    def sweep(self, timeout=1.0):
        """Stop what runs of any canary of this root and remove its files; return the pids that were found.

        :raises CanaryError: a process will not die, or a port stays taken.
        """
        try:
            found = sglang_terminate.terminate(self.base, timeout=timeout, grace=1.0)["found"]
        except sglang_terminate.TerminateError as error:
            raise CanaryError(f"the canary could not be stopped: {error}") from error
        if self.process:
            # What has its marker is gone; a start that had not come so far goes now.
            self.process.kill()
            self.process.wait()
        if self.guard:
            # Before the group's number can be another's.
            self.guard.kill()
            self.guard.communicate()
        shutil.rmtree(os.path.join(self.base, "releases"), ignore_errors=True)
        try:
            os.rmdir(self.base)
        except OSError:
            pass  # it is not there, or holds the log of a canary that failed
        return found

    def prepare(self, user):
        """Make the run directory, owned by the server's account.

        :raises CanaryError: its path is too long for the sockets that lie in it.
        """
        tmp = os.path.join(self.path, "tmp")
        if len(os.fsencode(tmp)) > _MAX_TMP:
            raise CanaryError(
                f"sglang_root is too long for a canary: {tmp} may have {_MAX_TMP} bytes. Way out: a shorter root, or "
                "-e canary=false"
            )
        os.makedirs(tmp)
        os.mkdir(os.path.join(self.path, "run"))
        if user:
            account = pwd.getpwnam(user)
            for folder in (self.path, tmp, os.path.join(self.path, "run")):
                os.chown(folder, account.pw_uid, account.pw_gid)

    def start(self, launch, nice):
        """Start the server of a launch; return its pid."""
        account, owner = {}, None
        if launch["user"] and os.geteuid() == 0:
            owner = pwd.getpwnam(launch["user"])
            groups = os.getgrouplist(owner.pw_name, owner.pw_gid)
            account = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": groups}
        for name, text in {
            "launch.json": json.dumps(launch, indent=1),
            "launch.py": LAUNCH_PY,
            "start.py": START_PY,
        }.items():
            # As in a release: an environment may hold a token. No link of the folder's owner is followed.
            descriptor = os.open(os.path.join(self.path, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
                if owner:
                    os.fchown(descriptor, owner.pw_uid, owner.pw_gid)
                handle.write(text)
        with open(launch["log"], "ab") as log:
            self.process = subprocess.Popen(
                [launch["argv"][0], "-I", "-S", f"{self.path}/start.py", str(os.getpid()), str(nice)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.path,
                # The marker from the first moment on, or a stop at once would not find it; the rest is the launcher's.
                env={sglang_proc.MARKER: self.path, "LANG": "C.UTF-8"},
                **account,
            )
        # Not by the server's account, and in a session of its own: who ends the module's group does not end this.
        self.guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD_PY, str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        stat = sglang_proc.stat_of(self.process.pid, "/proc")
        note = {"pgid": self.process.pid, "start": stat["start"] if stat else 0, "boot_id": sglang_proc.boot_id()}
        # The server's account owns the folder by now: no link of its own is followed.
        with open(sglang_proc.record_path(self.path), "x", encoding="ascii") as handle:
            json.dump(note, handle)
        return self.process.pid

    def keep_log(self, log):
        """Keep the log of a canary that failed; return its path, empty where there is none."""
        kept = os.path.join(self.base, "failed.log")
        try:
            os.replace(log, kept)
        except OSError:
            return ""
        return kept

    def forget_log(self):
        """Remove the log that an earlier canary left."""
        try:
            os.unlink(os.path.join(self.base, "failed.log"))
        except OSError:
            pass

    def traces(self, ports):
        """Return what is left of the canary after :meth:`sweep`, as texts; empty where it is gone."""
        left = [sglang_proc.describe(item) for item in sglang_proc.scan(self.base) if sglang_proc.alive(item["state"])]
        left += [f"port {port} is taken" for port in ports if sglang_proc.listeners(port)]
        if os.path.lexists(self.path):
            left.append(f"{self.path} is still there")
        return left


def memory_back(read, before, back, timeout=10.0):
    """Wait until the memory is free again; return the last figures, MiB.

    :param read: function that returns the free MiB now.
    :param back: function ``back(before, now)`` that judges them.
    """
    end = time.monotonic() + timeout
    now = read()
    while not back(before, now) and time.monotonic() < end:
        time.sleep(0.2)
        now = read()
    return now
