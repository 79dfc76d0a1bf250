"""Mapping of a file's columns to a model's inputs, and conversion of their values. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from remora.calls import ModelInfo, TensorInfo
from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import DTYPES, Array
from remora_tools.client.inputs import as_typed, find_input
from remora_tools.scoring import Chunk, Refusal, Values

_SHOWN_COLUMNS = 20
_WORDS = {"true": True, "false": False, "1": True, "0": False}


class InputColumns(NamedTuple):
    """An input and the columns that its values come from.

    ``shape`` is that of one row, with -1 for variable sizes. Several columns hold one number each; a single column
    holds all values of the row.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    columns: tuple[str, ...]


def map_columns(
    info: ModelInfo, columns: Sequence[str], given: Mapping[str, Sequence[str]], kept: Sequence[str], *, batches: bool
) -> list[InputColumns]:
    """Return the columns of each input.

    An input takes the ``given`` columns, else the column of its name. The only input of a model takes all columns that
    are not ``kept``, in the file's order. ``batches`` tells that the first dimension of each shape counts rows.

    Raises InvalidArgumentError for an input without columns, and for a column that the file lacks.
    """
    for name in given:
        find_input(info, name)
    known, copied = frozenset(columns), frozenset(kept)  # files of measurements have tens of thousands of columns
    for name in (*kept, *(column for several in given.values() for column in several)):
        if name not in known:
            raise InvalidArgumentError(f"the file has no column '{name}'; it has {_listing(columns)}")
    found = []
    for tensor in info.inputs:
        chosen = tuple(given.get(tensor.name, ()))
        if not chosen and tensor.name in known:
            chosen = (tensor.name,)
        if not chosen and len(info.inputs) == 1:
            chosen = tuple(name for name in columns if name not in copied)
        if not chosen:
            raise InvalidArgumentError(
                f"no column for input '{tensor.name}': pass --column {tensor.name}=COLUMN,...; the file has "
                f"{_listing(columns)}"
            )
        shape = tensor.shape[1:] if batches else tensor.shape
        size = math.prod(shape)
        if len(chosen) > 1 and -1 not in shape and size != len(chosen):
            raise InvalidArgumentError(
                f"input '{tensor.name}' takes {size} values a row, but {len(chosen)} columns are chosen: "
                f"{_listing(chosen)}. Choose them with --column {tensor.name}=COLUMN,... or leave some out with --keep"
            )
        found.append(InputColumns(tensor.name, tensor.datatype, shape, chosen))
    return found


def _listing(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
    return ", ".join(columns[:_SHOWN_COLUMNS]) + more


def convert_chunk(chunk: Chunk, inputs: Sequence[InputColumns]) -> tuple[dict[str, Array], Array, list[Refusal]]:
    """Return the inputs' arrays, the positions of their rows, and the rows that do not convert."""
    count = len(chunk.rows)
    reasons: dict[int, str] = {}
    arrays = {}
    for each in inputs:
        parts = [_converted(each, name, chunk.columns[name], reasons) for name in each.columns]
        array = parts[0] if len(parts) == 1 else np.stack([part.reshape(count, -1)[:, 0] for part in parts], axis=1)
        arrays[each.name] = array.reshape(count, *fit_shape(each, array.shape[1:])) if count else array
    if not reasons:
        return arrays, np.arange(count), []
    good = np.array([place for place in range(count) if place not in reasons], np.int64)
    refused = [
        Refusal(int(chunk.rows[place]), reason, {name: _plain(values[place]) for name, values in chunk.columns.items()})
        for place, reason in sorted(reasons.items())
    ]
    return {name: array[good] for name, array in arrays.items()}, good, refused


def fit_shape(each: InputColumns, found: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one row for values of the shape ``found``.

    Its last variable size is computed. Raises InvalidArgumentError if no size fits.
    """
    count = math.prod(found)
    if len(found) == len(each.shape) and all(want in (-1, size) for want, size in zip(each.shape, found, strict=True)):
        return found
    shape = [max(size, 1) if size < 0 else size for size in each.shape]
    varying = [place for place, size in enumerate(each.shape) if size < 0]
    known = math.prod(shape)
    if varying and known and count % known == 0:
        shape[varying[-1]] = count // known
    if math.prod(shape) != count:
        raise InvalidArgumentError(
            f"input '{each.name}' of shape {list(each.shape)} does not hold the {count} values that a row has in "
            f"{_listing(each.columns)}"
        )
    return tuple(shape)


def _converted(each: InputColumns, column: str, values: Values, reasons: dict[int, str]) -> Array:
    """Return a column in the input's dtype.

    Rows that do not convert are zero, with their reason in ``reasons``.
    """
    try:
        return _convert_all(each, column, values)
    except (ValueError, TypeError, OverflowError, RemoraError):
        pass
    rows: list[Array | None] = []
    for place, value in enumerate(values):
        try:
            rows.append(_convert_one(each, column, value))
        except (ValueError, TypeError, OverflowError, RemoraError) as error:
            rows.append(None)
            reasons.setdefault(place, str(error))
    shape = next((row.shape for row in rows if row is not None), ())
    array = np.zeros((len(rows), *shape), DTYPES[each.datatype])
    for place, row in enumerate(rows):
        if row is not None and row.shape == shape:
            array[place] = row
        elif row is not None:
            text = f"column '{column}' has {row.size} values, not {math.prod(shape)} as in the first row of its chunk"
            reasons.setdefault(place, text)
    return array


def _convert_all(each: InputColumns, column: str, values: Values) -> Array:
    if isinstance(values, np.ndarray):
        return as_typed(column, each.datatype, values)
    if values and isinstance(values[0], str) and each.datatype != "BYTES":
        read = _reader(each.datatype)
        return as_typed(column, each.datatype, np.array([read(text) for text in values]))
    if each.datatype != "BYTES":
        array = np.array(values)  # raises ValueError for ragged lists
        if array.dtype.kind in "iuf":
            return as_typed(column, each.datatype, array)
    return as_typed(column, each.datatype, values)


def _convert_one(each: InputColumns, column: str, value: Any) -> Array:
    if value is None or (value == "" and each.datatype != "BYTES"):
        raise InvalidArgumentError(f"column '{column}' is empty")
    if isinstance(value, str) and each.datatype != "BYTES":
        try:
            value = _reader(each.datatype)(value)
        except (ValueError, KeyError):
            raise InvalidArgumentError(f"column '{column}' holds {value!r}, which is not {each.datatype}") from None
    try:
        row = as_typed(column, each.datatype, [_plain(value)]).reshape(np.shape(value))
    except RemoraError as error:
        raise InvalidArgumentError(str(error).replace("input '", "column '", 1)) from None
    if len(each.columns) > 1 and row.size != 1:
        raise InvalidArgumentError(f"column '{column}' holds {row.size} values, expected one")
    if len(each.columns) == 1:
        fit_shape(each, row.shape)
    return row


def _reader(datatype: str) -> Callable[[str], float]:
    if datatype == "BOOL":
        return lambda text: _WORDS[text.strip().lower()]
    return float if datatype in ("FP16", "FP32", "FP64", "BF16") else int


def _plain(value: object) -> object:
    """Return a value of a refused row in a form that JSON can hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def tensor_rows(info: ModelInfo, names: Sequence[str]) -> list[TensorInfo]:
    """Return the outputs of these names, all for none.

    Raises InvalidArgumentError for an unknown name.
    """
    known = {tensor.name: tensor for tensor in info.outputs}
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"model '{info.name}' has no output '{name}'; it has {', '.join(known)}")
    return [known[name] for name in names] if names else list(info.outputs)
