"""One run of the probe: which settings must be measured, which are known already, and what is said of them."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import pwd
import shutil
import tempfile
import time

from ansible.module_utils import (
    sglang_ledger,
    sglang_nccl_plan,
    sglang_nccl_run,
    sglang_nccl_verdict,
    sglang_nccl_worker,
    sglang_proc,
)
from ansible.module_utils.sglang_findings import errors, finding
from ansible.module_utils.sglang_precheck_host import Host
from ansible.module_utils.sglang_precheck_kernel import pci_path

SCHEMA = 1
FOLDER = "probe"
# Results kept on a host; one has about 10 kB.
KEEP = 300
# Files that NCCL reads beside the environment.
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
KEPT = ("outcome", "message", "where", "failed_ranks", "seconds", "steps", "predicted")
# GPU memory that may differ before and after, MiB: the driver's own, which comes and goes.
MEMORY_SLACK = 64


class ProbeError(Exception):
    """The probe could not run; the text says why and names the way out."""


def engine_environment(args):
    """Return what SGLang sets for NCCL and CUDA itself where the variable is unset."""
    symmetric, switches = bool(args.get("enable-symm-mem")), bool(args.get("enable-nccl-nvls"))
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(switches or symmetric))}


def account(name):
    """Return ``(uid, gid)`` of a user, or None for the own account.

    :raises ProbeError: there is no such user.
    """
    if not name:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ProbeError(f"user: there is no user {name!r} on this host; create it, or leave user empty") from None
    return None if entry.pw_uid == os.geteuid() else (entry.pw_uid, entry.pw_gid)


def machine(host, cuda):
    """Return what a result depends on beside its setting: GPUs, driver, their links, the kernel's command line."""
    found = {"cmdline": host.read("/proc/cmdline") or "", "files": {}}
    for name in NCCL_FILES:
        text = host.read(os.path.expanduser(name))
        if text:
            found["files"][name] = text
    if cuda:
        for key, argv in (
            ("gpus", ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]),
            ("links", ["nvidia-smi", "topo", "-m"]),
        ):
            status, out, err = host.run(argv)
            if status:
                raise ProbeError(
                    f"{' '.join(argv)} exits with {status}: {(err or out).strip()[:200]}; run precheck.yml"
                )
            found[key] = out
    return found


def memory_used(host):
    """Return the MiB in use on each GPU."""
    _status, out, _err = host.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    return [float(line) for line in out.split() if line.replace(".", "").isdigit()]


