"""The deploy lock ``<root>/lock``: JSON ``{schema, run, variant, since}`` naming the run that may change the root.

Reading and writing happen under a short flock of ``<root>/.lock.guard``; the lock itself outlives the process that took
it, since one run is many module calls. Its modification time is the heartbeat, which waiting modules renew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import threading
import time

from ansible.module_utils.sglang_proc import alive, boot_id, stat_of
from ansible.module_utils.sglang_release_store import atomic_write, fsync_directory, utc_now

SCHEMA = 1
HEARTBEAT_INTERVAL = 30
HEARTBEAT_LIMIT = 15 * 60


class LockedError(Exception):
    """Another run holds the lock; the message says who and what to do. ``holder`` is its dict."""

    def __init__(self, message, holder):
        super().__init__(message)
        self.holder = holder


def lock_path(root):
    """Return ``<root>/lock``."""
    return os.path.join(root, "lock")


@contextlib.contextmanager
def _guard(root):
    descriptor = os.open(os.path.join(root, ".lock.guard"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(root):
    """Return the holder ``{run, variant, since, heartbeat_age}`` (age in seconds), or null where nobody holds the lock.

    A lock file that is no JSON is somebody's all the same: its run is empty.
    """
    try:
        with open(lock_path(root), encoding="utf-8", errors="replace") as handle:
            age = max(0.0, time.time() - os.fstat(handle.fileno()).st_mtime)
            text = handle.read()
    except FileNotFoundError:
        return None
    try:
        holder = json.loads(text)
        if not isinstance(holder["run"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        holder = {"run": {}, "variant": "", "since": ""}
    holder["heartbeat_age"] = round(age, 1)
    return holder


def _pid_start(pid):
    """Return the start time of a process in clock ticks since boot, or null where it is gone or only a zombie."""
    if not str(pid).isdigit():
        return None
    stat = stat_of(pid, "/proc")
    return stat["start"] if stat and alive(stat["state"]) else None


def pid_namespace():
    """Return the name of this process's PID namespace; empty where the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def machine_id():
    """Return what names this machine across restarts; empty where nothing does."""
    try:
        with open("/etc/machine-id", encoding="ascii", errors="replace") as handle:
            text = handle.read().strip()
    except OSError:
        return ""
    return text if re.fullmatch("[0-9a-f]{32}", text) else ""


def without_alive(run):
    """Return the run as it is recorded: without ``alive``, which is true only when it is asked."""
    return {key: value for key, value in run.items() if key != "alive"}


def judge(holder, run):
    """Return ``(alive, reason)``: true, or false and why, or null and an empty text where that cannot be known.

    A holder on this host is looked for in ``/proc``. One on the asking run's own controller is looked for among the
    processes that lived there when the asking run was named. A name alone makes no machine the same one: the boot id
    does, or the machine id after a restart.

    :param holder: dict of :func:`read`. :param run: the run that asks.
    """
    held = holder["run"]
    name, boot, space = held.get("controller"), held.get("boot_id"), held.get("pid_ns")
    if not name or not boot:
        return None, ""
    machine, host = held.get("machine_id"), socket.gethostname()
    for where in (run, {"controller": host, "machine_id": machine_id(), "boot_id": boot_id()}):
        if (
            machine
            and (name, machine) == (where.get("controller"), where.get("machine_id"))
            and boot != where.get("boot_id")
        ):
            return False, f"{name} was restarted since"
    same = (name, boot) == (run.get("controller"), run.get("boot_id"))
    if (name, boot) == (host, boot_id()) and space in (None, "", pid_namespace()):
        start = _pid_start(held.get("pid"))
        if start is None:
            return False, f"its process {held.get('pid')} is gone"
        if str(start) != str(held.get("pid_start")):
            return False, f"process {held.get('pid')} is another one by now"
        return True, ""
    if not same or not space or space != run.get("pid_ns") or not isinstance(run.get("alive"), list):
        return None, ""
    try:
        process = (int(held["pid"]), int(held["pid_start"]))
        if process in {(int(pid), int(start)) for pid, start in run["alive"]}:
            return True, ""
        # Who came after the asking run may be younger than its list.
        if process[1] <= int(run["pid_start"]) and held["time"] < run["time"]:
            return False, f"its process {process[0]} on {name} is gone"
    except (KeyError, TypeError, ValueError):
        pass
    return None, ""


