"""The processes of a release, read from ``/proc`` with the standard library alone.

A process is ours when ``SGLANG_DEPLOY_RELEASE`` in its environment is a path below the root's ``releases/``. A child
that lost the variable (a process title may overwrite it, a zombie has no environment left) is ours when it is in the
process group of one that has it, or in a session that one of ours leads. Nothing else is ever signalled.

Every reader takes ``proc``, the mount point of procfs, so that a test can lay out a process table of its own.
"""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import sys

from ansible.module_utils.sglang_api_key import names_secret

MARKER = "SGLANG_DEPLOY_RELEASE"
_NEEDLE = MARKER.encode() + b"="
# The engine assigns these in the parent whatever was there before (0.5.9: engine.py, _set_envs_and_config).
ENGINE_OVERRIDES = ("CUDA_DEVICE_MAX_CONNECTIONS",)
WORKER_ROLES = ("scheduler", "detokenizer")
# A server this young may not have spawned its workers yet; older ones that lack some are not the wanted state.
LOADING_SECONDS = 120
_DEAD_STATES = ("Z", "X", "x")
_LISTEN = "0A"
# A flag with its separator, or the name of a variable that is set.
_NAMED = re.compile(r"--([\w-]+)[= ]|(?<![\w-])(\w+)=")
_VALUE = re.compile(r"\S*")


def _read(path):
    """Return a file's bytes, or None where the process is gone or hidden from us."""
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError:
        return None


def stat_of(pid, proc):
    """Return ``{pid, comm, state, ppid, pgid, sid, ticks, start}``, or None.

    ``start`` is in clock ticks since boot, ``ticks`` the clock ticks of CPU time that the process has used.
    """
    raw = _read(f"{proc}/{pid}/stat")
    if not raw:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses: the last one ends it.
    head, tail = raw.decode("utf-8", "replace").rsplit(")", 1)
    field = tail.split()
    return {
        "pid": int(pid),
        "comm": head.split("(", 1)[1],
        "state": field[0],
        "ppid": int(field[1]),
        "pgid": int(field[2]),
        "sid": int(field[3]),
        "ticks": int(field[11]) + int(field[12]),
        "start": int(field[19]),
    }


