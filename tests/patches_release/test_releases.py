"""The catalogue on the real release packages through the real module; each gate is also executed on simulated hosts."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from ansible.module_utils import sglang_patching as patching

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import simulate  # noqa: E402

SGLANG = {
    "0.5.8.post1": "guard and server_args",
    "0.5.9": "guard and server_args",
    "0.5.10": "guard and server_args",
    "0.5.10.post1": "guard and server_args",
    "0.5.11": "multicast preflight",
    "0.5.12.post1": "multicast preflight",
    "0.5.13.post1": "multicast preflight",
    "0.5.14": "backend resolver",
    "0.5.15.post1": "overrides",
    "0.5.16": "overrides",
    "0.5.17": "overrides and a look-alike",
    "0.5.18": "overrides and a look-alike",
    "0.5.19": "platform object",
    "0.5.20": "platform object",
    "0.5.21": "moved guard",
    "0.5.22": "renamed guard",
    "0.5.23": "renamed guard",
}
FLASHINFER = {
    "0.6.1": "applied",
    "0.6.3": "applied",
    "0.6.7.post2": "refused",
    "0.6.7.post3": "refused",
    "0.6.8.post1": "refused",
    "0.6.12": "applied",
    "0.6.17": "upstream",
    "0.7.2": "upstream",
}
PRISTINE, PATCHED = ["9.0", "10.0"], ["9.0", "10.0", "12.0"]


@pytest.fixture(scope="module")
def entries(repository):
    """Return the fusion patch and FlashInfer's gate."""
    names = ["sm120_allreduce_fusion", "flashinfer_sm120_gate"]
    return patching.load_entries(names, repository / "roles" / "sglang_patches" / "files")


def admits(source, name, attempt, **more):
    """Return the hosts on which ``attempt(function)`` is true; an exception of the engine is a refusal."""
    hosts = []
    for host in simulate.HOSTS:
        try:
            if attempt(simulate.function(source, name, host, **more)):
                hosts.append(host)
        except (ValueError, RuntimeError):
            pass
    return hosts


def executed(package, version):
    """Return {gate: hosts admitted} found by running the functions of a package's files."""
    found = {}
    for path in ("srt/layers/communicator.py", "srt/layers/layer_boundary/residual/add_norm.py"):
        if (package / path).exists():
            source = (package / path).read_text()
            name = "apply_flashinfer_allreduce_fusion"
            name = name if f"def {name}(" in source else "flashinfer_ar_fusion_applies"
            found["guard"] = admits(source, name, lambda gate: bool(gate(16)))
    comm = (package / "srt/layers/flashinfer_comm_fusion.py").read_text()
    if "def _resolve_backend" in comm:
        found["resolver"] = admits(comm, "_resolve_backend", lambda gate: gate("auto") in ("trtllm", "mnnvl"))
    if "cuMulticastGetGranularity" in comm:
        found["preflight"] = admits(comm, "_flashinfer_trtllm_workspace_allocation_sizes", without_multicast)
    path = package / "srt/arg_groups/overrides.py"
    if path.exists() and "def _flashinfer_allreduce_fusion_auto_enable" in path.read_text():
        found["switch"] = admits(path.read_text(), "_flashinfer_allreduce_fusion_auto_enable", switch, **switch_names())
    return found


def without_multicast(gate):
    """Ask for the sizes on a card whose driver refuses the multicast question."""
    driver = MagicMock()
    driver.cuMemGetAllocationGranularity.return_value = (driver.CUresult.CUDA_SUCCESS, 2 << 20)
    driver.cuMulticastGetGranularity.return_value = ("CUDA_ERROR_NOT_SUPPORTED", 0)
    return len(gate(driver, MagicMock(), 8, 128, 7168, "bfloat16")) == 3


CONFIG = SimpleNamespace(hf_config=SimpleNamespace(architectures=["KimiK25ForConditionalGeneration"]))


