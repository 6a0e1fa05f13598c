"""What an engine is: an interpreter with SGLang in it, adopted as it stands or built from a lock file.

Everything here only reads. ``declared`` is one dict, the same for the role that provides the engine and for the
release that stands on it::

    {mode: build|adopt, version: str, root: str, python: str, base_python: str, lock_digest: str, cpu_only: bool}

``lock_digest`` is a hexadecimal digest over all that the controller gives to a build (lock file, stand-ins, pip
arguments).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess

from ansible.module_utils.sglang_patch_site import tree

# Raised when the way a build is made changes, so that engines made the old way are not taken for the same.
EDITION = 1
SCHEMA = 1
MARKER = "engine.json"
PROBE_LIMIT_S = 30
# Packages of an adopted engine whose files are looked at: a checkout or an edit changes no version.
TREES = ("sglang", "flashinfer")

# Runs in the engine's interpreter. It imports none of the packages: names and versions come from the metadata
# directories, origins from the import system. Reading directory names instead of metadata files keeps it near the
# interpreter's own start.
_PROBE = r"""
import importlib.util, json, os, re, sys
packages = {}
for entry in sys.path:
    try:
        names = os.listdir(entry or ".")
    except OSError:
        continue
    for name in names:
        stem, extension = os.path.splitext(name)
        if extension not in (".dist-info", ".egg-info"):
            continue
        parts = stem.split("-")
        key = re.sub(r"[-_.]+", "-", parts[0]).lower()
        if key in packages:
            continue
        if len(parts) > 1:
            packages[key] = parts[1]
            continue
        # Seldom, and its import takes longer than all the rest.
        import importlib.metadata
        try:
            packages[key] = importlib.metadata.version(key)
        except importlib.metadata.PackageNotFoundError:
            continue
origins = {}
for name in ("sglang", "torch", "flashinfer", "sgl_kernel", "triton", "transformers"):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        origins[name] = None
    elif spec.origin:
        origins[name] = os.path.dirname(spec.origin)
    else:
        origins[name] = next(iter(spec.submodule_search_locations or []), None)
print(json.dumps({"python_version": sys.version.split()[0], "executable": sys.executable, "prefix": sys.prefix,
                  "base": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
                  "packages": packages, "origins": origins}))
"""


class EngineError(Exception):
    """The engine cannot be provided; the text names the input, the rule and the way out."""


def digest(value):
    """Return the SHA-256 of a JSON-serialisable value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def build_digest(declared):
    """Return the digest that names a built engine; it needs nothing of the host."""
    # Values may come straight from an inventory, where true may be the text "true".
    cpu_only = str(declared.get("cpu_only", False)).lower() in ("true", "yes", "on", "1")
    base_python = declared.get("base_python") or "python3"
    return digest([EDITION, str(declared["version"]), base_python, declared.get("lock_digest") or "", cpu_only])


def engine_id(declared):
    """Return ``<version>-<12 hex digits>``, the directory name of a built engine."""
    return f"{declared['version']}-{build_digest(declared)[:12]}"


def clean_environment(environ=None):
    """Return the environment for an engine's interpreter without what would change where it imports from or whether it
    compiles: the engine must come out the same whoever builds it."""
    environ = os.environ if environ is None else environ
    drop = (
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONOPTIMIZE",
        "VIRTUAL_ENV",
        "__PYVENV_LAUNCHER__",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_USER",
        "PIP_NO_COMPILE",
        "PIP_REQUIREMENT",
    )
    return {key: value for key, value in environ.items() if key not in drop}


def probe(python, limit=PROBE_LIMIT_S):
    """Ask an interpreter what it has, importing none of it.

    :param python: path of the interpreter.
    :param limit: seconds.
    :returns: ``{python_version, executable, prefix, base, packages: {name: version}, origins: {module: directory |
        None}}``;
        ``base`` is the real path of the interpreter that a virtual environment stands on.
    :raises EngineError: it is absent, not executable, hangs or fails.
    """
    if not os.path.exists(python):
        raise EngineError(f"the interpreter {python} does not exist")
    if os.path.isdir(python) or not os.access(python, os.X_OK):
        raise EngineError(f"the interpreter {python} is not an executable file")
    try:
        done = subprocess.run(
            [python, "-B", "-c", _PROBE],
            cwd="/",
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=limit,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise EngineError(f"the interpreter {python} exits with {done.returncode}: {tail(done.stderr, limit=300)}")
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"the interpreter {python} gave no answer within {limit} s") from error
    except OSError as error:
        raise EngineError(f"the interpreter {python} cannot be run: {error.strerror}") from error
    except ValueError as error:
        raise EngineError(
            f"{python} does not answer like a Python interpreter: {tail(done.stdout, limit=300)}"
        ) from error


