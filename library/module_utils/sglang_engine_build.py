"""Build an engine from a lock file into its own directory.

A virtual environment cannot be moved, so it is made in place and ``engine.json`` is written last: a directory without
it is unfinished, and the next build starts it again from nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import time

from ansible.module_utils.sglang_engine import (
    MARKER,
    SCHEMA,
    EngineError,
    build_digest,
    clean_environment,
    describe,
    find_interpreter,
    probe,
    tail,
)

# pip gets its arguments on standard input: they may hold a password, and a command line is readable by every user.
_PIP = (
    "import json, runpy, sys; sys.argv = ['pip'] + json.load(sys.stdin); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


def version_tuple(text):
    """Return the leading numbers of a version as a tuple: ``3.11.7`` gives ``(3, 11, 7)``."""
    return tuple(int(part) for part in re.match(r"[0-9.]*[0-9]", text).group().split("."))


def lock_pins(lock):
    """Return ``{normalised name: version}`` of a lock file.

    :raises EngineError: a line is not an exact pin.
    """
    pins = {}
    for number, text in enumerate(lock.splitlines(), 1):
        line = text.split(" #")[0].strip()
        if not line or line.startswith(("#", "--")):
            continue
        match = re.match(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?==([^\s;*]+)(\s.*|;.*)?$", line)
        if not match:
            raise EngineError(f"line {number} of the lock file is not an exact pin NAME==VERSION: {line}")
        pins[re.sub(r"[-_.]+", "-", match.group(1)).lower()] = match.group(3)
    return pins


def python_range(lock):
    """Return ``(lowest, below)``, version tuples, from the line ``# python: >=A,<B`` of a lock file, else None."""
    match = re.search(r"^#\s*python:\s*>=([0-9.]+),\s*<([0-9.]+)\s*$", lock, re.MULTILINE)
    return (version_tuple(match.group(1)), version_tuple(match.group(2))) if match else None


def gpu_evidence(dev="/dev/nvidiactl", proc="/proc/driver/nvidia/version"):
    """Return what shows an NVIDIA GPU on this host, as text, or None."""
    for path in (dev, proc):
        if os.path.exists(path):
            return path
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value:
            return f"NVML counts {count.value} GPU"
    except (OSError, AttributeError):
        pass
    return None


def refuse_gpu(declared, gpu=gpu_evidence):
    """Raise EngineError where a host declared CPU-only has a GPU: the stand-ins would replace working kernels."""
    seen = gpu() if declared["cpu_only"] else None
    if seen:
        raise EngineError(
            f"cpu_only is set and this host has a GPU ({seen}); the CPU-only stand-ins are refused here. "
            "Unset cpu_only and give a lock file with the real packages"
        )


def check_inputs(declared, lock, standins, pip_args, gpu=gpu_evidence):
    """Refuse what cannot become an engine before anything is written.

    :returns: what :func:`probe` saw of the base interpreter.
    :raises EngineError: naming the input and the way out.
    """
    wanted = declared["version"]
    if not re.match(r"^[0-9][A-Za-z0-9.+]*$", wanted):
        raise EngineError(f"version {wanted!r} is not a release number; a build needs one such as 0.5.9")
    if not os.path.isabs(declared["root"]):
        raise EngineError(f"root must be an absolute path, not {declared['root']!r}")
    pinned = lock_pins(lock).get("sglang")
    if pinned != wanted:
        raise EngineError(
            f"the lock file pins sglang {pinned}, and version {wanted} is declared; give the lock file of that release"
        )
    bad = [arg for arg in pip_args if not arg.startswith("--")]
    if bad:
        raise EngineError(f"{len(bad)} of the pip_args do not begin with --; write each as one item, --option=value")
    if not declared["lock_digest"]:
        raise EngineError("lock_digest is empty; give the digest of the lock file, the stand-ins and the pip arguments")
    refuse_gpu(declared, gpu)
    if standins and not declared["cpu_only"]:
        raise EngineError("stand-ins are for a host that is declared cpu_only")
    base = find_interpreter(declared["base_python"])
    if base is None:
        raise EngineError(
            f"base_python {declared['base_python']} is not found in PATH; give the absolute path of an interpreter"
        )
    try:
        seen = probe(base)
    except EngineError as error:
        raise EngineError(f"base_python: {error}; give the path of another interpreter") from error
    limits = python_range(lock)
    if limits and not limits[0] <= version_tuple(seen["python_version"]) < limits[1]:
        low, high = (".".join(map(str, limit)) for limit in limits)
        raise EngineError(
            f"base_python {base} is Python {seen['python_version']}, and this lock file is for >={low},<{high}; "
            "give the path of an interpreter in that range"
        )
    return seen


