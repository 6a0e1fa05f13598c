"""Start a server and stay beside it: the program ``watch.py`` of a release, which unit and supervisor program run.

It is the parent of the server and outlives it, under every service manager alike. It sees what SGLang itself does not:
a scheduler that died under a living parent (0.5.9), a server that hangs with all its processes alive. Whether it starts
the server again is decided at the moment of the death and from what is on disk then: only a promoted release that is
current and that nobody stopped, never under the deploy lock, and only so many times in so many minutes. What it sees
and does is in ``run/health.json`` and in the ledger.

Its own death takes the server along. Where a signal was the cause, the service manager starts it again, and only then:
an exit code is its last word. The next one finds in ``run/health.json`` that the one before ended without a word, and
asks the same policy. Standard library only, and ``policy.py``, ``probe.py``, ``newlog.py`` and ``signatures.py`` of the
same release.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import signal
import subprocess
import sys
import time
import traceback

try:
    from ansible.module_utils import sglang_launch_newlog as newlog
    from ansible.module_utils import sglang_launch_policy as policy
    from ansible.module_utils import sglang_launch_probe as probe
except ImportError:  # in a release, where they lie beside this file
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import newlog
    import policy
    import probe

INTERVAL = 5.0
# A worker that dies, and whose parent clears it away, before the first look at it would never be missed.
YOUNG, BRISK = 60.0, 1.0
# A server that stops ends its workers first: only a death that lasts is one under a living parent.
CONFIRM = 10.0
PAUSE = 2.0
TITLES = ("sglang::schedul", "sglang::detoken")  # as the kernel cuts them
MARKER = "SGLANG_DEPLOY_RELEASE"


def stat_of(pid, proc="/proc"):
    """Return ``(name, state, ppid, start in ticks, pgid)`` of a process, or None where it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            head, _, tail = handle.read().rpartition(")")
    except OSError:
        return None
    field = tail.split()
    return (head.partition("(")[2], field[0], int(field[1]), int(field[19]), int(field[2])) if field else None


def lives(pid, start):
    """Return whether a process still is the one that began at a time (ticks); a zombie is dead."""
    found = stat_of(pid)
    return found is not None and found[3] == start and found[1] not in "ZX"


def below(server):
    """Return ``{(pid, start): (name, ppid)}`` of what lives below a server, and of the workers that are its zombies."""
    table = {int(name): stat_of(name) for name in os.listdir("/proc") if name.isdigit()}
    found = {}
    for pid, stat in table.items():
        above = stat and (stat[1] not in "ZX" or stat[0].startswith(TITLES)) and stat[2]
        while above and above != server:
            above = table[above][2] if table.get(above) else None
        if above:
            found[(pid, stat[3])] = (stat[0], stat[2])
    return found


def workers(children):
    """Return ``{(pid, start): title}`` of the schedulers and detokenizers among the processes of :func:`below`."""
    found = {}
    titled = {pid for (pid, _start), (name, _above) in children.items() if name.startswith(TITLES)}
    for (pid, start), (name, above) in children.items():
        # A worker that runs a program forks first: until it has become that program the child has the worker's name.
        if pid in titled and above not in titled:
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as handle:
                    found[(pid, start)] = handle.read().split(b"\0")[0].decode("utf-8", "replace").strip() or name
            except OSError:
                continue
    return found


def now():
    """Return the time as the ledger writes it."""
    seconds = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"


def write_json(path, data):
    """Replace a file; a full disk is no reason to end. The server's account may own the folder: no link is followed."""
    temporary = f"{path}.{os.getpid()}.new"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            json.dump(data, handle, indent=1)
        os.replace(temporary, path)
    except OSError as problem:
        print(f"watch.py: {path}: {problem}", file=sys.stderr)