def describe(holder):
    """Return one line that names a holder."""
    run = holder["run"]
    if not run:
        return f"an unreadable lock file, touched {holder['heartbeat_age']:.0f} s ago"
    return (
        f"run {run.get('id')} of user {run.get('user')} on controller {run.get('controller')} (pid {run.get('pid')}), "
        f"variant {holder.get('variant') or 'none'}, since {holder.get('since')}, "
        f"last sign of life {holder['heartbeat_age']:.0f} s ago"
    )


def _refusal(root, holder, alive_known):
    text = f"{lock_path(root)} is held by {describe(holder)}. Rule: one deploy at a time on a host. Way out: "
    left = HEARTBEAT_LIMIT - holder["heartbeat_age"]
    if alive_known:
        return text + f"wait for it, or end process {holder['run'].get('pid')}; then this run takes over."
    if left > 0:
        return text + f"wait for it, or end it; -e sglang_break_lock=true breaks a silent one in {left:.0f} s."
    return text + "make sure that it is dead, then run again with -e sglang_break_lock=true."


def acquire(root, run, variant="", break_lock=False):
    """Take the lock for a run, or renew it where the run has it.

    :return: ``{taken: bool, took_over: text}``; ``taken`` is false where the run had it, ``took_over`` names the dead.
    :raises LockedError: another run has it. :raises OSError: the root is missing or not writable.
    """
    with _guard(root):
        holder, took_over = read(root), ""
        if holder and holder["run"].get("id") == run["id"]:
            os.utime(lock_path(root))
            return {"taken": False, "took_over": ""}
        if holder:
            lives, reason = judge(holder, run)
            if lives is None and break_lock and holder["heartbeat_age"] > HEARTBEAT_LIMIT:
                reason = "broken by break_lock=true"
            if not reason:
                raise LockedError(_refusal(root, holder, lives), holder)
            took_over = f"took the lock over from {describe(holder)}: {reason}"
        record = {"schema": SCHEMA, "run": without_alive(run), "variant": variant, "since": utc_now()}
        atomic_write(lock_path(root), (json.dumps(record, sort_keys=True, indent=2) + "\n").encode("ascii"))
        return {"taken": True, "took_over": took_over}


def touch(root):
    """Show that whoever holds the lock lives; false where nobody does or the lock cannot be touched. Never raises."""
    try:
        holder = read(root)
        # The root may be a guess from a path: a foreign file of that name names no run.
        if not holder or not holder["run"]:
            return False
        os.utime(lock_path(root))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def kept_fresh(root, interval=HEARTBEAT_INTERVAL):
    """Touch the lock every ``interval`` seconds while the block runs, also where the block has no loop of its own.

    :param root: directory of the deployment, or None for none.
    """
    over = threading.Event()

    def beat():
        touch(root)
        while not over.wait(interval):
            touch(root)

    thread = threading.Thread(target=beat, daemon=True)
    if root:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if root:
            thread.join()


def release(root, run):
    """Give the lock back; true where the run had it, false where nobody or somebody else has it."""
    if not os.path.exists(lock_path(root)):
        return False
    with _guard(root):
        holder = read(root)
        if not holder or holder["run"].get("id") != run.get("id"):
            return False
        os.unlink(lock_path(root))
        fsync_directory(root)
        return True


@contextlib.contextmanager
def held(root, run, variant=""):
    """Hold the lock for a block: renewed where the run has it, else taken and given back at the end."""
    taken = acquire(root, run, variant)["taken"]
    try:
        yield
    finally:
        if taken:
            release(root, run)