def switch_names():
    """Return what the automatic switch reads of the engine, for Kimi-K2.5 on one node."""
    envs = MagicMock()
    envs.SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION.get.return_value = False
    return {
        "model_config_of": lambda view: CONFIG,
        "attn_dp_enabled_of": lambda view: False,
        "envs": envs,
        "_FLASHINFER_ALLREDUCE_FUSION_ARCHS": CONFIG.hf_config.architectures,
    }


def switch(gate):
    """Tell whether the automatic switch turns fusion on with eight GPUs."""
    view = SimpleNamespace(
        get_model_config=lambda: CONFIG,
        flashinfer_allreduce_fusion_backend=None,
        tp_size=8,
        nnodes=1,
        enable_dp_attention=False,
        moe_a2a_backend="none",
        disable_custom_all_reduce=True,
    )
    return gate(view).get("flashinfer_allreduce_fusion_backend") == "auto"


def run_patch(run_module, entries, folder, release, **more):
    arguments = {
        "python": sys.executable,
        "env": {"PYTHONPATH": str(folder)},
        "chdir": str(release),
        "site": str(release / "site"),
        "entries": entries,
        **more,
    }
    return run_module("sglang_patch", arguments)


def row(item, before):
    files = ", ".join(f"`{path}`" for path in item["files"]) or "none"
    return [
        item["package"],
        item["version"],
        item["state"],
        item["family"],
        files,
        ", ".join(before),
        ", ".join(item["admitted"] or before),
    ]


@pytest.mark.parametrize("version", SGLANG)
def test_sglang(version, unpacked, tmp_path, run_module, entries, table):
    folder, release = unpacked("sglang", version), tmp_path / "release"
    release.mkdir()
    pristine = executed(folder / "sglang", version)
    assert pristine.pop("preflight", []) == []
    assert all(hosts == PRISTINE for hosts in pristine.values()), pristine
    args_before = (folder / "sglang/srt/server_args.py").read_text()

    result = run_patch(run_module, entries, folder, release)
    item = result["results"][0]
    assert (item["state"], item["version"], item["family"]) == ("applied", version, SGLANG[version])
    assert item["admitted"] == PATCHED
    copy = release / "site" / "sglang"
    assert item["files"] == changed_files(folder / "sglang", copy)
    after = executed(copy, version)
    assert after.pop("preflight", ["12.0"]) == ["12.0"]
    assert set(after) == set(pristine)
    assert all(hosts == PATCHED for hosts in after.values()), after
    if item["family"] in ("overrides", "overrides and a look-alike", "platform object", "moved guard", "renamed guard"):
        assert (copy / "srt/server_args.py").read_text() == args_before

    again = run_patch(run_module, entries, folder, release)
    assert (again["changed"], again["results"][0]["state"]) == (False, "already_applied")
    # The patched tree as somebody's engine: recognised as complete.
    hand, _none = patching.judge(entries[0], version, texts(copy, entries[0], version))
    assert hand["state"] == "already_applied"
    table.append(row(item, PRISTINE))
    shutil.rmtree(folder)
    shutil.rmtree(release)


def texts(package, entry, version):
    """Return the files of the family that covers a version."""
    paths = patching.paths(patching.family_of(entry, version))
    return {path: (package / path).read_text() for path in paths}


#: The one-line patch of the old days: text looked for, text written. One hit in each file of 0.5.17 and 0.5.18.
SED = {
    "srt/layers/communicator.py": (
        "(_is_sm90_supported or _is_sm100_supported)",
        "(_is_sm90_supported or _is_sm100_supported or _is_sm120_supported)",
    ),
    "srt/server_args.py": (
        "(is_sm90_supported() or is_sm100_supported())",
        "(is_sm90_supported() or is_sm100_supported() or is_sm120_supported())",
    ),
}


