"""Readers of CSV, JSON lines, .npy and Parquet files, in chunks of rows."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from remora.errors import InvalidArgumentError, RemoraError, UnsupportedError
from remora.messages import Array
from remora.system.install_advice import install_command
from remora.system.json_text import read_json
from remora_tools.scoring import CHUNK_BYTES, Chunk, Refusal, Source, Values, format_of

ARRAY_COLUMN = "array"
"""Name of the only column of an .npy file."""
_MOST_COLUMNS = 100_000
_ROWS_AT_A_TIME = 16
_PIECE_BYTES = 64 << 10
_Row = TypeVar("_Row")


def open_source(file: BinaryIO, name: str, size: int) -> Source:
    """Return the reader for a file by the suffix of ``name``.

    Args:
        file: seekable, open at its start.
        size: bytes of the file.

    Raises InvalidArgumentError for a damaged file, UnsupportedError without pyarrow.
    """
    match format_of(name):
        case "csv":
            return CsvSource(file, name, size)
        case "jsonl":
            return JsonLinesSource(file, name, size)
        case "npy":
            return NpySource(file, name)
        case _:
            return ParquetSource(file, name)


class _TextSource:
    """Lines of a text file, with the share that has been read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def _take(self, rows: Iterator[_Row], size: int, most_bytes: int) -> list[_Row]:
        """Return the next ``size`` rows, fewer if they are longer than ``most_bytes``."""
        taken: list[_Row] = []
        end = self._file.tell() + most_bytes
        while len(taken) < size:
            before = len(taken)
            taken += islice(rows, min(_ROWS_AT_A_TIME, size - before))
            if len(taken) == before or self._file.tell() >= end:
                break
        return taken

    def fraction(self) -> float:
        return min(self._file.tell() / self._size, 1.0) if self._size else 1.0

    def close(self) -> None:
        self._file.close()


