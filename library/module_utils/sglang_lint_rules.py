"""The register of lint rules and what they look at; the rules are in sglang_lint_nccl, _flags and _engine."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, NamedTuple

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.module_utils.sglang_variant_flags import FlagTable
from packaging.version import Version

# The NCCL that each torch build loads; SGLang pins torch.
TORCH_NCCL = {"2.9.1": "2.27.5", "2.11.0": "2.28.9", "2.13.0": "2.29.7", "2.14.1": "2.30.7"}
SPECULATIVE = "speculative-algorithm"
# Kimi-K2.5 in the spellings that folders and draft models have: kimi_k2.5, Kimi-K25, KimiK2-5.
KIMI = re.compile(r"kimi[-_]?k2[._-]?5(?!\d)", re.IGNORECASE)


class Rule(NamedTuple):
    """One rule: a generator of ``(message, evidence, advice)``."""

    id: str
    level: str
    text: str
    check: Callable


RULES: dict[str, Rule] = {}


def rule(identifier, level, text):
    """Register a generator function as the rule ``identifier``; ``text`` is its line in docs/lint-rules.md."""

    def register(check):
        if identifier in RULES:
            raise ValueError(f"two rules are called {identifier}")
        RULES[identifier] = Rule(identifier, level, text, check)
        return check

    return register


class Context:
    """What is known on the controller about the host that a variant is for.

    :param engine: declared SGLang version.
    :param device: ``cuda`` or ``cpu``.
    :param tp_size: tensor parallel size, the number of ranks.
    :param launch: host, port, model_path, has_api_key, api_key_problem, and where declared gpu_count,
        compute_capability ("12.0"), interconnect (pcie, the default, or nvlink), gpu_memory_gib (of one GPU),
        nccl_version, server_env (names of the variables in sglang_server_env), and allow_experimental, whether
        experimental patches may be applied.
    :param flags: the table of plugins/data/sglang_flags.json.
    :param nccl: the table of plugins/data/nccl_variables.json.
    """

    def __init__(self, engine, device, tp_size, launch, flags, nccl):
        self.engine = Version(engine).public
        self.device = device
        self.tp_size = int(tp_size)
        self.launch: dict[str, Any] = launch or {}
        self.flags = FlagTable(flags, self.engine)
        self._nccl = nccl

    @property
    def cuda(self):
        """Whether the host computes on GPUs."""
        return self.device == "cuda"

    @property
    def pcie(self):
        """Whether the GPUs have no NVLink between them, the case unless declared otherwise."""
        return str(self.launch.get("interconnect") or "pcie").lower() == "pcie"

    @property
    def experimental(self):
        """Whether experimental patches may be applied."""
        return boolean(self.launch.get("allow_experimental") or False, strict=False)

    @property
    def kimi(self):
        """Whether the model path names Kimi-K2.5."""
        return bool(KIMI.search(str(self.launch.get("model_path") or "")))

    @functools.cached_property
    def nccl(self):
        """The NCCL version that the engine loads, as text."""
        declared = self.launch.get("nccl_version")
        return str(declared) if declared else TORCH_NCCL[self.flags.pins["torch"]]

    @functools.cached_property
    def variables(self):
        """``{name: kind}`` of the variables that this NCCL reads; kind is int or str."""
        known = [Version(item) for item in self._nccl["releases"]]
        older = [item for item in known if item <= Version(self.nccl)]
        here = max(older) if older else min(known)
        return {
            name: kind
            for name, (since, until, kind) in self._nccl["variables"].items()
            if Version(since) <= here <= Version(until)
        }

    def before(self, version):
        """Whether the engine is older than a release."""
        return Version(self.engine) < Version(version)

    def argument(self, variant, flag):
        """Return the value of a flag in the final command line, or None where it is left out."""
        value = variant["args"].get(flag)
        return None if value is False else value
