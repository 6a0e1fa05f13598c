#!/usr/bin/env python3
"""Time the deployment of the embedded node against plain playbooks, in one run on one root of its own.

Prints a table of medians with the targets; exit status 1 when one was missed. Run it on a quiet machine.

The overhead of a switch is its wall time less the old server's stop, the new server's start to ready, and the
benchmark. Stop and start to ready are one stretch: from the begin of the call that stops the one and starts the other
to the end of the wait. Ansible's time between these two calls lies in it, because the server loads meanwhile. The soak
and the decision after the measurement count as overhead; two more figures say how much of it they are. The benchmark
runs once.

    bench_deploy.py [--repeat N] [--engines DIR]

--engines names a directory of engines that were built before; without it one is built, which takes minutes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from deployment import Node, extra, free_port, marked, play, variables_of  # noqa: E402

BARE = """
- name: Gather facts and ping
  hosts: sglang
  tasks:
    - name: Ping
      ansible.builtin.ping:
"""
# How a start is usually awaited. Ten minutes of retries are common for a large model; one minute is enough to see it.
NAIVE = """
- name: Start a server and poll it
  hosts: sglang
  gather_facts: false
  tasks:
    - name: Start the server
      ansible.builtin.command:
        argv: "{{ argv }}"
        chdir: "{{ folder }}"
      environment: "{{ env }}"
      async: 300
      poll: 0
    - name: Wait until it answers
      ansible.builtin.uri:
        url: "http://127.0.0.1:{{ port }}/health"
      register: health
      until: health.status == 200
      retries: 12
      delay: 5
"""
BAD_FLAG = "--no-such-flag"


def spent(action, result):
    """Return the seconds of a module's result that are no overhead: stop and start, wait, benchmark."""
    if action == "sglang_proof":
        result = result.get("health") or {}
    elif action not in ("sglang_service", "sglang_bench"):
        return 0
    return result.get("elapsed") or 0


def soaked(outcome):
    """Return the seconds that the soaks of a run took."""
    return sum((result.get("soak") or {}).get("elapsed", 0) for result in outcome.results("sglang_proof"))


def called(outcome, action):
    """Return the seconds that the calls of a module or action took, with Ansible's time for them."""
    began, seconds = 0, 0
    for event in outcome.events:
        if event.get("action") != action:
            continue
        if event["status"] == "start":
            began = event["at"]
        elif event["status"] != "skipped":
            seconds += event["at"] - began
    return seconds


def started(outcome):
    """Return the seconds from the begin of the last stop and start to the end of the wait after it; 0 without one.

    A result arrives a moment after its module has ended; that moment is the same for both and drops out.
    """
    done = [event for event in outcome.events if "result" in event and event["status"] != "skipped"]
    ends = {event["action"]: event for event in done}
    if "sglang_service" not in ends:
        return 0
    service, proof = ends["sglang_service"], ends["sglang_proof"]
    begin = service["at"] - service["result"]["elapsed"]
    return proof["at"] - (proof["result"]["elapsed"] - spent("sglang_proof", proof["result"])) - begin


def waited(outcome):
    """Return the seconds that a switch spent on the servers themselves and on the benchmark."""
    return started(outcome) + sum(spent("sglang_bench", result) for result in outcome.results("sglang_bench"))


class Death(threading.Thread):
    """Notes when the first server process that is chosen has died, in ``at`` (seconds since the epoch).

    :param choose: callable that returns a pid as soon as there is one.
    """

    def __init__(self, choose):
        super().__init__(daemon=True)
        self.choose, self.at, self.start_at = choose, None, time.time()
        self.start()

    def run(self):
        pid = None
        while not pid:
            pid = self.choose()
            time.sleep(0.02)
        status = pathlib.Path(f"/proc/{pid}/stat")
        while True:
            try:
                if status.read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX":
                    break
            except OSError:
                break
            time.sleep(0.005)
        self.at = time.time()


def second_deploy(node, bare, repeat):
    """Return (walls of a deploy that has nothing to do, walls of the bare playbook), taken in turns."""
    ours, peers = [], []
    pid, variant = node.server, node.manifest(node.current)["variant"]
    for _ in range(repeat):
        peers.append(play(str(bare)).succeeded().wall)
        outcome = node.deploy(variant).succeeded()
        if outcome.recap["changed"] or node.server != pid:
            raise SystemExit(f"the second deploy changed {outcome.recap['changed']} things")
        ours.append(outcome.wall)
    return ours, peers


def switches(node, repeat):
    """Return two lists of (overhead, soak, decision) in seconds, of releases built before and of first-time ones, and
    one of the seconds that the patches took."""
    built, first, patches = [], [], []
    for number in range(repeat):
        fresh = {"nccl": {"NCCL_BUFFSIZE": str(262144 + 4096 * number)}}
        for variant, into, more in (
            ("fewchan_fusion", first, {"sglang_variant_overrides": fresh}),
            ("baseline", built, {}),
        ):
            outcome = node.deploy(variant, timeout=300, **more).succeeded()
            into.append((outcome.wall - waited(outcome), soaked(outcome), called(outcome, "sglang_decision")))
            if into is first:
                patches += [item["seconds"]["patches"] for item in outcome.results("sglang_release") if item["seconds"]]
            report(f"switch to {variant}", outcome)
    return built, first, patches


