"""What the engine's interpreter has, which NCCL it would load, and whether the variant's patches fit it.

The checks have the form that :mod:`sglang_prechecks` describes. An engine that is still to be built has none of this:
lint then judges by what the release pins.
"""

from __future__ import annotations

import os
import re

from ansible.module_utils.sglang_patch_gate import GateError, admitted
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_patching import EntryError
from ansible.module_utils.sglang_precheck_gpu import query
from ansible.module_utils.sglang_prechecks import report

# Importable package: its distributions, the newest name last.
PACKAGES = {
    "sglang": ("sglang",),
    "torch": ("torch",),
    "flashinfer": ("flashinfer-python",),
    "sgl_kernel": ("sgl-kernel", "sglang-kernel"),
    "triton": ("triton",),
    "transformers": ("transformers",),
}
GATE = {"scope": "gen_trtllm_comm_module", "kind": "majors", "text": "supported_major_versions"}
FUSION = ("enable-flashinfer-allreduce-fusion", "flashinfer-allreduce-fusion-backend")
LIBRARY = "libnccl.so.2"
SYSTEM_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
)


def version_of(package, state):
    """Return the version of an importable package as its metadata states it, None without metadata."""
    return next((state["packages"][name] for name in PACKAGES[package] if name in state["packages"]), None)


def packages(wanted, host):
    """Each package of the engine comes from one place, and has the version that SGLang pins."""
    state = host.engine(wanted["engine"])
    if not state["present"]:
        return []
    try:
        seen = host.candidates(state["python"], {name: names[-1] for name, names in PACKAGES.items()}, wanted["env"])
    except SiteError as error:
        advice = "run the interpreter by hand with the service's environment"
        return [report("engine-answers", "error", "the engine's interpreter does not answer", error, advice)]
    found, known = [], []
    for package, answer in seen.items():
        places = answer["candidates"]
        if places:
            known.append(f"{package} {version_of(package, state) or 'without metadata'} in {places[0]}")
        elif package in ("sglang", "torch") or wanted["device"] == "cuda":
            found.append(
                report(
                    "package-missing",
                    "error" if package in ("sglang", "torch") else "warning",
                    f"the engine cannot import {package}",
                    state["python"],
                    "install the package with the version that SGLang pins",
                )
            )
        if len(places) > 1:
            found.append(
                report(
                    "package-origins",
                    "error" if package in ("sglang", "flashinfer") else "warning",
                    f"the engine finds {package} in two places",
                    " and ".join(places),
                    "remove one of them, or its entry in PYTHONPATH",
                )
            )
    if wanted["device"] == "cuda":
        found += pins(state, host)
    message = f"the engine is {state['python']}, Python {state['python_version']}"
    return [*found, report("engine-packages", "info", message, "; ".join(known), "compare runs only at equal versions")]


def pins(state, host):
    """Return findings about packages whose version is another than SGLang or torch was released with."""
    wrong = []
    for package in ("sglang", "torch"):
        origin, version = state["origins"].get(package), version_of(package, state)
        text = host.read(f"{os.path.dirname(origin)}/{package}-{version}.dist-info/METADATA") if origin else None
        for name, pinned, marker in re.findall(
            r"(?m)^Requires-Dist: ([\w.-]+)[^\n=<>~!;]*==([^\s;,]+)(.*)$", text or ""
        ):
            key = re.sub(r"[-_.]+", "-", name).lower()
            installed = state["packages"].get(key)
            asked = key.startswith("nvidia-nccl") or any(key in names for names in PACKAGES.values())
            if asked and "extra ==" not in marker and installed and installed.split("+")[0] != pinned:
                wrong.append(f"{key} {installed}, {package} {version} wants {pinned}")
    if not wrong:
        return []
    message = "some packages have another version than the engine was released with"
    return [report("package-pins", "warning", message, "; ".join(wrong), "install what is pinned, or know why not")]


