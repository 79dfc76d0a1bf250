"""Template of a custom backend: models with one matrix, ``y = x @ matrix``, in a file ``matrix.npy``."""

from __future__ import annotations

import numpy as np

from remora.backends import Instance, Placement, Source
from remora.backends.ragged import array_instance
from remora.calls import TensorInfo
from remora.config import complete_from_tensors
from remora.errors import InternalError, NotFoundError
from remora.messages import Array, Tensor
from remora.proto.model_config_pb2 import ModelConfig


class Backend:
    """Backend of configurations with ``backend: "linear"``; the engine creates it without arguments."""

    name = "linear"
    api_version = "1.0"

    def open(self, source: Source, config: ModelConfig) -> Model:
        """Open one version of a model in the directory ``source.path``; any exception fails the load."""
        file = source.path / "matrix.npy"
        if not file.is_file():
            raise NotFoundError(f"model '{source.name}' has no {file.name}")
        try:
            matrix = np.load(file, allow_pickle=False)
        except ValueError as error:
            raise InternalError(f"model '{source.name}': {file.name} contains no array: {error}") from error
        if matrix.ndim != 2:
            raise InternalError(f"model '{source.name}': the matrix must have two dimensions, but has {matrix.ndim}")
        return Model(matrix.astype("f4"))


class Model:
    """Opened version, which completes configurations and creates instances."""

    def __init__(self, matrix: Array) -> None:
        self._matrix = matrix

    def complete(self, config: ModelConfig) -> None:
        """Declare inputs and outputs, where a leading -1 means that the model batches."""
        rows, columns = self._matrix.shape
        complete_from_tensors(config, [TensorInfo("x", "FP32", (-1, rows))], [TensorInfo("y", "FP32", (-1, columns))])

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance, for which `array_instance` joins the requests of a batch and splits the outputs."""
        return array_instance(placement.name, config, self._run, quick=True)

    def _run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        if not np.isfinite(inputs["x"]).all():
            raise InternalError("x must be finite", from_model=True)
        return [Tensor("y", "FP32", inputs["x"] @ self._matrix) for _ in wanted]

    def close(self) -> None:
        """Release nothing, because the model owns no resources."""
