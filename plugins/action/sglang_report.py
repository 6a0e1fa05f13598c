"""Write the report on the controller. Documented in library/sglang_report.py."""

from __future__ import annotations

import math
import os
import pathlib
import sys
import tempfile
import time

import ansible.module_utils
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE_UTILS, PLUGIN_UTILS = str(ROOT / "library" / "module_utils"), str(ROOT / "plugins" / "plugin_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)
if PLUGIN_UTILS not in sys.path:
    sys.path.append(PLUGIN_UTILS)

from ansible.module_utils.sglang_history_read import unpack  # noqa: E402
from ansible.module_utils.sglang_report_spec import ARGUMENTS  # noqa: E402


def write(path, text):
    """Replace a file by rename where its text differs; return whether it did."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".report-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    return True


def read_plan(path):
    """Return ``(path, interventions)``; without a path the checkout's own plan, where there is one.

    :raises ValueError: the plan cannot be used. :raises OSError: it cannot be read.
    """
    from sglang_report_plan import parse

    own = ROOT / "inventory" / "plan.yml"
    if not path and not own.is_file():
        return "", []
    path = path or str(own)
    return path, parse(pathlib.Path(path).read_text(encoding="utf-8"), path)


def spreads_of(given):
    """Return ``{host: share}``; :raises ValueError: a value is no share of 0 or more."""
    out = {}
    for host, value in given.items():
        try:
            out[host] = float(value)
        except (TypeError, ValueError):
            out[host] = -1.0
        if not 0 <= out[host] < math.inf:
            raise ValueError(
                f"start_spread: {value!r} of {host} is no share of 0 or more; set sglang_decision_start_spread to one."
            )
    return out


class ActionModule(ActionBase):
    """Thin: the functions of plugin_utils build the report, this writes it."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Return files, counts, problems, plan and elapsed."""
        result = super().run(tmp, task_vars)
        begin = time.monotonic()
        _spec, args = self.validate_argument_spec(ARGUMENTS)
        result["changed"] = False
        try:
            result.update(self.report(args, boolean(self._task.check_mode)))
        except ImportError as error:
            result.update(failed=True, msg=f"The controller lacks a library: {error}. Way out: make controller.")
        except ValueError as error:
            result.update(failed=True, msg=str(error))
        except OSError as error:
            result.update(
                failed=True, msg=f"{error}. Way out: give a plan and a directory (sglang_report_dir) that exist."
            )
        result["elapsed"] = round(time.monotonic() - begin, 3)
        return result

    @staticmethod
    def report(args, check):
        """Build the files and write them unless in check mode; return the result's keys."""
        # matplotlib keeps a cache of fonts, which belongs to the checkout and not into somebody's home.
        os.environ.setdefault("MPLCONFIGDIR", str(ROOT / ".cache" / "matplotlib"))
        from sglang_report_data import build
        from sglang_report_page import files

        directory = pathlib.Path(args["directory"])
        if not directory.is_absolute():
            raise ValueError(f"directory: {args['directory']!r} is not an absolute path; set sglang_report_dir to one.")
        plan, interventions = read_plan(args["plan"])
        hosts = {name: unpack(text) for name, text in args["histories"].items()}
        report = build(hosts, interventions, args["unread"], args["baseline"], spreads_of(args["start_spread"]))
        texts = files(report, ROOT / "plugins" / "data")
        paths = [directory / name for name in texts]
        if check:
            differ = [not path.is_file() or path.read_text(encoding="utf-8") != texts[path.name] for path in paths]
        else:
            directory.mkdir(parents=True, exist_ok=True)
            differ = [write(path, texts[path.name]) for path in paths]
        counts = {
            "hosts": len(hosts),
            "runs": len(report["runs"]),
            "variants": len({row["variant"] for row in report["runs"]}),
            "decisions": len(report["decisions"]),
            "page_bytes": len(texts["report.html"].encode()),
        }
        done = ("would write" if check else "wrote") if any(differ) else "nothing new in"
        return {
            "changed": any(differ),
            "files": [str(path) for path in paths],
            "counts": counts,
            "problems": {host["name"]: host["problems"] for host in report["hosts"] if host["problems"]},
            "plan": plan,
            "msg": f"{done} {paths[0]}: {counts['runs']} runs, {counts['variants']} variants, {len(hosts)} host(s)",
        }
