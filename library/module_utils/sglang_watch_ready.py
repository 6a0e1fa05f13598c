"""The wait for a server as one call: options, result and words of the modules sglang_health and sglang_proof."""

from __future__ import annotations

import contextlib
import os
import select
import sys

from ansible.module_utils import sglang_watch
from ansible.module_utils.sglang_lock import kept_fresh
from ansible.module_utils.sglang_watch_progress import Progress, alarm, waiting
from ansible.module_utils.sglang_watch_signatures import cause
from ansible.module_utils.sglang_watch_stacks import HUNG, collect
from ansible.module_utils.sglang_watch_wait import NotReadyError, Options, Watch

TIMED_PHASES = ("spawned", "imports", "distributed", "weights", "kv_cache", "graph", "warmup")

# Their part of the argument spec that says how long and how often.
WAIT_SPEC = dict(
    pid=dict(type="int"),
    timeout=dict(type="float", default=1800),
    phase_silence=dict(type="dict", default={}, options={phase: dict(type="float") for phase in TIMED_PHASES}),
    generations=dict(type="int", default=3),
    max_tokens=dict(type="int", default=8, no_log=False),
)


def empty(message):
    """Return the result for a release that cannot be looked at."""
    return {
        "changed": False,
        "ready": False,
        "busy": False,
        "phase": "spawned",
        "phases": [],
        "progress": None,
        "elapsed": 0.0,
        "attempts": 0,
        "last_error": message,
        "endpoint": {"url": None, "port": "closed", "health": "not asked", "generation": "not asked"},
        "cause": cause("not_running", "spawned", message),
        "generations": [],
        "served_model": None,
        "pid": None,
        "waiting": None,
        "alarm": None,
        "stacks": None,
        "log_tail": [],
    }


def result_of(watch, found, log_lines):
    """Return the module's result from a watch and the cause of its failure (or None)."""
    return {
        "changed": False,
        "ready": found is None,
        "busy": watch.busy,
        "phase": watch.log.phase,
        "phases": watch.log.history(),
        "progress": watch.log.progress(),
        "elapsed": round(watch.elapsed, 3),
        "attempts": watch.attempts,
        "last_error": watch.last_error,
        "endpoint": {
            "url": watch.client.url,
            "port": watch.port,
            "health": watch.health,
            "generation": watch.generation,
        },
        "cause": found,
        "generations": watch.generations,
        "served_model": watch.served_model,
        "pid": watch.processes.pid,
        "waiting": waiting(watch.release),
        "alarm": alarm(watch.release),
        "stacks": None,
        "log_tail": [line[:300] for line in watch.log.tail[-log_lines:]] if log_lines else [],
    }


def explain(result, stacks=()):
    """Return one message: what failed, in which phase, what each layer said, the first error, the way out.

    :param stacks: one line for each process of a server that hangs.
    """
    found = result["cause"]
    said = result["endpoint"]
    ranks = f" on ranks {', '.join(str(rank) for rank in found['ranks'])}" if found["ranks"] else ""
    parts = [
        f"The server is not ready: {found['message']}",
        f"[{found['signature']}] in phase {found['phase']}{ranks}, after {result['elapsed']:.1f} s."
        f" Port {said['port']}, health: {said['health']}, generation: {said['generation']}.",
    ]
    if found["detail"]:
        parts.append(f"Seen: {found['detail']}")
    if found["first_error"] and found["first_error"] != found["detail"]:
        parts.append(f"First error of the log: {found['first_error']}")
    parts += stacks
    if result["stacks"]:
        parts.append(f"All stacks: {result['stacks']}")
    return "\n".join([*parts, f"Way out: {found['advice']}."])


def unheard():
    """Return whether the reader of the result is gone: the controller was killed, or its connection broke."""
    answer = select.poll()
    answer.register(sys.__stdout__, 0)  # an error or a hang-up is reported unasked
    return any(event & (select.POLLERR | select.POLLHUP) for _handle, event in answer.poll(0))


def wrong(params, once):
    """Return what is wrong with the numbers of a wait, or an empty text.

    :param params: values of :data:`WAIT_SPEC`, ``request_timeout``, ``generation_timeout``, ``min_distinct``.
    :param once: whether it looks once, so that no generation need be asked for.
    """
    for name, least in (("generations", 0 if once else 1), ("max_tokens", 2), ("min_distinct", 1)):
        if params[name] < least:
            return f"{name} must be at least {least}, not {params[name]}."
    for name in ("timeout", "request_timeout", "generation_timeout"):
        if params[name] <= 0:
            return f"{name} must be more than 0 seconds, not {params[name]:g}."
    return ""


def wait(release, launch, client, params, once=False, log_lines=40):
    """Wait until a server is ready, or look once; return ``(result, message)``, the message empty where it is ready.

    :param release: absolute path. :param launch: its ``launch.json``. :param client: :class:`sglang_client.Client`.
    :param params: as in :func:`wrong`. :param log_lines: of the log in the result.
    """
    silence = {key: value for key, value in params["phase_silence"].items() if value is not None}
    limits = ("timeout", "request_timeout", "generation_timeout", "generations", "max_tokens", "min_distinct")
    options = Options(silence=dict(sglang_watch.SILENCE, **silence), **{key: params[key] for key in limits})
    progress = Progress(release, enabled=not once)
    watch = Watch(release, launch, client, options, params["pid"], progress, unheard)
    found, message, stacks = None, "", ()
    try:
        with contextlib.nullcontext() if once else kept_fresh(os.path.dirname(os.path.dirname(release))):
            watch.probe() if once else watch.wait()
    except NotReadyError as problem:
        found = problem.cause
        watch.failed(found)
    result = result_of(watch, found, log_lines)
    if found and not once and found["signature"] in HUNG:
        result["stacks"], stacks = collect(release, launch["argv"][0])
    if found:
        message = explain(result, stacks)
    return result, message
