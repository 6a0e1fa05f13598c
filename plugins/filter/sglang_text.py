"""Lines of text for an operator, built from the dicts that the modules return."""

from __future__ import annotations

import pathlib

import ansible.module_utils

MODULE_UTILS = str(pathlib.Path(__file__).resolve().parents[2] / "library" / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.sglang_api_key import problem_of  # noqa: E402
from ansible.module_utils.sglang_findings import line  # noqa: E402


def finding_lines(findings):
    """Return one line for each finding: level, rung/rule, message, evidence and way out."""
    return [f"{item['level']} {line(item)}" for item in findings]


def verdict(hosts, names):
    """Return ``{ok, failures: [rule], hosts: {name: {ok, failures, findings}}}`` of prechecked hosts.

    :param hosts: variables by host name; ``__host_preflight_reported`` holds the findings of a host that answered.
    :param names: all hosts that were to be checked.
    """
    reports = {}
    for name in names:
        findings = hosts[name].get("__host_preflight_reported")
        failures = sorted({item["rule"] for item in findings or [] if item["level"] == "error"})
        failures = ["not-checked"] if findings is None else failures
        reports[name] = {"ok": not failures, "failures": failures, "findings": findings or []}
    failures = sorted({rule for report in reports.values() for rule in report["failures"]})
    return {"ok": not failures, "failures": failures, "hosts": reports}


def refusal(steps):
    """Return ``{rung, reason}`` of the first step that failed, both empty where none did.

    :param steps: ``[[rung, registered result], ...]`` in the order of the steps; an empty result has not run.
    """
    for rung, result in steps:
        if result.get("failed"):
            # The proof waits for the server first; a server that was never ready has not been proven wrong.
            waited = (result.get("health") or {}).get("ready", True) if rung == "verify" else True
            return {"rung": rung if waited else "ready", "reason": str(result.get("msg") or "")}
    return {"rung": "", "reason": ""}


def _figures(metrics):
    """Return the figures of one level in words, without those that it has not, as TPOT with one token."""
    parts = [
        ("{:.1f} output tok/s", "output_tok_s"),
        ("TTFT p50 {:.1f} ms", "ttft_ms_p50"),
        ("p99 {:.1f} ms", "ttft_ms_p99"),
        ("TPOT p50 {:.2f} ms", "tpot_ms_p50"),
    ]
    single = (metrics.get("output_tokens_mean") or 1) == 1
    if metrics.get("tpot_ms_p50") is None:
        parts.append(("prefill p50 {:.0f} tok/s", "prefill_tok_s_p50") if single else ("no TPOT", "output_tok_s"))
    return ", ".join(text.format(metrics[name]) for text, name in parts if metrics.get(name) is not None)


def benchmark_lines(result):
    """Return what a benchmark measured, or why it measured nothing; one line a level where there are several.

    :param result: the result of the module sglang_bench, or an empty dict where it was left out.
    """
    metrics = (result or {}).get("metrics") or {}
    if metrics.get("output_tok_s") is None:
        reason = (result or {}).get("skipped_reason")
        return [f"nothing was measured: {reason}"] if reason else []
    lines = [f"measured: {_figures(metrics)}"]
    levels = result.get("levels") or []
    if len(levels) > 1:
        lines[0] = f"measured {len(levels)} levels, the fastest: {_figures(metrics)}"
        lines += [
            f"concurrency {entry['concurrency']}: {_figures(entry['metrics']) or entry['failure']}" for entry in levels
        ]
    return [*lines, f"raw figures: {result['result_path']}"]


def canary_lines(result, target):
    """Return what a canary has shown.

    :param result: result of the module sglang_canary.
    :param target: ``{id, variant}`` of the release.
    """
    room, live = result.get("room") or {}, result.get("live")
    words = {"planned": "would be tried", "not_exercised": "is not exercised here"}
    verdict = words.get(result["verdict"], result["verdict"])
    lines = [f"canary of {target['variant']}: {verdict} after {result['elapsed']:.1f} s, release {target['id']}"]
    if room:
        fits = "fits" if room["fits"] else "does not fit"
        free = ", ".join(map(str, room["free_mb"]))
        lines.append(f"room: {fits}, {room['needed_mb']} MiB needed, {room['keep_mb']} MiB kept, MiB free: {free}")
    if live:
        during = live["during"]
        lines.append(
            f"live server, median of {during['requests']} requests: {live['before']['median']} s before, "
            f"{during['median']} s during (worst {during['worst']} s, allowed {live['allowed']} s), "
            f"{live['after']['median']} s after"
        )
    elif result["layers"]:
        lines.append("live server: none answers")
    shown = [item for item in result["findings"] if item["level"] != "info" or item["rule"] == "not-exercised"]
    return lines + finding_lines(shown)


def _health(probe):
    if not probe:
        return "no release is current"
    if probe["ready"] and not probe["busy"]:
        return "ready"
    if probe["busy"]:
        return "busy, tokens flow"
    if probe.get("waiting"):
        return f"starting: {probe['waiting']}"
    cause = probe.get("cause") or {}
    return f"not ready, phase {probe['phase']}: {cause.get('message') or probe['last_error']}"


def _stopped(stopped):
    """Return what is to be said of a stop that was wanted."""
    who = f"at {stopped['time']} by {stopped['user'] or 'an unknown user'}"
    if not stopped["temporary"]:
        return f"stopped on purpose {who}; deploy.yml starts it again"
    what = ", which ended before it brought it back; canary.yml or deploy.yml does" if stopped["ended"] else ""
    return f"stopped {who} for a canary in its place{what}"


def _lock(holder):
    if not holder:
        return "free"
    run = holder["run"]
    what = holder.get("variant") or "no variant"
    life = f"last sign of life {holder['heartbeat_age']:.0f} s ago"
    return f"held by {run.get('user')} on {run.get('controller')} since {holder['since']} for {what}, {life}"


def status_lines(info, probe, processes, endpoint):
    """Return the status of a host.

    :param info: ``info`` of sglang_release.
    :param probe: result of sglang_health as a probe; empty where no release is current.
    :param processes: result of sglang_process_info; empty where no release is current.
    :param endpoint: address of the inventory, shown where no release is current.
    """
    current = info["current"] or {}
    previous = info["previous"] or {}
    stopped = info.get("stopped") if not any(i["role"] == "server" for i in processes.get("processes", [])) else None
    lines = [
        f"release: {current.get('id', 'none is current')}",
        f"variant: {current.get('variant', 'none')}",
        f"state: {current.get('state', 'none')}",
        f"health: {_stopped(stopped) if stopped else _health(probe)}",
        f"endpoint: {(probe.get('endpoint') or {}).get('url') or endpoint}",
        f"lock: {_lock(info['lock'])}",
        f"rollback goes to: {previous.get('id', 'nothing, no other release is promoted')}",
    ]
    lines += [f"alarm: {probe['alarm']}"] if probe.get("alarm") else []
    lines += [f"restarted at {item['time']}: {item['reason']} ({item['why']})" for item in info.get("restarts", [])]
    # A stop that was wanted has no drift.
    lines += [f"drift: {text}" for text in processes.get("drift", []) if not stopped or "no server" not in text]
    lines += [f"problem: {text}" for text in info["problems"]]
    lines.append("releases, the newest first:" if info["releases"] else "releases: none")
    for item in info["releases"]:
        mark = "*" if item["current"] else "-"
        reason = " ".join((item["reason"] or "").split())
        lines.append(f"{mark} {item['id']} {item['state']}" + (f": {reason[:160]}" if reason else ""))
    return lines


class FilterModule:
    """The filters by name."""

    def filters(self):
        """Return the table that Ansible reads."""
        return {
            "sglang_api_key_problem": problem_of,
            "sglang_finding_lines": finding_lines,
            "sglang_verdict": verdict,
            "sglang_refusal": refusal,
            "sglang_benchmark_lines": benchmark_lines,
            "sglang_canary_lines": canary_lines,
            "sglang_status_lines": status_lines,
        }