class CsvSource(_TextSource):
    """CSV in UTF-8 with a header line. Blank lines do not count as rows."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        super().__init__(file, size)
        self._name = name
        # Bytes that are not UTF-8 reach a text input unchanged; in a number they make the row a bad row.
        text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        self._lines = csv.reader(text, strict=True)
        self.columns: Sequence[str] = self._next_row() or []
        if not self.columns:
            raise InvalidArgumentError(f"'{name}' is empty: expected a header line with the names of the columns")
        if len(set(self.columns)) < len(self.columns):
            raise InvalidArgumentError(f"'{name}': the header line names a column twice: {', '.join(self.columns)}")

    def _next_row(self) -> list[str] | None:
        try:
            return next(filter(None, self._lines), None)
        except csv.Error as error:
            raise InvalidArgumentError(f"'{self._name}' line {self._lines.line_num} is not CSV: {error}") from error

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        place_of = {name: place for place, name in enumerate(self.columns)}
        places = [place_of[name] for name in wanted]
        for _ in range(first):
            if self._next_row() is None:
                return
        while True:
            try:
                rows = self._take(filter(None, self._lines), size, most_bytes)
            except csv.Error as error:
                raise InvalidArgumentError(f"'{self._name}' line {self._lines.line_num} is not CSV: {error}") from error
            if not rows:
                return
            count = len(self.columns)
            numbers = np.arange(first, first + len(rows))
            refused = [
                Refusal(first + place, f"the line has {len(row)} values, the header line {count}", row)
                for place, row in enumerate(rows)
                if len(row) != count
            ]
            if refused:
                numbers = numbers[[len(row) == count for row in rows]]
                rows = [row for row in rows if len(row) == count]
            columns = {name: [row[place] for row in rows] for name, place in zip(wanted, places, strict=True)}
            first += len(rows) + len(refused)
            yield Chunk(numbers, columns, refused, first)


class JsonLinesSource(_TextSource):
    """JSON objects, one per line.

    The columns are the members of the first one. Blank lines do not count as rows.
    """

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        super().__init__(file, size)
        head = next((line for line in file if line.strip()), b"")
        try:
            document = read_json(head or b"{}")
        except ValueError as error:
            raise InvalidArgumentError(f"the first line of '{name}' is not JSON: {error}") from error
        if not isinstance(document, dict) or not document:
            raise InvalidArgumentError(f"the first line of '{name}' is not a JSON object with members")
        self.columns: Sequence[str] = list(document)
        file.seek(0)

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        from orjson import loads

        lines = filter(bytes.strip, self._file)
        for _ in islice(lines, first):
            pass
        while texts := self._take(lines, size, most_bytes):
            numbers, documents, refused = [], [], []
            for number, text in enumerate(texts, first):
                try:
                    document = loads(text)
                    reason = "" if isinstance(document, dict) else "the line is not a JSON object"
                except ValueError as error:
                    document, reason = text.decode(errors="replace")[:1000].rstrip(), f"the line is not JSON: {error}"
                if reason:
                    refused.append(Refusal(number, reason, document))
                else:
                    numbers.append(number)
                    documents.append(document)
            first += len(texts)
            columns = {name: [document.get(name) for document in documents] for name in wanted}
            yield Chunk(np.array(numbers, np.int64), columns, refused, first)


class NpySource:
    """One array of numbers, whose first dimension counts the rows."""

    columns: Sequence[str] = (ARRAY_COLUMN,)

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        try:
            version = np.lib.format.read_magic(file)
            read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            self._shape, fortran, self._dtype = read_header[version[0]](file)
        except (ValueError, KeyError) as error:
            raise InvalidArgumentError(f"'{name}' is not an .npy file: {error}") from error
        if not self._shape or self._dtype.hasobject or self._dtype.names or (fortran and len(self._shape) > 1):
            raise InvalidArgumentError(
                f"'{name}' holds an array of shape {list(self._shape)} and dtype {self._dtype}: expected numbers in C "
                "order with a first dimension that counts the rows"
            )
        self._begin = file.tell()
        self._row = 0

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        del wanted  # there is only one column
        row_bytes = int(np.prod(self._shape[1:])) * self._dtype.itemsize
        size = max(min(size, most_bytes // max(row_bytes, 1)), 1)
        self._file.seek(self._begin + first * row_bytes)
        self._row = min(first, self._shape[0])
        for begin in range(first, self._shape[0], size):
            count = min(size, self._shape[0] - begin)
            body = self._file.read(count * row_bytes)
            if len(body) != count * row_bytes:
                raise InvalidArgumentError(f"'{self._name}' ends in row {begin + len(body) // max(row_bytes, 1)}")
            self._row = begin + count
            array = np.frombuffer(body, self._dtype).reshape(count, *self._shape[1:])
            array = array.astype(self._dtype.newbyteorder("="), copy=False)  # writers take the bytes of this machine
            yield Chunk(np.arange(begin, self._row), {ARRAY_COLUMN: array}, (), self._row)

    def fraction(self) -> float:
        return self._row / self._shape[0] if self._shape[0] else 1.0

    def close(self) -> None:
        self._file.close()


class _Sizes(NamedTuple):
    """Bytes of the wanted columns in a Parquet file.

    Attributes:
        row: mean of a row in the row group with the longest rows.
        group: largest row group in the file.
        columns: number of columns with values, at least 1.
    """

    row: int
    group: int
    columns: int


_FOOTER_END_BYTES = 8
"""The length of a Parquet file's footer, and the mark at the end of the file."""
_READ_COLUMNS = """
import sys
sys.path[:] = sys.argv[1:]
import io
from pyarrow import parquet
metadata = parquet.read_metadata(io.BytesIO(sys.stdin.buffer.read()))
for group in map(metadata.row_group, range(metadata.num_row_groups)):
    for place in range(metadata.num_columns):
        group.column(place)
"""