def record(release, event):
    """Append one line to the ledger of the root."""
    line = {"schema": 1, "time": now(), "run": None, "user": None, "controller": None, "variant": None}
    line.update(event, release=os.path.basename(release))
    path = os.path.join(os.path.dirname(os.path.dirname(release)), "ledger.jsonl")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            data = (json.dumps(line, sort_keys=True) + "\n").encode("ascii")
            size = os.fstat(descriptor).st_size
            # As sglang_ledger.append, which this program cannot import: end a torn line, and leave no torn one.
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(descriptor, data)
            if written != len(data):
                os.ftruncate(descriptor, size)
                raise OSError(f"only {written} of {len(data)} bytes were written; is the disk full?")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as problem:
        print(f"watch.py: {path}: {problem}", file=sys.stderr)


def clear(release, seconds=10.0):
    """Kill what is left of a release's processes, and remove what its workers wrote about their imports."""
    needle = f"{MARKER}={release}".encode()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rest = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/environ", "rb") as handle:
                    if needle in handle.read().split(b"\0") and (stat_of(name) or "XX")[1] not in "ZX":
                        rest.append(int(name))
            except OSError:
                continue
        if not rest:
            break
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for path in glob.glob(os.path.join(glob.escape(release), "run", "imports-*.json")):
        with contextlib.suppress(OSError):
            os.unlink(path)


def stacks(python, pids, folder):
    """Write the stacks of processes with the engine's py-spy, where it has one; return the file or an empty text."""
    spy = os.path.join(os.path.dirname(python), "py-spy")
    if not os.access(spy, os.X_OK):
        return ""
    path = os.path.join(folder, time.strftime("stacks-%Y%m%dT%H%M%SZ.txt", time.gmtime()))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640)
        with os.fdopen(descriptor, "ab") as handle:
            dumps = [subprocess.Popen([spy, "dump", "--pid", str(pid)], stdout=handle, stderr=handle) for pid in pids]
            end = time.monotonic() + 15
            for dump in dumps:
                try:
                    dump.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    dump.kill()
                    dump.wait()
    except OSError:
        return ""
    return path


