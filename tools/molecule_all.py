#!/usr/bin/env python3
"""Run the Molecule scenarios of every role, a few at a time, and say how many passed.

    molecule_all.py [ROLE...]      --jobs N (default 2)

One line for each scenario; the whole log of one that failed. Exit 1 when a scenario failed or a role has none.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOGS = ROOT / ".cache" / "molecule"


def run(scenario):
    """Run one scenario (the path of its directory) and return (exit status, seconds, log)."""
    role = scenario.parents[1]
    state = LOGS / f"{role.name}.{scenario.name}"
    # Molecule's own default is named after the role alone, so two checkouts would share it.
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    log = state.with_suffix(state.suffix + ".log")
    environment = dict(os.environ, MOLECULE_EPHEMERAL_DIRECTORY=str(state), NO_COLOR="1", ANSIBLE_NOCOLOR="1")
    # Molecule looks for its programs on PATH, not beside its interpreter.
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}"
    command = [
        *(sys.executable, "-m", "molecule", "--base-config", str(ROOT / ".config/molecule/config.yml")),
        *("test", "--scenario-name", scenario.name),
    ]
    started = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=role,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode, time.monotonic() - started, log


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roles", nargs="*", help="roles to test instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at a time (default: %(default)s)")
    options = parser.parse_args()
    roles = [ROOT / "roles" / name for name in options.roles] or sorted((ROOT / "roles").iterdir())
    of_role = {role: [path.parent for path in sorted(role.glob("molecule/*/molecule.yml"))] for role in roles}
    scenarios = [scenario for found in of_role.values() for scenario in found]
    passed, failed = 0, [f"{role.name}: no scenario" for role, found in of_role.items() if not found]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run, scenario): scenario for scenario in scenarios}
        for future in concurrent.futures.as_completed(running):
            scenario = running[future]
            name = f"{scenario.parents[1].name}/{scenario.name}"
            status, seconds, log = future.result()
            print(f"molecule {name}: {'failed' if status else 'passed'} in {seconds:.0f} s", flush=True)
            if status:
                failed.append(f"{name}: exit {status}, log {log.relative_to(ROOT)}")
                print(log.read_text(errors="replace"), flush=True)
            else:
                passed += 1
    for line in failed:
        print(f"molecule: {line}")
    print(f"molecule: {passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