def digest(*parts):
    """Return a key for plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def read_model(path):
    """Return a model's configuration.

    :raises ProbeError: it is not there or not JSON.
    """
    name = os.path.join(path, "config.json")
    try:
        with open(name, encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError) as error:
        raise ProbeError(f"model: {name} cannot be read: {error}; the sizes of the messages follow from it") from error


def measured(root):
    """Return ``{variant: {tpot_ms_p50, concurrency, result}}`` of the newest benchmark of each variant."""
    found = {}
    for event in sglang_ledger.read(root)[0]:
        value = (event.get("metrics") or {}).get("tpot_ms_p50")
        if event["event"] == "run" and event.get("variant") and value is not None:
            found[event["variant"]] = {
                "tpot_ms_p50": value,
                "concurrency": (event.get("workload") or {}).get("concurrency"),
                "result": event.get("result"),
            }
    return found


class Session:
    """A run of the probe over several settings; :meth:`run` gives the module's result.

    :param params: the parameters of the module ``sglang_nccl_probe``.
    """

    def __init__(self, params):
        self.params, self.cuda = params, params["device"] == "cuda"
        self.host = Host(params["root"])
        self.config = read_model(params["model"])
        self.machine = machine(self.host, self.cuda)
        self.folder = os.path.join(params["root"], FOLDER)
        self.user = account(params["user"])
        self.beside = self.cuda and bool(sglang_proc.scan(params["root"]))
        self.findings, self.left = [], []

    def prepare(self, setting):
        """Return a setting with its plan, environment and key."""
        args = setting.get("args") or {}
        try:
            plan = sglang_nccl_plan.make_plan(
                self.config, args, self.params["tp_size"], self.params["batches"], graphs=self.cuda
            )
        except sglang_nccl_plan.PlanError as error:
            raise ProbeError(f"model: {error}") from error
        values = {name: str(value) for name, value in (setting.get("variables") or {}).items()}
        first = sglang_nccl_plan.number(args, "base-gpu-id", 0)
        step = sglang_nccl_plan.number(args, "gpu-id-step", 1)
        devices = [first + rank * step for rank in range(plan["world"])]
        defaults = engine_environment(args)
        inherited = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        same = digest(
            SCHEMA, self.machine, self.params["fingerprint"], self.params["device"], plan, devices, defaults,
            {**inherited, **self.params["env"]}, inspect.getsource(sglang_nccl_worker),
        )  # fmt: skip
        key = digest(same, values, setting.get("site") or "")
        return {
            "name": setting["name"], "variables": values, "site": setting.get("site") or "", "args": args, "plan": plan,
            "defaults": defaults, "devices": devices, "same": same, "key": key,
        }  # fmt: skip

    def path(self, key):
        """Return the file of a result."""
        return os.path.join(self.folder, f"{key}.json")

    def known(self, setting):
        """Return an earlier trial of a setting, or None. A failure is not kept: its cause may be gone."""
        if not self.params["reuse"]:
            return None
        try:
            with open(self.path(setting["key"]), encoding="utf-8") as handle:
                record = json.load(handle)
        except (OSError, ValueError):
            return None
        return record["trial"] if record.get("schema") == SCHEMA else None

    def base_trial(self, wanted):
        """Return the newest earlier trial of the base under the same conditions as WANTED, or None."""
        found = []
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else []:
            try:
                with open(os.path.join(self.folder, name), encoding="utf-8") as handle:
                    record = json.load(handle)
            except (OSError, ValueError):
                continue
            if record.get("name") == self.params["base"] and record.get("same") == wanted["same"]:
                found.append((record["time"], record["trial"]))
        return max(found, key=lambda item: item[0])[1] if found else None

    def keep(self, setting, trial):
        """Note a trial that worked, and drop the oldest notes beyond :data:`KEEP`."""
        record = {"schema": SCHEMA, "name": setting["name"], "same": setting["same"], "variables": setting["variables"],
                  "time": time.time(), "trial": trial}  # fmt: skip
        os.makedirs(self.folder, mode=0o755, exist_ok=True)
        temporary = self.path(setting["key"]) + ".new"
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(record, handle)
        os.replace(temporary, self.path(setting["key"]))
        names = [os.path.join(self.folder, name) for name in os.listdir(self.folder) if name.endswith(".json")]
        for name in sorted(names, key=os.path.getmtime)[:-KEEP]:
            os.unlink(name)

    def groups(self, settings):
        """Return lists of settings that can share a worker: alike in all that is set before a process starts."""
        found = {}
        for item in settings:
            early = {name: value for name, value in item["variables"].items() if not name.startswith("NCCL_")}
            found.setdefault(digest(early), []).append(item)
        return list(found.values())

    @contextlib.contextmanager
    def scratch(self):
        """Give a scratch folder that is gone afterwards; then look for what the probe has left on the host."""
        os.makedirs(self.folder, mode=0o755, exist_ok=True)
        before = memory_used(self.host) if self.cuda else []
        folder = tempfile.mkdtemp(prefix="run-", dir=self.folder)
        os.chmod(folder, 0o755)
        try:
            yield folder
        except sglang_nccl_run.WorkerError as error:
            self.look_back(before)
            left = [f"{item['message'].rstrip('.')} ({item['evidence']})" for item in self.findings]
            raise ProbeError("; ".join([f"python: {error}", *left])) from error
        finally:
            shutil.rmtree(folder)
        self.look_back(before)

    @contextlib.contextmanager
    def workers(self, group, folder):
        """Give the worker program of settings that can share one; it has ended afterwards."""
        os.mkdir(folder)
        found = sglang_nccl_run.Workers(self.params["python"], folder, self.environment(group, folder), self.user)
        try:
            yield found
        finally:
            self.left += found.close()

    def measure(self, settings):
        """Try settings and return their trials by name."""
        trials = {}
        with self.scratch() as scratch:
            for number, group in enumerate(self.groups(settings)):
                with self.workers(group, os.path.join(scratch, str(number))) as workers:
                    for item in group:
                        trials[item["name"]] = sglang_nccl_verdict.complete(self.trial(workers, item), item["plan"])
        return trials

    def environment(self, group, folder):
        """Return the environment in which a group's worker starts.

        One setting alone starts as the server does, with its sitecustomize on PYTHONPATH. Several that share a worker
        differ in NCCL's variables only; these are set in each rank by the same file, before NCCL is asked for anything.
        """
        env = {name: value for name, value in os.environ.items() if name != sglang_proc.MARKER}
        env.update(self.params["env"])
        first = group[0]
        if len(group) == 1 and first["site"]:
            site = os.path.join(folder, "site")
            os.mkdir(site)
            with open(os.path.join(site, "sitecustomize.py"), "w", encoding="utf-8") as handle:
                handle.write(first["site"])
            env["PYTHONPATH"] = os.pathsep.join([site] + [item for item in [env.get("PYTHONPATH")] if item])
            return env
        early = {name: value for name, value in first["variables"].items() if not name.startswith("NCCL_")}
        return {**early, **env}

    def trial(self, workers, item, plan=None, **more):
        """Try one setting, with another plan than its own where one is given."""
        backend = "nccl" if self.cuda else "gloo"
        return workers.trial(item, plan or item["plan"], self.params["limit"], backend, item["devices"], **more)

    def look_back(self, before):
        """Note processes and memory that the probe has left."""
        if self.left:
            self.findings.append(
                finding("probe", "probe-left", "error", "the probe left processes",
                        f"pid {', '.join(map(str, self.left))}",
                        "they wait for the driver; look for Xid in the kernel log")
            )  # fmt: skip
        for _ in range(10):
            after = memory_used(self.host) if before else []
            more = [f"GPU {n}: {b - a:.0f} MiB" for n, (a, b) in enumerate(zip(before, after)) if b - a > MEMORY_SLACK]
            # A live server grows on its own account.
            if not more or self.beside:
                return
            time.sleep(0.3)
        self.findings.append(
            finding("probe", "probe-memory", "warning", "the GPUs hold more memory after the probe than before",
                    "; ".join(more), "look for its process with nvidia-smi")
        )  # fmt: skip

    def run(self, check_mode=False):
        """Return ``{findings, verdict, results, table, reused, exercised, changed}``."""
        settings = [self.prepare(item) for item in self.params["settings"]]
        trials = {item["name"]: trial for item in settings for trial in [self.known(item)] if trial}
        reused, keys, wanted = sorted(trials), {}, []
        for item in settings:
            # Variants that differ in flags only are one setting to NCCL.
            if item["name"] not in trials and keys.setdefault(item["key"], item["name"]) == item["name"]:
                wanted.append(item)
        if wanted and not check_mode:
            trials.update(self.measure(wanted))
            for item in wanted:
                if trials[item["name"]]["outcome"] == "ok" and not self.beside:
                    self.keep(item, trials[item["name"]])
        for item in settings:
            if item["name"] not in trials and keys.get(item["key"]) in trials:
                trials[item["name"]] = trials[keys[item["key"]]]
        return self.report(settings, trials, reused, bool(wanted) and not check_mode)

    def report(self, settings, trials, reused, changed):
        """Return the module's result."""
        facts, rows, benchmarks = None, [], measured(self.params["root"])
        if trials and not self.cuda:
            message = "not exercised: NCCL; the collectives ran through gloo"
            self.findings.append(
                finding("probe", "not-exercised", "info", message, ", ".join(trials), "probe on a host with GPUs")
            )
        for item in settings:
            trial = trials.get(item["name"])
            if trial is None:
                continue
            if trial["outcome"] == "hung" and facts is None:
                facts = [f"{one['message']} ({one['evidence']})" for one in pci_path({"device": "cuda"}, self.host)]
            base = trials.get(self.params["base"]) or self.base_trial(item)
            own = sglang_nccl_verdict.judge(
                trial, item, item["plan"], base if item["name"] != self.params["base"] else None,
                self.params["threshold"], facts or (), self.cuda,
            )  # fmt: skip
            self.findings += own
            notes = dict.fromkeys(one["rule"].replace("probe-", "") for one in own if one["level"] != "info")
            rows.append({
                "name": item["name"], "variables": item["variables"], "key": item["key"], "note": ", ".join(notes),
                "reused": item["name"] in reused, "plan": {k: v for k, v in item["plan"].items() if k != "steps"},
                **{key: trial[key] for key in KEPT},
                "nccl": nccl(trial), "measured": benchmarks.get(item["name"]),
            })  # fmt: skip
        if self.beside and changed:
            self.findings.append(
                finding("probe", "probe-beside", "info", "a live server ran beside the probe, so no times are kept",
                        self.params["root"], "probe again with the server stopped for times that can be compared")
            )  # fmt: skip
        rows, wrong = sglang_nccl_verdict.ranking(rows), errors(self.findings)
        return {
            "findings": self.findings,
            "verdict": {"ok": not wrong, "failures": sorted({item["rule"] for item in wrong})},
            "results": rows, "table": sglang_nccl_verdict.table(rows), "reused": reused, "exercised": self.cuda,
            "changed": changed,
        }  # fmt: skip


def nccl(trial):
    """Return what NCCL said of itself in a trial: version, library, transports, what it took, warnings."""
    rank = next(iter(trial["ranks"].values()), {})
    return {
        "version": rank.get("version") or trial["log"]["version"], "library": rank.get("library"),
        **{key: trial["log"][key] for key in ("transports", "environment", "channels", "threads", "warnings")},
    }  # fmt: skip
