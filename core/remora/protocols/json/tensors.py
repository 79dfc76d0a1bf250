"""Conversion of a JSON request's ``data`` into tensors.

Limits are checked before an array is allocated. Only the number of elements counts, not their nesting [Q02]. A wrong
kind of value is refused with Triton's text [H13, Q03], and an integer that the type cannot hold with the type's range.
100 000 values cost no Python loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from remora.errors import InvalidArgumentError, MalformedError
from remora.messages import DTYPES, Array
from remora.protocols.json.access import NOT_BOOL, NOT_INT, NOT_NUMBER, NOT_TEXT, NOT_UINT, too_deep
from remora.protocols.json.long_lists import extend, release

_INT64_MAX = 2**63 - 1
_NUMBERS = frozenset((int, float))
_INTEGERS = frozenset((int,))
_BOOLS = frozenset((bool,))
_STEP = 65_536
"""Values that are converted at a time."""


def too_large(name: str, byte_size: int, limit: int) -> InvalidArgumentError:
    """Return the error for an input beyond the size limit [H28]."""
    return InvalidArgumentError(
        f"JSON input '{name}' has a byte_size ({byte_size} bytes) that exceeds the maximum allowed value of "
        f"{limit} bytes. Use --http-max-input-size to increase the limit."
    )


def out_of_range(name: str, value: object, datatype: str) -> InvalidArgumentError:
    """Return the error for a value of an input that its numeric datatype cannot hold [Q03]."""
    dtype = np.dtype("<f4") if datatype == "BF16" else DTYPES[datatype]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        least, most = str(limits.min), str(limits.max)
    else:
        largest = float(np.finfo(dtype).max)
        least, most = f"{-largest:.5g}", f"{largest:.5g}"
    return InvalidArgumentError(f"input '{name}': {value} is out of the range of {datatype}, {least} to {most}")


def flatten(data: list[Any], max_depth: int) -> tuple[list[Any], set[type]]:
    """Return the elements of nested arrays in row-major order, and their types.

    Raises InvalidArgumentError for ``max_depth`` or more levels of arrays [H28].
    """
    depth = 1
    kinds = _kinds(data)
    while kinds == {list}:  # the usual nesting: every row is an array
        depth += 1
        if depth >= max_depth:
            raise too_deep(max_depth)
        data = _joined(data)
        kinds = _kinds(data)
    if list not in kinds:
        return data, kinds
    elements: list[Any] = []
    rows = [iter(data)]
    while rows:
        for item in rows[-1]:
            if type(item) is list:
                if len(rows) + depth >= max_depth:
                    raise too_deep(max_depth)
                rows.append(iter(item))
                break
            elements.append(item)
        else:
            rows.pop()
    return elements, _kinds(elements)


def _parts(values: list[Any]) -> Iterator[list[Any]]:
    """Yield the values, a bounded number at a time, between which other threads may run."""
    for at in range(0, len(values), _STEP):
        yield values[at : at + _STEP]


def _kinds(values: list[Any]) -> set[type]:
    kinds: set[type] = set()
    for part in _parts(values):
        kinds.update(map(type, part))
    return kinds


def _joined(rows: list[list[Any]]) -> list[Any]:
    elements: list[Any] = []
    extend(elements, _elements_of(rows), sum(sum(map(len, some)) for some in _parts(rows)))
    return elements


def _elements_of(rows: list[list[Any]]) -> Iterator[list[Any]]:
    for some in _parts(rows):
        rest = chain.from_iterable(some)
        while part := list(islice(rest, _STEP)):
            yield part


def strings(name: str, data: list[Any], max_depth: int, max_bytes: int) -> list[bytes] | Array:
    """Return the elements of a BYTES tensor, as an array if there are many.

    The engine checks their number [B02].
    """
    flat, kinds = flatten(data, max_depth)
    if kinds - {str}:
        raise MalformedError(f"Unable to parse JSON bytes array: {NOT_TEXT}")
    # A lower bound: characters may take more than a byte.
    byte_size = sum(sum(map(len, part)) for part in _parts(flat)) + 4 * len(flat)
    if byte_size > max_bytes:
        raise too_large(name, byte_size, max_bytes)
    if len(flat) <= _STEP:
        return [text.encode("utf-8", "surrogateescape") for text in flat]
    # An array is made here, because the engine would make it in the event loop.
    values = np.empty(len(flat), object)
    for number, part in enumerate(_parts(flat)):
        values[number * _STEP : number * _STEP + len(part)] = [text.encode("utf-8", "surrogateescape") for text in part]
    return values


def array(name: str, datatype: str, data: list[Any], count: int, max_depth: int, max_bytes: int) -> Array:
    """Return the values of a tensor other than BYTES, flat, in the datatype's dtype.

    ``data`` loses values if it is long, because freeing all of them at once would keep other threads waiting.

    Raises InvalidArgumentError for datatypes that JSON cannot carry [H17, H18], for tensors beyond ``max_bytes`` and
    for integers beyond the datatype [Q03], MalformedError for a wrong kind or number of values.
    """
    dtype = DTYPES.get(datatype)
    if datatype in ("FP16", "BF16"):
        raise InvalidArgumentError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if dtype is None:
        raise InvalidArgumentError(f"invalid datatype for input {name}")
    if count * dtype.itemsize > max_bytes:
        raise too_large(name, count * dtype.itemsize, max_bytes)
    try:
        flat, kinds = flatten(data, max_depth)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"Unable to parse 'data': {error.message}") from None
    try:
        if len(flat) > count:
            # Triton reads the elements in order, so a bad value before the surplus is reported first.
            kinds = _kinds(flat[:count])
            values = _convert(flat[:count], kinds, dtype, name, datatype)
        else:
            values = _convert(flat, kinds, dtype, name, datatype)
        if len(flat) != count:
            raise MalformedError("Unable to parse 'data': Shape does not match true shape of 'data' field")
        return values
    finally:
        if len(flat) > _STEP:
            release(data)
            release(flat)


def _convert(flat: list[Any], kinds: set[type], dtype: np.dtype[Any], name: str, datatype: str) -> Array:
    if dtype.kind == "f":
        if kinds - _NUMBERS:
            raise _misfit(NOT_NUMBER)
        with np.errstate(over="ignore"):  # a double too big for a float is an infinity
            return _array(flat, dtype)
    if dtype.kind == "b":
        if kinds - _BOOLS:
            raise _misfit(NOT_BOOL)
        return _array(flat, dtype)
    signed = dtype.kind == "i"
    problem = NOT_INT if signed else NOT_UINT
    if kinds - _INTEGERS:
        raise _misfit(problem)
    if not flat:
        return np.empty(0, dtype)
    if any((max(part) > _INT64_MAX) if signed else (min(part) < 0) for part in _parts(flat)):
        raise _misfit(problem)
    wide = _array(flat, np.dtype(np.int64 if signed else np.uint64))
    limits = np.iinfo(dtype)
    if dtype.itemsize < wide.itemsize and (wide.min() < limits.min or wide.max() > limits.max):
        misfits = (wide < limits.min) | (wide > limits.max)
        raise out_of_range(name, wide[np.argmax(misfits)], datatype)
    return wide.astype(dtype, copy=False)


def _array(flat: list[Any], dtype: np.dtype[Any]) -> Array:
    """Return the values as an array, in steps between which other threads may run."""
    if len(flat) <= _STEP:
        return np.array(flat, dtype=dtype)
    values = np.empty(len(flat), dtype)
    for number, part in enumerate(_parts(flat)):
        values[number * _STEP : number * _STEP + len(part)] = np.array(part, dtype=dtype)
    return values


def _misfit(problem: str) -> MalformedError:
    return MalformedError(f"Unable to parse 'data': {problem}")
