"""All checks of a host in their order."""

from __future__ import annotations

import time

from ansible.module_utils.sglang_precheck_engine import ENGINE_CHECKS
from ansible.module_utils.sglang_precheck_gpu import GPU_CHECKS
from ansible.module_utils.sglang_precheck_host import Host
from ansible.module_utils.sglang_precheck_kernel import KERNEL_CHECKS
from ansible.module_utils.sglang_precheck_leftovers import LEFTOVER_CHECKS
from ansible.module_utils.sglang_prechecks import HOST_CHECKS, run_checks

CHECKS = HOST_CHECKS + ENGINE_CHECKS + GPU_CHECKS + KERNEL_CHECKS + LEFTOVER_CHECKS


def precheck(wanted, engine=None):
    """Read the host and return ``{findings, verdict, elapsed}``, elapsed in seconds.

    :param wanted: values of :data:`sglang_precheck_spec.CHECKS`.
    :param engine: what :func:`sglang_engine.describe` says of ``wanted["engine"]``, where that is known already.
    """
    started = time.monotonic()
    host = Host(wanted["root"], engine=engine)
    wanted = {**wanted, "env": {name: str(value) for name, value in wanted["env"].items()}}
    findings, verdict = run_checks(wanted, host, CHECKS)
    return {"findings": findings, "verdict": verdict, "elapsed": round(time.monotonic() - started, 3)}
