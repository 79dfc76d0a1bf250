"""Data plane: requests, tickets, responses and mailboxes as plain data.

Nothing here depends on a wire format or a thread. The path of a request: bytes -> Call -> Engine.perform -> Request ->
Ticket -> Batch -> Instance.execute -> Response -> bytes. Arrays are views over the received bytes wherever possible;
nothing here copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from remora.errors import RemoraError


class RequestTrace(Protocol):
    """A traced request (``remora.tracing``).

    ``context`` is the trace context to propagate to other services, or "".
    """

    @property
    def id(self) -> int: ...

    @property
    def context(self) -> str: ...

    def wrap_child(self, model: Any, /) -> Any:
        """Return the model wrapped so that one sub-request to it becomes a child of this trace."""

    def record_inputs(self, request: Any, /) -> None:
        """Record the inputs of a request that passed its checks and is about to be queued."""

    def record_answer(self, attributes: Mapping[str, Any], events: Sequence[tuple[str, int]], /) -> None:
        """Record what a language model's answer consisted of, and the times of its tokens."""


Array = npt.NDArray[Any]
Parameter = bool | int | float | str
Buffer = bytes | bytearray | memoryview
Data = Buffer | Array | list[bytes] | None
"""Source of a tensor's values: raw little-endian bytes, a ready array, or the elements of a BYTES tensor."""

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
    "BYTES": np.dtype(object),
}
"""numpy dtype of each wire datatype.

numpy has neither BF16 nor BYTES: BF16 is held as its 16 raw bits in a uint16, BYTES as an object array of ``bytes``.
"""

_DATATYPE_OF = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}


def datatype_of(array: Array) -> str:
    """Return the wire datatype of an array, or "" if it has none (complex, datetime).

    Text and object arrays are ``"BYTES"``.
    """
    name = _DATATYPE_OF.get(array.dtype)
    if name is not None:
        return name
    return "BYTES" if array.dtype.kind in "SU" else _DATATYPE_OF.get(array.dtype.newbyteorder("<"), "")


class InputSpec(NamedTuple):
    """One input as declared by a request.

    ``datatype`` is a wire datatype (``"FP32"``); ``shape`` is the full shape, including the batch dimension.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class OutputSpec(NamedTuple):
    """One requested output.

    ``classes`` > 0 requests that number of class strings instead of the values [X06].
    """

    name: str
    classes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class InferForm:
    """The contents of an inference request except its tensor bytes.

    A form compares by identity: a protocol that receives the same header bytes again returns the same form, and the
    engine then skips the checks it has already done for it.

    ``inputs`` are in the order of the request's data. An empty ``outputs`` means all outputs. ``timeout_us`` is in
    microseconds, 0 for no timeout [H23]. ``raw`` marks a request whose body is the bytes of the model's only input
    [B03]: its ``inputs`` are empty and it has one piece of data.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...] = ()
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    raw: bool = False


class Tensor(NamedTuple):
    """A named array.

    ``data`` has the dtype that DTYPES lists for ``datatype``.
    """

    name: str
    datatype: str
    data: Array


class Response:
    """A model's response: outputs in the model's order, and the parameters it set [H24]."""

    __slots__ = ("outputs", "parameters")

    def __init__(self, outputs: list[Tensor], parameters: dict[str, Parameter] | None = None) -> None:
        self.outputs = outputs
        self.parameters = {} if parameters is None else parameters

    def __repr__(self) -> str:
        return f"Response(outputs={self.outputs!r}, parameters={self.parameters!r})"


class Streamed(NamedTuple):
    """One response of a decoupled model to a request [K08].

    A final marker without content has no ``outcome``. ``final`` marks the last item of the stream.
    """

    outcome: Response | RemoraError | None
    final: bool


Outcome = Response | RemoraError | Streamed
"""Result of a request.

A request to a decoupled model gets any number of Streamed, the last one final; any other request gets exactly one
Response or error.
"""


def split_outcome(outcome: Outcome) -> tuple[bool, Response | RemoraError | None]:
    """Return whether an outcome is the last one of its request, and its content."""
    return (outcome.final, outcome.outcome) if isinstance(outcome, Streamed) else (True, outcome)


_NO_INSTANCES: frozenset[object] = frozenset()


