#!/usr/bin/env python3
"""Exercise modules and unit tests under the Pythons that managed hosts may have, as far as this machine has them.

For each of 3.9 to 3.13 that is found, on PATH or under pyenv:

1. every module and module_util can be imported;
2. Ansible ships every module to the bare interpreter, which has the standard library alone, and runs it as far as its
   own argument check;
3. the unit tests pass, with the ansible-core of requirements/unit.lock that this Python can still install.

The last lines say what was exercised and what was not. Exit 1 when anything failed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/pythons"
PLAYBOOK = CACHE / "modules.yml"
LOCK = ROOT / "requirements/unit.lock"
LIBRARY = ROOT / "library"
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
# Building environments and waiting for processes takes minutes and is done by `make unit`; the modules are shipped and
# imported all the same.
SLOW = ("tests/unit/engine/test_engine_build.py", "tests/unit/server/test_service.py")
# Actions run on the controller, which has the tests' own Python.
CONTROLLER = (
    "tests/unit/variant",
    *(f"tests/unit/{name}/test_action.py" for name in ("decision", "health", "precheck")),
)
MODULES = sorted(path.stem for path in LIBRARY.glob("*.py"))
IMPORT_EVERYTHING = """
import importlib, pathlib, sys
import ansible.module_utils as utils
library = pathlib.Path(sys.argv[1])
utils.__path__.append(str(library / "module_utils"))
sys.path.insert(0, str(library))
names = [path.stem for path in library.glob("*.py")]
names += ["ansible.module_utils." + path.stem for path in library.glob("module_utils/*.py")]
for name in names:
    importlib.import_module(name)
print(len(names), "imported")
"""


def call(command, **keywords):
    """Run a command in the project and return (worked, output)."""
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1", **keywords)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout


def find(version):
    """Return an interpreter of VERSION that starts, or None."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    program = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):
        # A pyenv shim is on PATH for versions that are not selected, and then fails.
        worked, output = call([candidate, "-c", program])
        if worked and output.strip() == version:
            return candidate
    return None


def environment_of(version, interpreter):
    """Return (python, complaint): an environment with requirements/unit.lock, kept in .cache."""
    target = CACHE / version
    stamp = target / "lock.sha256"
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    python = target / "bin/python"
    if stamp.exists() and stamp.read_text() == digest and call([python, "-c", ""])[0]:
        return python, ""
    shutil.rmtree(target, ignore_errors=True)
    worked, output = call([interpreter, "-m", "venv", target])
    if worked:
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        worked, output = call([*install, "--require-hashes", "--no-deps", "--requirement", LOCK])
    if not worked:
        return None, output
    stamp.write_text(digest)
    return python, ""


def write_playbook():
    """Write the playbook that runs every module with an unknown argument: its refusal shows that it was imported."""
    tasks = [
        {
            "name": f"Run {name}",
            name: {"no_such_argument": True},
            "register": "answer",
            "failed_when": "answer.msg is not match('Unsupported parameters|missing required|one of the following')",
        }
        for name in MODULES
        # The plugin of that name runs on the controller; the module file only documents it.
        if not (ROOT / f"plugins/action/{name}.py").exists()
    ]
    PLAYBOOK.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))


def ship(interpreter):
    """Let Ansible ship the modules to one interpreter; return (worked, output)."""
    ansible = pathlib.Path(sys.executable).parent / "ansible-playbook"
    variables = {"ansible_python_interpreter": str(interpreter)}
    return call([ansible, "-i", "localhost,", "-c", "local", "-e", json.dumps(variables), PLAYBOOK])


def exercise(version):
    """Return (status, what happened, output on failure) of one Python; status is passed, failed or missing."""
    interpreter = find(version)
    if not interpreter:
        return "missing", "not on this machine", ""
    python, output = environment_of(version, interpreter)
    if not python:
        return "failed", "requirements/unit.lock does not install", output
    worked, output = call([python, "-c", IMPORT_EVERYTHING, LIBRARY])
    if not worked:
        return "failed", "a module does not import", output
    imported = output.strip()
    worked, output = ship(interpreter)
    if not worked:
        return "failed", "a module does not run when Ansible ships it", output
    ignored = [f"--ignore={path}" for path in SLOW + CONTROLLER]
    options = ["-q", "-o", f"cache_dir={CACHE / version / 'pytest'}", *ignored]
    worked, output = call([python, "-m", "pytest", *options, "tests/unit"])
    if not worked:
        return "failed", "unit tests", output
    return "passed", f"{imported}, {len(MODULES)} shipped; unit tests: {output.strip().splitlines()[-1]}", ""


def main():
    """Run the command line."""
    here = "{}.{}".format(*sys.version_info[:2])
    CACHE.mkdir(parents=True, exist_ok=True)
    write_playbook()
    wanted = [version for version in VERSIONS if version != here]
    # All at once: most of these tests wait.
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        results = dict(zip(wanted, pool.map(exercise, wanted)))
    results[here] = ("passed", "the tests' own interpreter: make unit", "")
    for version, (status, _what, output) in results.items():
        if status == "failed":
            print(f"--- Python {version}\n{output}")
    print(f"not exercised under another Python: {', '.join(SLOW + CONTROLLER)}")
    for version in VERSIONS:
        status, what, _output = results[version]
        print(f"Python {version}: {'not exercised' if status == 'missing' else status}: {what}")
    return 1 if any(status == "failed" for status, _what, _output in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
