"""Conversion of bodies that are not V2 to V2 requests by the model's signature.

The functions are pure. CSV, JSON lines and .npy become the model's inputs, in chunks of at most its batch size; images
and plain text become the single element of a BYTES input. The answer has the form that the client accepts.

Invariant: rows keep their order, one output per input, as batch transform requires.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson

from remora.api.http import MAX_DEPTH, flatten
from remora.calls import TensorInfo
from remora.errors import RemoraError
from remora.messages import DTYPES, Array, Buffer
from remora.protocols.rest.answer import Headers, HttpAnswer
from remora_adapters.sagemaker.arrays import (
    CSV,
    JSON,
    LINES,
    NPY,
    array_of_npy,
    csv_of_arrays,
    npy_of_array,
    same_rows,
    tables_of_csv,
)

_WHOLE = ("text/plain", "application/x-image")
_MAX_PARTS = 1 << 16
"""Limit of the requests per body, because a line of two bytes may make one."""
_LINES_AT_ONCE = 4_096
_LINE = re.compile(rb"[^\r\n]+")
_NUMBERS = {bool, int, float}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


class Part(NamedTuple):
    """V2 request, with the length of the JSON before the tensors or None for JSON only."""

    body: bytes
    json_length: int | None


class Translated(NamedTuple):
    """V2 requests of a body, with ``own`` True for lines that were V2 requests already."""

    parts: list[Part]
    media: str
    own: bool = False


def is_translated(media: str) -> bool:
    """Return True for a content type that this module converts."""
    return media in (CSV, LINES, NPY, *_WHOLE) or media.startswith("image/")


def translate(media: str, body: Buffer, inputs: Sequence[TensorInfo], max_rows: int) -> Translated:
    """Return the V2 requests for a body and a model with these inputs.

    ``max_rows`` is the model's batch size, 0 without batching. Raises ValueError for an invalid body or one that does
    not fit the inputs.
    """
    if media == CSV:
        return Translated(_chunks(_columns(tables_of_csv(bytes(body)), inputs, max_rows), max_rows), media)
    if media == LINES:
        return _lines(bytes(body), inputs, max_rows)
    (row,) = _only(inputs, media)
    if media == NPY:
        array = _cast(array_of_npy(memoryview(body)), row)
        batched = array[None] if max_rows and array.ndim == len(row.shape) - 1 else array
        if max_rows and not batched.ndim:
            raise ValueError("an array of no dimensions has no rows")
        return Translated(_chunks({row: batched}, max_rows), media)
    shape = tuple(1 for _ in row.shape)
    if row.datatype == "BYTES":
        element = np.empty(shape, object)
        element[(0,) * len(shape)] = bytes(body)
        return Translated(_chunks({row: element}, max_rows), media)
    if row.datatype == "UINT8":
        octets = np.frombuffer(body, np.uint8).reshape((*shape[:-1], -1))
        return Translated(_chunks({row: octets}, max_rows), media)
    raise ValueError(f"the model's input '{row.name}' is {row.datatype}: send its values; {media} needs BYTES or UINT8")


def answer_of(translated: Translated, answers: Sequence[HttpAnswer], accept: str) -> HttpAnswer:
    """Return the successful answers of all parts as one, in a form that ``accept`` names.

    The default is the body's form. Raises ValueError for outputs without such a form.
    """
    if translated.own:
        return _answer(LINES, b"".join(b"".join(answer.body) + b"\n" for answer in answers))
    names, arrays = _joined([_outputs(answer) for answer in answers])
    media = _accepted(accept, translated.media)
    if media == CSV:
        return _answer(CSV, csv_of_arrays(arrays))
    if media == NPY:
        if len(arrays) != 1:
            raise ValueError(f"{NPY} holds one array and the model gives {len(arrays)}: {', '.join(names)}")
        return _answer(NPY, npy_of_array(arrays[0]))
    if media == LINES:
        rows = same_rows(arrays)
        return _answer(LINES, b"".join(_line(names, rows, at) for at in range(len(rows[0]) if rows else 0)))
    listed = {name: _plain(array) for name, array in zip(names, arrays, strict=True)}
    return _answer(JSON, orjson.dumps(listed))


# -- requests -------------------------------------------------------------------------------------------------------


def _only(inputs: Sequence[TensorInfo], media: str) -> Sequence[TensorInfo]:
    if len(inputs) != 1:
        raise ValueError(f"{media} is for models with one input; this one has {', '.join(row.name for row in inputs)}")
    return inputs


def _columns(tables: Iterator[Array], inputs: Sequence[TensorInfo], max_rows: int) -> dict[TensorInfo, Array]:
    """Convert tables of cells to the model's inputs, which take consecutive columns."""
    shapes = [_shape_of_one(row, max_rows) for row in inputs]
    sizes: list[int] = []
    read: dict[TensorInfo, list[Array]] = {row: [] for row in inputs}
    for cells in tables:
        sizes = sizes or _sizes(shapes, cells.shape[1])
        at = 0
        for (row, pieces), shape, size in zip(read.items(), shapes, sizes, strict=True):
            pieces.append(_parsed(cells[:, at : at + size], row).reshape(len(cells), *shape))
            at += size
    return _whole(read, max_rows)


