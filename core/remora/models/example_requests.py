"""Example request of a model: its first golden test, or the first request in its folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remora.calls import TensorInfo
from remora.model_files import GOLDEN_TESTS, REQUESTS
from remora.system.json_text import read_json

_MOST_FILES = 16
_MOST_BYTES = 1 << 20
MAX_ELEMENTS = 4096
"""Values of the longest example, because pages show them."""


class ExampleRequest(NamedTuple):
    """Inputs of a V2 request as JSON, and their file, relative to the folder."""

    file: str
    inputs: list[dict[str, Any]]


def find_example(folder: Path, inputs: Sequence[TensorInfo], required: frozenset[str]) -> ExampleRequest | None:
    """Return the first request in a model's folder that fits the model, None without one."""
    known = {row.name: row for row in inputs}
    for file, tensors in _requests(folder):
        rows = [_row(each, known) for each in tensors] if isinstance(tensors, list) else []
        found = [row for row in rows if row is not None]
        if found and len(found) == len(rows) and required <= {row["name"] for row in found}:
            return ExampleRequest(file, found)
    return None


def _requests(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of the requests in a model's folder with their files."""
    document = _read(folder / GOLDEN_TESTS)
    tests = document.get("tests") if isinstance(document, dict) else None
    if isinstance(tests, list) and tests and isinstance(tests[0], dict):
        yield GOLDEN_TESTS, tests[0].get("inputs")
    for file in sorted((folder / REQUESTS).glob("*.json"))[:_MOST_FILES]:
        document = _read(file)
        if isinstance(document, dict):
            yield f"{REQUESTS}/{file.name}", document.get("inputs")


def _read(file: Path) -> Any:
    try:
        return read_json(file.read_bytes()) if file.is_file() and file.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError):  # the file concerns nothing but the example
        return None


def _row(tensor: Any, known: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Return an input of a request without its parameters, None if it is not one of the model's."""
    if not isinstance(tensor, dict):
        return None
    row = known.get(str(tensor.get("name")))
    shape, data = tensor.get("shape"), tensor.get("data")
    if row is None or tensor.get("datatype") != row.datatype or not isinstance(shape, list):
        return None
    if len(shape) != len(row.shape) or not all(
        type(size) is int and size >= 0 and declared in (size, -1)
        for size, declared in zip(shape, row.shape, strict=True)
    ):
        return None
    values = _flat(data)
    if len(values) != math.prod(shape) or len(values) > MAX_ELEMENTS:
        return None
    return {"name": row.name, "datatype": row.datatype, "shape": shape, "data": values}


def _flat(data: Any) -> list[Any]:
    """Return the values of nested lists in the order of rows."""
    if not isinstance(data, list):
        return [data]
    return [value for each in data for value in _flat(each)]
