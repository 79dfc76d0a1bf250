"""A GGUF file with a language model of random weights, for tests; it takes a second to write."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.models.generation_models import SCRIPT

_U32, _F32, _TEXT, _ARRAY, _I32 = 4, 6, 8, 9, 5
_AS_F32, _AS_F16 = 0, 1
_ALIGNMENT = 32
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 128, 2, 2, 1, 512


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value: Any) -> bytes:
    """An entry of metadata: a text, a number, or a list of texts or whole numbers."""
    match value:
        case str():
            return text(key) + struct.pack("<I", _TEXT) + text(value)
        case float():
            return text(key) + struct.pack("<If", _F32, value)
        case int():
            return text(key) + struct.pack("<II", _U32, value)
        case [str(), *_]:
            return text(key) + struct.pack("<IIQ", _ARRAY, _TEXT, len(value)) + b"".join(map(text, value))
    return text(key) + struct.pack("<IIQ", _ARRAY, _I32, len(value)) + struct.pack(f"<{len(value)}i", *value)


def document(pairs: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """A GGUF file. Matrices are stored as fp16, vectors as fp32."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pair(*each) for each in pairs.items())
    data = b""
    for name, value in tensors.items():
        kind = _AS_F16 if value.ndim > 1 else _AS_F32
        head += text(name) + struct.pack(f"<I{value.ndim}Q", value.ndim, *reversed(value.shape))
        head += struct.pack("<IQ", kind, len(data))
        data += value.astype(np.float16 if kind == _AS_F16 else np.float32).tobytes()
        data += b"\0" * (-len(data) % _ALIGNMENT)
    return head + b"\0" * (-len(head) % _ALIGNMENT) + data


def load_example() -> Any:
    """The module that writes `tiny`."""
    spec = importlib.util.spec_from_file_location("tiny_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_gguf(path: Path) -> Path:
    """Write a Llama model with the tokenizer and chat template of `tiny`."""
    example = load_example()
    tokenizer = json.loads(example.tokenizer())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=lambda name: vocabulary[name])
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    pairs = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": 1,
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.vocab_size": len(names),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3 if name in example.SPECIAL else 1 for name in names],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": example.END,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": example.END,
        "tokenizer.chat_template": example.TEMPLATE,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(document(pairs, random_weights(len(names))))
    return path


def random_weights(vocabulary: int) -> dict[str, Any]:
    """Weights under the names of GGUF files, always the same."""
    random = np.random.RandomState(7)

    def matrix(rows: int, columns: int, scale: float = 0.15) -> Any:
        return random.standard_normal((rows, columns)) * scale

    head = matrix(vocabulary, HIDDEN, 0.35)
    head[:3] = 0  # answers rarely end by themselves
    found = {"token_embd.weight": matrix(vocabulary, HIDDEN, 1.0), "output_norm.weight": np.ones(HIDDEN)}
    sizes: Sequence[tuple[str, int, int]] = (
        ("attn_q", HIDDEN, HIDDEN),
        ("attn_k", HIDDEN * KV_HEADS // HEADS, HIDDEN),
        ("attn_v", HIDDEN * KV_HEADS // HEADS, HIDDEN),
        ("attn_output", HIDDEN, HIDDEN),
        ("ffn_gate", INNER, HIDDEN),
        ("ffn_up", INNER, HIDDEN),
        ("ffn_down", HIDDEN, INNER),
    )
    for layer in range(LAYERS):
        for name, rows, columns in sizes:
            found[f"blk.{layer}.{name}.weight"] = matrix(rows, columns)
        found[f"blk.{layer}.attn_norm.weight"] = np.ones(HIDDEN)
        found[f"blk.{layer}.ffn_norm.weight"] = np.ones(HIDDEN)
    return {**found, "output.weight": head}
