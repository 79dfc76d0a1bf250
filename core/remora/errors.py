"""What can go wrong, in words that fit every wire; the law: no status numbers of any protocol here.

    RemoraError                 code            meaning
    ├── UnknownError            UNKNOWN         the model gave no better reason
    ├── InternalError           INTERNAL        ours or the model's fault
    │   └── MalformedError      INTERNAL        a body that cannot be read (Triton calls these internal)
    ├── NotFoundError           NOT_FOUND       no such model, version, region
    ├── InvalidArgumentError    INVALID_ARG     the request does not fit the model
    │   └── ConfigError         INVALID_ARG     a model configuration that cannot be served
    ├── UnavailableError        UNAVAILABLE     not now: queue full, timed out, stopping, loading
    │   ├── QueueFullError      UNAVAILABLE     no room in the model's queue
    │   └── RetiredError        UNAVAILABLE     another version serves by now: look the model up again
    ├── UnsupportedError        UNSUPPORTED     the feature is not offered here
    ├── AlreadyExistsError      ALREADY_EXISTS  registered twice
    └── CancelledError          CANCELLED       the caller went away

The codes are Triton's [R03, Y05]; each protocol maps them to its own numbers in one table.
"""

from __future__ import annotations

from typing import ClassVar


class RemoraError(Exception):
    """A failure with a code and a text that a client may see.

    Args:
        message: what, where, why and what to do, in one line. Triton's exact text where Triton has one.
        from_model: True when the failure came out of the model or its backend rather than out of the checks
            before it. HTTP gives those another content type [H11].
        answered: True when a model answered a request with this error on purpose. The request then counts as a
            success in the statistics, as it does in Triton's [T02].
    """

    code: ClassVar[str] = "UNKNOWN"
    retry_after_s: int = 0
    """After how many seconds the same request may well succeed; 0 when nobody knows."""

    def __init__(self, message: str, *, from_model: bool = False, answered: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.from_model = from_model
        self.answered = answered

    def __str__(self) -> str:
        return self.message


class UnknownError(RemoraError):
    """The model failed and gave no better code."""

    code = "UNKNOWN"


class InternalError(RemoraError):
    """A failure inside the engine, a backend or a model."""

    code = "INTERNAL"


class MalformedError(InternalError):
    """Bytes that are not what the protocol asks for. Triton reports these as INTERNAL [H13]."""


class NotFoundError(RemoraError):
    """No such model, version, output or region."""

    code = "NOT_FOUND"


class InvalidArgumentError(RemoraError):
    """A request that does not fit the model it names."""

    code = "INVALID_ARG"


class ConfigError(InvalidArgumentError):
    """A model configuration that cannot be read or cannot be served."""


class UnavailableError(RemoraError):
    """Not now: the queue is full, the time is over, the model is not ready or the server is stopping."""

    code = "UNAVAILABLE"


class QueueFullError(UnavailableError):
    """The model's queue has no room now; the same request may well be taken a moment later [D12]."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RetiredError(UnavailableError):
    """The model version went out of service between its look-up and the request: look it up again, once is enough."""


class UnsupportedError(RemoraError):
    """Something this server, model or protocol does not offer."""

    code = "UNSUPPORTED"


class AlreadyExistsError(RemoraError):
    """Something that was registered before."""

    code = "ALREADY_EXISTS"


class CancelledError(RemoraError):
    """The caller went away before the answer was there."""

    code = "CANCELLED"


def about(request_id: str, text: str) -> str:
    """A text about one request, as Triton begins those: with the id that the client gave."""
    return f"[request id: {request_id or '<id_unknown>'}] {text}"


def given_twice(request_id: str, name: str) -> InvalidArgumentError:
    """The error for an input that a request has more than once [H19]."""
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
    """The error of a code such as ``"NOT_FOUND"``; codes nobody knows become UnknownError."""
    return BY_CODE.get(code, UnknownError)(message, from_model=from_model, answered=answered)
