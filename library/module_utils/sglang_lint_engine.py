"""Lint rules about the engine: release, environment, speculation, memory, and what the host declares."""

from __future__ import annotations

import json

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.module_utils.sglang_api_key import names_secret
from ansible.module_utils.sglang_lint_fusion import FUSION_PATCH
from ansible.module_utils.sglang_lint_rules import KIMI, SPECULATIVE, rule
from ansible.module_utils.sglang_variant_schema import matches

# NEXTN is another name of EAGLE.
DRAFTED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")
# SGLang writes these whatever was set before: (value, releases).
OVERWRITTEN = {
    "CUDA_DEVICE_MAX_CONNECTIONS": ("8", ""),
    "CUDA_MODULE_LOADING": ("AUTO", "<=0.5.18"),
}
# SGLang writes these only where they are unset: (value, releases).
DEFAULTED = {
    "NCCL_CUMEM_ENABLE": ("0", ""),
    "NCCL_NVLS_ENABLE": ("0", ""),
    "NCCL_GRAPH_REGISTER": ("0", ">=0.5.20"),
    "CUTE_DSL_LOG_LEVEL": ("30", ""),
    "CUTE_DSL_LOG_TO_CONSOLE": ("1", ""),
}
# Read by some releases only.
READ_BY = {
    "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": ">=0.5.22",
    "SGLANG_PCIE_IPC_MAX_NUMEL": ">=0.5.22",
    "SGLANG_ENABLE_SPEC_V2": "<0.5.14",
}
# Names of the size of DP attention, from 0.5.22.
ATTENTION_DP = ("attn-dp-size", "attention-data-parallel-size")
OPEN_HOSTS = ("0.0.0.0", "::", "[::]", "")


def setting(variant, name):
    """Return (section, value) of a variable, or None where it is unset."""
    section = "nccl" if name.startswith("NCCL_") else "env"
    return (section, variant[section][name]) if name in variant[section] else None


@rule("engine-range", "error", "The variant is not for this SGLang release.")
def engine_range(variant, _patches, context):
    """The ranges of the variant and of all it extends."""
    if not matches(context.engine, variant["engines"]):
        advice = "declare another engine, or choose a variant for this one"
        yield f"variant {variant['name']} is not for SGLang {context.engine}", f"it is for {variant['engines']}", advice


@rule("engine-unknown", "warning", "The release is not among those whose parsers were read; a neighbour stands in.")
def engine_unknown(_variant, _patches, context):
    """Flags are then checked against the nearest older release."""
    if not context.flags.exact:
        seen = f"flags and pins of {context.flags.release} are used"
        yield (
            f"SGLang {context.engine} is not in the table of releases",
            seen,
            "run tools/extract_sglang_flags.py on its package",
        )


@rule("engine-model", "error", "Kimi-K2.5 cannot be served by releases before 0.5.9.")
def engine_model(_variant, _patches, context):
    """The model's class exists from 0.5.9."""
    if context.kimi and context.before("0.5.9"):
        seen = f"model_path {context.launch.get('model_path')}"
        yield f"SGLang {context.engine} has no class for Kimi-K2.5", seen, "use 0.5.9 or later"


@rule("env-overwritten", "error", "SGLang overwrites the variable at start, so the value never counts.")
def overwritten(variant, _patches, context):
    """A factor that changes nothing."""
    for name, (value, releases) in OVERWRITTEN.items():
        given = setting(variant, name)
        if given and given[1] != value and matches(context.engine, releases):
            yield (
                f"{given[0]}.{name} is overwritten by SGLang {context.engine} with {value}",
                repr(given[1]),
                "leave it out",
            )
    if context.argument(variant, "enable-deterministic-inference"):
        names = ["NCCL_ALGO"] if context.before("0.5.18") else ["NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"]
        for name in names:
            if name in variant["nccl"]:
                seen = f"{variant['nccl'][name]!r} with enable-deterministic-inference"
                yield f"nccl.{name} is overwritten by deterministic inference", seen, "set it to null, or drop the flag"


@rule("env-defaulted", "info", "SGLang has a default of its own for the variable, and the variant's value replaces it.")
def defaulted(variant, _patches, context):
    """Worth knowing when two variants are compared."""
    for name, (value, releases) in DEFAULTED.items():
        given = setting(variant, name)
        if given and given[1] != value and matches(context.engine, releases):
            yield f"{given[0]}.{name} replaces SGLang's own default {value}", repr(given[1]), "know that it is a factor"


