"""Start and stop of one server: port, left-over processes, log rotation, provider, first moments, ledger."""

from __future__ import annotations

import glob
import json
import os
import re
import time

from ansible.module_utils import (
    sglang_canary_plan,
    sglang_ledger,
    sglang_lock,
    sglang_proc,
    sglang_release_step,
    sglang_stopped,
    sglang_terminate,
)
from ansible.module_utils.sglang_provider import ProviderError, Supervisor, Systemd, detect, write_if_changed
from ansible.module_utils.sglang_release_store import ReleaseError

# Enough to see an error of interpreter, launcher or package; what comes later is the verification's to see. The
# moment is over after this much CPU time, because a busy host may take seconds to run Python's first 50 ms.
_SETTLE_CPU_SECONDS, _SETTLE_SECONDS = 0.15, 2.0
_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b|\berror:|\bERROR\b|No module named|cannot ")


class ServiceError(Exception):
    """The wanted state was not reached; the message says why and what to do."""


def rotate(log, keep):
    """Move ``server.log`` to ``server.log.1`` and so on and keep ``keep`` of them: each start has a log of its own."""
    if not os.path.exists(log):
        return
    folder, base = os.path.split(log)
    for name in os.listdir(folder):
        suffix = name[len(base) + 1 :]
        if name.startswith(base + ".") and suffix.isdigit() and int(suffix) >= max(keep, 1):
            os.unlink(os.path.join(folder, name))
    for number in range(keep - 1, 0, -1):
        if os.path.exists(f"{log}.{number}"):
            os.replace(f"{log}.{number}", f"{log}.{number + 1}")
    if keep:
        os.replace(log, f"{log}.1")
    else:
        os.unlink(log)


def forget(release):
    """Remove what workers and watch of earlier starts wrote: pids come again, and this start is no restart."""
    run = os.path.join(glob.escape(release), "run")
    for path in glob.glob(os.path.join(run, "imports-*.json")) + glob.glob(os.path.join(run, "health.json")):
        os.unlink(path)


def log_tail(log, lines=20):
    """Return the last lines of a log; empty where there is none. Long lines are cut to 400 characters."""
    try:
        with open(log, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - 65536))
            text = handle.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line[:400] for line in text.splitlines()[-lines:]]


def first_error(lines):
    """Return the first line that names an error, else the last line that is not empty, else an empty text."""
    filled = [line.strip() for line in lines if line.strip()]
    return next((line for line in filled if _ERROR_LINE.search(line)), filled[-1] if filled else "")


