"""Codec of plain JSON for people: an object with a value for each input, answered by one with each output.

An object with single values is one row, answered by an object of single values. An object with a list of rows for each
input is answered by an object of lists, and a list of objects by a list of objects. A value for a model with one input
needs no name. Tensors with JSON documents hold the documents themselves. A model that does not batch, and that has an
input whose value may itself be a list, gets several rows as a list of objects alone. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import orjson

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError
from remora.messages import Array, Buffer, Response
from remora.protocols.json.long_lists import release
from remora.protocols.json.printer import dumps
from remora.protocols.json.reader import LONG_BYTES, loads
from remora.protocols.rest.plain_words import value_words, values_words
from remora.protocols.rest.predict import Part, Rows, array_of, check_parts, cut, request_of, rows_of
from remora.protocols.rest.request import RequestLimits, check_values

_MAX_ROWS = 1 << 20


class Field(NamedTuple):
    """An input or output of a model.

    ``dims`` is the shape of one row; ``is_document`` is True if each row is the text of a JSON document.
    """

    tensor: TensorInfo
    dims: tuple[int, ...]
    optional: bool = False
    is_document: bool = False

    @property
    def is_scalar(self) -> bool:
        """True if a row is one value, which needs no brackets."""
        return self.is_document or all(size == 1 for size in self.dims)


class Interface(NamedTuple):
    """Inputs and outputs of a model by name, and its largest batch."""

    inputs: Mapping[str, Field]
    outputs: Mapping[str, Field]
    max_batch_size: int

    @classmethod
    def of(
        cls,
        inputs: Iterable[TensorInfo],
        outputs: Iterable[TensorInfo],
        max_batch_size: int,
        optional: frozenset[str] = frozenset(),
        documents: frozenset[str] = frozenset(),
    ) -> Interface:
        """Return the interface of a model's signature."""
        batched = max_batch_size > 0

        def field(tensor: TensorInfo) -> Field:
            dims = tuple(tensor.shape[1:] if batched else tensor.shape)
            is_document = tensor.name in documents and tensor.datatype == "BYTES"
            return Field(tensor, dims, tensor.name in optional, is_document)

        return cls(
            {each.name: field(each) for each in inputs}, {each.name: field(each) for each in outputs}, max_batch_size
        )

    @property
    def has_columns(self) -> bool:
        """True if lists of rows are accepted, False if a list may be one value."""
        fields = self.inputs.values()
        return self.max_batch_size > 0 or not any(field.is_document or -1 in field.dims for field in fields)

    @property
    def rows(self) -> Rows:
        """The rule by which rows become requests."""
        return Rows(self.max_batch_size, True) if self.max_batch_size else Rows(1, False)


class Layout(Enum):
    """Form of a request, which its answer has too."""

    ONE = "one object"
    COLUMNS = "an object with lists of rows"
    LIST = "a list of objects"


class Question(NamedTuple):
    """A decoded request: V2 requests for its rows, in order."""

    layout: Layout
    parts: list[Part]


def decode_typed(body: Buffer, interface: Interface, limit: int = 64 << 20) -> Question:
    """Return the requests for a body.

    Raises InvalidArgumentError naming the input that is missing, unknown or has an unfit value.
    """
    if len(body) > limit:
        raise InvalidArgumentError(f"the request is {len(body)} bytes long, {limit} are accepted")
    check_values(memoryview(body), RequestLimits(limit))
    try:
        message = loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from error
    try:
        return _question(message, interface)
    finally:
        if len(body) > LONG_BYTES:
            release(message)


def _question(message: Any, interface: Interface) -> Question:
    if isinstance(message, list) and message and all(isinstance(each, dict) for each in message):
        return Question(Layout.LIST, _of_records([_named(each, interface) for each in message], interface))
    values = _named(message, interface)
    columns = interface.has_columns
    several = {name: _is_several(interface.inputs[name], value, columns) for name, value in values.items()}
    if not any(several.values()):
        return Question(Layout.ONE, _of_records([values], interface))
    single = next((name for name, is_several in several.items() if not is_several), None)
    if single is not None:
        rows = next(name for name, is_several in several.items() if is_several)
        raise InvalidArgumentError(
            f"input '{single}' has one value, but '{rows}' has a list of rows: send rows of both"
        )
    lengths = {name: len(value) for name, value in values.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"'{name}' has {length}" for name, length in lengths.items())
        raise InvalidArgumentError(f"the inputs have different numbers of rows: {shown}")
    layout = Layout.COLUMNS if isinstance(message, dict) and message.keys() == values.keys() else Layout.LIST
    count = next(iter(lengths.values()))
    _check_rows(count)
    if interface.max_batch_size:
        return Question(layout, cut(_tensors(values, interface, stacked=True), interface.rows))
    check_parts(count)
    records = [{name: value[index] for name, value in values.items()} for index in range(count)]
    return Question(layout, _of_records(records, interface))


