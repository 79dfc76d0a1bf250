"""Comparison of the outputs of two versions for the same request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Outputs = Mapping[str, npt.NDArray[Any]]


class Comparison(NamedTuple):
    """How outputs are compared.

    ``tolerance`` is the relative and absolute difference that numbers may have. ``top_k`` > 0 compares only which k
    elements along the last axis are the largest, in their order.
    """

    tolerance: float = 0.0
    top_k: int = 0


def difference(expected: Outputs, found: Outputs, how: Comparison) -> str:
    """Return how two answers differ, "" if they agree. Not-a-number equals itself."""
    if expected.keys() != found.keys():
        return f"outputs {', '.join(sorted(found))}, expected {', '.join(sorted(expected))}"
    for name, array in expected.items():
        other = found[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            return f"{name}: {other.dtype}{list(other.shape)}, expected {array.dtype}{list(array.shape)}"
        reason = _values(array, other, how)
        if reason:
            return f"{name}: {reason}"
    return ""


def _values(expected: npt.NDArray[Any], found: npt.NDArray[Any], how: Comparison) -> str:
    if expected.dtype.kind not in "fiub":
        return "" if np.array_equal(_as_bytes(expected), _as_bytes(found)) else "other elements"
    if how.top_k and expected.ndim:
        first, second = (np.argsort(-each.astype(np.float64), axis=-1, kind="stable") for each in (expected, found))
        same = np.array_equal(first[..., : how.top_k], second[..., : how.top_k])
        return "" if same else f"other elements are the {how.top_k} largest"
    close = np.isclose(found, expected, rtol=how.tolerance, atol=how.tolerance, equal_nan=expected.dtype.kind == "f")
    if close.all():
        return ""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.nanmax(np.abs(found.astype(np.float64) - expected.astype(np.float64))) if expected.size else 0.0
    return f"{int((~close).sum())} of {close.size} elements differ, by at most {gap:.3g}"


def _as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of BYTES with its texts encoded, because only some models return texts."""
    if array.dtype.kind != "O":
        return array
    flat = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1).tolist()]
    return np.array([*flat, None], object)[:-1].reshape(array.shape)