def environ(pid, proc="/proc"):
    """Return the environment of a process as ``{name: value}``; empty where it is gone, a zombie or not readable."""
    raw = _read(f"{proc}/{pid}/environ") or b""
    pairs = (item.split(b"=", 1) for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def cmdline(pid, proc="/proc"):
    """Return the argument list of a process; a process title comes back as one argument without its padding."""
    raw = _read(f"{proc}/{pid}/cmdline") or b""
    return [os.fsdecode(item) for item in raw.rstrip(b"\0").split(b"\0")] if raw.strip(b"\0") else []


def _executable(pid, proc):
    """Return the program that a process runs, or None for a zombie or one that is hidden from us."""
    try:
        return os.readlink(f"{proc}/{pid}/exe")
    except OSError:
        return None


def alive(state):
    """Return whether a state letter of ``/proc/PID/stat`` is that of a living process; a zombie is dead."""
    return state not in _DEAD_STATES


def _marker(pid, proc):
    """Return the marker's value in a process's environment, or None."""
    raw = _read(f"{proc}/{pid}/environ")
    if not raw or _NEEDLE not in raw:
        return None
    for item in raw.split(b"\0"):
        if item.startswith(_NEEDLE):
            return os.fsdecode(item[len(_NEEDLE) :])
    return None


def _scope(path):
    """Return ``(prefix, exact)`` for a root or for one release (a path whose parent is named ``releases``)."""
    path = os.path.abspath(path)
    if os.path.basename(os.path.dirname(path)) == "releases":
        return None, {path, os.path.realpath(path)}
    return tuple({os.path.join(base, "releases", "") for base in (path, os.path.realpath(path))}), None


def _dead(pid, table):
    return pid not in table or not alive(table[pid]["state"])


def _within(release, scope):
    prefix, exact = scope
    if release is None:
        return False
    return release in exact if exact is not None else release.startswith(prefix)


def release_of(pid, proc="/proc"):
    """Return the release path that a process is marked with, whatever root it belongs to, or None."""
    return _marker(pid, proc)


def launch_of(release):
    """Return a release's ``launch.json`` as a dict; empty where it is missing or not valid."""
    try:
        with open(os.path.join(release, "launch.json"), encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def role_of(argv, comm, launch_argv=None):
    """Return ``(role, tp_rank)`` from a command line; a zombie has only its name, cut to 15 characters."""
    title = argv[0] if argv else comm
    if title.startswith("sglang::schedul"):
        rank = re.search(r"_TP(\d+)", title)
        return "scheduler", int(rank.group(1)) if rank else None
    if title.startswith("sglang::detoken"):
        return "detokenizer", None
    text = " ".join(argv)
    if "multiprocessing.resource_tracker" in text:
        return "resource_tracker", None
    if "multiprocessing.spawn" in text or not argv:
        return "other", None
    if "sglang.launch_server" in argv or argv == launch_argv:
        return "server", None
    return "other", None


def record_path(release):
    """Return the file in which a start notes the process group of its server, ``{pgid, start, boot_id}``."""
    return os.path.join(release, "run", "service.json")


def boot_id():
    """Return the identifier of this boot of the kernel."""
    return (_read("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def _recorded_groups(root, scope):
    """Return ``{pgid: (release, start, interpreter)}`` that earlier starts noted in this boot."""
    exact = scope[1]
    releases = exact or glob.glob(os.path.join(glob.escape(os.path.abspath(root)), "releases", "*"))
    found = {}
    for release in releases:
        try:
            with open(record_path(release), encoding="ascii") as handle:
                note = json.load(handle)
            if note["boot_id"] == boot_id():
                found[note["pgid"]] = (release, note["start"], os.path.realpath(launch_of(release)["argv"][0]))
        except (OSError, ValueError, KeyError):
            continue
    return found


def _unmarked(table, marked, ours, recorded, proc):
    """Return ``{pid: release}`` of those without the variable that belong to the group or session of one of ours.

    A leader that is alive and not ours (a shell, supervisord) keeps its group and session. Where the leader is dead,
    what is older than ours is not ours; where all that had the variable are dead, the group is known by the note of the
    start, and only processes of the engine's interpreter count.
    """
    elders, found = {}, {}
    for pid in sorted(ours, key=lambda item: table[item]["start"]):
        elders.setdefault(table[pid]["pgid"], pid)
    for pid, stat in table.items():
        if pid in marked:
            continue
        leader, session = stat["pgid"], stat["sid"]
        elder = elders.get(leader)
        if leader in ours:
            found[pid] = ours[leader]
        elif elder is not None and _dead(leader, table):
            if pid == leader or stat["start"] >= table[elder]["start"]:
                found[pid] = ours[elder]
        elif session in ours:
            found[pid] = ours[session]
        elif leader in recorded and _dead(leader, table):
            release, start, python = recorded[leader]
            if stat["start"] >= start and _executable(pid, proc) == python:
                found[pid] = release
    return found


def scan(root, proc="/proc"):
    """Return the processes of a root, or of one release when ``root`` is a path ``.../releases/<id>``.

    :returns: ``[{pid, ppid, pgid, sid, state, start, ticks, uid, comm, cmdline, release, role, tp_rank}]`` ordered by
        pid, zombies included (``state`` Z). ``start`` is in clock ticks since boot, ``ticks`` the ticks of CPU time
        used, ``cmdline`` a list, ``role`` one of server, scheduler, detokenizer, resource_tracker, other.
    """
    scope = _scope(root)
    table, marked = {}, {}
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        stat = stat_of(name, proc)
        # Kernel threads (children of kthreadd, pid 2) have no environment; skipping them halves the cost on a big host.
        if stat is None or stat["ppid"] == 2:
            continue
        table[stat["pid"]] = stat
        release = _marker(name, proc)
        if release is not None:
            marked[stat["pid"]] = release
    ours = {pid: release for pid, release in marked.items() if _within(release, scope)}
    ours.update(_unmarked(table, marked, ours, _recorded_groups(root, scope), proc))
    launch_argv = {release: launch_of(release).get("argv") for release in set(ours.values())}
    found = []
    for pid in sorted(ours):
        argv = cmdline(pid, proc)
        role, rank = role_of(argv, table[pid]["comm"], launch_argv[ours[pid]])
        try:
            uid = os.stat(f"{proc}/{pid}").st_uid
        except OSError:
            continue
        found.append(dict(table[pid], uid=uid, cmdline=argv, release=ours[pid], role=role, tp_rank=rank))
    # Who runs a program forks first, and the child keeps the title until it has become that program.
    roles = {item["pid"]: item["role"] for item in found}
    for item in found:
        if roles.get(item["ppid"]) == item["role"]:
            item.update(role="other", tp_rank=None)
    return found


def is_ours(pid, root, proc="/proc"):
    """Return whether a process belongs to a root (or to one release, see :func:`scan`)."""
    if _within(_marker(pid, proc), _scope(root)):
        return True
    return any(item["pid"] == int(pid) for item in scan(root, proc))


def _address(text):
    """Return the dotted or colon form of an address in ``/proc/net/tcp`` (host byte order in groups of four bytes)."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _sockets(port, proc):
    """Return ``{inode: (address, uid)}`` of the listening TCP sockets on a port."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in (_read(f"{proc}/net/{name}") or b"").decode().splitlines()[1:]:
            field = line.split()
            if field[3] != _LISTEN:
                continue
            address, _, number = field[1].partition(":")
            if int(number, 16) == int(port):
                found[field[9]] = (_address(address), int(field[7]))
    return found


def listeners(port, proc="/proc"):
    """Return who listens on a TCP port, in this network namespace.

    :returns: ``[{pid, address, inode, uid, cmdline, release}]``; ``pid`` is None and ``cmdline`` empty where the holder
        is not visible to this user, ``release`` is None for a process that no release started.
    """
    sockets = _sockets(port, proc)
    if not sockets:
        return []
    found, seen = [], set()
    for name in sorted((item for item in os.listdir(proc) if item.isdigit()), key=int):
        try:
            links = os.listdir(f"{proc}/{name}/fd")
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(f"{proc}/{name}/fd/{link}")
            except OSError:
                continue
            inode = target[8:-1] if target.startswith("socket:[") else None
            if inode in sockets and (name, inode) not in seen:
                seen.add((name, inode))
                found.append((int(name), inode))
    held = {inode for _, inode in found}
    found += [(None, inode) for inode in sorted(sockets) if inode not in held]
    return [
        {
            "pid": pid,
            "address": sockets[inode][0],
            "inode": int(inode),
            "uid": sockets[inode][1],
            "cmdline": cmdline(pid, proc) if pid else [],
            "release": release_of(pid, proc) if pid else None,
        }
        for pid, inode in found
    ]


def without_secrets(text):
    """Return a command line without the values of flags and variables whose names are those of secrets."""
    shown, done = "", 0
    for match in _NAMED.finditer(text):
        if match.start() >= done and names_secret(match.group(1) or match.group(2)):
            shown += text[done : match.end()] + "***"
            done = _VALUE.match(text, match.end()).end()
    return shown + text[done:]


def describe(item):
    """Return one short text for a process or a listener, ``pid 12 (uid 0) python -m ...``, without its secrets."""
    if item.get("pid") is None:
        return f"a process of uid {item['uid']} that this user cannot see"
    text = without_secrets(" ".join(item.get("cmdline") or []) or item.get("comm", ""))
    return f"pid {item['pid']} (uid {item['uid']}) {text[:120]}"


def expected_schedulers(launch):
    """Return how many scheduler processes a launch asks for on this host: TP x PP x DP / nodes."""
    args = (launch.get("expect") or {}).get("args") or {}

    def number(*names):
        value = next((args[name] for name in names if args.get(name) is not None), 1)
        return max(int(value), 1)

    replicas = 1 if args.get("enable-dp-attention") else number("dp-size", "data-parallel-size", "dp")
    ranks = int(launch.get("tp_size") or 1) * number("pp-size", "pipeline-parallel-size") * replicas
    return max(ranks // number("nnodes"), 1)


def compare_env(process_env, expected):
    """Compare one worker's environment with the expected one.

    :returns: ``{name: {status, expected, actual}}`` with status ``equal``, ``missing``, ``different`` or ``overridden``
        (the engine assigns this variable itself, so the variant cannot set it).
    """
    result = {}
    for name, value in expected.items():
        actual = process_env.get(name)
        if actual == str(value):
            status = "equal"
        elif actual is None:
            status = "missing"
        else:
            status = "overridden" if name in ENGINE_OVERRIDES else "different"
        result[name] = {"status": status, "expected": str(value), "actual": actual}
    return result


def drift(launch, root, loading=False, proc="/proc"):
    """Return why the live processes are not those of a launch, as a list of texts; empty when they are.

    :param launch: content of the release's ``launch.json``.
    :param root: the deployment's root.
    :param loading: the server has just been started: schedulers that are not there yet are no reason.
    """
    release = launch["cwd"]
    found = scan(root, proc)
    living = [item for item in found if alive(item["state"])]
    reasons = []
    running = {item["release"] for item in living}
    foreign = sorted(item for item in running if os.path.realpath(item) != os.path.realpath(release))
    reasons += [f"processes of another release run: {os.path.basename(item)}" for item in foreign]
    living = [item for item in living if item["release"] not in foreign]
    servers = [item for item in living if item["role"] == "server"]
    if not servers:
        return reasons + ["no server process runs"]
    if all(item["cmdline"] != launch["argv"] for item in servers):
        reasons.append("the server runs with other arguments than launch.json")
    own = environ(servers[0]["pid"], proc)
    stale = sorted(name for name, value in launch.get("env", {}).items() if own.get(name) != value)
    if stale and MARKER in own:
        reasons.append(f"the server's environment differs from launch.json in {', '.join(stale)}")
    reasons += [
        f"{item['role']} pid {item['pid']} is a zombie"
        for item in found
        if item["role"] in WORKER_ROLES and item["release"] not in foreign and not alive(item["state"])
    ]
    schedulers = [item for item in living if item["role"] == "scheduler"]
    wanted = expected_schedulers(launch)
    if len(schedulers) != wanted and not (loading and len(schedulers) < wanted):
        reasons.append(f"{len(schedulers)} scheduler processes run, {wanted} are expected")
    expected = (launch.get("expect") or {}).get("env") or {}
    for item in (item for item in living if item["role"] in WORKER_ROLES):
        env = environ(item["pid"], proc)
        # A title that overwrote the block hides variables that are in force: that is no drift, verify reports it.
        if MARKER not in env:
            continue
        bad = sorted(n for n, one in compare_env(env, expected).items() if one["status"] in ("missing", "different"))
        if bad:
            reasons.append(f"{item['role']} pid {item['pid']} does not hold the expected {', '.join(bad)}")
    return reasons


def port_of(launch):
    """Return the TCP port of a launch's endpoint, or None."""
    match = re.search(r":(\d+)/?$", launch.get("endpoint") or "")
    return int(match.group(1)) if match else None


def age(item, proc="/proc"):
    """Return the age of a scanned process in seconds."""
    with open(f"{proc}/uptime", encoding="ascii") as handle:
        return float(handle.read().split()[0]) - item["start"] / os.sysconf("SC_CLK_TCK")


def loading(launch, server, proc="/proc"):
    """Return whether a scanned server may still lack workers: it is young and its port, which comes after, is closed.

    :param server: process of :func:`scan`, or None, which is not loading.
    """
    return server is not None and age(server, proc) < LOADING_SECONDS and not listeners(port_of(launch), proc)
