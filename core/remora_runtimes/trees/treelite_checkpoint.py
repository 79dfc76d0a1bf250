"""Check of a Treelite checkpoint before the library reads it.

The layout is that of Treelite 4, whose reader trusts every length and number. Here each is checked before use. Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from remora.errors import InternalError
from remora.messages import Array
from remora_runtimes.trees.checks import check_tree

_VALUES = {2: "<f4", 3: "<f8"}
_LEAF, _NUMERICAL, _CATEGORICAL = 0, 1, 2
_OPERATORS = range(1, 6)
_MULTICLASS = 2


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def array(self, dtype: str, length: int = -1) -> Array:
        """Return the next array.

        Its length precedes it and must be ``length`` unless that is negative.
        """
        actual = int(self._values("<u8", 1)[0])
        if length >= 0 and actual != length:
            raise InternalError(f"the checkpoint has {actual} instead of {length} values at byte {self.at}")
        return self._values(dtype, actual)

    def number(self, dtype: str = "<i4") -> Any:
        return self._values(dtype, 1)[0].item()

    def nothing(self) -> None:
        """Skip the extension fields of later versions, which must be empty."""
        if self.number():
            raise InternalError("the checkpoint is of a later version of Treelite: save it with Treelite 4")

    def end(self) -> None:
        if self.at != len(self._data):
            raise InternalError(f"the checkpoint ends at byte {self.at} of {len(self._data)}")

    def _values(self, dtype: str, count: int) -> Array:
        size = np.dtype(dtype).itemsize * count
        if size > len(self._data) - self.at:
            raise InternalError(f"the checkpoint wants {size} bytes at byte {self.at} of {len(self._data)}")
        self.at += size
        return np.frombuffer(self._data, dtype, count, self.at - size)


def check_checkpoint(data: bytes) -> None:
    """Check a checkpoint. Raises InternalError for an invalid forest or another version."""
    reader = _Reader(data)
    version = [reader.number() for _ in range(3)]
    if version[0] != 4:
        raise InternalError(
            f"the checkpoint is of version {version[0]}.{version[1]}: load it with Treelite 4 and save it again"
        )
    kinds = reader.number("u1"), reader.number("u1")
    if kinds not in ((2, 2), (3, 3)):
        raise InternalError("the checkpoint has values that are neither FP32 nor FP64")
    trees, features = reader.number("<u8"), reader.number()
    leaf = _check_outputs(reader, trees)
    for _ in range(trees):
        _check_tree(reader, _VALUES[kinds[0]], features, leaf)
    reader.end()


def _check_outputs(reader: _Reader, trees: int) -> int:
    """Return the number of values in a leaf."""
    task = reader.number("u1")
    averages = reader.number("u1")
    targets = reader.number()
    classes, shape = reader.array("<i4", targets), reader.array("<i4", 2).astype(np.int64)
    most = int(classes.max(initial=0))
    if averages > 1 or targets < 1 or classes.min() < 1:
        raise InternalError("the checkpoint has fewer classes than one")
    if shape[0] not in (1, targets) or shape[1] not in (1, most) or (task == _MULTICLASS and most < 2):
        raise InternalError("the checkpoint's leaves do not match its classes")
    target, chosen = reader.array("<i4", trees), reader.array("<i4", trees)
    limits = classes[np.maximum(target, 0)] if ((target >= -1) & (target < targets)).all() else None
    if limits is None or ((chosen < -1) | (chosen >= limits)).any():
        raise InternalError("a tree of the forest belongs to a class that is not there")
    # A leaf's vector covers all targets and classes, unless the tree names its target or class.
    wide = np.stack([np.where(target < 0, targets, 1), np.where(chosen < 0, most, 1)], 1)
    if (wide != shape).any():
        raise InternalError("the checkpoint's leaves do not match its trees")
    reader.array("u1")  # the postprocessor, which the library validates
    reader.number("<f4"), reader.number("<f4")
    reader.array("<f8", targets * most)
    reader.array("u1")
    reader.nothing()
    return int(shape[0] * shape[1])


def _check_tree(reader: _Reader, value: str, features: int, leaf: int) -> None:
    nodes = reader.number()
    flagged = reader.number("u1")
    if nodes < 1 or flagged > 1:
        raise InternalError("a tree of the forest has no nodes")
    kinds = reader.array("i1", nodes)
    left, right, split = (reader.array("<i4", nodes) for _ in range(3))
    inner = kinds != _LEAF
    check_tree(left, right, split, inner, features)
    default_left = reader.array("u1", nodes)
    reader.array(value, nodes), reader.array(value, nodes)
    operators, flipped = reader.array("i1", nodes), reader.array("u1", nodes)
    if not np.isin(kinds, (_LEAF, _NUMERICAL, _CATEGORICAL)).all() or max(default_left.max(), flipped.max()) > 1:
        raise InternalError("a tree of the forest has a decision of a kind that is not there")
    if not np.isin(operators[kinds == _NUMERICAL], _OPERATORS).all() or (left[~inner] != -1).any():
        raise InternalError("a tree of the forest has a decision of a kind that is not there")
    vectors, begins, ends = reader.array(value), reader.array("<u8", nodes), reader.array("<u8", nodes)
    sizes = _sizes(begins, ends, len(vectors))
    if (sizes[~inner] != leaf).any() and not (leaf == 1 and (sizes[~inner] == 0).all()):
        raise InternalError("a tree of the forest has leaves without values")
    categories = reader.array("<u4")
    _sizes(reader.array("<u8", nodes), reader.array("<u8", nodes), len(categories))
    for dtype in ("<u8", "<f8", "<f8"):
        statistics = reader.array(dtype)
        present = reader.array("u1")
        if {len(statistics), len(present)} - {0, nodes} or present.max(initial=0) > 1:
            raise InternalError("a tree of the forest has statistics of other nodes")
    reader.nothing()
    reader.nothing()


def _sizes(begins: Array, ends: Array, length: int) -> Array:
    if (begins > ends).any() or ends.max() > length:
        raise InternalError("a tree of the forest has values or categories that are not there")
    return ends - begins
