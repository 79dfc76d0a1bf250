"""Writers of scored rows as CSV, JSON lines, .npy and Parquet.

A segment is a complete file of its format. Segments of text or .npy are joined by copying their bytes. Those of Parquet
are written again in row groups that follow from the rows alone, so that the output does not tell where a run was
interrupted.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError, UnsupportedError
from remora.messages import DTYPES, Array, Tensor
from remora_tools.scoring import Values
from remora_tools.scoring.sources import import_parquet

ROW_COLUMN = "row"
"""Column with the number of the row in the input."""
_GROUP_ROWS = 65_536
_GROUP_BYTES = 64 << 20
_PIECE_ROWS = 1024
"""Rows after which the bytes of a row group are counted."""


class Sink(Protocol):
    """Writer of one segment into an open file, which the caller closes."""

    def write(self, rows: Array, kept: Mapping[str, Values], outputs: Sequence[Tensor]) -> None:
        """Append rows with their numbers, kept columns and outputs. Raises OSError, RemoraError."""

    def finish(self) -> None:
        """Write what is buffered, and the end of the format. Raises OSError."""


def make_sink(form: str, file: BinaryIO) -> Sink:
    """Return the writer of a segment in a format."""
    kinds: dict[str, type[Any]] = {"csv": CsvSink, "jsonl": JsonLinesSink, "npy": NpySink, "parquet": ParquetSink}
    sink: Sink = kinds[form](file)
    return sink


def join_segments(form: str, segments: Sequence[Path], file: BinaryIO) -> None:
    """Write the rows of all segments into one file.

    A segment may be an empty file, but not all. Raises OSError.
    """
    segments = [path for path in segments if path.stat().st_size]
    if form == "parquet":
        _join_parquet(segments, file)
    elif form == "npy":
        _join_npy(segments, file)
    else:
        _join_text(form, segments, file)


def _join_text(form: str, segments: Sequence[Path], file: BinaryIO) -> None:
    head = b""
    for path in segments:
        with path.open("rb") as segment:
            if form == "csv":
                line = segment.readline()
                if head and line != head:
                    raise InvalidArgumentError(
                        "outputs of different sizes have no common CSV columns: write JSON lines or Parquet"
                    )
                file.write(b"" if head else line)
                head = line
            shutil.copyfileobj(segment, file, 1 << 20)


def write_empty(form: str, kept: Sequence[str], outputs: Sequence[TensorInfo], file: BinaryIO) -> None:
    """Write a file without rows.

    Its columns are those of the outputs, which have the shapes of one row. A variable size counts
    as 1 where the format needs a number. Raises OSError.
    """
    if form == "parquet":
        _write_empty_parquet(kept, outputs, file)
        return
    tensors = []
    for each in outputs:
        shape = [0, *(1 if size < 0 else size for size in each.shape)]
        tensors.append(Tensor(each.name, each.datatype, np.empty(shape, DTYPES[each.datatype])))
    # It needs no `finish`, because the number of rows in its header is right.
    make_sink(form, file).write(np.arange(0), {name: [] for name in kept}, tensors)


# -- text -------------------------------------------------------------------------------------------------------------


def value_texts(data: Array, *, flat: bool) -> list[bytes]:
    """Return the values of each row as JSON text, without brackets if ``flat``."""
    import orjson

    count = len(data)
    if not data.size:
        return [b"" if flat else b"[]"] * count
    table = data.reshape(count, -1) if flat or data.ndim < 3 else data
    text = orjson.dumps(np.ascontiguousarray(table), option=orjson.OPT_SERIALIZE_NUMPY)
    if table.ndim == 2:
        rows = text[2:-2].split(b"],[")
        return rows if flat or data.ndim < 2 else [b"[%b]" % row for row in rows]
    return [orjson.dumps(np.ascontiguousarray(row), option=orjson.OPT_SERIALIZE_NUMPY) for row in table]


class JsonLinesSink:
    """One JSON object per row. Numbers that JSON cannot hold (NaN, infinity) are null."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Array, kept: Mapping[str, Values], outputs: Sequence[Tensor]) -> None:
        import orjson

        pieces: list[Sequence[bytes]] = [value_texts(rows, flat=False)]
        names = [ROW_COLUMN]
        for name, values in kept.items():
            names.append(name)
            pieces.append([orjson.dumps(_plain(value), option=orjson.OPT_SERIALIZE_NUMPY) for value in values])
        for tensor in outputs:
            names.append(tensor.name)
            data = one_value_flat(tensor)
            if data.dtype == object:
                pieces.append([orjson.dumps(_plain(value)) for value in data])
            else:
                pieces.append(value_texts(data, flat=False))
        form = b"{" + b",".join(orjson.dumps(name).replace(b"%", b"%%") + b":%b" for name in names) + b"}\n"
        self._file.write(b"".join([form % row for row in zip(*pieces, strict=True)]))

    def finish(self) -> None:
        """Do nothing: all lines are complete."""


