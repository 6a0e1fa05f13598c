"""Stacks of a server that hangs, taken by py-spy where the host or the engine has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time

from ansible.module_utils import sglang_proc

# Causes under which a process lives and does not go on.
HUNG = ("stalled", "p2p_hang", "generation_dead", "timeout")
LIMIT = 20
_INNERMOST = re.compile(r'"MainThread"[^\n]*\n\s+([^\n]+)')


def py_spy(python):
    """Return the path of py-spy beside an interpreter, else on PATH, else None."""
    beside = os.path.join(os.path.dirname(python), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump(program, pids, limit=LIMIT):
    """Return ``{pid: text}``: the stacks of several processes, or why there are none.

    All are asked at the same time and none is paused.

    :param program: path of py-spy.
    :param limit: seconds for all of them.
    """
    end, texts, asked = time.monotonic() + limit, {}, {}
    for pid in pids:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            asked[pid] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as problem:
            texts[pid] = f"{program} cannot be run: {problem}"
    for pid, process in asked.items():
        try:
            texts[pid] = process.communicate(timeout=max(end - time.monotonic(), 0.1))[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            texts[pid] = f"py-spy gave no answer within {limit:g} s"
    return texts


def collect(release, python):
    """Keep the stacks of a release's parent and workers in its ``logs`` directory.

    :param python: the engine's interpreter.
    :returns: ``(path of the file or None, one line for each process)``; the lines say why where there is no file.
    """
    program = py_spy(python)
    if not program:
        return None, ["no stacks: py-spy is neither on PATH nor beside the engine's interpreter"]
    wanted = ("server", *sglang_proc.WORKER_ROLES)
    there = [i for i in sglang_proc.scan(release) if i["role"] in wanted and sglang_proc.alive(i["state"])]
    texts = dump(program, [item["pid"] for item in there])
    shown = [(sglang_proc.describe(item), texts[item["pid"]]) for item in there]
    lines = []
    for name, text in shown:
        innermost = _INNERMOST.search(text)
        lines.append(f"{name}: {innermost.group(1) if innermost else text.strip().splitlines()[-1:] or 'nothing'}")
    path = os.path.join(release, "logs", time.strftime("stacks-%Y%m%dT%H%M%SZ.txt", time.gmtime()))
    try:
        with open(path, "w", encoding="utf-8") as handle:
            handle.write("\n\n".join(f"=== {name}\n{text}" for name, text in shown) + "\n")
    except OSError as problem:
        return None, [*lines, f"{path} cannot be written: {problem}"]
    return path, lines
