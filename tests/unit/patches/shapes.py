"""Reduced shapes of the engine's files that the patches touch, one per family, and a small tree made of them.

Only the structure that matters is here: imports, module-level facts, the gate and its surroundings. Run as a program it
writes a package tree: ``python shapes.py FOLDER VERSION``.
"""

from __future__ import annotations

import pathlib
import sys

FUNCTIONS = "functions"
PLATFORM = "platform"


def guard(style, name="apply_flashinfer_allreduce_fusion"):
    """Return the file with the runtime guard."""
    if style == FUNCTIONS:
        imports = "from sglang.srt.utils import (\n    is_cuda,\n    is_sm90_supported,\n    is_sm100_supported,\n)\n"
        facts = "is_sm90_supported()", "is_sm100_supported()"
    else:
        imports = "from sglang.srt.runtime_context import get_platform\nfrom sglang.srt.utils import is_cuda\n"
        facts = "get_platform().is_sm90", "get_platform().is_sm100"
    return f'''"""Guard."""
{imports}
_is_cuda = is_cuda()
_is_sm90_supported = _is_cuda and {facts[0]}
_is_sm100_supported = _is_cuda and {facts[1]}
LIMIT = 2048


def {name}(batch_size: int):
    return (
        # a comment that stays
        (_is_sm90_supported or _is_sm100_supported)
        and batch_size > 0
        and batch_size <= LIMIT
    )


def elsewhere():
    return (_is_sm90_supported or _is_sm100_supported)
'''


def server_args(switch, wrong_place=False):
    """Return server_args.py: the automatic switch, or from 0.5.17 only a condition that looks like it."""
    names = ("is_cuda", "is_sm100_supported", "is_sm120_supported", "is_sm90_supported")
    imports = "from sglang.srt.utils import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"
    body = f"""        if (
            not self.enabled
            and (is_sm90_supported() or is_sm100_supported())
            and self.nnodes == 1
        ):
            {switch}
"""
    if wrong_place:
        body = """
    def _handle_model_capability_adjustments(self):
        if self.is_embedding:
            backend = self.prefill_attention_backend or self.attention_backend
            if (
                is_cuda()
                and (is_sm90_supported() or is_sm100_supported())
                and backend in (None, "fa3", "fa4")
            ):
                self.prefill_only_disable_kv_cache = True
"""
    return f"""{imports}

class ServerArgs:
    def _handle_model_specific_adjustments(self):
        model_arch = self.arch()
        if model_arch == "other":
            if is_sm100_supported():
                self.backend = "other"
{body}
    def _later(self):
        return (is_sm90_supported() or is_sm100_supported() or is_sm120_supported())
"""


def overrides(style):
    """Return arg_groups/overrides.py."""
    if style == FUNCTIONS:
        names = "is_sm90_supported, is_sm100_supported, is_sm120_supported"
        imports = f"from sglang.srt.utils.common import {names}\n"
        sm90, sm100 = "is_sm90_supported()", "is_sm100_supported()"
    else:
        imports = "from sglang.srt.runtime_context import (\n    get_context,\n    get_platform,\n)\n"
        sm90, sm100 = "get_platform().is_sm90", "get_platform().is_sm100"
    return f"""{imports}
_FLASHINFER_ALLREDUCE_FUSION_ARCHS = ["KimiK25ForConditionalGeneration"]


def _flashinfer_allreduce_fusion_auto_enable(view) -> dict:
    model_arch = view.arch
    if view.owned and model_arch == "other":
        return {{"flashinfer_allreduce_fusion_backend": None}}
    if (
        view.flashinfer_allreduce_fusion_backend is None
        and model_arch in _FLASHINFER_ALLREDUCE_FUSION_ARCHS
        and ({sm90} or {sm100})
        and view.tp_size > 1
        and (view.nnodes == 1 or {sm100})
    ):
        return {{"flashinfer_allreduce_fusion_backend": "auto"}}
    return {{}}


def _other(view):
    return view.x and ({sm90} or {sm100})
"""


