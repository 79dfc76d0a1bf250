"""Errors, responses and response senders as Python models see them [Y05, Y08, Y09].

They are plain objects that do not know the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from remora.backends.python.arguments import instance, integer, sequence, text
from remora.backends.python.tensor import Tensor, TritonModelException
from remora.messages import Parameter
from remora.tensors.float_text import number

INT64_MAX = (1 << 63) - 1
COMPLETE_FINAL = 1
"""Flag of the last response."""


class ErrorCode(Enum):
    """Codes of a TritonError, numbered as in Triton's C API.

    As in Triton they are not integers, but equal theirs and can be used as an index.
    """

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, int) and self.value == other)

    def __hash__(self) -> int:
        return hash(self.value)


class TritonError:
    """Error with which a model answers one request [Y05].

    The codes are attributes: ``TritonError.NOT_FOUND``.

    Raises:
        TypeError: the message is not text, or the code is not one of the class's.
    """

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str | bytes, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = text(message, "TritonError: the message")
        self._code = instance(code, ErrorCode, "TritonError: the code")

    def code(self) -> ErrorCode:
        """Return one of the class's codes."""
        return self._code

    def message(self) -> str:
        """Return the text."""
        return self._message

    def __str__(self) -> str:
        return self._message


class MemoryType(IntEnum):
    """Location of a tensor, numbered as in Triton's Python backend."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Preferred location of the outputs of a request to another model.

    Raises TypeError for arguments of other types.
    """

    __slots__ = ("preferred_device_id", "preferred_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = instance(preferred_memory_type, MemoryType, "PreferredMemory: the memory type")
        self.preferred_device_id = integer(preferred_device_id, "PreferredMemory: the device id", -(1 << 63), INT64_MAX)


class InferenceTrace(NamedTuple):
    """Trace of a request, passed on to the requests made for it.

    ``context`` is the propagated text: JSON of the headers for calls to other services. ``id`` is 0 for a request that
    is not traced.
    """

    context: str = ""
    id: int = 0

    def get_context(self) -> str:
        """Return the propagated text."""
        return self.context


class InferenceResponse:
    """Answer of a model to one request [Y08].

    An error takes precedence over outputs.

    Args:
        output_tensors: ``Tensor`` objects, in the order of the answer.
        error: a TritonError, or None.
        parameters: names to bool, int, float or str.

    Raises:
        TypeError: an argument has an unsupported type.
        TritonModelException: None among the outputs, or a parameter of an unsupported type.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._outputs = sequence(output_tensors, "InferenceResponse: output_tensors")
        for tensor in self._outputs:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"InferenceResponse: output_tensors must be Tensor objects, found {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse: error must be a TritonError, not {type(error).__name__}")
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters else {}

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs, in order."""
        return self._outputs

    def has_error(self) -> bool:
        """Return True if the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON text."""
        return parameters_text(self._parameters)

    def parameter_values(self) -> dict[str, Parameter]:
        """Return the parameters."""
        return self._parameters


def parameters_text(parameters: Mapping[str, Parameter]) -> str:
    """Return the parameters of a received request as Triton's compact JSON text."""
    members = [f"{json.dumps(key, ensure_ascii=False)}:{_text(value)}" for key, value in parameters.items()]
    return f"{{{','.join(members)}}}"


def _text(value: Parameter) -> str:
    return number(value).decode() if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Parameter]:
    """Return a checked copy of a model's parameters.

    Raises TritonModelException with Triton's text for other types.
    """
    checked: dict[str, Parameter] = {}
    if parameters is not None and not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type {type(parameters)}")
    for name, raw in (parameters or {}).items():
        value = raw.item() if isinstance(raw, np.generic) else raw
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/float/str, found type {type(raw)}"
            )
        checked[name] = value
    return checked


class ResponseTarget(Protocol):
    """Receiver of the responses to one request."""

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Accept a response. Raises TritonModelException if it must not be sent."""

    def is_cancelled(self) -> bool:
        """Return True if the request is cancelled."""


class ResponseSender:
    """A model's interface to a ``ResponseTarget`` [Y09]."""

    __slots__ = ("__weakref__", "_reply")

    def __init__(self, reply: ResponseTarget) -> None:
        self._reply = reply

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response.

        The flag TRITONSERVER_RESPONSE_COMPLETE_FINAL marks the last one.

        Raises:
            TritonModelException: an unknown flag, no response without a flag, or too many responses.
        """
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send: expected an InferenceResponse, not {type(response).__name__}")
        self._reply.send(response, flags)

    def is_cancelled(self) -> bool:
        """Return True if the request is cancelled."""
        return self._reply.is_cancelled()