class Watch:
    """The life of one server and of those that follow it.

    :param release: absolute path of the release.
    """

    def __init__(self, release):
        self.release, self.root = release, os.path.dirname(os.path.dirname(release))
        self.launch = policy.read_json(os.path.join(release, "launch.json"))
        self.settings = self.launch.get("watch") or {}
        self.restarts, self.history = [], []
        self.server, self.begin, self.spawned, self.stopping = None, 0, 0.0, False
        self.mine, self.oom = (stat_of(os.getpid()) or (0, 0, 0, 0))[3], None
        self.code, self.reason, self.waited = 0, {}, ""

    def note(self, state, text="", ended=False, **more):
        """Write ``run/health.json``; ``ended`` is the word without which the next watch takes this one for killed."""
        server = {"pid": self.server.pid if self.server else None, "start": self.begin}
        data = {"schema": 1, "state": state, "server": server, "since": now(), "text": text}
        data.update(more, watch=os.getpid(), restarts=self.history[-10:], ended=ended)
        data.update(boot_id=policy.boot_id(), watch_start=self.mine, restarted=self.restarts, oom=self.oom)
        write_json(os.path.join(self.release, "run", "health.json"), data)

    def spawn(self):
        """Start the server; a session of its own makes its processes one group, which this one is not part of."""
        env = {MARKER: self.release, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        command = [sys.executable, "-I", "-S", os.path.join(self.release, "launch.py"), str(os.getpid())]
        self.server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        self.spawned = time.monotonic()
        self.begin = (stat_of(self.server.pid) or (0, 0, 0, 0))[3]
        self.known, self.died, self.told, self.first, self.hung = {}, {}, set(), {}, 0.0
        self.awaited = bool(self.restarts)
        self.probe, self.oom = probe.Probe(self.launch), policy.oom_kills()

    def run(self):
        """Start the server and stay until it is to be left alone; never returns."""
        awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        # A hangup is none of those that end this program.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*awaited, signal.SIGHUP})
        pause = 0.0
        if not self.follow():
            # Whoever starts the service wants it to run, whatever was wanted before.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.root, "stopped"))
            self.spawn()
            self.note("watching")
        while True:
            got = signal.sigtimedwait(awaited, pause)
            pause = self.settings.get("look_seconds", INTERVAL)
            if time.monotonic() - self.spawned < YOUNG:
                pause = min(pause, BRISK)
            try:
                if got is not None and got.si_signo != signal.SIGCHLD:
                    self.stop()
                if self.server and self.server.poll() is not None:
                    self.ended(self.server.returncode)
                if self.stopping and not self.server:
                    sys.exit(0)
                if not self.server:
                    self.decide()
                elif not self.stopping:
                    self.look()
            except Exception:  # a fault of this program must neither end a server that serves nor leave one down
                traceback.print_exc()

    def follow(self):
        """Take over from a watch of this release that ended without a word, whose server is to leave nothing behind.

        :returns: whether there was one.
        """
        before = policy.predecessor(self.release)
        if before:
            self.reason = policy.reason_of_watch(before, before.get("signal") or newlog.last_signal(self.root))
            self.restarts, self.history = before["restarted"], before["restarts"]
            self.code = -signal.SIGKILL
            clear(self.release)
        return bool(before)

    def stop(self):
        """Pass a stop on to the server; what happens from here on is no death of this program."""
        if not self.stopping:
            self.note("stopping", ended=True)
        self.stopping = True
        if self.server:
            self.server.terminate()

    def ended(self, code):
        """Note why the server ended; a worker that was seen dead well before is what died first."""
        early = [item for item in self.died.items() if time.monotonic() - item[1][0] >= 1]
        if early and not self.first:
            (pid, start), (_since, at) = min(early, key=lambda item: item[1])
            name = self.known[(pid, start)]
            self.first = {"process": name, "text": f"{name} (pid {pid}) died at {at}, and then the server ended"}
        self.reason = policy.reason_of(self.launch["log"], code, self.first)
        if (policy.oom_kills() or 0) > (self.oom or 0):
            self.reason["reason"] += "; the kernel's OOM killer has killed a process meanwhile"
        self.code, self.server, self.waited = code, None, ""

    def decide(self):
        """Restart, wait, or end in the way the server ended."""
        what, why = policy.verdict(self.release, self.settings, self.restarts)
        text = self.reason["reason"]
        if what == "wait":
            if why != self.waited:
                self.note("down", f"{text}. {why} and is waited for", reason=self.reason)
                self.waited = why
        elif what == "leave":
            if os.path.exists(os.path.join(self.root, "stopped")):
                self.note("stopped", ended=True)
            else:
                way = f"It stays down: {why}. Way out: {self.reason['advice']}; deploy.yml starts it again"
                self.note("down", f"{text}. {way}", ended=True, reason=self.reason)
                record(self.release, dict(self.reason, event="alarm", kind="server_died", why=why))
            self.leave()
        else:
            self.restart()

    def leave(self):
        """End with the server's exit code; a signal is told as a shell does, because one of its own is no last word."""
        sys.exit(128 - self.code if self.code < 0 else self.code)

    def restart(self):
        """Start the server anew: no process of the one before, a log of its own, and nobody with the lock."""
        if signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, self.settings.get("pause_seconds", PAUSE)):
            self.note("stopping", ended=True)
            sys.exit(0)
        clear(self.release)
        # A run that takes the lock from here on finds the new server, or none that could still come.
        with guarded(self.root):
            what, why = policy.verdict(self.release, self.settings, self.restarts)
            if what != "restart":
                return
            newlog.fresh_log(self.launch["log"], self.settings.get("log_keep", 5))
            self.restarts.append(time.monotonic())
            self.spawn()
        group = {"pgid": self.server.pid, "start": self.begin, "boot_id": policy.boot_id()}
        write_json(os.path.join(self.release, "run", "service.json"), group)
        self.history.append(dict(self.reason, time=now(), pid=self.server.pid, number=why))
        self.note("restarting", f"{self.reason['reason']}. {why}; it does not serve yet", reason=self.reason)
        record(self.release, dict(self.reason, event="restart", pid=self.server.pid, why=why))

    def look(self):
        """Look at the living server once."""
        children = below(self.server.pid)
        # The last name while it lived: a young worker has its parent's, a zombie fifteen characters.
        for key, title in workers(children).items():
            if key not in self.known or lives(*key):
                self.known[key] = title
        for key in self.known:
            if key not in self.died and not lives(*key):
                self.died[key] = (time.monotonic(), now())
        confirm = self.settings.get("confirm_seconds", CONFIRM)
        lasting = {key for key, (since, _at) in self.died.items() if time.monotonic() - since >= confirm} - self.told
        # The server may have ended since the look began: then this was its stop.
        if lasting and self.server.poll() is None and lives(self.server.pid, self.begin):
            self.dead(lasting)
        if self.told:
            self.give_up()
            return
        compiling = not probe.COMPILERS.isdisjoint(name for name, _above in children.values())
        text = self.probe.look(compiling, not policy.holder(self.root))
        # The probe's own thread may have heard the first token since the last look.
        if self.awaited and self.probe.served:
            self.awaited = False
            self.note("watching")
        if text and not self.hung:
            self.hung = time.monotonic()
            pids = [self.server.pid, *(pid for pid, _start in self.known)]
            where = stacks(self.launch["argv"][0], pids, os.path.dirname(self.launch["log"]))
            text = f"all processes live and the server hangs: {text}" + (f"; stacks: {where}" if where else "")
            self.note("hung", text)
            self.alarm("hung", text)
            self.first = {"process": "server", "text": text, "signature": "generation_dead"}
        elif self.hung and self.probe.tokens > self.hung:
            self.hung, self.first = 0.0, {}
            self.note("watching")
            self.alarm("recovered", "tokens flow again")
        if self.hung and self.settings.get("restart_on_hang"):
            self.give_up()

    def alarm(self, kind, text):
        """Tell the ledger about a server that lives."""
        record(self.release, {"event": "alarm", "kind": kind, "pid": self.server.pid, "reason": text})

    def dead(self, lasting):
        """Report workers that died under the living server."""
        self.told |= lasting
        dead = [{"pid": key[0], "title": self.known[key], "time": self.died[key][1]} for key in sorted(self.told)]
        names = ", ".join(f"{item['title']} (pid {item['pid']}) at {item['time']}" for item in dead)
        text = f"{names} died and the server process {self.server.pid} lives on; it cannot serve any more"
        self.note("worker_died", text, dead=dead)
        record(self.release, {"event": "worker_died", "pid": self.server.pid, "dead": dead})
        self.first = {"process": dead[0]["title"], "text": text}

    def give_up(self):
        """End a server that is of no use any more, where a restart follows."""
        if policy.verdict(self.release, self.settings, self.restarts)[0] == "restart":
            self.server.kill()


@contextlib.contextmanager
def guarded(root):
    """Keep everybody from taking the deploy lock for a moment, as :mod:`sglang_lock` does."""
    try:
        descriptor = os.open(os.path.join(root, ".lock.guard"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def tell(release):
    """Note how systemd saw the watch end, in the variables of ExecStopPost, for the one that follows it."""
    if os.environ.get("EXIT_CODE") in ("killed", "dumped"):
        before = policy.predecessor(release)
        if before:
            path = os.path.join(release, "run", "health.json")
            write_json(path, dict(before, signal="SIG" + os.environ.get("EXIT_STATUS", "")))


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.argv[1:] == ["tell"]:
        tell(here)
    else:
        Watch(here).run()
