"""Where the prechecks get their evidence: every look at the host goes through one object that a test can replace."""

from __future__ import annotations

import glob
import json
import os
import pwd
import resource
import subprocess

from ansible.module_utils import (
    sglang_engine,
    sglang_model,
    sglang_nccl_library,
    sglang_patch_run,
    sglang_patch_site,
    sglang_proc,
)


class Host:
    """Read-only view of this host.

    :param root: release root; a process is ours when it belongs to a release below it.
    :param command_limit: seconds that a command may take.
    :param engine: the state of the declared engine where it is known already.
    """

    def __init__(self, root, command_limit=10.0, engine=None):
        self.root = root
        self.command_limit = command_limit
        self.environ = dict(os.environ)
        self.cache = {"engine": engine} if engine else {}

    def run(self, argv):
        """Return ``(exit status, output, error output)`` of a command; status 127 where there is no such program, 124
        where it took longer than the limit."""
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=self.command_limit, stdin=subprocess.DEVNULL, check=False
            )
        except FileNotFoundError:
            return 127, "", f"{argv[0]}: not found"
        except OSError as error:
            return 126, "", f"{argv[0]}: {error.strerror}"
        except subprocess.TimeoutExpired:
            return 124, "", f"{argv[0]} gave no answer within {self.command_limit:g} s"
        return done.returncode, done.stdout, done.stderr

    def read(self, path, binary=False):
        """Return the content of a file, None where it is absent or closed to us."""
        try:
            with open(path, "rb") as handle:
                raw = handle.read()
        except OSError:
            return None
        return raw if binary else raw.decode("utf-8", "replace")

    def glob(self, pattern):
        """Return the sorted paths that match."""
        return sorted(glob.glob(pattern))

    def realpath(self, path):
        """Return a path with all links resolved."""
        return os.path.realpath(path)

    def read_link(self, path):
        """Return the real path of a file, None where there is none."""
        return os.path.realpath(path) if os.path.isfile(path) else None

    def existing(self, path):
        """Return the nearest ancestor of a path that exists, the path itself included."""
        while not os.path.lexists(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        return path

    def is_directory(self, path):
        """Return whether a path is a directory."""
        return os.path.isdir(path)

    def writable(self, path):
        """Return whether this process may create entries in a directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def free(self, path):
        """Return ``(free bytes, free inodes, device)``; inodes is None on a file system without a fixed number."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None, os.stat(path).st_dev

    def account(self, user):
        """Return the password entry of a user, None where there is none."""
        try:
            return pwd.getpwnam(user)
        except KeyError:
            return None

    def can_enter(self, path, user):
        """Return whether a user can enter a directory through all its parents."""
        return not sglang_model.unreadable("/", [path], user) if self.is_directory(path) else True

    def memlock(self):
        """Return the soft limit of locked memory in bytes, None where there is no limit."""
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return None if soft == resource.RLIM_INFINITY else soft

    def python(self, path):
        """Return what :func:`sglang_engine.probe` sees; raises :class:`sglang_engine.EngineError`."""
        return sglang_engine.probe(path)

    def engine(self, declared):
        """Return the state of the declared engine; asked once."""
        if "engine" not in self.cache:
            self.cache["engine"] = sglang_engine.describe(declared)
        return self.cache["engine"]

    def candidates(self, python, packages, env):
        """Return ``{package: {candidates: [path], ...}}``, see :func:`sglang_patch_site.ask`; raises its SiteError."""
        answers = self.ask(python, packages, env)["packages"]
        return {package: answers[package] for package in packages}

    def ask(self, python, packages, env):
        """Return what :func:`sglang_patch_site.ask` returns; an interpreter that was asked for as much before is not
        started again, nor one that failed. Raises SiteError."""
        key = (python, tuple(sorted(env.items())))
        asked, answer = self.cache.get(key, ({}, None))
        if answer is None or packages.items() - asked.items():
            asked = {**asked, **packages}
            try:
                answer = sglang_patch_site.ask(python, asked, env, None, self.unbuilt_site())
            except sglang_patch_site.SiteError as error:
                answer = error
            self.cache[key] = asked, answer
        if isinstance(answer, sglang_patch_site.SiteError):
            raise answer
        return answer

    def python_path(self, python, env):
        """Return where an interpreter looks for modules, in its order; raises
        :class:`sglang_patch_site.SiteError`."""
        return self.ask(python, {}, env)["path"]

    def judge_patches(self, wanted):
        """Return the results of the patch engine for ``{python, env, entries, engine_version, capabilities,
        allow_experimental}`` without writing; raises its SiteError or EntryError."""
        return sglang_patch_run.verdicts({"state": "present", "site": self.unbuilt_site(), **wanted}, self.candidates)

    def unbuilt_site(self):
        """Return the place of a release that is still to be built, for questions about the engine as it is."""
        return os.path.join(self.root, "releases", "unbuilt", "site")

    def version_of_library(self, path):
        """Return the version that a libnccl states, None where it states none."""
        return sglang_nccl_library.version_of_library(path)

    def mapped(self, name):
        """Return ``{path: [pid]}`` of the files with a name that the workers of this root have mapped."""
        return sglang_nccl_library.mapped(self.root, name)

    def model_problems(self, declared, user, digests):
        """Return what is wrong with existing model files; those named in ``digests`` are read in full."""
        return sglang_model.check(declared["path"], digests, user, declared["source"] == "existing")

    def listeners(self, port):
        """Return who listens on a port, see :func:`sglang_proc.listeners`."""
        return sglang_proc.listeners(port)

    def is_ours(self, pid):
        """Return whether a process belongs to a release of this root."""
        return pid is not None and sglang_proc.is_ours(pid, self.root)

    def served_models(self, url, limit=2.0):
        """Return the models that an OpenAI-compatible server at a URL serves; empty where nothing answers so."""
        # Here: it costs more than the checks, and a port is seldom taken.
        import urllib.error
        import urllib.request

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{url}/v1/models", timeout=limit) as answer:
                return [str(item["id"]) for item in json.loads(answer.read(1 << 20))["data"]]
        except urllib.error.HTTPError as error:
            error.close()
            return []
        except (OSError, ValueError, KeyError, TypeError):
            return []