class Request:
    """A checked request as seen by the schedulers and backends.

    Attributes:
        inputs: arrays in the *model's* shape (reshape applied, batch dimension first if the model batches).
        requested: names of the requested outputs, never empty.
        rows: batch size, 1 for a model without batching.
        shape_key: equal for requests that may share a batch [D04].
        cancelled: may become True at any time.
        blocking_instances: instances that are blocked until this request completes, because they issued it [L04].
        states: the server-side state of the request's sequence by the model's input names [S13], or None.
        caller: identifies the credential of a request to a language model, "" without one.
        keep_on_device: True if the outputs may stay on the device where the model computes them, as `DeviceArray`s.
        trace: the trace of the request, or None.
    """

    __slots__ = (
        "_watchers", "blocking_instances", "caller", "cancelled", "form", "inputs", "keep_on_device", "requested",
        "rows", "shape_key", "states", "trace",
    )  # fmt: skip

    def __init__(
        self, form: InferForm, inputs: dict[str, Array], requested: tuple[str, ...], rows: int, shape_key: object
    ) -> None:
        self.form = form
        self.inputs = inputs
        self.requested = requested
        self.rows = rows
        self.shape_key = shape_key
        self.cancelled = False
        self.blocking_instances: frozenset[object] = _NO_INSTANCES
        self.states: dict[str, Array] | None = None
        self.caller = ""
        self.keep_on_device = False
        self.trace: RequestTrace | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def stays(self) -> bool:
        """Name of ``keep_on_device`` before version 1.5 of the backend API."""
        return self.keep_on_device

    def cancel(self) -> None:
        """Request cancellation: the request is not run, or ends early.

        Any thread may call this, any number of times.
        """
        self.cancelled = True
        for act in tuple(self._watchers):
            act()

    def when_cancelled(self, act: Callable[[], None]) -> Callable[[], None]:
        """Register ``act`` to be called on cancellation, and return a function to unregister it.

        If the request is already cancelled, ``act`` is called at once. It may be called more than once, on any thread,
        and must not raise.
        """
        self._watchers.append(act)
        if self.cancelled:  # check after registering, so that a concurrent cancel cannot be missed
            act()
        return lambda: self._forget(act)

    def _forget(self, act: Callable[[], None]) -> None:
        with suppress(ValueError):  # already unregistered
            self._watchers.remove(act)


class Watcher(Protocol):
    """An event loop that can watch additional file descriptors."""

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        """Call ``work`` in the loop whenever ``fd`` is readable, and return a function to stop.

        Call this in the loop's thread; the returned function may be called in any thread. The caller keeps ownership of
        ``fd`` and may close it at any time: ``work`` receives a duplicate that stays open for as long as it is called.
        """

    def call_next(self, work: Callable[[], None]) -> None:
        """Call ``work`` in the loop's next turn, which begins without sleeping.

        Call this in the loop's thread.
        """

    def collect(self, work: Callable[[], None]) -> bool:
        """Run ``work``, which submits requests, at the end of this turn.

        What it defers runs directly after it. Returns False outside the loop's thread, and if no other request can
        arrive in this turn.
        """

    def is_current(self) -> bool:
        """Return True if the caller is in the loop's thread, and the loop runs."""

    def is_closed(self) -> bool:
        """Return True if the loop will not run again."""


class Mailbox(Protocol):
    """Destination of replies: a thread or an event loop that owns the objects they modify."""

    @property
    def watcher(self) -> Watcher | None:
        """The event loop behind this mailbox, for executions that end in another process, or None."""

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Run ``ticket.reply(ticket, outcome)`` for each pair in the owner's thread. Never raises.

        All pairs are delivered with one wake-up.
        """

    def defer(self, work: Callable[[], None]) -> bool:
        """Run ``work`` at the end of the current iteration of the caller's loop.

        Returns False if the caller is not in this mailbox's loop.
        """


NO_TIME = (0, 0, 0)  # phase times unknown; compared by identity


class Ticket:
    """A request in flight and the destination of its answer.

    Each ticket is answered exactly once (see Outcome). ``reply`` is called by the mailbox and must not raise. Without a
    mailbox it may block its caller for an answer that is not final, which keeps a model from running far ahead of its
    client.

    Times are in nanoseconds of the engine's monotonic clock. ``arrival_ns`` is the time of submission, ``start_ns`` the
    time at which its batch began to run. ``deadline_ns`` is 0 for no deadline. ``level`` is the priority level, 1 the
    highest. ``spent_ns`` are the durations of the execution phases (input, infer, output) and ``batch_rows`` is the
    batch size of the execution, both known before the answer unless the answer is streamed.
    """

    __slots__ = (
        "arrival_ns", "batch_rows", "context", "deadline_ns", "level", "mailbox", "reply", "request", "spent_ns",
        "start_ns",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        reply: Callable[[Ticket, Outcome], None],
        mailbox: Mailbox | None = None,
        context: object = None,
        arrival_ns: int = 0,
    ) -> None:
        self.request = request
        self.reply = reply
        self.mailbox = mailbox
        self.context = context
        self.arrival_ns = arrival_ns
        self.start_ns = 0
        self.deadline_ns = 0
        self.level = 1
        self.spent_ns = NO_TIME
        self.batch_rows = 0

    def cancel(self) -> None:
        """Cancel the request. Any thread may call this.

        A request that has not run is answered with CancelledError [D13].
        """
        self.request.cancel()


Reply = Callable[[Ticket, Outcome], None]
"""Destination of the outcomes of one request; see `Ticket`."""