class CsvSink:
    """CSV with a header line.

    An output of several values has a column for each, NAME_0, NAME_1 ...
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._widths: list[int] | None = None

    def write(self, rows: Array, kept: Mapping[str, Values], outputs: Sequence[Tensor]) -> None:
        arrays = [one_value_flat(tensor) for tensor in outputs]
        widths = [math.prod(array.shape[1:]) for array in arrays]
        if self._widths is None:
            self._widths = widths
            names = [ROW_COLUMN, *kept]
            for tensor, array, width in zip(outputs, arrays, widths, strict=True):
                names += [tensor.name] if array.ndim == 1 else [f"{tensor.name}_{place}" for place in range(width)]
            self._file.write(_csv_fields(names) + b"\n")
        if self._widths != widths:
            raise InvalidArgumentError(
                f"the rows from number {int(rows[0])} on have outputs of another size, which CSV columns cannot hold: "
                "write JSON lines or Parquet"
            )
        pieces: list[Sequence[bytes]] = [value_texts(rows, flat=True)]
        pieces += [[_csv_fields([value]) for value in values] for values in kept.values()]
        pieces += [_csv_texts(array) for array in arrays]
        self._file.write(b"".join([b",".join(row) + b"\n" for row in zip(*pieces, strict=True)]))

    def finish(self) -> None:
        """Do nothing: all lines are complete."""


def _csv_texts(array: Array) -> list[bytes]:
    table = array.reshape(len(array), math.prod(array.shape[1:]))
    if table.dtype == object:
        return [_csv_fields(row.tolist()) for row in table]
    if table.dtype.kind == "f" and not np.isfinite(table).all():
        return [",".join(str(value) for value in row).encode() for row in table]
    return value_texts(table, flat=True)


_QUOTED = re.compile(r'[",\r\n]')


def _csv_fields(values: Sequence[object]) -> bytes:
    if len(values) == 1 and isinstance(value := values[0], str | int | float) and not _QUOTED.search(str(value)):
        return str(value).encode("utf-8", "surrogateescape") if value != "" else b'""'
    line = io.StringIO()
    texts = [value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value for value in values]
    csv.writer(line, lineterminator="").writerow(texts)
    return line.getvalue().encode("utf-8", "surrogateescape")


def one_value_flat(tensor: Tensor) -> Array:
    """Return an output's data with one dimension if each row has one value, and BF16 as float32."""
    data = tensor.data
    if tensor.datatype == "BF16":
        data = (data.astype("<u4") << 16).view("<f4")
    if tensor.datatype == "FP16":
        data = data.astype("<f4")
    return data.reshape(len(data)) if data.ndim > 1 and math.prod(data.shape[1:]) == 1 else data


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(each) for each in value.tolist()]
    return [_plain(each) for each in value] if isinstance(value, list) else value


# -- .npy -------------------------------------------------------------------------------------------------------------


