"""Python models that run in a thread of this process."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from remora.backends import Placement, Source
from remora.backends.python import PythonBackend, PythonInstance, PythonModel
from remora.proto.model_config_pb2 import ModelConfig

CONFIG = """
name: "m" backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "MORE" data_type: TYPE_INT32 dims: [ -1 ] }]
"""
HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"

_ECHO_CONFIG = """
backend: "python"
input {{ name: "IN" data_type: TYPE_{datatype} dims: -1 }}
output {{ name: "OUT" data_type: TYPE_{datatype} dims: -1 }}
"""
_ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


def write_echo(repository: Path, datatype: str) -> None:
    """Write the model ``echo``, which returns its input."""
    version = repository / "echo" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_ECHO_CONFIG.format(datatype=datatype))
    (version / "model.py").write_text(_ECHO)


def config_of(text: str = CONFIG) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


class Models:
    """Writes model files and opens them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open_ones: list[PythonModel | PythonInstance] = []

    def write(self, code: str, name: str = "m", file: str = "model.py") -> Path:
        path = self.root / name / "1" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
        return path

    def open(self, code: str, config: ModelConfig | None = None, name: str = "m") -> PythonModel:
        path = self.write(code, name)
        source = Source(name, 1, path.parents[1], path.parent, self.root)
        model = PythonBackend().open(source, config or config_of())
        self.open_ones.append(model)
        return model

    def start(self, code: str, config: ModelConfig | None = None, name: str = "m") -> PythonInstance:
        """An instance of a model whose file is ``code``, or the usual head and the methods ``code``."""
        whole = code if "TritonPythonModel" in code else HEAD + code
        instance = self.open(whole, config, name).instance(config or config_of(), Placement(f"{name}_0_0"))
        assert isinstance(instance, PythonInstance)
        self.open_ones.append(instance)
        return instance