def redact(text, pip_args=()):
    """Return text without credentials: user and password of a URL, and whole pip arguments that hold one."""
    for arg in pip_args:
        if re.search(r"//[^/@\s]+@", arg):
            text = text.replace(arg, "****")
    return re.sub(r"//[^/@\s]+@", "//****@", text)


def _run(step, argv, deadline, pip_args=(), stdin="", env=None):
    limit = max(1.0, deadline - time.monotonic())
    try:
        done = subprocess.run(
            argv,
            cwd="/",
            env=env or clean_environment(),
            input=stdin,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{step} took longer than the timeout allows") from error
    if done.returncode:
        raise EngineError(f"{step} failed with {done.returncode}: {tail(redact(done.stdout, pip_args), 15)}")
    return done.stdout


def _install_standins(python, standins, deadline):
    site = _run(
        "asking for the package directory",
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        deadline,
    ).strip()
    tops = sorted({name.split("/")[0] for name in standins})
    for top in tops:
        if os.path.exists(os.path.join(site, top)):
            raise EngineError(f"the lock file installs the real {top}; it needs no stand-in")
    for name, text in sorted(standins.items()):
        target = os.path.join(site, *name.split("/"))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8") as handle:
            handle.write(text)
    _run(
        "compiling the stand-ins",
        [python, "-m", "compileall", "-q"] + [os.path.join(site, top) for top in tops],
        deadline,
    )


@contextlib.contextmanager
def _one_builder(root):
    """Hold the lock of an engines directory; a second builder is told at once."""
    os.makedirs(root, mode=0o755, exist_ok=True)
    with open(os.path.join(root, ".build.lock"), "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EngineError(f"another run is building an engine in {root}; wait for it") from error
        yield


def build(declared, lock, standins, pip_args, timeout):
    """Build the declared engine; an unfinished or outdated directory of the same name is removed first.

    :param declared: see :mod:`sglang_engine`.
    :param lock: text of the lock file.
    :param standins: ``{path below site-packages: source text}``.
    :param pip_args: additional arguments of ``pip install``.
    :param timeout: seconds for the whole build.
    :returns: the state, as :func:`sglang_engine.describe` gives it.
    :raises EngineError: a step failed; the directory is left without its marker.
    """
    base = check_inputs(declared, lock, standins, pip_args)
    deadline = time.monotonic() + timeout
    before = os.umask(0o022)  # a service user reads what root builds
    try:
        with _one_builder(declared["root"]):
            state = describe(declared)
            if state["present"]:
                return state
            _build_in_place(declared, state, base, lock, standins, pip_args, deadline)
    except OSError as error:
        raise EngineError(
            f"building {declared['root']} failed: {error.strerror} {error.filename or ''}".rstrip()
        ) from error
    finally:
        os.umask(before)
    return describe(declared)


def _build_in_place(declared, state, base, lock, standins, pip_args, deadline):
    path, python = state["path"], state["python"]
    if os.path.lexists(path):
        # The marker goes first: a removal cut short must not leave a directory that looks finished.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, MARKER))
        shutil.rmtree(path)
    _run(
        "creating the virtual environment (on Debian and Ubuntu it needs the package python3-venv)",
        [base["executable"], "-m", "venv", path],
        deadline,
    )
    with tempfile.TemporaryDirectory(prefix="sglang-engine-") as scratch:
        requirements = os.path.join(scratch, "lock.txt")
        with open(requirements, "w", encoding="utf-8") as handle:
            handle.write(lock)
        arguments = [
            "install",
            "--no-deps",
            "--no-input",
            "--compile",
            "--disable-pip-version-check",
            "--quiet",
            "--requirement",
            requirements,
        ] + list(pip_args)
        _run("pip install of the lock file", [python, "-c", _PIP], deadline, pip_args, stdin=json.dumps(arguments))
    if standins:
        _install_standins(python, standins, deadline)
    imported = _run("importing sglang", [python, "-c", "import sglang; print('version', sglang.__version__)"], deadline)
    version = imported.strip().splitlines()[-1].split(" ")[-1]
    seen = probe(python)
    recorded = seen["packages"].get("sglang")
    if not version == recorded == declared["version"]:
        raise EngineError(
            f"the built engine imports sglang {version} and its metadata says {recorded}; "
            f"{declared['version']} is declared"
        )
    marker = {
        "schema": SCHEMA,
        "version": version,
        "digest": build_digest(declared),
        "python": python,
        "base": os.path.realpath(python),
        "python_version": seen["python_version"],
        "cpu_only": declared["cpu_only"],
        "packages": seen["packages"],
        "origins": seen["origins"],
        "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    draft = os.path.join(path, MARKER + ".new")
    with open(draft, "w", encoding="utf-8") as handle:
        json.dump(marker, handle, indent=1, sort_keys=True)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(draft, os.path.join(path, MARKER))
