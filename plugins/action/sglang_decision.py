"""Judge a release on the controller, which has the statistics. Documented in library/sglang_decision.py."""

from __future__ import annotations

import pathlib
import sys

import ansible.module_utils
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE_UTILS, PLUGIN_UTILS = str(ROOT / "library" / "module_utils"), str(ROOT / "plugins" / "plugin_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)
if PLUGIN_UTILS not in sys.path:
    sys.path.append(PLUGIN_UTILS)

from ansible.module_utils.sglang_decision_spec import ARGUMENTS, RESULT  # noqa: E402
from sglang_decide import decide  # noqa: E402
from sglang_verdict import PROMOTE, ROLLBACK, SettingsError  # noqa: E402


class ActionModule(ActionBase):
    """Thin: the host reads and writes its ledger, the functions of plugin_utils decide."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Return verdict, outcome, lines, decision and what of it is still to be written."""
        result = super().run(tmp, task_vars)
        _spec, args = self.validate_argument_spec({key: ARGUMENTS[key] for key in ARGUMENTS if key != "event"})
        result.update(changed=False, **dict.fromkeys(RESULT))
        result["lines"] = []
        if boolean(self._task.check_mode):
            result["skipped_reason"] = "check mode: nothing was measured"
            return result
        known = args.pop("read")
        seen = {"read": known} if known else self._execute_module(module_args=args, task_vars=task_vars)
        if seen.get("failed"):
            return {**result, **seen}
        try:
            event = decide(args, seen["read"])
        except SettingsError as error:
            result.update(failed=True, msg=str(error))
            return result
        except ImportError as error:
            result.update(failed=True, msg=f"The controller lacks a library: {error}. Way out: make controller.")
            return result
        # A second call of the module costs as much as the first; the one that records the verdict can carry the event.
        if args["deferred"] and event["outcome"] in (PROMOTE, ROLLBACK):
            result["pending"] = event
        else:
            written = self._execute_module(module_args={**args, "event": event}, task_vars=task_vars)
            if written.get("failed"):
                return {**result, **written}
        result.update(verdict=event["verdict"], outcome=event["outcome"], lines=event["lines"], decision=event)
        if event["outcome"] == ROLLBACK:
            result.update(failed=True, msg="\n".join(event["lines"]))
        return result
