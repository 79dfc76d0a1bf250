"""Errors, responses and senders as Python models see them [Y05, Y08, Y09]; the law: plain objects, no engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from remora.backends.python.tensor import Tensor, TritonModelException
from remora.messages import Parameter
from remora.tensors.float_text import number

COMPLETE_FINAL = 1
"""The flag of the last response."""


class ErrorCode(IntEnum):
    """The codes of a TritonError, by their numbers in Triton's C API."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """A failure that a model answers one request with; the codes are attributes: ``TritonError.NOT_FOUND`` [Y05].

    Raises:
        TypeError: a message that is no text.
        ValueError: a code that is none.
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

    def __init__(self, message: str, code: int = ErrorCode.INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"TritonError: the message must be str, not {type(message).__name__}")
        self._message = message
        self._code = ErrorCode(code)

    def code(self) -> ErrorCode:
        """One of the class's codes."""
        return self._code

    def message(self) -> str:
        """The text, as it was given."""
        return self._message

    def __str__(self) -> str:
        return self._message


class MemoryType(IntEnum):
    """Where a tensor may lie; the numbers are the Python backend's."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory(NamedTuple):
    """Where the outputs of a request to another model should lie."""

    preferred_memory_type: MemoryType
    preferred_device_id: int = 0


class InferenceTrace(NamedTuple):
    """The trace a request belongs to, to be handed on to requests made for it; ``context`` is its propagated text: JSON
    of the headers that calls to other services should carry. ``id`` is 0 for a request that is not traced."""

    context: str = ""
    id: int = 0

    def get_context(self) -> str:
        """The propagated text."""
        return self.context


class InferenceResponse:
    """What a model answers one request with [Y08]. An error wins over outputs beside it.

    Args:
        output_tensors: ``Tensor`` objects, in the order in which they are to be answered.
        error: a TritonError, or None.
        parameters: names to bool, int, float or str.

    Raises:
        TypeError: anything of another type.
        TritonModelException: an output that is None, parameters of other types.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._outputs = list(output_tensors) if output_tensors is not None else []
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
        """The outputs, in order."""
        return self._outputs

    def has_error(self) -> bool:
        """Is this a failure?"""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The failure, None if there is none."""
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON text."""
        return parameters_text(self._parameters)

    def parameter_values(self) -> dict[str, Parameter]:
        """The parameters as they are."""
        return self._parameters


def parameters_text(parameters: Mapping[str, Parameter]) -> str:
    """Parameters as the compact JSON text that Triton gives to models, ``{}`` for none."""
    members = [f"{json.dumps(key, ensure_ascii=False)}:{_text(value)}" for key, value in parameters.items()]
    return f"{{{','.join(members)}}}"


def _text(value: Parameter) -> str:
    return number(value).decode() if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Parameter]:
    """A copy of what a model gave as parameters. Raises TritonModelException for other types, in Triton's words."""
    checked: dict[str, Parameter] = {}
    for name, given in (parameters or {}).items():
        value = given.item() if isinstance(given, np.generic) else given
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/float/str, found type {type(given)}"
            )
        checked[name] = value
    return checked


class ResponseTarget(Protocol):
    """Where the responses to one request go."""

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Take a response. Raises TritonModelException for one that must not be sent."""

    def is_cancelled(self) -> bool:
        """Has the caller gone away?"""


class ResponseSender:
    """A model's end of a ``ResponseTarget`` [Y09]."""

    __slots__ = ("__weakref__", "_reply")

    def __init__(self, reply: ResponseTarget) -> None:
        self._reply = reply

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; flag TRITONSERVER_RESPONSE_COMPLETE_FINAL says that it is the last.

        Raises:
            TritonModelException: another flag, no response without a flag, or more than may be sent.
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
        """Has the caller gone away?"""
        return self._reply.is_cancelled()
