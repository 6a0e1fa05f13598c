"""Patched copies of engine packages in a release's ``site`` folder: where a package comes from, the copy, its record.

The engine is only read. A copy appears under its final name complete or not at all.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import time

RECORD = ".patches.json"
_VERSION_FILES = ("_version.py", "version.py", "_build_meta.py", "__init__.py")

# Runs in the engine's interpreter and imports nothing of the engine: finders only answer where it would come from.
_PROBE = r"""
import importlib.machinery as machinery, json, os, re, sys
site, wanted, path = sys.argv[1], json.loads(sys.argv[2]), [item for item in sys.path if item]
def real(path): return os.path.realpath(path or os.getcwd())
def text(*names):
    try:
        with open(os.path.join(*names), encoding="utf-8", errors="replace") as handle: return handle.read()
    except OSError: return ""
def names(folder):
    try: return os.listdir(folder)
    except OSError: return []
def key(name): return re.sub(r"[-_.]+", "-", name).lower()
# What importlib.metadata would say: to import it costs as much as all the rest.
def distributions(name):
    for parent in entries:
        for item in names(parent):
            stem, kind = os.path.splitext(item)
            if kind.lower() not in (".dist-info", ".egg-info") or key(stem.partition("-")[0]) != key(name): continue
            head = text(parent, item, "METADATA") or text(parent, item, "PKG-INFO") or text(parent, item)
            version = re.search(r"(?mi)^Version:[ \t]*(\S+)", head)
            url = json.loads(text(parent, item, "direct_url.json") or "{}")
            yield {"version": version and version.group(1), "parent": parent,
                   "editable": bool(url.get("dir_info", {}).get("editable"))}
def place(spec):
    if spec and spec.origin and spec.submodule_search_locations: return os.path.abspath(os.path.dirname(spec.origin))
entries = [item for item in dict.fromkeys(real(item) for item in sys.path) if item != real(site)]
out = {}
for package, distribution in wanted.items():
    found = [place(machinery.PathFinder.find_spec(package, [item])) for item in entries]
    for finder in sys.meta_path:
        if finder in (machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder): continue
        search = getattr(finder, "find_spec", None)
        found.append(place(search(package, None)) if search else None)
    found = [item for item in found if item]
    out[package] = {"candidates": list(dict.fromkeys(map(real, found))),
                    "distributions": list(distributions(distribution)),
                    "parents": [real(os.path.dirname(item)) for item in found]}