def started_at(item):
    """Return the start time of a scanned process in UTC, from the kernel's clock ticks since boot."""
    with open("/proc/stat", encoding="ascii") as handle:
        boot = next(int(line.split()[1]) for line in handle if line.startswith("btime"))
    seconds = boot + item["start"] / os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def cpu_seconds(pid):
    """Return the CPU time that a process has used, in seconds; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            field = handle.read().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(field[11]) + int(field[12])) / os.sysconf("SC_CLK_TCK")


class Service:
    """One start or stop with the parameters of the module ``sglang_service``.

    :param run: callable ``run(argv) -> (rc, stdout, stderr)`` for the few commands that are needed.
    """

    def __init__(self, params, check_mode, run):
        self.p, self.check_mode = params, check_mode
        self.begin = time.monotonic()
        self.root, self.release = params["root"], params["release"]
        self.launch = sglang_proc.launch_of(self.release) if self.release else {}
        self.kind = detect() if params["provider"] == "auto" else params["provider"]
        if self.kind == "systemd":
            self.provider = Systemd(self.root, params["unit"], run, params["install_unit"])
        else:
            self.provider = Supervisor(self.root, params["unit"], run, params["python"], params["supervisor_lock"])
        self.out = {
            "changed": False,
            "state": "stopped",
            "pid": None,
            "started_at": None,
            "reasons": [],
            "stopped": [],
            "killed": [],
            "activation": None,
        }

    def result(self):
        """Return the module's result."""
        return dict(
            self.out,
            provider=self.kind,
            log=self.launch.get("log", ""),
            endpoint=self.launch.get("endpoint", ""),
            elapsed=round(time.monotonic() - self.begin, 3),
        )

    def _living(self):
        return [item for item in sglang_proc.scan(self.root) if sglang_proc.alive(item["state"])]

    def _server(self):
        """Return the living server process of the release, or None."""
        wanted = os.path.realpath(self.release)
        return next(
            (i for i in self._living() if i["role"] == "server" and os.path.realpath(i["release"]) == wanted), None
        )

    def _up(self, server):
        self.out.update(state="running", pid=server["pid"], started_at=started_at(server))

    def _record(self, event, **more):
        if not self.check_mode:
            name = os.path.basename(self.release) if self.release else None
            sglang_ledger.append(self.root, dict({"event": event, "release": name, "run": self.p["run"]}, **more))

    def _wish(self):
        """Note that what runs is to stop, before it does: watch.py restarts nothing that is stopped on purpose."""
        if not self.check_mode and os.path.isdir(self.root):
            sglang_stopped.write(self.root, self.p["run"], self.p["state"], self.p["temporary"])

    def _terminate(self):
        """Stop all processes of the root; return whether there were any."""
        self._wish()
        living = self._living()
        self.out["stopped"] = [item["pid"] for item in living]
        if not living or self.check_mode:
            return bool(living)
        releases = sorted({os.path.basename(item["release"]) for item in living})
        try:
            done = sglang_terminate.terminate(self.root, timeout=self.p["stop_timeout"])
        except sglang_terminate.TerminateError as error:
            self.out.update(changed=True, killed=error.killed)
            raise ServiceError(f"The server could not be stopped: {error}") from error
        # One that died between the two looks is gone all the same.
        stopped = sorted({*self.out["stopped"], *done["found"]})
        self.out.update(stopped=stopped, killed=done["killed"], changed=True)
        for release in releases:
            killed = [item["pid"] for item in done["killed"] if os.path.basename(item["release"]) == release]
            self._record("stop", release=release, pid=stopped[0], killed=killed, elapsed=done["elapsed"])
        return True

    def _end_canary(self):
        """End what is left of a canary, whose module may have been killed; return whether there was anything."""
        base = sglang_canary_plan.canary_root(self.root)
        left = [item["pid"] for item in sglang_proc.scan(base) if sglang_proc.alive(item["state"])]
        self.out["stopped"] += left
        if left and not self.check_mode:
            try:
                self.out["killed"] += sglang_terminate.terminate(base, timeout=5.0, grace=1.0)["killed"]
            except sglang_terminate.TerminateError as error:
                raise ServiceError(f"The canary could not be stopped: {error}") from error
        return bool(left)

    def stopped(self):
        """Reach the state stopped.

        :raises ServiceError: a process does not die, or the port stays taken.
        """
        try:
            self.out["changed"] = self._terminate()
            self.out["changed"] |= self._end_canary()
            if not self.check_mode:
                self.provider.settle()
            self.out["changed"] |= self.provider.close(self.check_mode)
        except ProviderError as error:
            raise ServiceError(str(error)) from error

    def started(self):
        """Reach the state started.

        :raises ServiceError: the port is another's, the release may not be activated, the provider fails, or the
            process dies at once.
        """
        if not self.launch:
            if self.check_mode and not os.path.lexists(os.path.join(self.release, "launch.json")):
                # The task before this one would have written it.
                self.out.update(changed=True, state="running", reasons=["no server process runs"])
                self._activate()
                return
            raise ServiceError(
                f"{self.release}/launch.json is missing or damaged. Way out: build the release again (deploy.yml)."
            )
        server = self._server()
        self.out["reasons"] = sglang_proc.drift(
            self.launch, self.root, loading=sglang_proc.loading(self.launch, server)
        )
        if server is not None and not self.out["reasons"]:
            self._activate()
            self._up(server)
            return
        self._refuse_foreign_port()
        try:
            # Before the stop: a running server is not given up for a start that is not allowed.
            self.provider.permit(self.release, planned=self.p["activate"])
            # Before the stop too: killed from here on, the next run sees that what runs is not what the link says.
            self._activate()
            self.out.update(changed=True)
            self._terminate()
            if self.check_mode:
                self.out.update(state="running")
                return
            self.provider.settle()
            self.provider.prepare(self.release)
            rotate(self.launch["log"], self.p["log_keep"])
            forget(self.release)
            self.provider.start()
            self._first_moments()
        except ProviderError as error:
            raise ServiceError(str(error)) from error

    def _activate(self):
        """Let the link ``current`` point to the release, where that is asked for."""
        if not self.p["activate"]:
            return
        step = dict(self.p, release=os.path.basename(self.release))
        try:
            done = sglang_release_step.locked(sglang_release_step.activate, step, self.check_mode)
        except (ReleaseError, sglang_lock.LockedError) as error:
            raise ServiceError(str(error)) from error
        self.out["activation"] = {key: done[key] for key in ("changed", "msg", "before", "after")}
        self.out["changed"] |= done["changed"]

    def _refuse_foreign_port(self):
        port = sglang_proc.port_of(self.launch)
        ours = {item["pid"] for item in sglang_proc.scan(self.root)}
        holders = [item for item in sglang_proc.listeners(port) if item["pid"] not in ours]
        if holders:
            raise ServiceError(
                f"sglang_server_port {port} is taken by {'; '.join(sglang_proc.describe(item) for item in holders)}, "
                "which this deployment did not start and will not stop. Way out: stop it, or choose another port."
            )

    def _first_moments(self):
        """Wait until the server process exists, and a moment longer; record the start."""
        end = time.monotonic() + self.p["start_timeout"]
        seen = None
        while True:
            pid, state = self.provider.pid()
            server = self._server() if pid else None
            if server is not None:
                seen = seen or time.monotonic()
                if cpu_seconds(server["pid"]) >= _SETTLE_CPU_SECONDS or time.monotonic() - seen >= _SETTLE_SECONDS:
                    break
            elif seen or not pid:
                self._died(self._last_state())
            elif time.monotonic() >= end:
                self._died(f"no server process after {self.p['start_timeout']} s, {state}")
            time.sleep(0.03)
        self._up(server)
        note = {"pgid": server["pgid"], "start": server["start"], "boot_id": sglang_proc.boot_id()}
        write_if_changed(sglang_proc.record_path(self.release), json.dumps(note) + "\n")
        self._record("start", pid=server["pid"], killed=[item["pid"] for item in self.out["killed"]])

    def _last_state(self):
        """Return the service manager's state of a server that is gone; it may learn of the death a moment after us."""
        end = time.monotonic() + 2
        while True:
            pid, state = self.provider.pid()
            if not pid or time.monotonic() >= end:
                return state
            time.sleep(0.03)

    def _died(self, state):
        tail = log_tail(self.launch["log"], 200)
        self.out["log_tail"] = tail[-20:]
        self._record("start", pid=None, killed=[item["pid"] for item in self.out["killed"]], failed=state)
        raise ServiceError(
            f"The server died at once ({state}): {first_error(tail) or 'it wrote nothing'} "
            f"The whole log is {self.launch['log']}."
        )
