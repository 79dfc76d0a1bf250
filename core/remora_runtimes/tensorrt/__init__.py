"""TensorRT backend for engines built ahead of time.

Each GPU has one engine, each instance a context and a stream. TensorRT and the CUDA runtime are loaded when the first
model is opened. All calls of TensorRT are in `remora_runtimes.tensorrt.context`, so that tests can replace it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from remora.api.backends import CudaMemory, cuda, transfer_for
from remora.backends import Instance, Placement, Source
from remora.backends.model_files import import_framework, load_failure, model_path, require_file
from remora.backends.ragged import array_instance
from remora.config import BatchingChoice, complete_from_tensors
from remora.errors import ConfigError, UnsupportedError
from remora.proto.model_config_pb2 import ModelConfig
from remora_runtimes.tensorrt.context import TrtContext, TrtEngine, describe, log_of

_EXTRA = "tensorrt"


class TensorRtBackend:
    """Backend for ``model.plan``."""

    name = "tensorrt"

    def open(self, source: Source, config: ModelConfig) -> TensorRtModel:
        """Read the engine on the GPU of its first instance.

        Raises:
            NotFoundError: there is no model file.
            ConfigError: TensorRT is not installed, or there is no GPU.
            UnsupportedError: a tensor has a type without a protocol datatype.
            InternalError: the engine was built for another version of TensorRT or another GPU, or is invalid.
        """
        path = require_file(model_path(source, config, "model.plan"), source, "*.plan", "*.engine", "*.trt")
        trt = import_framework("tensorrt", source.name, "TensorRT", _EXTRA)
        try:
            runtime = cuda.cuda()
        except UnsupportedError as error:
            raise ConfigError(f"model '{source.name}': TensorRT engines need CUDA: {error.message}") from error
        if not runtime.device_count():
            raise ConfigError(f"model '{source.name}': TensorRT engines run on GPUs, and CUDA sees none here")
        return TensorRtModel(trt, runtime, source, path, config)


class TensorRtModel:
    """Opened engine, read once for each GPU with instances."""

    def __init__(self, trt: Any, runtime: cuda.Cuda, source: Source, path: Path, config: ModelConfig) -> None:
        self._trt = trt
        self._cuda = runtime
        self._source = source
        self._path = path
        self._engines: dict[int, TrtEngine] = {}
        self._opening = threading.Lock()
        self.batching: BatchingChoice | None = None
        self._profile = _profile(config)
        if _named_gpu(config) is not None:  # otherwise the GPU is chosen before `complete`
            self._engine(_first_gpu(config))

    def complete(self, config: ModelConfig) -> None:
        """Fill in and check inputs, outputs and batch size from the engine's first profile [C15].

        Raises:
            ConfigError: the configuration contradicts the engine, or has larger batches than it was built for.
        """
        engine = self._engine(_first_gpu(config))
        most = engine.most_rows(self._profile)
        inputs = [tensor.info for tensor in engine.tensors if tensor.is_input]
        outputs = [tensor.info for tensor in engine.tensors if not tensor.is_input]
        built = f"the engine's optimization profile {self._profile} has batches of up to {most} rows"
        choice = complete_from_tensors(config, inputs, outputs, default_max_batch=most, independent=built)
        self.batching = choice or self.batching
        if config.max_batch_size > most > 0:
            raise ConfigError(
                f"model '{config.name}': max_batch_size is {config.max_batch_size}, but the engine's optimization "
                f"profile {self._profile} was built for batches of up to {most}"
            )

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance with a separate execution context and stream.

        Raises ConfigError if it is not placed on a GPU.
        """
        if placement.kind != "GPU":
            raise ConfigError(
                f"model '{config.name}': TensorRT engines run on GPUs: set the instance group's kind to KIND_GPU"
            )
        engine = self._engine(placement.device_id)
        memory = CudaMemory(self._cuda, placement.device_id)
        transfer = transfer_for(config, memory, lambda: self._cuda)
        context = TrtContext(self._cuda, engine, memory, transfer, self._profile)
        return array_instance(
            placement.name,
            config,
            context,
            staying=context.staying,
            devices=frozenset({memory.device}),
            close=context.close,
            gpu=placement.device_id,
        )

    def close(self) -> None:
        """Release the engines."""
        for device in list(self._engines):
            with self._cuda.on(device):
                del self._engines[device]

    def _engine(self, device: int) -> TrtEngine:
        with self._opening:
            if device not in self._engines:
                with self._cuda.on(device):
                    inner = describe(self._trt, self._path.read_bytes(), self._source.name)
                if inner is None:
                    raise load_failure(self._source, self._path, log_of(self._trt).reasons.take())
                if self._profile >= inner.profiles:
                    raise ConfigError(
                        f"model '{self._source.name}' asks for optimization profile {self._profile}; the engine has "
                        f"{inner.profiles}"
                    )
                self._engines[device] = inner
            return self._engines[device]


def _named_gpu(config: ModelConfig) -> int | None:
    """Return the first GPU that the configuration names, or None."""
    return next((gpu for group in config.instance_group for gpu in group.gpus), None)


def _first_gpu(config: ModelConfig) -> int:
    return _named_gpu(config) or 0


def _profile(config: ModelConfig) -> int:
    """Return the optimization profile that the configuration names, else the engine's first."""
    named = (profile for group in config.instance_group for profile in group.profile if profile.isdecimal())
    return int(next(named, "0"))