def flashinfer(wanted, host):
    """FlashInfer's all-reduce module builds for these GPUs."""
    state = host.engine(wanted["engine"])
    origin = state["origins"].get("flashinfer") if state["present"] else None
    text = host.read(f"{origin}/jit/comm.py") if origin else None
    if text is None:
        return []
    name = f"FlashInfer {version_of('flashinfer', state) or 'without metadata'}"
    try:
        verdict = admitted(text, GATE)
    except (GateError, SyntaxError) as error:
        message = f"{name} has its gate for the all-reduce module elsewhere, so it is not known what that admits"
        return [report("flashinfer-gate", "info", message, f"{origin}/jit/comm.py: {error}", "watch the log for it")]
    majors = sorted(
        {int(label.split(".")[0]) for label, good in verdict.items() if good is True and label[0].isdigit()}
    )
    listed = ", ".join(map(str, majors))
    refused = [item for item in capabilities(wanted, host) if verdict.get(item) is False]
    patched = any(entry.get("package") == "flashinfer" for entry in wanted["patches"])
    if not refused or patched or not fuses(wanted["args"]):
        message = f"{name} builds its all-reduce module for the compute capability majors {listed}"
        advice = "the fused all-reduce needs the GPUs' major in this list"
        return [report("flashinfer-gate", "info", message, f"{origin}/jit/comm.py", advice)]
    return [
        report(
            "flashinfer-gate",
            "error",
            f"the variant asks for the fused all-reduce, and {name} refuses to build it for these GPUs",
            f"compute capability {', '.join(refused)}; the gate in {origin}/jit/comm.py lists the majors {listed}",
            "use an engine whose FlashInfer admits them, or leave the flag out",
        )
    ]


def fuses(args):
    """Return whether a variant's flags ask for FlashInfer's fused all-reduce."""
    return any(str(args.get(name)).lower() not in ("none", "false", "") for name in FUSION)


def capabilities(wanted, host):
    """Return the compute capabilities of the GPUs, or what is declared where none answers; ``none`` on a CPU host."""
    if wanted["device"] == "cpu":
        return ["none"]
    seen = sorted({gpu["compute_cap"] for gpu in query(host)[0]})
    return seen or [item for item in [wanted["compute_capability"]] if item]


def patches(wanted, host):
    """The variant's patches fit the installed packages, whatever was declared; a built release has them already."""
    state, entries = host.engine(wanted["engine"]), wanted["patches"]
    if not entries or wanted["built"] or not (state["present"] or wanted["engine"]["mode"] == "build"):
        return []
    seen = capabilities(wanted, host)
    try:
        results = host.judge_patches(
            {
                "python": state["python"],
                "env": wanted["env"],
                "entries": entries,
                "engine_version": str(wanted["engine"].get("version") or ""),
                "capabilities": seen,
                "allow_experimental": wanted["allow_experimental"],
            }
        )
    except (EntryError, SiteError) as error:
        advice = "correct what it names; no patch was judged"
        return [
            report("patch-refused", "error", "the variant's patches cannot be judged on this engine", error, advice)
        ]
    found = []
    for entry, item in zip(entries, results):
        facts = [f"{item['package']} {item['version']}" + (f" in {item['origin']}" if item["origin"] else "")]
        facts = facts if item["version"] else []
        if item["ok"]:
            if item["admitted"]:
                facts.append(f"it then admits {', '.join(item['admitted'])}")
            message = f"the patch {item['name']} lets the variant go on: {item['message'] or item['state']}"
            advice = "deploy writes it into the release's own copy" if item["files"] else "nothing to do"
            found.append(report("patch-fits", "info", message, "; ".join(facts), advice))
            continue
        ways_out = (
            item["ways_out"] or entry.get("ways_out") or DEFAULT_WAYS_OUT[item["state"] in ("conflict", "upstream")]
        )
        found.append(
            report(
                "patch-refused",
                "error",
                f"the patch {item['name']} does not fit: {item['state']}: {item['message'].split('. Ways out')[0]}",
                "; ".join(
                    [f"the GPUs have compute capability {', '.join(seen)}"] * bool(seen) + facts + others(entry, state)
                ),
                "; or ".join(ways_out),
            )
        )
    return found