def _shape_of_one(row: TensorInfo, max_rows: int) -> tuple[int, ...]:
    """Return the shape of one record in an input."""
    return row.shape[1:] if max_rows or row.shape[:1] == (-1,) else row.shape


def _whole(read: dict[TensorInfo, list[Array]], max_rows: int) -> dict[TensorInfo, Array]:
    """Concatenate the blocks of records of each input."""
    found: dict[TensorInfo, Array] = {}
    for row, pieces in read.items():
        array = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        pieces.clear()
        if not max_rows and row.shape[:1] != (-1,):
            if len(array) != 1:
                raise ValueError(f"the model takes one row at a time, the body has {len(array)}")
            array = array.reshape(array.shape[1:])  # array[0] of a text without a shape would not be an array
        found[row] = array
    return found


def _sizes(shapes: Sequence[Sequence[int]], width: int) -> list[int]:
    """Return the number of cells for each input, or all for a single input of variable shape."""
    sizes = [math.prod(shape) if -1 not in shape else -1 for shape in shapes]
    if -1 in sizes:
        if len(sizes) > 1 or list(shapes[0]).count(-1) > 1:
            raise ValueError("the model's inputs have variable shapes: the columns are ambiguous")
        return [width]
    if sum(sizes) != width:
        raise ValueError(f"a row has {width} cells and the model takes {sum(sizes)}")
    return sizes


def _parsed(cells: Array, row: TensorInfo) -> Array:
    """Convert cells (text or JSON values) to an input's datatype. Raises ValueError."""
    if row.datatype == "BYTES":
        flat = [value.encode() if isinstance(value, str) else orjson.dumps(value) for value in cells.ravel().tolist()]
        found = np.empty(len(flat), object)
        found[:] = flat
        return found.reshape(cells.shape)
    if row.datatype == "BOOL":
        words = [str(value).strip().lower() for value in cells.ravel().tolist()]
        wrong = next((word for word in words if word not in _BOOLS), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:40]!r} is neither true nor false")
        return np.array([_BOOLS[word] for word in words], bool).reshape(cells.shape)
    dtype = DTYPES[row.datatype]
    if row.datatype == "BF16":
        raise ValueError(f"the model's input '{row.name}' is BF16: send it as a V2 request with binary data")
    if dtype.kind == "f":
        return cells.astype(dtype)
    wide = np.uint64 if row.datatype == "UINT64" else np.int64
    # Compare numbers before the cast, because it would wrap them around; numpy refuses invalid texts.
    values = cells.astype(wide) if cells.dtype.kind in "USO" else _integral(cells)
    bounds = np.iinfo(dtype)
    if values.size and not bounds.min <= int(values.min()) <= int(values.max()) <= bounds.max:
        raise ValueError(f"the model's input '{row.name}' is {row.datatype}: a value is out of range")
    return values.astype(dtype)


