"""Resolve and lint a variant on the controller; no host is contacted. Documented in library/sglang_variant.py."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Mapping

import ansible.module_utils
from ansible.plugins.action import ActionBase

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE_UTILS = str(ROOT / "library" / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils import (  # noqa: E402
    sglang_lint,
    sglang_variant_patches,
    sglang_variant_resolve,
    sglang_variant_run,
    sglang_variant_text,
)
from ansible.module_utils.sglang_findings import errors, summary  # noqa: E402
from ansible.module_utils.sglang_variant_schema import (  # noqa: E402
    ARGUMENTS,
    VariantError,
    check_dotted,
    check_launch,
)


@functools.cache
def table(name):
    """Return one data file of plugins/data, read once in a process."""
    return json.loads((ROOT / "plugins" / "data" / name).read_text(encoding="utf-8"))


class ActionModule(ActionBase):
    """Thin: reads the catalogue's files, calls the pure functions, turns their findings into one message."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Return variant, patches, findings, run (unless it failed) and, with ``against``, difference."""
        result = super().run(tmp, task_vars)
        _spec, args = self.validate_argument_spec(ARGUMENTS)
        known = task_vars or {}
        result["changed"] = False
        try:
            wrong = check_dotted(known, lambda name: isinstance(known.get(name), Mapping))
            wrong += check_launch(args["launch"], args["tp_size"])
            if wrong:
                raise VariantError(wrong)
            result.update(self.judge(args["name"], args))
            if args["against"] is not None:
                sglang_variant_resolve.check_name(args["against"], args["catalogue"], "against")
                other = self.judge(args["against"], args)["variant"]
                sides = [sglang_variant_text.hide(item) for item in (result["variant"], other)]
                result["difference"] = sglang_variant_resolve.difference(*sides)
            if args["explain"]:
                host = known.get("inventory_hostname", "the controller")
                result["explanation"] = sglang_variant_text.explain(
                    host, result, args["engine_version"], result.get("difference")
                )
        except VariantError as error:
            result["findings"] = error.findings
        wrong = errors(result["findings"])
        if wrong:
            # A failed task is shown whole, with the secret that it may have been refused for; so nobody needs its run.
            if "variant" in result:
                result["variant"] = sglang_variant_text.hide(result["variant"])
            result.update(failed=True, msg=summary(wrong))
        else:
            # The action runs in a fork: the playbook's own process is its parent.
            result["run"] = sglang_variant_run.identify_run(os.getppid())
        return result

    @staticmethod
    def judge(name, args):
        """Return ``{variant, unset, patches, findings}`` of one variant.

        :raises VariantError: it cannot be resolved.
        """
        variant, unset = sglang_variant_resolve.resolve(
            name,
            args["catalogue"],
            args["base"],
            args["overrides"],
            args["engine_version"],
            args["host"],
            table("sglang_flags.json"),
        )
        patches = sglang_variant_patches.load(variant["patches"], args["patch_dir"])
        context = sglang_lint.Context(
            engine=args["engine_version"],
            device=args["device"],
            tp_size=args["tp_size"],
            launch=args["launch"],
            flags=table("sglang_flags.json"),
            nccl=table("nccl_variables.json"),
        )
        variant, findings = sglang_lint.lint(variant, patches, context)
        variant, unset = sglang_variant_resolve.settle(variant, unset)
        return {
            "variant": variant,
            "unset": unset,
            "patches": patches,
            "findings": sglang_variant_resolve.refused(findings, args["force"]),
        }