def comm_fusion(style, resolver):
    """Return layers/flashinfer_comm_fusion.py, with the backend resolver from 0.5.14 on."""
    if style == FUNCTIONS:
        names = ["ceil_align", "is_flashinfer_available"] + ["is_sm90_supported", "is_sm100_supported"] * resolver
        imports = "from sglang.srt.utils import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"
        sm90, sm100 = "is_sm90_supported()", "is_sm100_supported()"
    else:
        imports = "from sglang.srt.runtime_context import get_platform\nfrom sglang.srt.utils import ceil_align\n"
        sm90, sm100 = "get_platform().is_sm90", "get_platform().is_sm100"
    resolve = f"""
def _resolve_backend(backend: str, is_multi_node: bool = False) -> str:
    if not ({sm90} or {sm100}):
        raise ValueError(
            "FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."
        )
    if backend == "auto":
        if is_multi_node:
            raise ValueError("single-node only")
        return "mnnvl" if {sm100} else "trtllm"
    return backend

"""
    return f"""{imports}
{resolve if resolver else ""}
def _flashinfer_trtllm_workspace_allocation_sizes(cuda_driver, prop, world_size, sizes):
    allocation_sizes = []
    for size in sizes:
        allocation_size = ceil_align(size, 2)

        mc_prop = cuda_driver.CUmulticastObjectProp()
        mc_prop.numDevices = world_size
        err, granularity = cuda_driver.cuMulticastGetGranularity(mc_prop)
        if err:
            raise RuntimeError("cuMulticastGetGranularity failed")
        allocation_sizes.append(ceil_align(allocation_size, granularity))
    return allocation_sizes
"""


def flashinfer(majors):
    """Return jit/comm.py of FlashInfer."""
    return f"""from .core import current_compilation_context, gen_jit_spec


def gen_trtllm_comm_module():
    nvcc_flags = current_compilation_context.get_nvcc_flags_list(
        supported_major_versions={majors}
    )
    return gen_jit_spec("trtllm_comm", extra_cuda_cflags=nvcc_flags)


def gen_other():
    return current_compilation_context.get_nvcc_flags_list(supported_major_versions=[9, 10])
"""


_SWITCH = "self.enable_flashinfer_allreduce_fusion = True"
_BACKEND = 'self.flashinfer_allreduce_fusion_backend = "auto"'
_GUARD, _ARGS = "srt/layers/communicator.py", "srt/server_args.py"
_OVER, _COMM = "srt/arg_groups/overrides.py", "srt/layers/flashinfer_comm_fusion.py"
_MOVED = "srt/layers/layer_boundary/residual/add_norm.py"


SGLANG = {
    "0.5.9": {_GUARD: guard(FUNCTIONS), _ARGS: server_args(_SWITCH)},
    "0.5.12.post1": {_GUARD: guard(FUNCTIONS), _ARGS: server_args(_SWITCH), _COMM: comm_fusion(FUNCTIONS, False)},
    "0.5.14": {_GUARD: guard(FUNCTIONS), _ARGS: server_args(_BACKEND), _COMM: comm_fusion(FUNCTIONS, True)},
    "0.5.18": {
        _GUARD: guard(FUNCTIONS),
        _ARGS: server_args("", wrong_place=True),
        _OVER: overrides(FUNCTIONS),
        _COMM: comm_fusion(FUNCTIONS, True),
    },
    "0.5.20": {_GUARD: guard(PLATFORM), _OVER: overrides(PLATFORM), _COMM: comm_fusion(PLATFORM, True)},
    "0.5.21": {_MOVED: guard(PLATFORM), _OVER: overrides(PLATFORM), _COMM: comm_fusion(PLATFORM, True)},
    "0.5.23": {
        _MOVED: guard(PLATFORM, "flashinfer_ar_fusion_applies"),
        _OVER: overrides(PLATFORM),
        _COMM: comm_fusion(PLATFORM, True),
    },
}
FLASHINFER = {
    **{version: {"jit/comm.py": flashinfer("[9, 10]")} for version in ("0.6.3", "0.6.7.post3", "0.6.11.post1")},
    "0.6.17": {"jit/comm.py": flashinfer("[9, 10, 12]")},
}


def write(folder, package, version, files):
    """Write a package below ``folder`` with its version in ``_version.py`` and return its path."""
    root = pathlib.Path(folder) / package
    for path, text in {"__init__.py": "", "_version.py": f'__version__ = "{version}"\n', **files}.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
    return root


if __name__ == "__main__":
    write(sys.argv[1], "sglang", sys.argv[2], SGLANG[sys.argv[2]])