def _integral(values: Array) -> Array:
    if values.dtype.kind == "f" and not np.array_equal(values, np.trunc(values)):
        raise ValueError("expected integers, got fractions")
    return values


def _cast(array: Array, row: TensorInfo) -> Array:
    """Convert an array to an input's datatype without loss except float precision.

    Raises ValueError.
    """
    dtype = DTYPES[row.datatype]
    if row.datatype == "BYTES":
        if array.dtype.kind not in "SU":
            raise ValueError(f"the model's input '{row.name}' is BYTES and the array {array.dtype}")
        return array.astype(object) if array.dtype.kind == "S" else _parsed(array, row)
    if array.dtype == dtype:
        return array
    if array.dtype.kind == "f" == dtype.kind or np.can_cast(array.dtype, dtype):
        return array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iuf":
        return _parsed(array, row)
    raise ValueError(f"the model's input '{row.name}' is {row.datatype} and the array {array.dtype}")


def _lines(body: bytes, inputs: Sequence[TensorInfo], max_rows: int) -> Translated:
    own: list[Part] = []
    read: dict[TensorInfo, list[Array]] = {}
    for block in _records(body):
        if not read and all(_is_v2(record, inputs) for _, record in block):
            own += [Part(line, None) for line, _ in block]
            _check_parts(len(own))
        elif own:
            raise ValueError("some of its lines are V2 requests, and others are not")
        else:
            for row, values in _by_input([record for _, record in block], inputs).items():
                read.setdefault(row, []).append(_stacked(values, row, _shape_of_one(row, max_rows)))
    if own:
        return Translated(own, LINES, own=True)
    return Translated(_chunks(_whole(read, max_rows), max_rows), LINES)


def _records(body: bytes) -> Iterator[list[tuple[bytes, Any]]]:
    """Yield lines with their JSON values in blocks, because all objects take much memory."""
    lines = (match[0] for match in _LINE.finditer(body) if match[0].strip())
    block = list(islice(lines, _LINES_AT_ONCE))
    if not block:
        raise ValueError("it has no lines")
    while block:
        try:
            yield [(line, orjson.loads(line)) for line in block]
        except orjson.JSONDecodeError as error:
            raise ValueError(f"a line is not JSON: {error}") from error
        block = list(islice(lines, _LINES_AT_ONCE))


def _by_input(records: list[Any], inputs: Sequence[TensorInfo]) -> dict[TensorInfo, list[Any]]:
    """Return the records' values by input, where plain values belong to the only input."""
    if not all(isinstance(record, dict) for record in records):
        (row,) = _only(inputs, LINES)
        return {row: records}
    names = {row.name for row in inputs}
    strange = next((record for record in records if set(record) != names), None)
    if strange is not None:
        raise ValueError(f"a line has {', '.join(map(str, strange))} and the model takes {', '.join(sorted(names))}")
    return {row: [record[row.name] for record in records] for row in inputs}


def _is_v2(record: object, inputs: Sequence[TensorInfo]) -> bool:
    """Return True if a line is a V2 request, whose ``inputs`` is a list of objects."""
    if not isinstance(record, dict) or "inputs" not in record:
        return False
    inputs_value = record["inputs"]
    objects = isinstance(inputs_value, list) and all(isinstance(each, dict) for each in inputs_value)
    return objects or all(row.name != "inputs" for row in inputs)


def _stacked(values: list[Any], row: TensorInfo, shape: tuple[int, ...]) -> Array:
    """Return one value per record, of that shape, in an input's datatype."""
    try:
        flat, kinds = flatten(values, MAX_DEPTH)
    except RemoraError as error:
        raise ValueError(error.message) from error
    if row.datatype == "BYTES" or kinds == {str}:
        array = np.array(values, object)
        if array.size != len(flat):  # numpy keeps ragged rows as objects
            raise ValueError(f"the values for '{row.name}' differ in number between rows")
    elif kinds <= _NUMBERS:
        array = np.array(values)
    else:
        raise ValueError(f"the values for '{row.name}' are not numbers")
    if -1 not in shape and array.size == len(values) * math.prod(shape):
        array = array.reshape(len(values), *shape)
    return _parsed(array, row)