class ParquetSource:
    """Parquet file, read through pyarrow one batch of rows at a time.

    A row group is read as a whole, or in pieces of its columns if it has more bytes than a chunk.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._parquet = import_parquet(name)
        self._name = name
        self._opened = file
        try:
            # Without `pre_buffer`, which would hold the whole file.
            self._file: Any = self._parquet.ParquetFile(file, pre_buffer=False)
            self._check_columns()
        except RemoraError:
            raise
        except Exception as error:  # damaged files raise errors of many types
            raise InvalidArgumentError(f"'{name}' is not a Parquet file: {error}") from error
        self.columns: Sequence[str] = list(self._file.schema_arrow.names)
        self._total = int(self._file.metadata.num_rows)
        self._row = 0
        if len(self.columns) > _MOST_COLUMNS:
            raise InvalidArgumentError(f"'{name}' has {len(self.columns)} columns, more than {_MOST_COLUMNS}")

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        self._row = min(first, self._total)
        begin, groups = 0, list(range(self._file.metadata.num_row_groups))
        while groups and begin + self._file.metadata.row_group(groups[0]).num_rows <= first:
            begin += self._file.metadata.row_group(groups.pop(0)).num_rows
        if not groups:
            return
        sizes = self._sizes(wanted)
        size = max(min(size, most_bytes // sizes.row), 1)
        file = self._file if sizes.group <= most_bytes else self._in_pieces(most_bytes // sizes.columns)
        batches = file.iter_batches(batch_size=size, row_groups=groups, columns=list(wanted))
        try:
            for batch in batches:
                end = begin + batch.num_rows
                if end > first:
                    batch = batch.slice(max(first - begin, 0))
                    columns = {name: arrow_values(batch.column(name)) for name in wanted}
                    self._row = end
                    yield Chunk(np.arange(end - batch.num_rows, end), columns, (), end)
                begin = end
        except Exception as error:  # damaged files raise errors of many types
            raise InvalidArgumentError(f"'{self._name}' cannot be read after row {self._row}: {error}") from error

    def _check_columns(self) -> None:
        """Raise InvalidArgumentError if the description of a column would end the process.

        pyarrow catches the C++ errors of other parts of the footer alone, so another process reads it first.
        """
        end = self._opened.seek(0, io.SEEK_END)
        self._opened.seek(end - _FOOTER_END_BYTES)
        size = int.from_bytes(self._opened.read(4), "little") + _FOOTER_END_BYTES
        self._opened.seek(end - size)
        footer = b"PAR1" + self._opened.read(size)
        command = [sys.executable, "-c", _READ_COLUMNS, *sys.path]
        done = subprocess.run(command, input=footer, capture_output=True, check=False)
        if done.returncode:
            reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2].strip()
            raise InvalidArgumentError(f"'{self._name}' has a damaged description of its columns: {reason[:500]}")

    def _sizes(self, wanted: Sequence[str]) -> _Sizes:
        metadata = self._file.metadata
        paths = (metadata.schema.column(place).path for place in range(metadata.num_columns))
        names = frozenset(wanted)
        places = [place for place, path in enumerate(paths) if path.partition(".")[0] in names]
        row, most = 1, 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            parts = [group.column(place) for place in places]
            row = max(row, sum(part.total_uncompressed_size for part in parts) // max(group.num_rows, 1))
            most = max(most, sum(part.total_compressed_size for part in parts))
        return _Sizes(row, most, max(len(places), 1))

    def _in_pieces(self, size: int) -> Any:
        """Open the file again, to read about ``size`` bytes of a column at a time."""
        # Below its buffer, because that of a file in a bucket fetches more than a piece.
        file = getattr(self._opened, "raw", self._opened)
        size = max(size, _PIECE_BYTES)
        return self._parquet.ParquetFile(file, metadata=self._file.metadata, buffer_size=size, pre_buffer=False)

    def fraction(self) -> float:
        return self._row / self._total if self._total else 1.0

    def close(self) -> None:
        self._file.close()
        self._opened.close()


def import_parquet(name: str) -> Any:
    """Return the module `pyarrow.parquet`. Raises UnsupportedError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError(
            f"'{name}': Parquet needs pyarrow, which is not installed. Install it with: {install_command('parquet')}"
        ) from None
    return pyarrow.parquet


def arrow_values(column: Any) -> Values:
    """Return the values of an Arrow array.

    Numbers and lists of equal length give a numpy array, other types a list. A missing value is None in a list.
    Numbers pass through DLPack, because pyarrow's own conversion imports pandas, which takes longer than many runs.
    """
    from pyarrow import types

    kind = column.type
    if column.null_count:
        return list(column.to_pylist())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        fixed = types.is_fixed_size_list(kind)
        lengths = [kind.list_size] if fixed else np.unique(arrow_values(column.value_lengths()))
        inner = arrow_values(column.flatten()) if len(lengths) == 1 else None
        if isinstance(inner, np.ndarray):
            array: Array = inner.reshape(len(column), lengths[0], *inner.shape[1:])
            return array
        return list(column.to_pylist())
    if types.is_decimal(kind):
        column = column.cast("float64")
    if types.is_integer(column.type) or types.is_floating(column.type):
        return np.from_dlpack(column) if len(column) else np.empty(0, column.type.to_pandas_dtype())
    return np.asarray(column.to_numpy(zero_copy_only=False)) if types.is_boolean(kind) else list(column.to_pylist())