DEFAULT_WAYS_OUT = (
    ["declare an engine that the patch covers", "deploy a variant without it"],
    ["install the package anew, so that its files are as released", "deploy a variant without the patch"],
)


def others(entry, state):
    """Return the SGLang that a patched package belongs to, as a fact."""
    return [] if entry["package"] == "sglang" or not state["present"] else [f"the engine is SGLang {state['version']}"]


def nccl_library(wanted, host):
    """One libnccl is there, and it is the one that the running server has loaded."""
    state = host.engine(wanted["engine"])
    torch = state["origins"].get("torch") if state["present"] else None
    if wanted["device"] == "cpu" or not torch:
        return []
    own = f"{os.path.dirname(torch)}/nvidia/nccl/lib/{LIBRARY}"
    wheels = [
        f"{name} {version}" for name, version in sorted(state["packages"].items()) if name.startswith("nvidia-nccl-")
    ]
    environment = {**host.environ, **wanted["env"]}
    found, first = [], own if host.read_link(own) else None
    if len(wheels) > 1:
        advice = "uninstall both, then install the one that torch pins"
        message = "two distributions own one libnccl, so the file may be of either"
        found.append(report("nccl-two-wheels", "warning", message, ", ".join(wheels), advice))
    named = environment.get("SGLANG_NCCL_SO_PATH")
    if named and not host.read_link(named):
        advice = "correct the path or leave the variable out"
        found.append(report("nccl-library", "error", "SGLANG_NCCL_SO_PATH names no file", named, advice))
    searched = [item for item in environment.get("LD_LIBRARY_PATH", "").split(":") if item]
    places = [named, first, *(f"{item}/{LIBRARY}" for item in [*searched, *SYSTEM_LIBRARIES])]
    libraries = {}
    for place in places:
        real = host.read_link(place) if place else None
        if real:
            libraries.setdefault(real, place)
    chosen = [f"{place} ({host.version_of_library(place) or 'version unknown'})" for place in libraries.values()]
    if not chosen:
        message = "no libnccl is found beside torch nor in the system; torch may hold it inside"
        found.append(report("nccl-library", "info", message, own, "see the version that the server's log states"))
    elif len(chosen) > 1:
        found.append(
            report(
                "nccl-candidates",
                "warning",
                "more than one libnccl can be loaded",
                " and ".join(chosen) + (f"; SGLANG_NCCL_SO_PATH={named}" if named else ""),
                "remove all but one; SGLang and torch may otherwise load different ones",
            )
        )
    else:
        advice = "compare runs only at equal versions"
        found.append(report("nccl-library", "info", f"NCCL is {chosen[0]}", ", ".join(wheels) or "no wheel", advice))
    return found + _loaded(host, first)


def _loaded(host, expected):
    """Return findings about the libnccl that the workers of the running server have mapped."""
    mapped = host.mapped("libnccl")
    if not mapped:
        return []
    seen = [
        f"{path} ({host.version_of_library(path) or 'version unknown'}) in pid {', '.join(map(str, pids))}"
        for path, pids in sorted(mapped.items())
    ]
    if len(mapped) == 1 and (expected is None or host.read_link(next(iter(mapped))) == host.read_link(expected)):
        advice = "nothing to do"
        return [report("nccl-loaded", "info", "the running server has loaded this libnccl", seen[0], advice)]
    return [
        report(
            "nccl-loaded",
            "warning",
            "the running server has loaded another libnccl than the one beside torch",
            "; ".join([*seen, f"beside torch: {expected}"]),
            "its measurements belong to the loaded one; start it anew after removing the other",
        )
    ]


ENGINE_CHECKS = (packages, flashinfer, patches, nccl_library)
