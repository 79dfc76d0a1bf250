"""Requests and answer streams of programs that embed the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import (
    DTYPES,
    Array,
    Data,
    InferForm,
    InputSpec,
    Outcome,
    OutputSpec,
    Parameter,
    Response,
    Streamed,
    Ticket,
    datatype_of,
)
from remora.models.served_model import ServedModel
from remora.scheduling.backpressure import Backpressure


def as_request(model: ServedModel, inputs: Mapping[str, npt.ArrayLike]) -> tuple[tuple[InputSpec, ...], list[Data]]:
    """Return the input specs and data of a program's arrays.

    A datatype follows the model's if the cast loses nothing, otherwise the array's.
    """
    wanted = {row.name: row.datatype for row in model.signature.inputs}
    specs: list[InputSpec] = []
    data: list[Data] = []
    for name, values in inputs.items():
        array = _as_array(np.asarray(values), wanted.get(name, ""), name)
        datatype = wanted[name] if name in wanted and array.dtype == DTYPES[wanted[name]] else datatype_of(array)
        if not datatype:
            raise InvalidArgumentError(
                f"input '{name}' has dtype {array.dtype}, which no tensor of the protocol can hold"
            )
        specs.append(InputSpec(name, datatype, array.shape))
        data.append(np.ascontiguousarray(array).reshape(array.shape))
    return tuple(specs), data


_RESERVED: Mapping[str, tuple[str, type, type]] = {
    "sequence_id": ("sequence_id", int, str),
    "sequence_start": ("sequence_start", bool, bool),
    "sequence_end": ("sequence_end", bool, bool),
    "priority": ("priority", int, int),
    "timeout": ("timeout_us", int, int),
}
"""Parameters reserved by V2: the form's field, and the accepted types."""
_PLAIN = frozenset((bool, int, float, str))


def as_form(
    specs: tuple[InputSpec, ...], outputs: Sequence[str], id: str, parameters: Mapping[str, Parameter]
) -> InferForm:
    """Return the form of a program's request.

    Reserved parameters have their V2 meaning. Raises InvalidArgumentError for a reserved parameter whose value has
    another type or is negative, and for a parameter that the protocol cannot carry: a worker's messages hold the
    requests of several clients, and one that cannot be encoded would fail all of them.
    """
    rest = {name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()}
    fields: dict[str, Any] = {}
    for name, (field, first, second) in _RESERVED.items():
        if name not in rest:
            continue
        value = rest.pop(name)
        if type(value) not in (first, second) or (type(value) is int and value < 0):
            kinds = " or ".join(dict.fromkeys((first.__name__, second.__name__)))
            raise InvalidArgumentError(f"parameter '{name}' is {value!r}: expected {kinds}, not below 0")
        fields[field] = value
    for name, value in rest.items():
        if (
            not isinstance(name, str)
            or type(value) not in _PLAIN
            or (type(value) is int and not -(1 << 63) <= value < 1 << 64)
        ):
            raise InvalidArgumentError(
                f"parameter {name!r} is {_shown(value)}: expected bool, a 64-bit int, float or text"
            )
    return InferForm(specs, tuple(OutputSpec(name) for name in outputs), id, rest, **fields)


def _shown(value: object) -> str:
    return "an integer beyond 64 bits" if type(value) is int else f"of type {type(value).__name__}"


def _as_array(array: Array, datatype: str, name: str) -> Array:
    if array.dtype.kind in "SU" or array.dtype == object:
        flat = [_as_bytes(value, name) for value in array.reshape(-1).tolist()]
        out = np.empty(len(flat), object)
        out[:] = flat
        return out.reshape(array.shape)
    dtype = DTYPES.get(datatype)
    if dtype is None or dtype.hasobject or array.dtype == dtype:
        return array
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        cast = array.astype(dtype)
        return cast if (array == cast).all() else array
    return array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else array


def _as_bytes(value: object, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise InvalidArgumentError(f"input '{name}' holds {type(value).__name__} objects: expected text or bytes")


AHEAD = 256
"""Number of unread answers above which a model's ``send`` blocks."""

_ANY = 1 << 62

T = TypeVar("T")


class AnswerStream(Iterator[T], Generic[T]):
    """Iterator over the answers of a model.

    For one thread, but any thread may call `close`. An error response is raised by ``next``; if it was not the final
    one, iteration can continue. Closing or dropping the iterator cancels the request.

    Args:
        convert: converts a response for the program.
        ahead: see AHEAD.
    """

    def __init__(self, convert: Callable[[Response], T], ahead: int = AHEAD) -> None:
        self._convert = convert
        self._answers: SimpleQueue[Streamed | None] = SimpleQueue()
        self._room = Backpressure(ahead, _ANY)
        self._ticket: Ticket | None = None
        self._ended = False

    def follow(self, ticket: Ticket) -> AnswerStream[T]:
        """Cancel this ticket when the iterator is closed. Returns the iterator."""
        self._ticket = ticket
        return self

    def receiver(self) -> Callable[[Ticket, Outcome], None]:
        """Return the ticket's reply, which does not keep the iterator alive."""
        answers, room = self._answers, self._room

        def reply(_ticket: Ticket, outcome: Outcome) -> None:
            streamed = outcome if isinstance(outcome, Streamed) else Streamed(outcome, True)
            if streamed.final:
                room.add()
            else:
                room.take()  # returns at once after `close`, because the answer is then not read
            answers.put(streamed)

        return reply

    def __iter__(self) -> AnswerStream[T]:
        return self

    def __next__(self) -> T:
        while not self._ended:
            streamed = self._answers.get()
            if streamed is None:
                break
            self._ended = streamed.final
            self._room.give()
            if isinstance(streamed.outcome, RemoraError):
                raise streamed.outcome
            if streamed.outcome is not None:
                return self._convert(streamed.outcome)
        raise StopIteration

    def close(self) -> None:
        """Cancel the request unless it is answered, and end the iteration."""
        if self._ended:
            return
        self._ended = True
        if self._ticket is not None:
            self._ticket.cancel()
        self._room.close()
        self._answers.put(None)

    def __enter__(self) -> AnswerStream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
