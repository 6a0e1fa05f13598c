"""Run single functions of a patched file for real, with the engine around them replaced by a simulated host.

This is the second opinion on the gates: the module evaluates conditions, this executes them.
"""

from __future__ import annotations

import ast
import builtins
import functools
from types import SimpleNamespace
from unittest.mock import MagicMock

HOSTS = {"9.0": 9, "10.0": 10, "12.0": 12, "8.6": 8, "cpu": None, "amd-12.0": None}


_parsed = functools.lru_cache(maxsize=8)(ast.parse)


def platform(host):
    """Return the platform object of a host; only NVIDIA cards have an SM number."""
    major = HOSTS[host]
    return SimpleNamespace(
        is_sm90=major == 9,
        is_sm100=major == 10,
        is_sm120=major == 12,
        is_blackwell=major in (10, 11, 12),
        is_cuda=major is not None,
    )


def function(source, name, host, **more):
    """Return the function ``name`` of a file, with the module's own architecture facts and a simulated engine.

    Other names: what begins with ``is_`` or ``uses_`` answers False, the rest is a mock.
    """
    facts = platform(host)
    tree = _parsed(source)
    space = {
        "is_cuda": lambda: facts.is_cuda,
        "is_sm90_supported": lambda: facts.is_sm90,
        "is_sm100_supported": lambda: facts.is_sm100,
        "is_sm120_supported": lambda: facts.is_sm120,
        "get_platform": lambda: facts,
        "ceil_align": lambda size, unit: -(-size // unit) * unit,
        "get_global_server_args": lambda: MagicMock(attn_cp_size=1),
        "_is_flashinfer_available": True,
        "FUSE_ALLREDUCE_MAX_BATCH_SIZE": 2048,
        **more,
    }
    imported = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", [])}
    for known in ("is_sm90_supported", "is_sm100_supported", "is_sm120_supported", "get_platform"):
        if known not in imported:
            del space[known]  # a file that forgot the import must fail as it would in the engine
    wanted = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").startswith("_is_sm"))
    ]
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.returns, node.decorator_list = None, []
            for argument in node.args.args:
                argument.annotation = None
    code = compile(ast.Module(wanted, []), name, "exec")
    exec_in = dict(space)
    names = [item for node in wanted for item in ast.walk(node) if isinstance(item, ast.Name)]
    bound = {item.id for item in names if isinstance(item.ctx, ast.Store)}
    for item in {item.id for item in names} - set(space) - bound - set(dir(builtins)):
        if "sm90" in item or "sm100" in item or "sm120" in item or item == "get_platform":
            continue
        exec_in[item] = (lambda *_a, **_k: False) if item.lstrip("_").startswith(("is_", "uses_")) else MagicMock()
    exec(code, exec_in)
    return exec_in[name]
