"""Trial run that shows whether the rows of a model are independent.

For models whose batching is not configured (`remora.config.batching_choice`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remora.backends.arrays import Run
from remora.calls import TensorInfo
from remora.config.batching_choice import Trial
from remora.messages import DTYPES, Array, Tensor

_log = logging.getLogger(__name__)

_LIMIT_BYTES = 64 << 20
"""Maximum size of the inputs of one run; a model with larger rows is not tried."""

_TOGETHER = (0, 1, 0)
"""Rows of the shared run: one on both sides of the other, so that sorting and sums show."""

_TOLERANCE = {"FP16": 2e-2, "BF16": 2e-2}
_FLOAT_TOLERANCE = 2e-3
"""Tolerance relative to the largest magnitude, because rounding depends on the batch size."""


class _Values(NamedTuple):
    """Kind of generated inputs: the size of variable inner axes and the bound of integers."""

    inner: int
    integers: int
    positive: bool = False


_ATTEMPTS = (_Values(8, 8), _Values(8, 2, positive=True), _Values(1, 2), _Values(32, 2), _Values(224, 2))
"""Tried in order, because models accept only some sizes of images and some token numbers."""


def try_rows(run: Run, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> Trial:
    """Compare rows that run together with each row alone.

    ``run`` runs the model, ``inputs`` and ``outputs`` are its tensors with the batch dimension. Errors of the model
    on generated values give ``Trial.UNKNOWN``.
    """
    wanted = tuple(info.name for info in outputs)
    for values in _ATTEMPTS:
        rows = _rows(inputs, values)
        if rows is None:
            continue
        try:
            alone = [run(row, wanted) for row in rows]
            together = run(_joined([rows[index] for index in _TOGETHER]), wanted)
        except Exception as error:  # whatever the framework raises for values that the model does not accept
            _log.debug("a trial run on generated values failed: %s", error)
            continue
        if any(_has_nan(tensor) for tensors in alone for tensor in tensors) and not values.positive:
            continue
        if all(_same([row[place] for row in alone], tensor) for place, tensor in enumerate(together)):
            return Trial.EQUAL
        again = run(rows[0], wanted)
        repeats = all(_close(one, other.data, one.data) for one, other in zip(again, alone[0], strict=True))
        return Trial.DIFFERENT if repeats else Trial.UNKNOWN
    return Trial.UNKNOWN


def _rows(inputs: Sequence[TensorInfo], values: _Values) -> list[dict[str, Array]] | None:
    """Return two different rows, None if they would be too large."""
    shapes = {info.name: (1, *(values.inner if dim < 0 else dim for dim in info.shape[1:])) for info in inputs}
    size = sum(math.prod(shapes[info.name]) * DTYPES[info.datatype].itemsize for info in inputs)
    if size * len(_TOGETHER) > _LIMIT_BYTES:
        return None
    random = np.random.default_rng(0)
    real = {info.name: random.standard_normal(shapes[info.name]) for info in inputs}
    # Opposite signs show filters of rows, and different magnitudes what depends on the range of a whole batch, such as
    # dynamic quantization.
    return [
        {info.name: _array(info.datatype, scale * real[info.name], values, random) for info in inputs}
        for scale in (1.0, -3.0)
    ]


def _array(datatype: str, real: Array, values: _Values, random: np.random.Generator) -> Array:
    shape = real.shape
    if datatype == "BYTES":
        text = np.empty(shape, object)
        text.ravel()[:] = [bytes(letters) for letters in random.integers(97, 123, (math.prod(shape), 4), np.uint8)]
        return text
    if datatype == "BOOL":
        return random.integers(0, 2, shape).astype(np.bool_)
    if datatype in ("FP16", "FP32", "FP64", "BF16"):
        real = np.abs(real) + 0.1 if values.positive else real + random.normal(0, 0.1, shape)
        if datatype == "BF16":
            return (real.astype(np.float32).view(np.uint32) >> 16).astype(DTYPES["BF16"])
        return real.astype(DTYPES[datatype])
    return random.integers(0, values.integers, shape).astype(DTYPES[datatype])


def _joined(rows: Sequence[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _same(alone: Sequence[Tensor], together: Tensor) -> bool:
    """Return True if an output of the shared run has the rows of the runs alone."""
    if any(not tensor.data.ndim or len(tensor.data) != 1 for tensor in alone):
        return False
    if not together.data.ndim or len(together.data) != len(_TOGETHER):
        return False
    return all(
        _close(together, together.data[place : place + 1], alone[index].data) for place, index in enumerate(_TOGETHER)
    )


def _close(tensor: Tensor, one: Array, other: Array) -> bool:
    """Return True if two arrays of the tensor's type are equal up to rounding."""
    if one.shape != other.shape:
        return False
    if tensor.datatype == "BF16":
        one, other = ((array.astype(np.uint32) << 16).view(np.float32) for array in (one, other))
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    largest = float(np.max(np.abs(np.nan_to_num(other.astype(np.float64))), initial=0.0))
    allowed = _TOLERANCE.get(tensor.datatype, _FLOAT_TOLERANCE) * largest + 1e-6
    return bool(np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=0, atol=allowed, equal_nan=True))


def _has_nan(tensor: Tensor) -> bool:
    return tensor.data.dtype.kind == "f" and bool(np.isnan(tensor.data).any())
