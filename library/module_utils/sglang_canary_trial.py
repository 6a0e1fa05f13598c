"""One trial of a release: does it fit, start it, prove it, stop it, and see that nothing is left."""

from __future__ import annotations

import os

from ansible.module_utils import sglang_canary_plan as plan
from ansible.module_utils import sglang_canary_room, sglang_proc
from ansible.module_utils.sglang_activation_rules import judge
from ansible.module_utils.sglang_canary_live import UnmeasuredError
from ansible.module_utils.sglang_canary_run import CanaryWatch, Disturbed, memory_back
from ansible.module_utils.sglang_client import Call, Client, ClientError
from ansible.module_utils.sglang_findings import errors, finding
from ansible.module_utils.sglang_ports import flags_of
from ansible.module_utils.sglang_process_report import report
from ansible.module_utils.sglang_watch import LogFollower
from ansible.module_utils.sglang_watch_progress import Progress
from ansible.module_utils.sglang_watch_signatures import cause
from ansible.module_utils.sglang_watch_stacks import HUNG, collect
from ansible.module_utils.sglang_watch_wait import NotReadyError, Options

RUNG = "canary"
# What dummy weights cannot show: nobody accepts the tokens of a draft model that is noise.
_NOISE = ("speculation",)


class Trial:
    """A trial with the parameters of the module ``sglang_canary``.

    :param launch: content of the release's ``launch.json``.
    :param run: callable ``run(argv) -> (rc, stdout, stderr)``.
    :param silence: seconds of silence for each phase.
    :param result: the module's result, which is filled in.
    """

    def __init__(self, params, release, launch, run, silence, result):
        self.p, self.release, self.launch, self.result = params, release, launch, result
        self.run, self.silence = run, silence
        self.args = (launch.get("expect") or {}).get("args") or {}
        self.flags = flags_of(launch["argv"])
        self.model = self.flags.get("model-path", "")
        self.config = plan.read_config(self.model)
        wanted = plan.layers_wanted(params["layers"], self.args)
        self.changed = plan.fewer_layers(self.config, wanted)
        self.layers = plan.layers_of(dict(self.config, **self.changed))

    def _find(self, *item):
        self.result["findings"].append(finding(RUNG, *item))

    def _free(self):
        return sglang_canary_room.free_mb(self.p["device"], self.launch, self.run)

    def _workers(self):
        """Return ``{(pid, start): text}`` of the live server's workers."""
        return {
            (item["pid"], item["start"]): sglang_proc.describe(item)
            for item in sglang_proc.scan(self.p["root"])
            if item["role"] in sglang_proc.WORKER_ROLES and sglang_proc.alive(item["state"])
        }

    def fits(self):
        """Return whether there is room now.

        :raises OSError: what is free cannot be read. :raises ValueError: the model's configuration cannot.
        """
        if not self.layers:
            raise ValueError(
                f"{self.model}/config.json does not say how many layers the model has, so it cannot be made small"
            )
        ranks = int(self.launch.get("tp_size") or 1)
        weights = plan.weights_mb(self.config, plan.weight_bytes(self.model), self.layers, ranks)
        self.before = self._free()
        room = sglang_canary_room.room(
            self.p["device"], self.before, weights, self.p["overhead_mb"], self.p["keep_mb"], ranks
        )
        self.result["room"] = room
        if not room["fits"]:
            where = "a GPU" if self.p["device"] == "cuda" else "the host"
            self._find(
                "no-room",
                "error",
                f"The canary needs {room['needed_mb']} MiB on {where} beside {room['keep_mb']} MiB that stay free",
                f"free MiB: {', '.join(map(str, room['free_mb']))}",
                "let it take the live server's place for a minute or two with -e canary_downtime=true, give it "
                "fewer layers, or go without with -e canary=false",
            )
        return room["fits"]

    def _flags(self, path):
        """Return ``(flags that replace those of the release, model directory or None)``; make what they name."""
        args = {
            "load-format": "dummy",
            "max-total-tokens": self.p["max_total_tokens"],
            "mem-fraction-static": self.result["room"]["share"],
            **self.p["args"],
        }
        args = {flag: value for flag, value in args.items() if value not in (None, False)}
        nested = any(isinstance(value, dict) for value in self.changed.values())
        draft = str(self.flags.get("speculative-draft-model-path") or "")
        if draft and os.path.isdir(draft):
            taps = plan.eagle_taps(plan.read_config(draft))
            if taps:
                plan.shadow(draft, f"{path}/draft", taps)
                args["speculative-draft-model-path"] = f"{path}/draft"
        if not self.changed:
            return args, None
        if nested or draft:
            # SGLang puts the override over the top of a configuration and over that of a draft model as well.
            plan.shadow(self.model, f"{path}/model", self.changed)
            return args, f"{path}/model"
        before = self.flags.get("json-model-override-args")
        args["json-model-override-args"] = plan.merged_override(before, self.changed)
        return args, None

    def go(self, canary, probe, key, abandoned):
        """Run the trial; fills ``verdict``, ``findings`` and the rest of the result.

        :param canary: :class:`sglang_canary_run.Canary`, swept.
        :param probe: :class:`sglang_canary_live.LiveProbe` of the live server, or None.
        :param key: API key, or None.
        :param abandoned: function that returns whether nobody waits for the answer any more.
        :raises CanaryError: the canary cannot be started or stopped.
        """
        canary.forget_log()
        try:
            if probe and not probe.start():
                self._find("live-silent", "warning", "The live server does not answer, so nothing watches over it")
                probe = None
        except UnmeasuredError as problem:
            self._unmeasured(problem)
            return
        workers = self._workers() if probe else {}
        ports = plan.free_ports()
        self.result.update(port=ports[0], layers=self.layers)
        verdict = "refused"
        try:
            canary.prepare(self.launch["user"])
            args, model = self._flags(canary.path)
            launch = plan.canary_launch(self.launch, canary.path, ports, args, model)
            if probe:
                probe.phase("during")
            self._try(canary, launch, probe, key, abandoned)
            if not errors(self.result["findings"]):
                verdict = "passed"
        except Disturbed as hurt:
            verdict = "disturbed"
            self._find(
                "live-hurt",
                "error",
                "The canary was stopped because it hurt the live server",
                str(hurt),
                "try it when the server has less to do, or in its place with -e canary_downtime=true",
            )
        finally:
            self.result["verdict"] = verdict
            if verdict != "passed":
                self.result["log"] = canary.keep_log(f"{canary.path}/server.log")
            canary.sweep()
        self._gone(canary, ports)
        if probe:
            probe.finish()
            self.result["live"] = probe.summary()
            self._died(workers)
            if probe.failures and verdict == "passed":
                self._find("live-hurt", "error", "The live server failed a request", "; ".join(probe.failures))
        if errors(self.result["findings"]) and verdict == "passed":
            self.result["verdict"] = "refused"

    def _died(self, before):
        gone = sorted(set(before) - set(self._workers()))
        if gone:
            self._find(
                "live-died",
                "error",
                "Workers of the live server died while the canary ran",
                ", ".join(before[key] for key in gone),
                "read the live server's log before the canary is blamed (status.yml names it)",
            )

    def _unmeasured(self, problem):
        self.result["verdict"] = "refused"
        if problem.kind == "unauthorised":
            text, advice = "The live server asks for another API key than the one given", "give its key"
        else:
            text = "The live server is too slow to measure, so nothing could keep the canary from hurting it"
            advice = "try it when the server has less to do"
        way = "or try it in its place with -e canary_downtime=true"
        self._find("live-unmeasured", "error", text, str(problem), f"{advice}, {way}")

    def _try(self, canary, launch, probe, key, abandoned):
        client = Client(launch["endpoint"], key)
        pid = canary.start(launch, self.p["nice"])
        names = ("timeout", "idle_silence", "request_timeout", "generation_timeout", "generations", "max_tokens")
        # The answers of dummy weights are noise: nothing is asked of them but that they come.
        options = Options(silence=self.silence, min_distinct=0, **{name: self.p[name] for name in names})
        watch = CanaryWatch(canary.path, launch, client, options, pid, Progress(canary.path), abandoned)
        watch.live = probe
        try:
            watch.wait()
            self._prove(canary, launch, client, watch)
        except NotReadyError as problem:
            self._failed(canary, launch, watch, problem.cause)
        finally:
            self.result.update(phases=watch.log.history(), generations=watch.generations)
            if self.result["cause"] or errors(self.result["findings"]):
                self.result["log_tail"] = [line[:300] for line in watch.log.tail[-40:]]

    def _failed(self, canary, launch, watch, found):
        self.result["cause"] = found
        ranks = f" on ranks {', '.join(map(str, found['ranks']))}" if found["ranks"] else ""
        evidence = [f"phase {found['phase']}{ranks} after {watch.elapsed:.0f} s", found["detail"]]
        if found["first_error"] and found["first_error"] != found["detail"]:
            evidence.append(f"first error of the log: {found['first_error']}")
        if found["signature"] in HUNG:
            evidence += collect(canary.path, launch["argv"][0])[1]
        text = "; ".join(item for item in evidence if item)
        self._find(found["signature"], "error", found["message"], text, found["advice"])

    def _prove(self, canary, launch, client, watch):
        """Judge what runs as the proof of a release does."""
        seen = report(launch, canary.base)["findings"]
        limit = self.p["request_timeout"]
        try:
            info = Call(client.server_info, limit, limit=limit).wait()
        except ClientError as error:
            raise NotReadyError(cause("health_failed", watch.log.phase, str(error))) from None
        seen += judge(launch, info, LogFollower(launch["log"]).read(), self.p["device"])
        for item in seen:
            level = "info" if item["rule"] in _NOISE else item["level"]
            self.result["findings"].append(dict(item, rung=RUNG, level=level))

    def _gone(self, canary, ports):
        left = canary.traces(ports)
        if left:
            self._find("trace", "error", "The canary left something behind", "; ".join(left), "end it by hand")
        if self.p["device"] == "cuda":
            now = memory_back(self._free, self.before, sglang_canary_room.given_back)
            if not sglang_canary_room.given_back(self.before, now):
                self._find(
                    "memory-not-back",
                    "warning",
                    "Less GPU memory is free than before the canary",
                    f"MiB before: {', '.join(f'{item:.0f}' for item in self.before)}; "
                    f"after: {', '.join(f'{item:.0f}' for item in now)}",
                    "see with nvidia-smi whether another process has taken it",
                )