def _named(message: Any, interface: Interface) -> dict[str, Any]:
    """Return the values by the names of the inputs.

    Raises InvalidArgumentError for an unknown or missing name.
    """
    inputs = interface.inputs
    required = [name for name, field in inputs.items() if not field.optional]
    only = (required or list(inputs))[0] if len(required) == 1 or len(inputs) == 1 else ""
    is_value = not isinstance(message, dict) or message.keys() == {"b64"}
    if only and only not in (message if isinstance(message, dict) else ()) and (is_value or inputs[only].is_document):
        return {only: message}
    if not isinstance(message, dict):
        names = ", ".join(inputs)
        raise InvalidArgumentError(f"expected a JSON object with values for {names}, got {_kind_of(message)}")
    unknown = next((name for name in message if name not in inputs), None)
    if unknown is not None:
        raise InvalidArgumentError(f"there is no input '{unknown}'{nearest(unknown, inputs)}")
    missing = next((name for name in required if name not in message), None)
    if missing is not None:
        raise InvalidArgumentError(f"the input '{missing}' is missing; the model has {', '.join(inputs)}")
    return message


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name that is closest to an unknown one."""
    from difflib import get_close_matches  # imported here because only an error needs it

    names = list(known)
    close = get_close_matches(name, names, 1)
    return f"; did you mean '{close[0]}'?" if close else f"; there is {', '.join(names[:10])}" if names else ""


def _is_several(field: Field, value: Any, columns: bool) -> bool:
    """Return True if a value is a list of rows, which only models with ``columns`` take.

    Raises InvalidArgumentError if it is neither that nor one row.
    """
    if field.is_document:
        return columns and isinstance(value, list)
    depth, rank = _depth(value), len(field.dims)
    if field.is_scalar and depth < 2 and rank < 2 and (columns or not depth):
        return depth == 1
    if depth == rank or (columns and depth == rank + 1):
        return depth > rank
    if field.is_scalar and not depth:
        return False
    raise InvalidArgumentError(
        f"input '{field.tensor.name}': expected {_described(field)}{' or a list of them' if columns else ''}, got "
        f"{f'a list of depth {depth}' if depth else _kind_of(value)}"
        + ("" if columns else "; send several rows as a list of objects")
    )


def _described(field: Field) -> str:
    if field.is_scalar:
        return value_words(field.tensor.datatype)
    sizes = ", ".join("any" if size < 0 else str(size) for size in field.dims)
    return f"{values_words(field.tensor.datatype)} of shape [{sizes}]"


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list):
        depth += 1
        value = value[0] if value else None
    return depth


def _kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _of_records(records: Sequence[dict[str, Any]], interface: Interface) -> list[Part]:
    """Return the requests for rows. Raises InvalidArgumentError."""
    _check_rows(len(records))
    if not interface.max_batch_size:
        check_parts(len(records))
        return [Part(*request_of(_tensors(_columns([each]), interface, stacked=False)), 1) for each in records]
    names = records[0].keys()
    for index, each in enumerate(records):
        other = next(iter(names ^ each.keys()), None)
        if other is not None:
            has, lacks = (0, index) if other in names else (index, 0)
            raise InvalidArgumentError(
                f"row {has} has the input '{other}' and row {lacks} has not: send it in all rows"
            )
    return cut(_tensors(_columns(records), interface, stacked=True), interface.rows)


def _check_rows(count: int) -> None:
    if not count:
        raise InvalidArgumentError("the inputs have no rows: send at least one")
    if count > _MAX_ROWS:
        raise InvalidArgumentError(f"there are {count} rows, {_MAX_ROWS} are accepted in one request")


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the rows of each input; the records have the same names."""
    return {name: [each[name] for each in records] for name in records[0]}


def _tensors(
    columns: Mapping[str, list[Any]], interface: Interface, *, stacked: bool
) -> list[tuple[TensorInfo, Array]]:
    found = []
    for name, field in interface.inputs.items():
        if name in columns:
            rows = _array(columns[name], field)
            found.append((field.tensor, rows if stacked else rows[0]))
    return found


def _array(rows: list[Any], field: Field) -> Array:
    if field.is_document:
        array = np.empty(len(rows), object)
        array[:] = [orjson.dumps(row) for row in rows]
    else:
        array = array_of(rows, field.tensor)
    if field.is_scalar and array.ndim == 1:
        return array.reshape(len(rows), *[1] * len(field.dims))
    return array


# -- answers ----------------------------------------------------------------------------------------------------------


def encode_typed(question: Question, responses: Sequence[Response], interface: Interface) -> bytes:
    """Return the answer in the layout of its request.

    Raises InternalError if an output does not have one row for each row of the request.
    """
    columns: dict[str, list[Any]] = {}
    for response, part in zip(responses, question.parts, strict=True):
        for output in response.outputs:
            field = interface.outputs.get(output.name)
            rows = rows_of(output, part.instances, interface.rows)
            columns.setdefault(output.name, []).extend(_plain(row, field) for row in rows)
    if question.layout is Layout.ONE:
        answer: Any = {name: rows[0] for name, rows in columns.items()}
    elif question.layout is Layout.COLUMNS:
        answer = columns
    else:
        names = list(columns)
        answer = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if sum(output.data.nbytes for response in responses for output in response.outputs) <= LONG_BYTES:
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    text = dumps(answer)
    release(columns)
    release(answer)
    return text


def _plain(row: Any, field: Field | None) -> Any:
    """Return a row without the brackets of a single value, and a document parsed."""
    if field is None or not field.is_scalar:
        return row
    while isinstance(row, list) or (isinstance(row, np.ndarray) and row.ndim):
        row = row[0]
    if field.is_document and isinstance(row, str):
        try:
            return orjson.loads(row)
        except orjson.JSONDecodeError:
            return row
    return row.item() if isinstance(row, np.ndarray | np.generic) else row