class NpySink:
    """The values of one output as one array. Bad rows are left out."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rows = 0
        self._like: Array | None = None

    def write(self, rows: Array, kept: Mapping[str, Values], outputs: Sequence[Tensor]) -> None:
        if kept or len(outputs) != 1 or outputs[0].data.dtype == object:
            raise UnsupportedError(
                ".npy holds the numbers of one output: choose it with --output NAME, without --keep, or write Parquet"
            )
        data = outputs[0].data
        if self._like is None:
            self._like = data[:0]
            _write_npy_header(self._file, 0, self._like)
        elif data.shape[1:] != self._like.shape[1:]:
            raise InvalidArgumentError(
                f"the rows from number {int(rows[0])} on have the shape {list(data.shape[1:])}, not "
                f"{list(self._like.shape[1:])}, which one array cannot hold"
            )
        self._file.write(np.ascontiguousarray(data).data)
        self._rows += len(data)

    def finish(self) -> None:
        """Write the number of rows into the header."""
        if self._like is not None:
            self._file.seek(0)
            _write_npy_header(self._file, self._rows, self._like)
            self._file.seek(0, io.SEEK_END)


def _write_npy_header(file: BinaryIO, rows: int, like: Array) -> None:
    # numpy pads the header for growth of the first dimension, so that it has the same length for any number of rows.
    form = {"descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False, "shape": (rows, *like.shape[1:])}
    np.lib.format.write_array_header_1_0(file, form)


def _join_npy(segments: Sequence[Path], file: BinaryIO) -> None:
    rows, like = 0, None
    for path in segments:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        rows += len(array)
        like = np.empty((0, *array.shape[1:]), array.dtype) if like is None else like
        if array.shape[1:] != like.shape[1:]:
            raise InvalidArgumentError("the outputs differ in shape, so that one array cannot hold them")
    assert like is not None, "there is a segment"
    _write_npy_header(file, rows, like)
    for path in segments:
        with path.open("rb") as segment:
            np.lib.format.read_magic(segment)
            np.lib.format.read_array_header_1_0(segment)
            shutil.copyfileobj(segment, file, 1 << 20)


# -- Parquet ----------------------------------------------------------------------------------------------------------


class ParquetSink:
    """Parquet in row groups of some ten thousand rows, buffered in memory until a group is full."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._writer: Any = None
        self._tables: list[Any] = []
        self._rows = 0
        self._bytes = 0

    def write(self, rows: Array, kept: Mapping[str, Values], outputs: Sequence[Tensor]) -> None:
        import pyarrow

        columns = {ROW_COLUMN: arrow_column(rows)}
        columns |= {
            name: arrow_column(values) if isinstance(values, np.ndarray) else pyarrow.array(values)
            for name, values in kept.items()
        }
        columns |= {tensor.name: arrow_column(one_value_flat(tensor)) for tensor in outputs}
        table = pyarrow.table(columns)
        self._tables.append(table)
        self._rows += len(rows)
        self._bytes += table.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if not self._tables:
            return
        try:
            table = pyarrow.concat_tables(self._tables, promote_options="permissive")
            if self._writer is None:
                self._writer = import_parquet("the output").ParquetWriter(self._file, table.schema)
            elif table.schema != self._writer.schema:
                self._widen(pyarrow.unify_schemas([self._writer.schema, table.schema], promote_options="permissive"))
            self._writer.write_table(table.cast(self._writer.schema))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
            raise InvalidArgumentError(f"the outputs do not fit into the same columns: {error}") from error
        self._tables, self._rows, self._bytes = [], 0, 0

    def _widen(self, schema: Any) -> None:
        """Write the segment again in a schema that also holds later rows."""
        if schema == self._writer.schema:
            return
        parquet = import_parquet("the output")
        self._writer.close()
        self._file.seek(0)
        table = parquet.read_table(self._file).cast(schema)
        self._file.seek(0)
        self._file.truncate()
        self._writer = parquet.ParquetWriter(self._file, schema)
        self._writer.write_table(table)

    def finish(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()


def arrow_column(data: Array) -> Any:
    """Return an array as an Arrow column, with fixed-size lists for the further dimensions.

    Numbers are wrapped, because `pyarrow.array` imports pandas, which takes longer than many runs.
    """
    import pyarrow

    if data.dtype == object:
        return pyarrow.array(data.tolist())
    flat = np.ascontiguousarray(data).reshape(-1)
    if flat.dtype.kind in "iuf" and flat.dtype.isnative:
        kind = pyarrow.from_numpy_dtype(flat.dtype)
        column = pyarrow.Array.from_buffers(kind, flat.size, [None, pyarrow.py_buffer(flat)])
    else:
        column = pyarrow.array(flat)
    for size in reversed(data.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column


def _write_empty_parquet(kept: Sequence[str], outputs: Sequence[TensorInfo], file: BinaryIO) -> None:
    import pyarrow

    fields = [(ROW_COLUMN, pyarrow.int64()), *((name, pyarrow.null()) for name in kept)]
    for each in outputs:
        like = one_value_flat(Tensor(each.name, each.datatype, np.empty(0, DTYPES[each.datatype])))
        kind = pyarrow.binary() if like.dtype == object else pyarrow.from_numpy_dtype(like.dtype)
        if math.prod(each.shape) != 1:
            for size in reversed(each.shape):
                kind = pyarrow.list_(kind, -1 if like.dtype == object else size)  # -1 for any length
        fields.append((each.name, kind))
    import_parquet("the output").write_table(pyarrow.schema(fields).empty_table(), file)


def _join_parquet(segments: Sequence[Path], file: BinaryIO) -> None:
    import pyarrow

    parquet = import_parquet("the output")
    try:
        # A kept column may have been empty in one segment, or without fractions.
        schemas = [parquet.read_schema(path) for path in segments]
        schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
        with parquet.ParquetWriter(file, schema) as writer:
            for group in _row_groups(_tables_of(segments, schema)):
                writer.write_table(group, row_group_size=len(group))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        raise InvalidArgumentError(f"the outputs do not fit into the same columns: {error}") from error


def _tables_of(segments: Sequence[Path], schema: Any) -> Iterator[Any]:
    parquet = import_parquet("the output")
    for path in segments:
        with parquet.ParquetFile(path) as segment:
            for number in range(segment.num_row_groups):
                yield segment.read_row_group(number).cast(schema)


def _row_groups(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield the row groups of the output, which do not depend on the tables' boundaries."""
    import pyarrow

    parts: list[Any] = []
    rows = size = 0
    for piece in _pieces(tables):
        parts.append(piece)
        rows += len(piece)
        size += _value_bytes(piece)
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pyarrow.concat_tables(parts).combine_chunks()
            parts, rows, size = [], 0, 0
    if parts:
        yield pyarrow.concat_tables(parts).combine_chunks()


def _pieces(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield tables of `_PIECE_ROWS` rows, and one of the rest."""
    import pyarrow

    rest = None
    for table in tables:
        whole = table if rest is None else pyarrow.concat_tables([rest, table])
        end = len(whole) - len(whole) % _PIECE_ROWS
        yield from (whole.slice(begin, _PIECE_ROWS) for begin in range(0, end, _PIECE_ROWS))
        rest = whole.slice(end)
    if rest is not None and len(rest):
        yield rest


def _value_bytes(table: Any) -> int:
    """Return the bytes of a table's values, which do not depend on its buffers."""
    import pyarrow
    import pyarrow.compute

    size, waiting = 0, [chunk for column in table.columns for chunk in column.chunks]
    while waiting:
        array = waiting.pop()
        if pyarrow.types.is_nested(array.type) and hasattr(array, "flatten"):
            inner = array.flatten()
            waiting += inner if isinstance(inner, list) else [inner]
        elif _has_lengths(array.type):
            size += pyarrow.compute.sum(pyarrow.compute.binary_length(array)).as_py() or 0
        size += len(array) * _width(array.type)
    return size


def _width(kind: Any) -> int:
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:  # a type of variable width, whose lengths take this
        return 8


def _has_lengths(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_string(kind) or types.is_large_string(kind)
    )
