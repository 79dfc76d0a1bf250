"""Commands `remora init` and `remora export`."""

from __future__ import annotations

import argparse
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from remora.cli.arguments import bind
from remora.cli.output import UsageError
from remora.cli.stderr import print_error
from remora.system.url_secrets import begins_as_url

_FUNCTION = '''"""A model written as a function. Serve it with: remora serve app.py"""

import numpy as np

import remora


@remora.model(batch=32, max_delay="1ms")
def distance(points: remora.Array[np.float32, -1, 2]) -> remora.Array[np.float32, -1]:
    """Return the distance of each point from the origin."""
    return np.hypot(points[:, 0], points[:, 1])
'''
_TEST = """import numpy as np

import remora
from app import distance


def test_the_model_answers() -> None:
    with remora.Engine(models=[distance]) as engine:
        answer = engine.infer("distance", {"points": np.array([[3, 4]], np.float32)})
    assert answer["output"].ravel().tolist() == [5.0]
"""
_HUGGING_FACE = '''"""A Hugging Face pipeline as a model. Serve it with: remora serve app.py"""

from typing import TypedDict

import remora


class Sentiment(TypedDict):
    label: list[str]
    score: list[float]


MODEL = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"  # of the hub, or a folder


@remora.model(name="sentiment", batch=16, max_delay="5ms")
class SentimentModel:
    def setup(self, device: str) -> None:
        from transformers import pipeline

        self.classify = pipeline("text-classification", model=MODEL, device=device)

    def predict(self, text: list[str]) -> Sentiment:
        found = self.classify(text)
        return {"label": [each["label"] for each in found], "score": [each["score"] for each in found]}
'''
_ENSEMBLE = '''"""Two models as an ensemble. Serve it with: remora serve app.py"""

import remora


@remora.model(batch=32)
def words(text: list[str]) -> list[dict]:
    """Return the words of each text."""
    return [{"words": each.lower().split()} for each in text]


@remora.model(batch=32)
def longest(found: list[dict]) -> list[str]:
    """Return the longest word of each list."""
    return [max(each["words"], key=len, default="") for each in found]


longest_word = words >> longest
'''
_ONNX_CONFIG = """max_batch_size: 64
dynamic_batching {}
"""
_ONNX_SCRIPT = '''"""Write models/linear/1/model.onnx again: needs the packages onnx and numpy.

Replace this model by yours: skl2onnx and torch.onnx.export write such files too. The server reads names, types and
shapes from the file.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

info = helper.make_tensor_value_info
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weights"], ["scaled"]), helper.make_node("Add", ["scaled", "bias"], ["y"])],
    "linear",
    [info("x", onnx.TensorProto.FLOAT, ["rows", 3])],
    [info("y", onnx.TensorProto.FLOAT, ["rows", 1])],
    [
        numpy_helper.from_array(np.array([[1], [2], [3]], np.float32), "weights"),
        numpy_helper.from_array(np.array([0.5], np.float32), "bias"),
    ],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.save(model, Path(__file__).parent / "models" / "linear" / "1" / "model.onnx")
'''
_ONNX_MODEL = (
    "CAg6oQEKHAoBeAoHd2VpZ2h0cxIGc2NhbGVkIgZNYXRNdWwKFgoGc2NhbGVkCgRiaWFzEgF5IgNBZGQSBmxpbmVhciodCAMIARABQgd3ZWlnaHRz"
    "SgwAAIA/AAAAQAAAQEAqEAgBEAFCBGJpYXNKBAAAAD9aFwoBeBISChAIARIMCgYSBHJvd3MKAggDYhcKAXkSEgoQCAESDAoGEgRyb3dzCgIIAUIECgAQEQ=="
)
"""The file that `_ONNX_SCRIPT` writes, in base64."""
_TRITON_CONFIG = """backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [3] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [3] }]
dynamic_batching {}
"""
_TRITON_MODEL = '''"""A model for Triton's Python backend. Serve it with: remora serve models"""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * x)]))
        return answers
'''
TEMPLATES: Mapping[str, Mapping[str, str | bytes]] = {
    "function": {"app.py": _FUNCTION, "test_app.py": _TEST},
    "ensemble": {"app.py": _ENSEMBLE},
    "hugging-face": {"app.py": _HUGGING_FACE, "requirements.txt": "torch\ntransformers\n"},
    "onnx": {
        "models/linear/1/model.onnx": b64decode(_ONNX_MODEL),
        "models/linear/config.pbtxt": _ONNX_CONFIG,
        "make_model.py": _ONNX_SCRIPT,
    },
    "triton-python": {"models/double/config.pbtxt": _TRITON_CONFIG, "models/double/1/model.py": _TRITON_MODEL},
}
"""Files of each template by their path."""


def add_init(parser: argparse.ArgumentParser) -> None:
    """Add the command `init`."""
    parser.description = "Write the files of a template into a folder. Existing files are never overwritten."
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder, which is created if necessary")
    parser.add_argument(
        "--template", choices=list(TEMPLATES), default="function", help="what to create (default %(default)s)"
    )
    bind(parser, init)


def check_is_folder(path: Path) -> None:
    """Raise UsageError for a URL, which a folder of that name would only seem to be."""
    if begins_as_url(str(path)):
        raise UsageError(f"'{path}' is a URL: pass a folder of this machine")


def init(options: argparse.Namespace) -> int:
    """Write the files of a template."""
    files = TEMPLATES[options.template]
    check_is_folder(options.folder)
    existing = [name for name in files if (options.folder / name).exists()]
    if existing:
        print_error("remora init", f"{options.folder / existing[0]} exists: name another folder")
        return 1
    for name, text in files.items():
        path: Path = options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        print(f"wrote {path}")
    served = options.folder / next(iter(files)).partition("/")[0]
    print(f"serve it: remora serve {served}")
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the command `export`."""
    parser.description = (
        "Import each SOURCE and write its models into DIR as a repository that remora and Triton serve. "
        "Each model gets a copy of the file and of the modules beside it that it imports."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="repository to write; must be empty or missing")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="app.py, app.py:NAME,NAME or package.module:NAME")
    bind(parser, export)


def export(options: argparse.Namespace) -> int:
    """Write a repository."""
    from remora.api.functions import ModelDefinitionError
    from remora.api.storage import export as write
    from remora.api.storage import parse_source

    directory: Path = options.directory
    check_is_folder(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        print_error("remora export", f"{directory} is not an empty folder: name another one")
        return 1
    try:
        names = write(directory, [parse_source(each) for each in options.sources], linked=False)
    except ModelDefinitionError as error:
        print_error("remora export", error)
        return 1
    for name in names:
        print(f"wrote {directory / name}")
    return 0