@pytest.mark.parametrize("version", ["0.5.17", "0.5.18"])
def test_the_old_patch_in_the_wrong_place(version, unpacked, tmp_path, run_module, entries):
    """Both edits are said, and nothing is copied until the wrong one is gone; the other is completed."""
    folder, release = unpacked("sglang", version), tmp_path / "release"
    release.mkdir()
    pristine = {}
    for path, (old, new) in SED.items():
        file = folder / "sglang" / path
        pristine[path] = file.read_text()
        assert pristine[path].count(old) == 1
        file.write_text(pristine[path].replace(old, new))
    result = run_patch(run_module, entries, folder, release)
    item = result["results"][0]
    assert (result["failed"], item["state"], list(release.iterdir())) == (True, "conflict", [])
    place = "sglang/srt/server_args.py: edited by hand in ServerArgs._handle_model_capability_adjustments"
    for words in (place, "it admits 9.0, 10.0, 12.0, as released 9.0, 10.0", "communicator.py was patched by hand"):
        assert words in item["message"]
    (folder / "sglang/srt/server_args.py").write_text(pristine["srt/server_args.py"])
    item = run_patch(run_module, entries, folder, release)["results"][0]
    assert item["state"] == "applied" and "by hand and incomplete" in item["message"]


def changed_files(before, after):
    """Return the Python files that differ between two trees, which must have the same files."""
    left = {str(item.relative_to(before)): item for item in before.rglob("*") if item.is_file()}
    right = {
        str(item.relative_to(after)): item for item in after.rglob("*") if item.suffix != ".pyc" and item.is_file()
    }
    assert left.keys() == right.keys()
    return sorted(path for path, item in left.items() if item.read_bytes() != right[path].read_bytes())


@pytest.mark.parametrize("version", FLASHINFER)
def test_flashinfer(version, unpacked, tmp_path, run_module, entries, table):
    folder, release = unpacked("flashinfer-python", version), tmp_path / "release"
    release.mkdir()
    refused = run_patch(run_module, entries[1:], folder, release, capabilities=["12.0"])
    assert bool(refused.get("failed")) is (FLASHINFER[version] != "upstream")
    result = run_patch(run_module, entries[1:], folder, release, allow_experimental=True)
    item = result["results"][0]
    assert (item["state"], item["version"]) == (FLASHINFER[version], version)
    assert item["admitted"] == ([] if item["state"] == "refused" else PATCHED)
    origin = (folder / "flashinfer/jit/comm.py").read_text()
    assert majors(origin) == ([9, 10, 12] if item["state"] == "upstream" else [9, 10])
    assert demands_multicast(folder, version) is (item["state"] == "refused")
    if item["state"] == "applied":
        copy = release / "site" / "flashinfer"
        assert item["files"] == changed_files(folder / "flashinfer", copy) == ["jit/comm.py"]
        assert majors((copy / "jit/comm.py").read_text()) == [9, 10, 12]
    elif item["state"] == "refused":
        assert "NVLink multicast" in result["msg"] and not (release / "site").exists()
    table.append(row(item, PATCHED if item["state"] == "upstream" else PRISTINE))


def demands_multicast(folder, version):
    """Tell whether the workspace that SGLang pins this release for needs a GPU with NVLink multicast.

    It does where the all-reduce takes its memory from SymmDeviceMemory, whose first test is of multicast alone. Before
    0.6.4 SGLang calls the older function, which takes CUDA IPC buffers.
    """
    uses = "SymmDeviceMemory(" in (folder / "flashinfer/comm/trtllm_ar.py").read_text()
    tests_alone = "if multicast_supported == 0:" in (folder / "flashinfer/comm/mnnvl.py").read_text()
    return uses and tests_alone and patching.covers(">=0.6.4", version)


def majors(source):
    """Return the majors that the module hands to the compiler, by running the function."""
    context = MagicMock()
    gate = simulate.function(source, "gen_trtllm_comm_module", "12.0", current_compilation_context=context)
    gate()
    return context.get_nvcc_flags_list.call_args.kwargs["supported_major_versions"]


def test_a_release_before_the_first_family(unpacked, tmp_path, run_module, entries):
    folder = unpacked("sglang", "0.5.8.post1")
    info = next(folder.glob("sglang-*.dist-info")) / "METADATA"
    info.write_text(info.read_text().replace("Version: 0.5.8.post1", "Version: 0.5.7"))
    result = run_patch(run_module, entries, folder, tmp_path)
    assert result["results"][0]["state"] == "not_applicable"
    assert "covered are >=0.5.8,<0.5.11" in result["msg"]