@rule("env-unread", "error", "The engine's release does not read the variable.")
def unread(variant, _patches, context):
    """Variables of features that come or go with a release."""
    for name, releases in READ_BY.items():
        if name in variant["env"] and not matches(context.engine, releases):
            seen = f"{variant['env'][name]!r} from {variant['origins'].get('env.' + name, 'unknown')}"
            yield (
                f"env.{name} has no effect in SGLang {context.engine}",
                seen,
                f"declare an engine {releases}, or leave it out",
            )


@rule("env-secret", "error", "A secret in a variant is written into a file that every user of the host can read.")
def secret_variable(variant, _patches, _context):
    """A variable whose name says that it holds a secret; its value is not shown."""
    for section in ("env", "nccl"):
        for name, value in variant[section].items():
            if value not in (None, "") and names_secret(name):
                seen = f"set by {variant['origins'].get(f'{section}.{name}', 'unknown')}"
                advice = f"leave it out of the variant and give it as sglang_server_env: {{{name}: ...}}"
                yield f"{section}.{name} would write a secret into site/sitecustomize.py", seen, advice


@rule("env-outside", "error", "sglang_server_env sets an NCCL variable or one of the variant, and would win unseen.")
def outside(variant, _patches, context):
    """What is there before Python starts is neither linted nor explained. Only names are known here, no values."""
    sets = {**variant["nccl"], **variant["env"]}
    names = [name for name in context.launch.get("server_env") or [] if name.startswith("NCCL_") or name in sets]
    if names:
        sections = {section: {} for section in ("nccl", "env")}
        for name in names:
            sections["nccl" if name.startswith("NCCL_") else "env"][name] = "..."
        example = json.dumps({"sglang_variant_overrides": {key: value for key, value in sections.items() if value}})
        message = f"sglang_server_env sets {', '.join(names)}, which belongs to the variant"
        seen = "it is set before Python starts and wins over the variant, and neither lint nor explain sees its value"
        yield message, seen, f"take it out of sglang_server_env and give it as -e '{example}'"


@rule("kv-fp8-int4", "error", "fp8 KV cache with the original int4 checkpoint of Kimi-K2.5.")
def kv_fp8(variant, _patches, context):
    """Measured 16 tok/s against 73 to 90 with bf16."""
    kind = str(context.argument(variant, "kv-cache-dtype") or "")
    path = str(context.launch.get("model_path") or "").lower()
    original = not any(word in path for word in ("nvfp4", "fp8", "bf16"))
    if kind.startswith("fp8") and context.kimi and original and context.cuda:
        advice = "leave args.kv-cache-dtype out: 16 tok/s were measured with it, 73 to 90 without"
        yield "args.kv-cache-dtype fp8 does not go with the original int4 checkpoint", f"{kind}, {path}", advice


