"""What travels between the protocols, the engine and the backends: plain data that knows no wire and no thread.

The journey: bytes -> Call -> Engine.perform -> Request -> Ticket -> Batch -> Instance.execute -> Response -> bytes.
Arrays are views over the received bytes wherever that is possible; nothing here copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from remora.errors import RemoraError


class RequestTrace(Protocol):
    """A traced request (``remora.tracing``). ``context`` is what calls to other services carry, or ""."""

    @property
    def id(self) -> int: ...

    @property
    def context(self) -> str: ...

    def over(self, model: Any, /) -> Any:
        """The model for one request that is made for this one."""

    def taken(self, request: Any, /) -> None:
        """The request was checked, and is about to be queued."""


Array = npt.NDArray[Any]
Parameter = bool | int | float | str
Buffer = bytes | bytearray | memoryview
Data = Buffer | Array | list[bytes] | None
"""Where a tensor's values come from: raw little-endian bytes, a ready array, or the elements of a BYTES tensor."""

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
"""The wire's datatypes and the numpy dtype each travels in. BF16 travels as the 16 raw bits in a uint16, BYTES as
an object array of ``bytes``: numpy has neither type."""

_DATATYPE_OF = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}


def datatype_of(array: Array) -> str:
    """The wire datatype of an array, ``"BYTES"`` for text and objects; "" when it has none (complex, datetime)."""
    name = _DATATYPE_OF.get(array.dtype)
    if name is not None:
        return name
    return "BYTES" if array.dtype.kind in "SU" else _DATATYPE_OF.get(array.dtype.newbyteorder("<"), "")


class InputSpec(NamedTuple):
    """One input as a request declares it: wire datatype (``"FP32"``), full shape, batch dimension included."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class OutputSpec(NamedTuple):
    """One requested output. ``classes`` > 0 asks for that many class strings instead of the values [X06]."""

    name: str
    classes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class InferForm:
    """All that an inference request says besides its tensor bytes.

    A form compares by identity: a protocol that meets the same header bytes again hands out the same form, and the
    engine then skips the checks it has already made for it.

    ``inputs`` come in the order of the request's data. ``outputs`` is empty for "all of them". ``timeout_us`` is in
    microseconds, 0 for none [H23]. ``raw`` marks a request that is nothing but the bytes of the model's one
    input [B03]: its ``inputs`` are empty and it has one piece of data.
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
    """A named array. ``data`` has the dtype that DTYPES gives for ``datatype``."""

    name: str
    datatype: str
    data: Array


class Response:
    """What a model answered: outputs in the model's own order, and parameters it set [H24]."""

    __slots__ = ("outputs", "parameters")

    def __init__(self, outputs: list[Tensor], parameters: dict[str, Parameter] | None = None) -> None:
        self.outputs = outputs
        self.parameters = {} if parameters is None else parameters

    def __repr__(self) -> str:
        return f"Response(outputs={self.outputs!r}, parameters={self.parameters!r})"


class Streamed(NamedTuple):
    """One of the answers of a decoupled model to one request [K08].

    ``outcome`` is None for a final mark that carries nothing. After one with ``final`` no more come.
    """

    outcome: Response | RemoraError | None
    final: bool


Outcome = Response | RemoraError | Streamed
"""What a request ends in. A request to a decoupled model gets any number of Streamed, the last one final; every other
request gets exactly one Response or error."""


_NOBODY: frozenset[object] = frozenset()


class Request:
    """A checked request as the schedulers and backends see it.

    ``inputs`` hold arrays in the *model's* shape (reshape applied, batch dimension first when the model batches).
    ``requested`` names the outputs wanted, never empty. ``rows`` is the batch size, 1 for a model without batching.
    ``shape_key`` is equal for requests that may share a batch [D04]. ``cancelled`` may turn True at any time.
    ``held`` are the instances that wait for this request: whoever made it on their behalf [L04]. ``states`` are
    what the server keeps for the request's sequence, by the names of the model's inputs [S13]; None for nothing.
    ``stays``: the outputs may stay on the device where the model makes them, as `DeviceArray`s. ``trace`` follows the
    request where it is traced, None elsewhere.
    """

    __slots__ = (
        "_watchers", "cancelled", "form", "held", "inputs", "requested", "rows", "shape_key", "states", "stays", "trace"
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
        self.held: frozenset[object] = _NOBODY
        self.states: dict[str, Array] | None = None
        self.stays = False
        self.trace: RequestTrace | None = None
        self._watchers: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Ask that the request never run, or end early. Any thread may call, any number of times."""
        self.cancelled = True
        for act in tuple(self._watchers):
            act()

    def when_cancelled(self, act: Callable[[], None]) -> Callable[[], None]:
        """Have ``act`` called when the request is cancelled, at once if it is already; returns what takes that back.

        ``act`` may be called more than once, on any thread, and must not raise.
        """
        self._watchers.append(act)
        if self.cancelled:  # asked second: a cancel in between has found the watcher or is found here
            act()
        return lambda: self._forget(act)

    def _forget(self, act: Callable[[], None]) -> None:
        with suppress(ValueError):  # taken back twice
            self._watchers.remove(act)


class Watcher(Protocol):
    """An event loop that can wait for more than its own sockets."""

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        """Call ``work`` in the loop whenever ``fd`` is readable, until the function that this returns is called.

        Called in the loop's thread; what it returns may be called in any. ``fd`` stays the caller's, who may close it
        at any time: ``work`` is given a duplicate that is open as long as it is called.
        """

    def is_current(self) -> bool:
        """Is the caller in the loop's thread?"""


class Mailbox(Protocol):
    """Where replies want to be delivered: a thread or an event loop that owns what the replies touch."""

    @property
    def watcher(self) -> Watcher | None:
        """The event loop behind it, for executions that end elsewhere; None when there is none."""

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Run ``ticket.reply(ticket, outcome)`` for each pair where they belong, all in one wake-up. Never raises."""

    def defer(self, work: Callable[[], None]) -> bool:
        """Run ``work`` at the end of the current turn of the caller's loop; False when the caller is not that loop."""


NO_TIME = (0, 0, 0)  # not known what the phases took; compared by identity


class Ticket:
    """A request on its way, and where its answer goes. Each ticket is answered exactly once (see Outcome).

    ``reply`` is called by the mailbox and must not raise. Without a mailbox it may hold up its caller for an answer
    that is not final, so that a model does not run far ahead of its client. Times are in nanoseconds of the engine's
    monotonic clock; ``arrival_ns`` is when the request was handed in, ``start_ns`` when its batch began to run.
    ``deadline_ns`` is 0 for none. ``level`` is its priority level, 1 the highest. ``spent_ns`` is what the phases of
    its execution took, known before its answer unless that streams: input, infer, output.
    """

    __slots__ = ("arrival_ns", "context", "deadline_ns", "level", "mailbox", "reply", "request", "spent_ns", "start_ns")

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

    def cancel(self) -> None:
        """Ask that the request never run; it is then answered with CancelledError [D13]. Any thread may call."""
        self.request.cancel()
