"""Backend of configurations with ``backend: "greeter"``: each name becomes a greeting."""

from __future__ import annotations

import numpy as np

from remora.backends import Instance, Placement, Source
from remora.backends.ragged import array_instance
from remora.calls import TensorInfo
from remora.config import complete_from_tensors
from remora.messages import Array, Tensor
from remora.proto.model_config_pb2 import ModelConfig


class Backend:
    """Backend, which the engine creates without arguments."""

    name = "greeter"
    api_version = "1.0"

    def open(self, source: Source, config: ModelConfig) -> Model:
        """Open one version of a model; the text of ``greeting.txt`` precedes each name."""
        return Model((source.path / "greeting.txt").read_text(encoding="utf-8").strip())


class Model:
    """Opened version."""

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting

    def complete(self, config: ModelConfig) -> None:
        """Declare one text and one text, both in batches."""
        complete_from_tensors(config, [TensorInfo("name", "BYTES", (-1, 1))], [TensorInfo("text", "BYTES", (-1, 1))])

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance, for which `array_instance` joins the requests of a batch and splits the outputs."""
        return array_instance(placement.name, config, self._run, quick=True)

    def _run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        texts = [f"{self._greeting} {name.decode()}".encode() for name in inputs["name"].ravel()]
        return [Tensor("text", "BYTES", np.array(texts, object).reshape(inputs["name"].shape)) for _ in wanted]

    def close(self) -> None:
        """Release nothing, because the model owns no resources."""
