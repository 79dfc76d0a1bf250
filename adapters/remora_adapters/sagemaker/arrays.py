"""Conversion between arrays and CSV, JSON and .npy bodies.

Invariant: declared sizes are checked against the body's length, and no pickled object is read.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence

import numpy as np
import orjson

from remora.api.http import MAX_DEPTH, flatten
from remora.errors import RemoraError
from remora.messages import Array

JSON = "application/json"
CSV = "text/csv"
NPY = "application/x-npy"
LINES = "application/jsonlines"

_CELLS_AT_ONCE = 65_536
_NPY_HEADER_LIMIT = 10_000
_TEXT_ROOM_BYTES = 16 << 20
"""Memory limit of a numpy text array; larger arrays hold Python strings.

Each text takes 4 bytes per character of the longest.
"""


def tables_of_csv(body: bytes) -> Iterator[Array]:
    """Yield the cells of a CSV body as texts, some rows at a time. Raises ValueError.

    Empty lines at the end and a byte order mark are ignored. Texts take at least ten times the memory of their numbers,
    so a body of a gigabyte (asynchronous endpoints) is never converted at once.
    """
    rows: list[list[str]] = []
    width, blank = 0, False
    csv.field_size_limit(max(csv.field_size_limit(), len(body)))  # the limit of the body is enough
    try:
        for row in csv.reader(io.TextIOWrapper(io.BytesIO(body), "utf-8-sig", newline="")):
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
    """Return the numbers of a CSV body as float64, one row per line. Raises ValueError."""
    return np.concatenate([cells.astype(np.float64) for cells in tables_of_csv(body)])


def array_of_json(body: bytes | str) -> Array:
    """Return the values of a JSON body in numpy's type, long texts as objects.

    Raises ValueError.
    """
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
    """Return the array of a .npy body as a view in C order.

    Raises ValueError for objects and wrong sizes.
    """
    file = io.BytesIO(body[: _NPY_HEADER_LIMIT + 16])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_NPY_HEADER_LIMIT)
    except Exception as error:  # numpy parses the header as a Python literal, which can raise anything
        raise ValueError(f"not a .npy file: {error}") from error
    if dtype.hasobject or any(type(dim) is not int or dim < 0 for dim in shape):  # numpy accepts True as a size
        raise ValueError("a .npy file with objects or invalid sizes is not supported")
    data = memoryview(body)[file.tell() :]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"it claims {math.prod(shape)} elements of {dtype} and has {len(data)} bytes of data")
    flat = np.frombuffer(data, dtype)
    return np.ascontiguousarray(flat.reshape(shape[::-1]).T) if fortran else flat.reshape(shape)


def npy_of_array(array: Array) -> bytes:
    """Return a .npy body, with BYTES as fixed-length byte strings.

    Raises ValueError if unsupported.
    """
    if array.dtype.hasobject:
        array = np.array([_bytes_of(item) for item in array.reshape(-1)]).reshape(array.shape)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def csv_of_arrays(arrays: Sequence[Array]) -> bytes:
    """Return one line per row with the cells of all arrays, a vector being one column.

    Raises ValueError for arrays with different numbers of rows.
    """
    tables = [array.reshape(len(array), math.prod(array.shape[1:])) for array in same_rows(arrays)]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    step = max(1, _CELLS_AT_ONCE // max(1, sum(table.shape[1] for table in tables)))
    for at in range(0, len(tables[0]) if tables else 0, step):  # in steps, between which other threads may run
        parts = [table[at : at + step] for table in tables]
        # As text numpy prints the shortest number that reads back as the same float of its width.
        columns = [(part.astype(str) if part.dtype.kind == "f" else part).tolist() for part in parts]
        for row in zip(*columns, strict=True):
            writer.writerow([_cell(value) for part in row for value in part])
    return text.getvalue().encode()


def same_rows(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays, a scalar as one row. Raises ValueError for different numbers of rows."""
    found = [np.atleast_1d(array) for array in arrays]
    if len({len(array) for array in found}) > 1:
        raise ValueError(f"the outputs have {', '.join(str(len(array)) for array in found)} rows")
    return found


def _cell(value: object) -> object:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _bytes_of(item: object) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()
