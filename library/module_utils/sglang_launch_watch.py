"""Watch a server's workers from beside it: the program ``watch.py`` of a release.

SGLang 0.5.9 does not notice that a scheduler died: the parent lives on and answers nobody. This program sees it from
the processes alone. It asks the server nothing, so it neither disturbs a measurement nor takes a busy server for a dead
one. What it sees is in ``run/health.json`` and in the ledger. It lives and ends with the server, restarts nothing, and
needs the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import time

INTERVAL = 5.0
# A server that stops ends its workers first: only a death that lasts is one under a living parent.
CONFIRM = 10.0
TITLES = ("sglang::schedul", "sglang::detoken")  # as the kernel cuts them
PR_SET_PDEATHSIG = 1


def stat_of(pid, proc="/proc"):
    """Return ``(name, state, ppid, start in ticks)`` of a process, or None where it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            head, _, tail = handle.read().rpartition(")")
    except OSError:
        return None
    field = tail.split()
    return (head.partition("(")[2], field[0], int(field[1]), int(field[19])) if field else None


def lives(pid, start):
    """Return whether a process still is the one that began at a time (ticks); a zombie is dead."""
    found = stat_of(pid)
    return found is not None and found[3] == start and found[1] not in "ZX"


def workers(server):
    """Return ``{(pid, start): title}`` of the living schedulers and detokenizers below a server."""
    table = {int(name): stat_of(name) for name in os.listdir("/proc") if name.isdigit()}
    found = {}
    for pid, stat in table.items():
        if not stat or not stat[0].startswith(TITLES) or stat[1] in "ZX":
            continue
        above = stat[2]
        while above != server and table.get(above):
            above = table[above][2]
        if above == server:
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as handle:
                    title = handle.read().split(b"\0")[0].decode("utf-8", "replace").strip()
            except OSError:
                continue
            found[(pid, stat[3])] = title or stat[0]
    return found


def now():
    """Return the time as the ledger writes it."""
    seconds = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"


def note(release, data):
    """Replace ``run/health.json``; a full disk is no reason to end."""
    path = os.path.join(release, "run", "health.json")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".new", "w", encoding="utf-8") as handle:
            json.dump(data, handle, indent=1)
        os.replace(path + ".new", path)
    except OSError as problem:
        print(f"watch.py: {path}: {problem}", file=sys.stderr)


def record(release, event):
    """Append one line to the ledger of the root; the server's account may not be allowed to, and health.json stays."""
    line = {"schema": 1, "time": now(), "run": None, "user": None, "controller": None, "variant": None}
    line.update(event, release=os.path.basename(release))
    path = os.path.join(os.path.dirname(os.path.dirname(release)), "ledger.jsonl")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
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


def watch(server, release, interval=INTERVAL, confirm=CONFIRM):
    """Look every INTERVAL seconds until the server process ends.

    :param server: its pid.
    :param release: absolute path of the release.
    :param confirm: seconds that a death must last under a living server before it is reported.
    """
    begin = stat_of(server)
    if begin is None:
        return
    data = {"schema": 1, "state": "watching", "server": {"pid": server, "start": begin[3]}, "since": now(), "text": ""}
    note(release, data)
    known, died, told = {}, {}, set()
    while lives(server, begin[3]):
        known.update(workers(server))
        for key in known:
            if key not in died and not lives(*key):
                died[key] = (time.monotonic(), now())
        lasting = {key for key, (since, _at) in died.items() if time.monotonic() - since >= confirm} - told
        # The server may have ended since the loop began: then this was its stop.
        if lasting and lives(server, begin[3]):
            told |= lasting
            dead = [{"pid": key[0], "title": known[key], "time": died[key][1]} for key in sorted(told)]
            names = ", ".join(f"{item['title']} (pid {item['pid']}) at {item['time']}" for item in dead)
            text = f"{names} died and the server process {server} lives on; it cannot serve any more"
            note(release, dict(data, state="worker_died", since=dead[0]["time"], dead=dead, text=text))
            record(release, {"event": "worker_died", "pid": server, "dead": dead})
        time.sleep(interval)


def main():
    """Watch the parent process; end with it at once, whatever ends it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    server = int(sys.argv[1])
    if os.getppid() == server:
        watch(server, os.path.dirname(os.path.abspath(__file__)))


if __name__ == "__main__":
    main()
