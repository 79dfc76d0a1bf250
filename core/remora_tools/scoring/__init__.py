"""Offline scoring of files, with results that survive a kill of the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from remora.errors import InvalidArgumentError
from remora.messages import Array

FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy", ".parquet": "parquet"}
"""File format by suffix."""

CHUNK_BYTES = 64 << 20
"""Bytes after which a chunk ends before its number of rows."""

Values = Sequence[Any] | Array
"""Values of one column, one for each row."""


class Refusal(NamedTuple):
    """A row that has no result, with the reason and what was read of it."""

    row: int
    reason: str
    values: object = None


class Chunk(NamedTuple):
    """Consecutive rows of a file.

    Attributes:
        rows: numbers of the rows in ``columns``, ascending from 0 at the start of the file.
        columns: values by column, as many as ``rows``.
        refused: rows that could not be parsed; they are missing in ``columns``.
        end: number of the first row after this chunk.
    """

    rows: Array
    columns: Mapping[str, Values]
    refused: Sequence[Refusal]
    end: int


class Source(Protocol):
    """Rows of a file, read once from front to back."""

    columns: Sequence[str]

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield the rows from number ``first`` on, with the wanted columns.

        A chunk has ``size`` rows, fewer if they have more than about ``most_bytes``, but at least one.

        Raises RemoraError for a file that cannot be read any further.
        """

    def fraction(self) -> float:
        """Return how much of the file has been read, 0 to 1."""

    def close(self) -> None:
        """Close the file."""


def format_of(name: str, others: str = "") -> str:
    """Return the format of a file or URL by its suffix.

    Raises InvalidArgumentError, whose message ends with ``others``.
    """
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in FORMATS:
        raise InvalidArgumentError(f"'{name}': expected a file that ends in {', '.join(FORMATS)}{others}")
    return FORMATS[suffix]
