"""Writer of `tiny`, a random language model for tests and demonstrations.

    python tiny_model.py REPOSITORY [NAME]

writes REPOSITORY/NAME/1 in the layout of onnxruntime-genai's exporter: two Llama layers, 64 wide, 512 tokens of
context, and a byte-level tokenizer. It takes a second and needs onnx, numpy and tokenizers. The model writes nonsense,
always the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 512, 64, 128, 2, 4, 2, 512
HEAD_SIZE = HIDDEN // HEADS
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('the role ' ~ message.role ~ ' is not known') }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CORPUS = """\
A lamp stood in the window, and the window looked over the harbour. Every evening the boats came home one after another.
The baker opens at six, the school at eight, the post office at nine. On Sunday all of them are closed.
Write a short story about a cat. Explain the rules of chess. What is two plus two? Two plus two is four.
Please translate this sentence. List three reasons. Summarise the following text in one paragraph. Thank you very much!
The answer begins with a question, and the question begins with a doubt. Nothing is certain, but some things are likely.
import math; for item in items: total += item * 2; return {"name": "value", "count": [1, 2, 3], "done": true}
"""


def tokenizer() -> str:
    """Return the text of ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS.splitlines(), trainer)
    text: str = made.to_str()
    return text


class _Graph:
    """Graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._random = np.random.RandomState(7)

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, name: str, rows: int, columns: int, scale: float) -> str:
        return self.constant(name, (self._random.standard_normal((rows, columns)) * scale).astype(np.float32))

    def node(self, operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        domain = "com.microsoft" if operator in ("GroupQueryAttention", "SkipSimplifiedLayerNormalization") else ""
        self.nodes.append(helper.make_node(operator, inputs, outputs, domain=domain, **attributes))
        return outputs[0]


def graph(vocabulary: int) -> Any:
    """Return the ONNX model."""
    made = _Graph()
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", vocabulary])]
    one = made.constant("one", np.array([1], np.int64))
    made.node("ReduceSum", ["attention_mask", one], ["lengths"], keepdims=0)
    made.node("Sub", ["lengths", one], ["last"])
    made.node("Cast", ["last"], ["last_int"], to=TensorProto.INT32)
    made.node("Shape", ["attention_mask"], ["mask_shape"])
    made.node("Gather", ["mask_shape", made.constant("axis", np.array(1, np.int64))], ["total"], axis=0)
    made.node("Cast", ["total"], ["total_int"], to=TensorProto.INT32)
    angles = np.outer(np.arange(CONTEXT), 1 / 10000.0 ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))
    made.constant("cos", np.cos(angles).astype(np.float32))
    made.constant("sin", np.sin(angles).astype(np.float32))
    norm = made.constant("norm", np.ones(HIDDEN, np.float32))
    stream = made.node("Gather", [made.weight("embedding", vocabulary, HIDDEN, 1.0), "input_ids"], ["embedded"])
    normed = made.node("SimplifiedLayerNormalization", [stream, norm], ["normed"], axis=-1, epsilon=1e-6, stash_type=1)
    for layer in range(LAYERS):
        stream, normed = _layer(made, layer, stream, normed)
        for part in ("key", "value"):
            shape = ["batch", KV_HEADS, "past", "kv_cache_dim"]  # named as the exporter does
            float_type = TensorProto.FLOAT
            inputs.append(helper.make_tensor_value_info(f"past_key_values.{layer}.{part}", float_type, shape))
            outputs.append(helper.make_tensor_value_info(f"present.{layer}.{part}", float_type, shape))
    head = (made._random.standard_normal((HIDDEN, vocabulary)) * 0.35).astype(np.float32)
    head[:, : len(SPECIAL)] = 0  # answers rarely end by themselves
    made.node("MatMul", [normed, made.constant("head", head)], ["logits"])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    whole = helper.make_graph(made.nodes, "tiny", inputs, outputs, made.constants)
    return helper.make_model(whole, opset_imports=imports, ir_version=9)


def _layer(made: _Graph, layer: int, stream: str, normed: str) -> tuple[str, str]:
    """Add a layer; return the residual stream and its norm."""
    at = f"layers.{layer}."
    norm = "norm"
    sizes = {"query": HIDDEN, "key": KV_HEADS * HEAD_SIZE, "value": KV_HEADS * HEAD_SIZE}
    query, key, value = (
        made.node("MatMul", [normed, made.weight(f"{at}{part}.weight", HIDDEN, size, 0.15)], [f"{at}{part}"])
        for part, size in sizes.items()
    )
    past, present = f"past_key_values.{layer}.", f"present.{layer}."
    cache = [f"{past}key", f"{past}value", "last_int", "total_int", "cos", "sin"]
    attended = made.node(
        "GroupQueryAttention",
        [query, key, value, *cache],
        [f"{at}attended", f"{present}key", f"{present}value"],
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        rotary_interleaved=0,
        scale=HEAD_SIZE**-0.5,
    )
    mixed = made.node("MatMul", [attended, made.weight(f"{at}mix.weight", HIDDEN, HIDDEN, 0.15)], [f"{at}mixed"])
    middle = [f"{at}middle_norm", "", "", f"{at}middle"]
    inner = made.node("SkipSimplifiedLayerNormalization", [stream, mixed, norm], middle, epsilon=1e-6)
    gate = made.node("MatMul", [inner, made.weight(f"{at}gate.weight", HIDDEN, INNER, 0.15)], [f"{at}gate"])
    up = made.node("MatMul", [inner, made.weight(f"{at}up.weight", HIDDEN, INNER, 0.15)], [f"{at}up"])
    made.node("Sigmoid", [gate], [f"{at}sigmoid"])
    made.node("Mul", [gate, f"{at}sigmoid"], [f"{at}silu"])
    made.node("Mul", [f"{at}silu", up], [f"{at}inner"])
    down = made.weight(f"{at}down.weight", INNER, HIDDEN, 0.12)
    made.node("MatMul", [f"{at}inner", down], [f"{at}down"])
    outputs = [f"{at}end_norm", "", "", f"{at}end"]
    made.node("SkipSimplifiedLayerNormalization", [f"{at}middle", f"{at}down", norm], outputs, epsilon=1e-6)
    return f"{at}end", f"{at}end_norm"


def config(vocabulary: int) -> dict[str, Any]:
    """Return the contents of ``genai_config.json``."""
    return {
        "model": {
            "type": "llama",
            "bos_token_id": 0,
            "eos_token_id": END,
            "pad_token_id": 0,
            "context_length": CONTEXT,
            "vocab_size": vocabulary,
            "decoder": {
                "filename": "model.onnx",
                "head_size": HEAD_SIZE,
                "hidden_size": HIDDEN,
                "num_attention_heads": HEADS,
                "num_hidden_layers": LAYERS,
                "num_key_value_heads": KV_HEADS,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "max_length": CONTEXT},
    }


def write_tiny(repository: Path, name: str = "tiny") -> Path:
    """Write the model into a repository and return its version's directory."""
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    text = tokenizer()
    document = json.loads(text)
    vocabulary = len(document["model"]["vocab"])
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[END], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": CONTEXT}, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "genai_config.json").write_text(json.dumps(config(vocabulary), indent=1))
    onnx.save(graph(vocabulary), str(folder / "model.onnx"))
    return folder


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    print(write_tiny(Path(sys.argv[1]), *sys.argv[2:]))
