"""Captured requests as Parquet: a row for each, whose tensors have their bytes on the wire.

pyarrow is imported by the first call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from remora_tools.traffic.captured import CapturedError, CapturedTensor, Exchange

_ROWS_AT_ONCE = 16
_PIECE_BYTES = 8 << 20
"""Bytes of a column that are read at a time, so that a large row group is not held as a whole.

Smaller pieces would fetch ranges of a file in a bucket again.
"""


def write_parquet(exchanges: Sequence[Exchange], path: Path) -> None:
    """Write a file of exchanges. Raises OSError."""
    import pyarrow
    from pyarrow import parquet

    tensor = pyarrow.struct(
        [
            ("name", pyarrow.string()),
            ("datatype", pyarrow.string()),
            ("shape", pyarrow.list_(pyarrow.int64())),
            ("content", pyarrow.binary()),
        ]
    )
    kinds = {
        "time": pyarrow.timestamp("ms", "UTC"),
        "inputs": pyarrow.list_(tensor),
        "outputs": pyarrow.list_(pyarrow.string()),
        "answers": pyarrow.list_(pyarrow.list_(tensor)),
        "duration_us": pyarrow.int64(),
    }
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in Exchange._fields])
    rows = [_row(each) for each in exchanges]
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def read_parquet(file: BinaryIO) -> Iterator[Exchange]:
    """Yield the exchanges of a file.

    Raises CapturedError for a file that is damaged or has other columns.
    """
    from pyarrow import parquet

    try:
        reader = parquet.ParquetFile(file, buffer_size=_PIECE_BYTES, pre_buffer=False)
        for batch in reader.iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from map(_exchange, batch.to_pylist())
    except Exception as error:  # damaged files raise errors of many types
        raise CapturedError(f"not a file of captured requests: {error}") from error


def _row(exchange: Exchange) -> dict[str, Any]:
    row = {name: _text(value) if isinstance(value, str) else value for name, value in exchange._asdict().items()}
    return row | {
        "time": datetime.fromisoformat(exchange.time),
        "parameters": _text(json.dumps(dict(exchange.parameters), ensure_ascii=False)),
        "inputs": [each._asdict() for each in exchange.inputs],
        "answers": [[each._asdict() for each in answer] for answer in exchange.answers],
    }


def _text(value: str) -> str:
    """Return a text that UTF-8 can hold; a client's may not be UTF-8."""
    return value.encode("utf-8", "replace").decode()


def _exchange(row: dict[str, Any]) -> Exchange:
    fields = {name: row[name] for name in Exchange._fields}
    return Exchange(
        **fields
        | {
            "time": fields["time"].isoformat(timespec="milliseconds"),
            "parameters": json.loads(fields["parameters"]),
            "inputs": [_tensor(each) for each in fields["inputs"]],
            "answers": [[_tensor(each) for each in answer] for answer in fields["answers"]],
        }
    )


def _tensor(row: dict[str, Any]) -> CapturedTensor:
    return CapturedTensor(row["name"], row["datatype"], tuple(row["shape"]), row["content"])
