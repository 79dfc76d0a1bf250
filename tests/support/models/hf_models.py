"""A Hugging Face folder with a language model of random weights, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.models.gguf_models import CONTEXT, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, load_example, random_weights

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def write_hf(folder: Path) -> Path:
    """Write a Llama model with the tokenizer and chat template of `tiny`."""
    example = load_example()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(example.tokenizer())
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    special = {**tokens, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": example.TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "vocab_size": example.VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": example.END,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(
        folder / "model.safetensors",
        {_name(name): value.astype(np.float32) for name, value in random_weights(example.VOCABULARY).items()},
    )
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write fp32 tensors without the package safetensors, which not every environment of the tests has."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in tensors.values()))


def _name(name: str) -> str:
    parts: list[Any] = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
    return f"{_NAMES[parts[0]]}.weight"
