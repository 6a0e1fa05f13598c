"""Which collectives of which size a model makes in a step of tensor parallel serving, from its configuration alone.

A plan is plain data::

    {dtype, hidden_size, layers, vocab_size, world, steps: [step], counts: {phase: {collective: calls in one step}}}
    step: {phase: decode|verify|prefill, tokens, collective, elements, bytes, modes: [eager, graph]}

``elements`` is what one rank puts in (of a reduce-scatter: gets out), ``bytes`` the whole message as NCCL counts it.
"""

from __future__ import annotations

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Assumed where the variant's flags do not say.
DRAFT_TOKENS = 4
PREFILL_TOKENS = (512, 4096)
BATCHES = (1, 32)


class PlanError(Exception):
    """The model's configuration does not say what is needed; the text names the key."""


def text_config(config):
    """Return the part of a ``config.json`` that describes the language model."""
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(key), dict) and "hidden_size" in config[key]:
            return {**{name: config[name] for name in ("torch_dtype", "dtype") if name in config}, **config[key]}
    return config


def number(args, name, default):
    """Return the flag NAME of a launch as a number."""
    value = args.get(name)
    return default if value in (None, "", False) else int(value)


def make_plan(config, args, world, batches=BATCHES, graphs=True):
    """Return the plan of one variant.

    :param config: the model's ``config.json``.
    :param args: flags of the launch without dashes: speculation, prefill chunk, attention data parallelism.
    :param world: number of ranks.
    :param batches: numbers of streams that decode together.
    :param graphs: whether to capture each step in a CUDA graph too.
    :raises PlanError: hidden size, layers or vocabulary are not in the configuration, or the type is not known.
    """
    model = text_config(config)
    missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if not isinstance(model.get(key), int)]
    if missing:
        raise PlanError(f"config.json of the model does not say {', '.join(missing)}; without it no size is known")
    dtype = str(args.get("dtype") or "auto")
    if dtype in ("auto", "half", "float"):
        named = {"half": "float16", "float": "float32"}
        dtype = named.get(dtype) or str(model.get("torch_dtype") or model.get("dtype") or "bfloat16")
    dtype = dtype.rpartition(".")[2]
    if dtype not in BYTES:
        raise PlanError(f"the model computes in {dtype}, which is none of {', '.join(BYTES)}")
    hidden, vocabulary = model["hidden_size"], model["vocab_size"]
    draft = number(args, "speculative-num-draft-tokens", DRAFT_TOKENS)
    chunk = number(args, "chunked-prefill-size", PREFILL_TOKENS[-1])
    chunk = PREFILL_TOKENS[-1] if chunk < 1 else chunk
    points = [("decode", int(batch)) for batch in batches] + [("verify", draft)]
    points += [("prefill", tokens) for tokens in sorted({min(PREFILL_TOKENS[0], chunk), min(PREFILL_TOKENS[1], chunk)})]
    size, modes = BYTES[dtype], ["eager", "graph"] if graphs else ["eager"]
    steps, seen = [], set()

    def add(phase, tokens, collective, elements):
        if (phase, collective, elements) in seen:
            return
        seen.add((phase, collective, elements))
        whole = elements * size * (1 if collective in ("all_reduce", "broadcast") else world)
        steps.append(
            {"phase": phase, "tokens": tokens, "collective": collective, "elements": elements, "bytes": whole,
             "modes": modes}
        )  # fmt: skip

    for phase, tokens in sorted(points, key=lambda item: item[1]):
        add(phase, tokens, "all_reduce", tokens * hidden)
        if phase != "prefill":
            # Each rank has the logits of its share of the vocabulary; a prefill needs those of its last token only.
            add(phase, tokens, "all_gather", tokens * -(-vocabulary // world))
        if args.get("enable-dp-attention"):
            share = -(-tokens // world) * hidden
            add(phase, tokens, "reduce_scatter", share)
            add(phase, tokens, "all_gather", share)
    layers = model["num_hidden_layers"]
    return {
        "dtype": dtype, "hidden_size": hidden, "layers": layers, "vocab_size": vocabulary, "world": world,
        "steps": steps,
        "counts": {phase: {"all_reduce": 2 * layers, "all_gather": 1} for phase in ("decode", "verify", "prefill")},
    }  # fmt: skip


def bus_bandwidth(collective, size, world, microseconds):
    """Return the bus bandwidth in GB/s as nccl-tests defines it: what each link carries for any number of ranks."""
    factor = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1}.get(collective, (world - 1) / world)
    return float(f"{size * factor / microseconds / 1e3:.4g}")
