"""API that Triton's Python models import as ``triton_python_backend_utils`` [Y01-Y12].

Its names behave the same whether the model runs in a thread of the server or in a worker process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from remora.backends.python.arguments import instance, text
from remora.backends.python.config import ModelConfig
from remora.backends.python.host import Caller, current_host
from remora.backends.python.messages import (
    COMPLETE_FINAL,
    InferenceResponse,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ResponseSender,
    TritonError,
)
from remora.backends.python.metrics import Metric, MetricFamily
from remora.backends.python.requests import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
)
from remora.backends.python.tensor import (
    DATATYPES,
    Tensor,
    TritonModelException,
    deserialize_bytes_tensor,
    serialize_byte_tensor,
)
from remora.messages import DTYPES

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITON_STRING_TO_NUMPY: dict[str, type[np.generic | bool]] = {
    f"TYPE_{'STRING' if name == 'BYTES' else name}": bool if name == "BOOL" else DTYPES[name].type
    for name in DATATYPES[1:14]
}
"""The numpy type of each datatype of the configuration, except those that numpy does not have."""

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = SEQUENCE_END
TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's input of that name, or None."""
    return inference_request.input_tensor(name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's output of that name, or None."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration (parsed JSON) of the input of that name, or None."""
    return _tensor_config(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration (parsed JSON) of the output of that name, or None."""
    return _tensor_config(model_config, "output", name)


def _tensor_config(model_config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    if kind not in model_config:  # as Triton asks, so that any container is taken
        return None
    return next((tensor for tensor in model_config[kind] if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return True if this configuration (parsed JSON) is decoupled."""
    if "model_transaction_policy" not in model_config:
        return False
    return bool(model_config["model_transaction_policy"].get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> type[np.generic] | None:
    """Return the numpy type for a datatype number, or None if numpy does not have it."""
    number = next((number for number in range(1, 14) if number == data_type), None)
    return None if number is None else DTYPES[DATATYPES[number]].type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the datatype number of a numpy type, or None. Bytes and objects are TYPE_STRING."""
    if data_type is None or isinstance(data_type, bytes):  # numpy would make types of them
        return None
    try:
        dtype = np.dtype(data_type)
    except (TypeError, ValueError):
        return None
    if dtype.kind in "SU":
        return DATATYPES.index("BYTES")
    return next((number for number in range(1, 14) if DTYPES[DATATYPES[number]] == dtype), None)


def triton_string_to_numpy(triton_type_string: str) -> type[np.generic | bool]:
    """Return the numpy type of a configuration's type, e.g. ``"TYPE_FP32"``.

    Raises KeyError if numpy does not have it.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def get_model_dir() -> str:
    """Return the directory of the running model's version, as in Triton."""
    host = current_host()
    if host is None:
        raise TritonModelException("get_model_dir: no model's code is running in this thread; ask before starting it")
    return host.model_dir


class LogLevel(IntEnum):
    """Severity of a log line."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


class Logger:
    """Writer to the server's log, under the logger ``remora.model.<name>`` [Y12]."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: Any = LogLevel.INFO) -> None:
        """Log a line at any level."""
        _log(message, instance(level, LogLevel, "Logger: the level"))

    @staticmethod
    def log_info(message: str | bytes) -> None:
        """Log a line at level INFO."""
        _log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        """Log a line at level WARNING."""
        _log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        """Log a line at level ERROR."""
        _log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        """Log a line at level VERBOSE."""
        _log(message, LogLevel.VERBOSE)


def _log(message: str | bytes, level: LogLevel) -> None:
    message = text(message, "Logger: the message")
    host = current_host()
    logger = logging.getLogger(f"remora.model.{host.model_name}" if host is not None else "remora.model")
    logger.log(_LEVELS[level], "%s", message, stacklevel=3)  # points at the line in the model's file


def load_model(model_name: str | bytes, config: str | bytes = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model and wait until it is loaded [L06].

    Only servers in explicit mode allow this.

    Args:
        config: a configuration as JSON text that replaces the one on disk.
        files: ``"file:<version>/<path>"`` to content; replaces the model's directory.

    Raises:
        TritonModelException: the model cannot be loaded.
    """
    name = text(model_name, "load_model: model_name")
    _caller("load_model", name).load_model(name, text(config, "load_model: config"), files)


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    """Take a model out of service without waiting [L06].

    Raises:
        TritonModelException: the server is not in explicit mode.
    """
    name = text(model_name, "unload_model: model_name")
    _caller("unload_model", name).unload_model(name, unload_dependents=bool(unload_dependents))


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """Return True if requests may be sent to that model [L06].

    An empty version means any version.

    Raises:
        TritonModelException: the version is not a number.
    """
    name = text(model_name, "is_model_ready: model_name")
    return _caller("is_model_ready", name).is_model_ready(name, text(model_version, "is_model_ready: model_version"))


def _caller(what: str, model_name: str) -> Caller:
    host = current_host()
    if host is None or host.caller is None:
        raise TritonModelException(
            f"{what}('{model_name}'): no model of a server is running here; use the server's repository API"
        )
    return host.caller
