"""Arrays as CSV, JSON and .npy bodies and back; the law: claims are held against their length, no object is read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence

import numpy as np
import orjson

from remora.errors import RemoraError
from remora.messages import Array
from remora.protocols.json.reader import MAX_DEPTH
from remora.protocols.json.tensors import flatten

JSON = "application/json"
CSV = "text/csv"
NPY = "application/x-npy"
LINES = "application/jsonlines"

_CELLS_AT_ONCE = 65_536
_NPY_HEADER_LIMIT = 10_000
_TEXT_ROOM_BYTES = 16 << 20
"""As numpy's own, texts get the room of the longest each, 4 bytes a character; what would take more stays Python's."""


def tables_of_csv(body: bytes) -> Iterator[Array]:
    """The cells of a CSV body as texts, some rows at a time; empty lines at the end do not count. Raises ValueError.

    A field may not be longer than csv's own limit, 128 KiB. Texts take ten times the room of the numbers that they
    stand for and more: a body of a gigabyte, as asynchronous endpoints get them, is never all texts at once.
    """
    rows: list[list[str]] = []
    width, blank = 0, False
    try:
        for row in csv.reader(io.TextIOWrapper(io.BytesIO(body), "utf-8", newline="")):
            if not row:
                blank = True
                continue
            if blank or (width and len(row) != width):
                raise ValueError(
                    f"its rows have {0 if blank else min(width, len(row))} to {max(width, len(row))} cells"
                )
            width = len(row)
            rows.append(row)
            if len(rows) * width >= _CELLS_AT_ONCE:
                yield np.array(rows, object)
                rows = []
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(str(error)) from error
    if not width:
        raise ValueError("it has no rows")
    if rows:
        yield np.array(rows, object)


def array_of_csv(body: bytes) -> Array:
    """Numbers of a CSV body, float64, one row of the array for each line. Raises ValueError."""
    return np.concatenate([cells.astype(np.float64) for cells in tables_of_csv(body)])


def array_of_json(body: bytes | str) -> Array:
    """The values of a JSON body in the type that numpy gives them, but long texts as objects. Raises ValueError."""
    values = orjson.loads(body)
    try:
        flat, kinds = flatten(values, MAX_DEPTH) if isinstance(values, list) else ([], set[type]())
    except RemoraError as error:
        raise ValueError(error.message) from error
    if str not in kinds or 4 * len(flat) * max(len(item) for item in flat if type(item) is str) <= _TEXT_ROOM_BYTES:
        return np.array(values)
    array = np.array(values, object)
    if array.size != len(flat):
        raise ValueError("its rows differ in length")
    return array


def array_of_npy(body: bytes | memoryview) -> Array:
    """The array of a .npy body, a view of its bytes in C order. Raises ValueError for objects and for wrong sizes."""
    file = io.BytesIO(body[: _NPY_HEADER_LIMIT + 16])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_NPY_HEADER_LIMIT)
    except Exception as error:  # numpy parses the header as a Python literal: anything may be wrong with it
        raise ValueError(f"not a .npy file: {error}") from error
    if dtype.hasobject or any(type(dim) is not int or dim < 0 for dim in shape):  # to numpy True is a size as well
        raise ValueError("a .npy file of objects, or with sizes that are none, is not read")
    data = memoryview(body)[file.tell() :]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"it claims {math.prod(shape)} elements of {dtype} and has {len(data)} bytes of data")
    flat = np.frombuffer(data, dtype)
    return np.ascontiguousarray(flat.reshape(shape[::-1]).T) if fortran else flat.reshape(shape)


def npy_of_array(array: Array) -> bytes:
    """A .npy body. BYTES arrays become fixed-length byte strings. Raises ValueError for what has no such form."""
    if array.dtype.hasobject:
        array = np.array([_bytes_of(item) for item in array.reshape(-1)]).reshape(array.shape)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def csv_of_arrays(arrays: Sequence[Array]) -> bytes:
    """One line for each row; the arrays' cells one after the other. An array of one dimension is one column.

    Raises ValueError when the arrays have different numbers of rows.
    """
    tables = [array.reshape(len(array), math.prod(array.shape[1:])) for array in same_rows(arrays)]
    # As text numpy prints the shortest number that reads back as the same float of its width.
    columns = [(table.astype(str) if table.dtype.kind == "f" else table).tolist() for table in tables]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for row in zip(*columns, strict=True):
        writer.writerow([_cell(value) for part in row for value in part])
    return text.getvalue().encode()


def same_rows(arrays: Sequence[Array]) -> list[Array]:
    """The arrays, a single number as one row. Raises ValueError when they have different numbers of rows."""
    found = [np.atleast_1d(array) for array in arrays]
    if len({len(array) for array in found}) > 1:
        raise ValueError(f"the outputs have {', '.join(str(len(array)) for array in found)} rows")
    return found


def _cell(value: object) -> object:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _bytes_of(item: object) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()
