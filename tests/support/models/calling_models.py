"""Python models that call other models, in a whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from remora import Engine

WAIT_S = 60.0
HEAD = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


def values(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def answer(array, name="OUT"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(array))])


def ask(model, array, **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", array)], **more
    )


class TritonPythonModel:
"""
CONFIG = """
backend: "python" {more}
input {{ name: "IN" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "OUT" data_type: {out} dims: -1 }}
"""
DOUBLER = "    def execute(self, requests):\n        return [answer(values(request) * 2) for request in requests]\n"
TELL = """
    def execute(self, requests):
        return [answer(np.array([self.tell(request).encode()], object)) for request in requests]

    def tell(self, request):
"""


class Repository:
    """Writes models and serves them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine: Engine | None = None

    def model(self, name: str, methods: str, *, more: str = "", out: str = "TYPE_INT32") -> None:
        folder = self.root / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(HEAD + methods)
        (folder.parent / "config.pbtxt").write_text(CONFIG.format(more=more, out=out))

    def teller(self, name: str, body: str, **settings: str) -> None:
        """A model that answers with a text; ``body`` are the lines of ``tell(self, request)``."""
        lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
        self.model(name, TELL + lines, out="TYPE_STRING", **settings)

    def serve(self, **settings: Any) -> Engine:
        self.engine = Engine(self.root, **settings)
        return self.engine.start()


def infer(engine: Engine, model: str, *values: int, **more: Any) -> Any:
    return engine.infer(model, {"IN": np.array(values, np.int32)}, timeout_s=WAIT_S, **more)["OUT"].tolist()


def told(engine: Engine, model: str, *values: int) -> str:
    return str(infer(engine, model, *(values or (3,)))[0].decode())