print("SGLANG_PATCH " + json.dumps({"packages": out, "path": path}))
"""

_COMPILE = r"""
import json, py_compile, sys
for source, shown in json.loads(sys.argv[1]):
    py_compile.compile(source, dfile=shown, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
"""


class SiteError(RuntimeError):
    """The interpreter or the file system does not allow the work; the text says what to do."""


def run_engine(python, script, arguments, env, chdir):
    """Run a script in the engine's interpreter with the service's environment and folder; return its stdout.

    :raises SiteError: it cannot be started or fails.
    """
    base = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "LC_ALL") if key in os.environ}
    try:
        done = subprocess.run(
            [python, "-c", script, *arguments],
            env={**base, **env},
            cwd=chdir or None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SiteError(f"python {python} with chdir {chdir or '.'}: {error}") from error
    if done.returncode:
        raise SiteError(f"python {python} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def locate(python, packages, env, chdir, site):
    """Ask the interpreter where packages come from, the release's own ``site`` left out.

    :param packages: ``{package: distribution name}``.
    :returns: ``{package: {origin: path, kind: wheel | editable | copy, version: str} | None}``, None = not importable.
    :raises SiteError: two candidates for a package, no version, or the interpreter fails.
    """
    return origins(ask(python, packages, env, chdir, site)["packages"], python)


def origins(answers, python):
    """Return what :func:`locate` returns, for the ``packages`` that :func:`ask` returned."""
    return {package: _origin(package, answer, python) for package, answer in answers.items()}


def ask(python, packages, env, chdir, site):
    """Return what an interpreter sees, ``{packages, path}``: ``path`` are the folders in which it looks for modules,
    ``packages`` what :func:`locate` judges, ``{package: {candidates: [path], distributions: [{version, parent,
    editable}], parents: [folder]}}``. A parent is where the package or a link to it lies.

    :raises SiteError: the interpreter fails.
    """
    output = run_engine(python, _PROBE, [site, json.dumps(packages)], env, chdir)
    lines = [line for line in output.splitlines() if line.startswith("SGLANG_PATCH ")]
    if not lines:
        raise SiteError(f"python {python} gave no answer to where {', '.join(packages)} comes from: {output[-500:]!r}")
    return json.loads(lines[-1].split(" ", 1)[1])


def _origin(package, answer, python):
    candidates = answer["candidates"]
    if not candidates:
        return None
    if len(candidates) > 1:
        raise SiteError(
            f"{python} finds {package} in two places, {' and '.join(candidates)}: "
            "remove one of them, or its entry in PYTHONPATH"
        )
    origin = candidates[0]
    parents = [os.path.dirname(origin), *answer["parents"]]
    beside = [item for item in answer["distributions"] if item["parent"] in parents]
    editable = [item for item in answer["distributions"] if item["editable"]]
    chosen = (editable or beside or [None])[0]
    kind = "editable" if editable else "wheel" if beside else "copy"
    version = chosen["version"] if chosen else written_version(origin)
    if not version:
        raise SiteError(f"{package} in {origin} states no version: install it with its metadata")
    return {"origin": origin, "kind": kind, "version": version}


def written_version(package_dir):
    """Return the version that a package without metadata states in its own files, or None."""
    for name in _VERSION_FILES:
        text = read_text(os.path.join(package_dir, name)) or ""
        match = re.search(r"(?m)^(?:__version__|version)\b[^'\"\n]*['\"](\d[^'\"]*)['\"]", text)
        if match:
            return match.group(1)
    return None


def read_text(path):
    """Return a UTF-8 text with its line endings as they are, or None where the file is missing.

    :raises SiteError: it is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8", newline="") as handle:
            return handle.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise SiteError(f"{path} is not UTF-8: {error}") from error


def sha256(text):
    """Return the hex digest of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _digest(path):
    with open(path, "rb") as handle:
        return hashlib.sha256(handle.read()).hexdigest()


def _walk(root, below=""):
    """Yield (relative path, stat) of the files that make a package, no bytecode; a link counts as what it shows."""
    with os.scandir(os.path.join(root, below)) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            path = os.path.join(below, entry.name)
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _walk(root, path)
            elif entry.is_file() and not entry.name.endswith(".pyc"):
                yield path, entry.stat()


def tree(root):
    """Return ``{relative path: [size in bytes, mtime in ns]}`` of a package's files, or None where it is missing."""
    if not os.path.isdir(root):
        return None
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in _walk(root)}