def tail(text, lines=8, limit=2000):
    """Return the last lines of a program's output, at most ``limit`` characters, for a message."""
    return "\n".join(text.strip().splitlines()[-lines:])[-limit:]


def find_interpreter(name):
    """Return the path of an interpreter given by path or by name, or None; a bare name is looked up in PATH."""
    return name if os.sep in name else shutil.which(name)


def describe(declared):
    """Return the state of the declared engine on this host.

    :returns: ``{present, mode, id, path, python, python_version, version, fingerprint, packages, origins, problem}``.
        ``python`` and, for a build, ``fingerprint`` are known before the engine exists. That of an adopted engine
        changes with the interpreter, with version or place of a package, and with path, size or time of any file of
        SGLang or FlashInfer, bytecode left out. ``problem`` says why ``present`` is false.
    """
    if declared["mode"] not in ("build", "adopt"):
        return _state(declared, problem=f"the mode of an engine is build or adopt, not {declared['mode']!r}")
    return _describe_built(declared) if declared["mode"] == "build" else _describe_adopted(declared)


def _state(declared, **known):
    state = {
        "present": False,
        "mode": declared["mode"],
        "id": None,
        "path": None,
        "python": None,
        "python_version": None,
        "version": None,
        "fingerprint": None,
        "packages": {},
        "origins": {},
        "problem": None,
    }
    state.update(known)
    return state


def _describe_built(declared):
    name = engine_id(declared)
    path = os.path.join(declared["root"], name)
    state = _state(
        declared,
        id=name,
        path=path,
        python=os.path.join(path, "bin", "python3"),
        version=declared["version"],
        fingerprint=build_digest(declared),
    )
    try:
        with open(os.path.join(path, MARKER), encoding="utf-8") as handle:
            marker = json.load(handle)
        base, packages = marker["base"], marker["packages"]
    except FileNotFoundError:
        unfinished = os.path.isdir(path)
        state["problem"] = f"the engine {path} " + ("was left unfinished" if unfinished else "is not built yet")
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        state["problem"] = f"{os.path.join(path, MARKER)} cannot be read: {error}"
        return state
    # A distribution upgrade replaces the interpreter below the environment; the packages are then for another Python.
    now = os.path.realpath(state["python"])
    if now != base or not os.access(now, os.X_OK):
        state["problem"] = f"the engine {path} stands on {base}, and its interpreter now leads to {now}"
        return state
    state.update(
        present=True, packages=packages, origins=marker.get("origins", {}), python_version=marker.get("python_version")
    )
    return state


def _describe_adopted(declared):
    python = declared.get("python") or ""
    state = _state(declared, python=python, version=declared.get("version") or None)
    if not os.path.isabs(python):
        state["problem"] = f"python must be the absolute path of an interpreter when the mode is adopt, not {python!r}"
        return state
    try:
        seen = probe(python)
    except EngineError as error:
        state["problem"] = str(error)
        return state
    version = seen["packages"].get("sglang")
    state.update(
        path=seen["prefix"],
        python_version=seen["python_version"],
        version=version,
        packages=seen["packages"],
        origins=seen["origins"],
        id=f"adopted-{version}",
    )
    try:
        trees = {name: tree(seen["origins"][name]) for name in TREES if seen["origins"].get(name)}
    except OSError as error:
        state["problem"] = f"{error.filename} of the interpreter {python} cannot be read: {error.strerror}"
        return state
    software = [python, seen["python_version"], seen["base"], seen["packages"], seen["origins"]]
    state["fingerprint"] = digest([*software, trees])
    wanted = declared.get("version")
    if version is None or seen["origins"]["sglang"] is None:
        state["problem"] = f"the interpreter {python} has no importable package sglang"
    elif wanted and version != wanted:
        state["problem"] = f"the interpreter {python} has sglang {version}, and version {wanted} is declared"
    else:
        state["present"] = True
    return state
