"""What sglang_precheck takes and gives: for the module, its action, and sglang_release, which checks in its call."""

from __future__ import annotations

from ansible.module_utils.sglang_findings import errors, summary

# What is read of the host, and for whom.
CHECKS = {
    "root": {"type": "str", "required": True},
    "engine": {"type": "dict", "required": True},
    "model": {"type": "dict", "default": {}},
    "user": {"type": "str", "default": ""},
    "port": {"type": "int", "required": True},
    "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
    "gpu_count": {"type": "int", "default": 0},
    "compute_capability": {"type": "str", "default": ""},
    "args": {"type": "dict", "default": {}},
    "env": {"type": "dict", "default": {}},
    "patches": {"type": "list", "elements": "dict", "default": []},
    "built": {"type": "bool", "default": False},
    "allow_experimental": {"type": "bool", "default": False},
    "model_sha256": {"type": "dict", "default": {}},
    "python_range": {"type": "str", "default": ">=3.10,<3.14"},
    "engine_mb": {"type": "int", "default": 2500},
    "release_mb": {"type": "int", "default": 100},
    "margin_mb": {"type": "int", "default": 500},
}
ARGUMENTS = {
    **CHECKS,
    "found": {"type": "dict", "default": {}},
    "enforce": {"type": "bool", "default": True},
}


def outcome(found, enforce):
    """Return the result of a task for ``{findings, verdict, elapsed}``, with ``failed`` and ``msg`` where the verdict
    is negative and ``enforce`` is true."""
    result = {"changed": False, **found}
    if enforce and not found["verdict"]["ok"]:
        result.update(failed=True, msg=summary(errors(found["findings"])))
    return result
