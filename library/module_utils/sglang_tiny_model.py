"""A Llama of a few hundred kilobytes with real, seeded weights, made with the standard library alone.

It is built to answer, not to be clever: the row of ``lm_head`` for a word equals the embedding of the word before it
in one seeded cycle over all words. Greedy output walks that cycle, so it never repeats within ``vocab_size`` tokens,
is the same at every start and at every tensor-parallel size, and the answer to a known question is known (``is`` is
followed by ``paris``). Attention and MLP have small random weights: they are computed and move the logits, but less
than the cycle does.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct

# Raised whenever the same parameters give other bytes than before.
EDITION = 1
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
WORDS = (
    "the a is of to and in on it you hello world what capital france paris node model server user assistant system"
).split()
KNOWN = (("is", "paris"), ("hello", "world"))
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
CONTEXT = 2048
MIN_VOCAB = 256
# Half-widths of the uniform distributions. The embedding outweighs what the layers add; the gain of lm_head then puts
# the next word of the cycle about 8 standard deviations above a random one.
EMBEDDING, LAYER, GAIN = 1.0, 0.08, 2.0


def vocabulary(size):
    """Return ``size`` words in id order: the special ones, printable ASCII characters, plain words, then w0, w1, ...

    :raises ValueError: size is below :data:`MIN_VOCAB`.
    """
    if size < MIN_VOCAB:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB}, not {size}")
    words = list(SPECIAL) + [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words += [word for word in WORDS if word not in words]
    return words + [f"w{number}" for number in range(size - len(words))]


def successors(words, seed):
    """Return ``{id: id}``, the cycle over all ordinary words, with the pairs of :data:`KNOWN` side by side.

    Special tokens are led into the cycle and never follow anything, so a generation ends by length.
    """
    ids = {word: number for number, word in enumerate(words)}
    order = list(range(len(SPECIAL), len(words)))
    random.Random(f"cycle {seed}").shuffle(order)
    for first, second in KNOWN:
        order.remove(ids[second])
        order.insert(order.index(ids[first]) + 1, ids[second])
    following = dict(zip(order, order[1:] + order[:1]))
    following.update({number: order[number] for number in range(len(SPECIAL))})
    return following


def _bf16(values):
    """Return floats as little-endian bfloat16 bytes, rounded to nearest even."""
    packed = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    return struct.pack(f"<{len(values)}H", *[(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 for bits in packed])


def weights(size, seed):
    """Return ``{tensor name: (shape, bfloat16 bytes)}`` of the model.

    Only :meth:`random.Random.random` is drawn from, whose sequence is the same in every Python.
    """
    words = vocabulary(size)
    draw = random.Random(f"weights {seed}").random

    def uniform(rows, columns, width):
        return [(2.0 * draw() - 1.0) * width for _ in range(rows * columns)]

    tensors = {}
    embedding = uniform(size, HIDDEN, EMBEDDING)
    head = [0.0] * (size * HIDDEN)
    for before, after in successors(words, seed).items():
        row = embedding[before * HIDDEN : (before + 1) * HIDDEN]
        scale = GAIN / sum(value * value for value in row) ** 0.5
        for column, value in enumerate(row):
            head[after * HIDDEN + column] += scale * value
    tensors["model.embed_tokens.weight"] = ((size, HIDDEN), _bf16(embedding))
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    ones = ((HIDDEN,), _bf16([1.0] * HIDDEN))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = (shape, _bf16(uniform(*shape, LAYER)))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
    tensors["model.norm.weight"] = ones
    tensors["lm_head.weight"] = ((size, HIDDEN), _bf16(head))
    return tensors


def safetensors(tensors):
    """Return the bytes of a safetensors file: 8 bytes of header length, the JSON header, the data without gaps."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _shape, data in tensors.values())


def tokenizer(words):
    """Return ``tokenizer.json``: words and punctuation in lower case, one token each, joined with blanks again."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, word in enumerate(SPECIAL)
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": SPECIAL[0],
        },
    }


def files(vocab_size, seed):
    """Return ``{file name: bytes}`` of the model directory, the same bytes for the same parameters everywhere.

    :param vocab_size: number of tokens, at least :data:`MIN_VOCAB`.
    :param seed: any integer.
    """
    words = vocabulary(vocab_size)
    # The template ends with the question, so that the answer continues it.
    template = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
    parts = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": vocab_size,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
            "attention_bias": False,
            "mlp_bias": False,
        },
        "tokenizer.json": tokenizer(words),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    }
    made = {name: (json.dumps(part, indent=1) + "\n").encode() for name, part in parts.items()}
    made["model.safetensors"] = safetensors(weights(vocab_size, seed))
    return made


def continuation(prompt, length, vocab_size, seed):
    """Return the words that greedy generation puts after a prompt of known words."""
    words = vocabulary(vocab_size)
    following = successors(words, seed)
    last = prompt.lower().split()[-1]
    number = words.index(last) if last in words else 0
    answer = []
    for _ in range(length):
        number = following[number]
        answer.append(words[number])
    return answer


def fingerprint(vocab_size, seed):
    """Return what identifies the model before its files exist."""
    return hashlib.sha256(json.dumps(["tiny", EDITION, int(vocab_size), int(seed)]).encode()).hexdigest()
