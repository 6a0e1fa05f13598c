"""Stop the processes of a root for certain, and say what had to be killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time

from ansible.module_utils.sglang_ports import flags_of, ports_of
from ansible.module_utils.sglang_proc import alive, describe, launch_of, listeners, scan, stat_of

COMPUTE = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]


class TerminateError(Exception):
    """A process would not die, or kept port or GPU memory. ``killed`` and ``elapsed`` (seconds) tell what was done."""

    def __init__(self, message, killed=(), elapsed=0.0):
        super().__init__(message)
        self.killed = list(killed)
        self.elapsed = elapsed


def _signal(item, number, proc, kill):
    """Signal a process if it still is the one that was scanned; return whether the signal was sent."""
    now = stat_of(item["pid"], proc)
    if now is None or now["start"] != item["start"] or not alive(now["state"]):
        return False
    try:
        kill(item["pid"], number)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return False
        raise
    return True


def gpu_holders(pids):
    """Return ``{pid: memory}`` of those processes that the driver still lists; empty where no driver answers."""
    try:
        done = subprocess.run(COMPUTE, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.partition(",") for line in done.stdout.splitlines()]
    return {int(pid): used.strip() for pid, _, used in rows if pid.strip().isdigit() and int(pid) in pids}


def terminate(path, timeout=60.0, ports=(), grace=2.0, kill_timeout=10.0, spare=(), proc="/proc", kill=os.kill):
    """Stop every process of a root, or of one release, and wait until their ports and their GPU memory are free.

    SIGTERM goes to the topmost processes only, because the server drains its requests and takes its children along.
    What outlives it by ``grace`` seconds is killed: the group, and whatever else carries the marker.

    :param path: the root, or one release (``.../releases/<id>``).
    :param timeout: seconds that a topmost process may take after SIGTERM.
    :param ports: TCP ports to wait for, added to those of the launch.json of each release found, derived ones too.
    :param spare: release paths whose processes are left alone.
    :returns: ``{found: [pid], killed: [{pid, role, comm, release, signal}], elapsed}``; ``killed`` holds what SIGTERM
        did not stop, ``elapsed`` is in seconds.
    :raises TerminateError: a process will not die, may not be signalled, or keeps a port or GPU memory; the message
        names it.
    """
    begin = time.monotonic()
    ports, found, killed, devices = set(ports), set(), {}, set()

    def living():
        items = [item for item in scan(path, proc) if alive(item["state"]) and item["release"] not in spare]
        for release in {item["release"] for item in items}:
            launch = launch_of(release)
            ports.update(ports_of(launch))
            if launch.get("argv"):
                devices.add(flags_of(launch["argv"]).get("device"))
        found.update(item["pid"] for item in items)
        return items

    def fail(message):
        raise TerminateError(message, killed.values(), round(time.monotonic() - begin, 3))

    def wait(seconds, condition):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def send(item, number):
        try:
            return _signal(item, number, proc, kill)
        except PermissionError:
            return fail(f"{describe(item)} may not be signalled by this user")

    first = living()
    if not first:
        return {"found": [], "killed": [], "elapsed": round(time.monotonic() - begin, 3)}
    pids = {item["pid"] for item in first}
    top = [item for item in first if item["role"] == "server" or item["ppid"] not in pids]
    for item in top:
        send(item, signal.SIGTERM)
    keys = {(item["pid"], item["start"]) for item in top}
    wait(timeout, lambda: not any((item["pid"], item["start"]) in keys for item in living()))
    wait(grace, lambda: not living())

    def kill_all():
        rest = living()
        for item in rest:
            if send(item, signal.SIGKILL):
                entry = {key: item[key] for key in ("pid", "role", "comm", "release")}
                killed[item["pid"]] = dict(entry, signal="SIGKILL")
        return not rest

    if not wait(kill_timeout, kill_all):
        fail("still alive after SIGKILL: " + "; ".join(describe(item) for item in living()))

    def taken():
        return [(port, item) for port in sorted(ports) for item in listeners(port, proc)]

    if not wait(kill_timeout, lambda: not taken()):
        fail("; ".join(f"port {port} is still taken by {describe(item)}" for port, item in taken()))
    if devices - {"cpu"} and not wait(kill_timeout, lambda: not gpu_holders(found)):
        held = gpu_holders(found)
        fail("GPU memory is still held by " + ", ".join(f"pid {pid} ({used})" for pid, used in sorted(held.items())))
    return {"found": sorted(found), "killed": list(killed.values()), "elapsed": round(time.monotonic() - begin, 3)}