def fingerprint(files):
    """Return a digest of what :func:`tree` returned."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def deviations(target, origin_files, patched):
    """Say how ``target`` differs from the complete copy: patched texts as given, every other file as in the origin.

    :param patched: ``{relative path: sha256 of the patched text}``.
    :returns: such as ``["x.py was changed", "y.py is missing", "z.py was added"]``, empty where it is whole.
    """
    here = tree(target)
    if here is None:
        return ["it is missing"]
    found = [f"{path} was added" for path in here if path not in origin_files]
    for path, stat in origin_files.items():
        if path not in here:
            found.append(f"{path} is missing")
        elif path in patched:
            if _digest(os.path.join(target, path)) != patched[path]:
                found.append(f"{path} was changed")
        elif here[path] != stat:
            found.append(f"{path} was changed")
    return sorted(found)


def build(python, env, chdir, origin, target, patched):
    """Copy a package and write the patched texts, then put it under its final name.

    :param patched: ``{relative path: text}``.
    :raises SiteError: the engine's interpreter cannot compile a patched file; the old copy is then still there.
    """
    site, name = os.path.split(target)
    os.makedirs(site, exist_ok=True)
    sweep(site, name)
    partial = os.path.join(site, f".{name}.partial-{os.getpid()}")
    old = os.path.join(site, f".{name}.old-{os.getpid()}")
    try:
        # Bytecode travels along: it stays valid for every file whose size and time are kept.
        shutil.copytree(origin, partial, symlinks=False, ignore_dangling_symlinks=True, copy_function=_copy)
        for path, text in patched.items():
            _write_patched(os.path.join(partial, path), text)
        pairs = [(os.path.join(partial, path), os.path.join(target, path)) for path in patched]
        if pairs:
            run_engine(python, _COMPILE, [json.dumps(pairs)], {**env, "PYTHONPYCACHEPREFIX": ""}, chdir)
        if os.path.lexists(target):
            os.rename(target, old)
        os.rename(partial, target)
    except (OSError, shutil.Error) as error:
        raise SiteError(f"copying {origin} to {target}: {str(error)[:500]}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _copy(source, target):
    """Copy one file; bytecode, half of a package, is linked where it can be: nobody edits it in place, and Python
    replaces it by rename."""
    if source.endswith(".pyc") and not os.path.islink(source):
        try:
            return os.link(source, target)
        except OSError:  # another file system, too many links, or not ours
            pass
    return shutil.copy2(source, target)


def _write_patched(path, text):
    """Write a patched text with a new time, and drop every bytecode file of the old one."""
    folder, stem = os.path.dirname(path), os.path.basename(path)[: -len(".py")]
    for stale in glob.glob(os.path.join(glob.escape(folder), "__pycache__", f"{glob.escape(stem)}.*.pyc")):
        os.unlink(stale)
    if os.path.exists(path + "c"):
        os.unlink(path + "c")
    before = os.stat(path)
    with open(path, "w", encoding="utf-8", newline="") as handle:
        handle.write(text)
    # A bytecode cache outside the package (PYTHONPYCACHEPREFIX) compares whole seconds.
    moved = max(time.time(), before.st_mtime + 2)
    os.utime(path, (moved, moved))


def sweep(site, name):
    """Remove what an interrupted run left of a package's copy."""
    for kind in ("partial", "old"):
        for left in glob.glob(os.path.join(glob.escape(site), f".{name}.{kind}-*")):
            shutil.rmtree(left, ignore_errors=True)


def remove(site, name):
    """Remove a package's copy; the name disappears at once."""
    target = os.path.join(site, name)
    if os.path.isdir(target):
        gone = os.path.join(site, f".{name}.old-{os.getpid()}")
        os.rename(target, gone)
        shutil.rmtree(gone, ignore_errors=True)
    sweep(site, name)


def read_record(site):
    """Return the record of a site, ``{packages: {}, entries: []}`` where there is none.

    :raises SiteError: it cannot be read or is damaged, so that nobody knows what the copies are.
    """
    path = os.path.join(site, RECORD)
    try:
        with open(path, encoding="utf-8") as handle:
            record = json.load(handle)
        whole = record["schema"] == 1 and all(isinstance(item, dict) for item in record["packages"].values())
        if whole and all(
            {"name", "hunks"} <= set(item) and isinstance(item["entry"], dict) for item in record["entries"]
        ):
            return record
        raise ValueError("unknown shape")
    except (FileNotFoundError, NotADirectoryError):
        return {"schema": 1, "packages": {}, "entries": []}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SiteError(
            f"{path} is damaged ({type(error).__name__}: {error}), and it alone says what was patched here. "
            f"Way out: delete it and the package folders in {site}, then run again; both are made anew"
        ) from error


def write_record(site, record):
    """Replace the record by rename; an empty one is removed."""
    path = os.path.join(site, RECORD)
    if not record["packages"] and not record["entries"]:
        if os.path.exists(path):
            os.unlink(path)
        return
    os.makedirs(site, exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as handle:
        json.dump(record, handle, indent=1, sort_keys=True)
        handle.write("\n")
    os.rename(path + ".new", path)