def _chunks(columns: dict[TensorInfo, Array], max_rows: int) -> list[Part]:
    """Return V2 requests of at most ``max_rows`` rows each, or one without batching."""
    if not columns:
        raise ValueError("the model has no inputs: send a V2 request")
    rows = len(next(iter(columns.values()))) if max_rows else 1
    if not max_rows:
        return [_part(columns)]
    _check_parts(-(-rows // max_rows))
    return [
        _part({row: array[at : at + max_rows] for row, array in columns.items()})
        for at in range(0, max(rows, 1), max_rows)
    ]


def _check_parts(count: int) -> None:
    if count > _MAX_PARTS:
        raise ValueError(
            f"it needs {count} requests of the model's batch size, and the limit is {_MAX_PARTS}: send fewer "
            "rows, or raise the model's max_batch_size"
        )


def _part(columns: dict[TensorInfo, Array]) -> Part:
    pieces = [_serialized(array) for array in columns.values()]
    inputs = [
        {
            "name": row.name,
            "datatype": row.datatype,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(piece)},
        }
        for (row, array), piece in zip(columns.items(), pieces, strict=True)
    ]
    header = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return Part(b"".join((header, *pieces)), len(header))


def _serialized(array: Array) -> bytes:
    if array.dtype.kind == "O":
        return b"".join(len(item).to_bytes(4, "little") + item for item in array.ravel().tolist())
    return np.ascontiguousarray(array).tobytes()


# -- answers --------------------------------------------------------------------------------------------------------


def _accepted(accept: str, media: str) -> str:
    for entry in accept.lower().split(","):
        media_range = entry.partition(";")[0].strip()
        if media_range in (JSON, CSV, NPY, LINES):
            return media_range
    return media if media in (CSV, NPY, LINES) else JSON


def _outputs(answer: HttpAnswer) -> list[tuple[str, Array]]:
    """Return the outputs of a V2 answer of this server."""
    at = len(answer.body[0])  # the JSON
    whole = b"".join(answer.body)
    header = orjson.loads(whole[:at])
    found = []
    for output in header["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        found.append((output["name"], _array(output, whole[at : at + size])))
        at += size
    return found


def _array(output: dict[str, Any], data: bytes) -> Array:
    shape, datatype = output["shape"], output["datatype"]
    if datatype == "BF16":  # the upper half of a float
        return (np.frombuffer(data, DTYPES[datatype]).astype("<u4") << 16).view("<f4").reshape(shape)
    if datatype != "BYTES":
        return np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    items, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    found = np.empty(len(items), object)
    found[:] = items
    return found.reshape(shape)


def _joined(answers: list[list[tuple[str, Array]]]) -> tuple[list[str], list[Array]]:
    names = [name for name, _ in answers[0]]
    arrays = [[answer[at][1] for answer in answers] for at in range(len(names))]
    return names, [same[0] if len(same) == 1 else np.concatenate(same) for same in arrays]


def _line(names: list[str], arrays: list[Array], at: int) -> bytes:
    row: Any = {name: _plain(array[at : at + 1])[0] for name, array in zip(names, arrays, strict=True)}
    return orjson.dumps(row if len(names) > 1 else row[names[0]]) + b"\n"


def _plain(array: Array) -> list[Any]:
    """Return an array as JSON values, with null for floats without a JSON form."""
    if array.dtype.kind != "O":
        listed: list[Any] = array.tolist()
        return listed
    flat = [item.decode("utf-8", "replace") for item in array.ravel().tolist()]
    found = np.empty(len(flat), object)
    found[:] = flat
    nested: list[Any] = found.reshape(array.shape).tolist()
    return nested


def _answer(media: str, body: bytes) -> HttpAnswer:
    headers: Headers = ((b"Content-Type", media.encode()),)
    return HttpAnswer(200, headers, [body])
