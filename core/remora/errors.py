"""Exception hierarchy, independent of any protocol's status numbers.

    RemoraError                 code            meaning
    ├── UnknownError            UNKNOWN         the model gave no better reason
    ├── InternalError           INTERNAL        ours or the model's fault
    │   └── MalformedError      INTERNAL        a body that cannot be read (Triton calls these internal)
    ├── NotFoundError           NOT_FOUND       no such model, version, region
    ├── InvalidArgumentError    INVALID_ARG     the request does not fit the model
    │   └── ConfigError         INVALID_ARG     a model configuration that cannot be served
    ├── UnavailableError        UNAVAILABLE     not now: queue full, timed out, stopping, loading
    │   ├── QueueFullError      UNAVAILABLE     no room in the model's queue
    │   └── RetiredError        UNAVAILABLE     the version was replaced: look the model up again
    ├── PermissionDeniedError   PERMISSION_DENIED  the roles of the API key do not permit it
    ├── UnsupportedError        UNSUPPORTED     the feature is not supported
    ├── AlreadyExistsError      ALREADY_EXISTS  registered twice
    └── CancelledError          CANCELLED       the client disconnected or cancelled

The codes are Triton's [R03, Y05]; each protocol maps them to its own numbers in one table.
"""

from __future__ import annotations

import re
from typing import ClassVar


class RemoraError(Exception):
    """A failure with a code and a message for the client.

    Args:
        message: what, where, why and what to do, in one line. Triton's exact text where Triton has one.
        from_model: True if the failure came from the model or its backend, not from the checks before it. HTTP sends
            those with another content type [H11].
        answered: True if the model returned this error on purpose as its response. The request then counts as a success
            in V2's statistics, as in Triton, and as a failure in the metrics and for releases [T02].
    """

    code: ClassVar[str] = "UNKNOWN"
    retry_after_s: int = 0
    """Seconds after which the same request may succeed; 0 if unknown."""

    def __init__(self, message: str, *, from_model: bool = False, answered: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.from_model = from_model
        self.answered = answered

    def __str__(self) -> str:
        return self.message


class UnknownError(RemoraError):
    """A failure of the model without a more specific code."""

    code = "UNKNOWN"


class InternalError(RemoraError):
    """A failure inside the engine, a backend or a model."""

    code = "INTERNAL"


class MalformedError(InternalError):
    """Bytes that violate the protocol. Triton reports these as INTERNAL [H13]."""


class NotFoundError(RemoraError):
    """No such model, version, output or region."""

    code = "NOT_FOUND"


class InvalidArgumentError(RemoraError):
    """A request that does not fit its model."""

    code = "INVALID_ARG"


class ConfigError(InvalidArgumentError):
    """A model configuration that cannot be read or cannot be served."""


class UnavailableError(RemoraError):
    """A temporary refusal: queue full, timed out, model not ready or server stopping."""

    code = "UNAVAILABLE"


class QueueFullError(UnavailableError):
    """The model's queue is full.

    The same request may be accepted a moment later [D12].
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RetiredError(UnavailableError):
    """The model version was retired between its look-up and the request.

    Look the model up again; one repetition is enough.
    """


class PermissionDeniedError(RemoraError):
    """A request that the roles of its API key do not permit."""

    code = "PERMISSION_DENIED"


class UnsupportedError(RemoraError):
    """A feature that this server, model or protocol does not support."""

    code = "UNSUPPORTED"


class AlreadyExistsError(RemoraError):
    """A duplicate registration."""

    code = "ALREADY_EXISTS"


class CancelledError(RemoraError):
    """The client disconnected or cancelled before the answer was ready."""

    code = "CANCELLED"


FAILED_EXECUTION = "Failed to process the request(s) for model '{}', message: {}"
"""Triton's text for an exception of a model's code, by the name of the instance and the exception's text."""
ID_PREFIX = re.compile(r"\[request id: [^\]]*\] ")
"""What `about` adds."""


def about(request_id: str, text: str) -> str:
    """Return the text prefixed with the request's id in Triton's format."""
    return f"[request id: {request_id or '<id_unknown>'}] {text}"


def given_twice(request_id: str, name: str) -> InvalidArgumentError:
    """Return the error for an input that a request contains more than once [H19]."""
    return InvalidArgumentError(about(request_id, f"input '{name}' already exists in request"))


BY_CODE: dict[str, type[RemoraError]] = {
    kind.code: kind
    for kind in (
        UnknownError,
        InternalError,
        NotFoundError,
        InvalidArgumentError,
        UnavailableError,
        UnsupportedError,
        AlreadyExistsError,
        CancelledError,
    )
}


def error_of(code: str, message: str, *, from_model: bool = False, answered: bool = False) -> RemoraError:
    """Return the error of a code such as ``"NOT_FOUND"``, by default an UnknownError."""
    return BY_CODE.get(code, UnknownError)(message, from_model=from_model, answered=answered)