def report(what, outcome):
    """Print where a run spent its time: what its tasks took less what the servers and the benchmark did."""
    tasks, began, first, load = [], None, outcome.events[0]["at"], 0
    for event in outcome.events:
        if event["status"] == "start":
            began = event["at"]
        elif "result" in event and event["status"] != "skipped":
            own = spent(event.get("action"), event["result"])
            tasks.append((event["at"] - began - own, event["task"]))
            load += own
    tasks.sort(reverse=True)
    outside = outcome.wall - (outcome.events[-1]["at"] - first)
    rest = outcome.wall - load - outside - sum(seconds for seconds, _ in tasks[:12])
    print(f"\n{what}: {outcome.wall:.2f} s, {load:.2f} of them in the calls that stop, start, await, measure;")
    print(f"  {outside:6.2f} start of ansible-playbook up to the first task")
    for seconds, name in tasks[:12]:
        print(f"  {seconds:6.2f} {name}")
    print(f"  {rest:6.2f} the other {len(tasks[12:])} results and what lies between tasks", flush=True)


def crash(node):
    """Return seconds from the death of a bad-flag server to the play's end, less the restore's start and soak."""
    before = os.path.realpath(node.root / "current")

    def failing():
        for pid, parent in marked(node.root).items():
            try:
                if parent not in marked(node.root) and variables_of(pid)["SGLANG_DEPLOY_RELEASE"] != before:
                    return pid
            except OSError:
                continue
        return None

    death = Death(failing)
    overrides = {"args": {BAD_FLAG.lstrip("-"): True}}
    outcome = node.deploy("baseline", timeout=300, sglang_variant_overrides=overrides, sglang_force=True)
    ended = time.time()
    outcome.refused(BAD_FLAG.lstrip("-"), "serves again")
    death.join(1)
    report("crash at start, restored", outcome)
    return ended - death.at - started(outcome) - soaked(outcome)


def naive_crash(node, playbook, folder):
    """Return (seconds from the death of the same server to the failure of a polling playbook, its message)."""
    launch = node.launch()
    port = free_port()
    argv = [str(port) if word == str(node.port) else word for word in launch["argv"]] + [BAD_FLAG]
    note = folder / "pid"
    # The shell writes its pid, then becomes the server.
    argv = ["/bin/sh", "-c", f'echo $$ > {note}; exec "$@"', "sh", *argv]
    env = {key: value for key, value in launch["env"].items() if key != "SGLANG_DEPLOY_RELEASE"}
    death = Death(lambda: int(note.read_text() or 0) if note.exists() else None)
    outcome = play(str(playbook), *extra(argv=argv, folder=str(folder), env=env, port=port), timeout=300)
    ended = time.time()
    death.join(1)
    note.unlink()
    return ended - death.at, outcome.error


def row(name, values, target, unit="s"):
    """Return (line of the table, whether the target is met); ``target`` None where there is none."""
    middle = statistics.median(values)
    spread = f"{min(values):.2f} to {max(values):.2f}"
    met = target is None or middle <= target
    verdict = "" if target is None else ("met" if met else "missed")
    goal = "" if target is None else f"at most {target:g} {unit}"
    return f"| {name} | {middle:.2f} {unit} | {spread} | {goal} | {verdict} |", met


def main():
    """Run the three comparisons and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", default=os.environ.get("SGLANG_TEST_ENGINES"))
    options = parser.parse_args()
    # Containers often set it. Where an operator has not, Python compiles plugins and modules once and not in each run.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sg-"))
    bare, naive = folder / "bare.yml", folder / "naive.yml"
    bare.write_text(BARE)
    naive.write_text(NAIVE)
    engines = {"sglang_engine_root": os.path.realpath(options.engines)} if options.engines else {}
    node = Node(folder / "n", repeats=1, **engines)
    try:
        node.deploy("baseline", timeout=1500).succeeded()
        built, first, patches = switches(node, options.repeat)
        prechecks = [node.run("precheck", variant="fewchan_fusion").succeeded().wall for _ in range(options.repeat)]
        ours, peers = second_deploy(node, bare, options.repeat + 2)
        report("second deploy of the same variant", node.deploy("baseline").succeeded())
        crashes = [crash(node) for _ in range(options.repeat)]
        polled, message = naive_crash(node, naive, folder)
    finally:
        node.destroy()
        shutil.rmtree(folder)
    ratio = statistics.median(ours) / statistics.median(peers)
    rows = [
        row("peer: bare playbook, facts and ping", peers, None),
        row("second deploy of the same variant", ours, None),
        row("second deploy over bare playbook", [ratio], 2.5, "times"),
        row("switch to a release built before, overhead", [item[0] for item in built], 5),
        row("of it the soak", [item[1] for item in built], None),
        row("of it the decision", [item[2] for item in built], None),
        row("switch to a first-time release with patches, overhead", [item[0] for item in first], 5),
        row("of it the soak", [item[1] for item in first], None),
        row("of it the decision", [item[2] for item in first], None),
        row("of it the patches: the package copied, patched and compiled, in the call that compares", patches, 3),
        row("`precheck.yml`, whole", prechecks, 5),
        row("crash at start: death to failure, less the restore's start and soak", crashes, 5),
        row("peer: `uri` with 12 retries, 5 s apart, same crash, no restore", [polled], None),
    ]
    print("\n| figure | median | range | target | |\n|---|---|---|---|---|")
    print("\n".join(line for line, _ in rows))
    print("\nOverhead: wall time less the old server's stop, the new server's start to ready, and the benchmark.")
    print(f"\nThe polling playbook says of the cause: {message.splitlines()[0][:160] if message else 'nothing'}")
    return 0 if all(met for _, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