@rule("alloc-expandable-ipc", "error", "expandable_segments with an all-reduce over CUDA IPC.")
def expandable(variant, _patches, context):
    """IPC handles of such memory are refused with "invalid argument"."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        text = variant["env"].get(name, "").lower().replace(" ", "")
        users = [
            (
                "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
                variant["env"].get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "").lower() in ("true", "1", "yes", "y"),
            ),
            ("the fusion patch", FUSION_PATCH in variant["patches"]),
            ("custom all-reduce", not context.argument(variant, "disable-custom-all-reduce") and context.tp_size > 1),
        ]
        active = [label for label, on in users if on]
        if "expandable_segments:true" in text and active and context.cuda:
            yield f"env.{name}: expandable_segments breaks IPC all-reduce", f"with {', '.join(active)}", "leave it out"


@rule("spec-draft", "error", "Speculation that needs a draft model, without its path.")
def speculative_draft(variant, _patches, context):
    """Without it SGLang takes the target model as the draft, or fails late."""
    name = context.argument(variant, SPECULATIVE)
    paths = [variant["args"].get(item) for item in ("speculative-draft-model-path", "speculative-draft-model")]
    # From 0.5.12.post1 the flag takes any text, and SGLang any case.
    if str(name).upper() in DRAFTED and not any(isinstance(item, str) and item.strip() for item in paths):
        advice = f"set {DRAFT_INPUT.get(variant['name'], 'args.speculative-draft-model-path')}"
        yield f"args.speculative-draft-model-path is missing for {name}", f"{paths[0]!r}", advice


DRAFT_INPUT = {"eagle3": "sglang_draft_model_own", "eagle3_fewchan_fusion": "sglang_draft_model_own"}


@rule("spec-model", "warning", "The draft model is for Kimi-K2.5, and the model path names another model.")
def speculative_model(variant, _patches, context):
    """A draft model belongs to one target; only names are known here."""
    path = str(context.launch.get("model_path") or "")
    for flag in ("speculative-draft-model-path", "speculative-draft-model"):
        draft = context.argument(variant, flag)
        if path and not context.kimi and KIMI.search(str(draft or "")):
            advice = "deploy it where the target is Kimi-K2.5, or give the draft model of this target"
            yield f"args.{flag} is a draft model for Kimi-K2.5", f"{draft}, for the target {path}", advice


@rule("spec-engine", "error", "EAGLE-3 on Kimi-K2.5 before SGLang 0.5.10.")
def speculative_engine(variant, _patches, context):
    """The model lacks the hook for its hidden states. A target that is not declared is taken for Kimi-K2.5."""
    if context.launch.get("model_path") and not context.kimi:
        return
    if str(context.argument(variant, SPECULATIVE)).upper() == "EAGLE3" and context.before("0.5.10"):
        yield f"args.{SPECULATIVE} EAGLE3 needs SGLang 0.5.10", f"SGLang {context.engine}", "use 0.5.10 or later"


def ranks(variant, context):
    """Return ``(GPUs that one node needs, what multiplies tp_size)``.

    Pipeline stages and data parallel replicas have GPUs of their own; with DP attention the replicas share those of
    tp_size. Several nodes share what there is to do.
    """
    sizes = {
        "pp-size": ("pp-size", "pipeline-parallel-size"),
        "dp-size": ("dp-size", "data-parallel-size"),
        "nnodes": ("nnodes",),
    }
    given = {name: [context.argument(variant, flag) for flag in flags] for name, flags in sizes.items()}
    size = {name: next((item for item in items if isinstance(item, int)), 1) for name, items in given.items()}
    if any(context.argument(variant, flag) for flag in ("enable-dp-attention", *ATTENTION_DP)):
        size["dp-size"] = 1
    need = context.tp_size * size["pp-size"] * size["dp-size"] // max(size["nnodes"], 1)
    return need, "".join(f", {name} {value}" for name, value in size.items() if value > 1)


@rule("tp-gpus", "error", "Fewer GPUs than ranks.")
def too_few(variant, _patches, context):
    """Each rank needs a GPU of its own."""
    count = int(context.launch.get("gpu_count") or 0)
    need, more = ranks(variant, context)
    if context.cuda and 0 < count < need:
        message = f"tp_size {context.tp_size}{more} needs {need} GPUs"
        yield message, f"{count} declared", "lower tp_size" + " or the others" * bool(more)


@rule("tp-idle", "warning", "More GPUs than ranks: the others stay idle.")
def idle(variant, _patches, context):
    """Nothing uses the others."""
    count = int(context.launch.get("gpu_count") or 0)
    need, more = ranks(variant, context)
    if context.cuda and count > need:
        yield f"{count} GPUs are more than tp_size {context.tp_size}{more} uses", f"{count} declared", "raise tp_size"


@rule("api-key", "error", "The API key cannot be used: too short, with spaces, or given twice.")
def api_key(_variant, _patches, context):
    """What nobody could send is found before a release is made; nothing of the key is shown."""
    problem = context.launch.get("api_key_problem")
    if problem:
        yield problem, "its value is not shown", "mend it in the vault, or leave it out"


@rule("bind-open", "warning", "The server listens on every interface without an API key.")
def bind_open(_variant, _patches, context):
    """Anyone on the network can use it."""
    host, key = context.launch.get("host"), context.launch.get("has_api_key") or False
    if host is not None and str(host) in OPEN_HOSTS and not boolean(key, strict=False):
        advice = "give an API key, or bind to 127.0.0.1 behind a proxy"
        yield "launch.host opens the server to the network without an API key", repr(host), advice
