"""Is every tree of a forest a tree? Pure; the law: libraries follow a file's child numbers unchecked, this does not.

A child that is not there, a feature that no row has, or a tree that leads back into itself ends the process or keeps it
busy for ever.
"""

from __future__ import annotations

import numpy as np

from remora.errors import InternalError
from remora.messages import Array

_DEEPEST = 4096
"""Libraries go down some trees by calling themselves; far deeper ones than any that was ever grown end the process."""


def check_tree(left: Array, right: Array, feature: Array, inner: Array, features: int) -> int:
    """How deep a tree is whose nodes are numbered from 0, the root.

    Args:
        left: the left child of each node.
        right: the right child of each node.
        feature: what each node looks at.
        inner: which nodes have children at all.
        features: how many features a row has.

    Raises:
        InternalError: it is no tree.
    """
    if not len(left) == len(right) == len(feature) == len(inner):
        raise InternalError("a tree of the forest has nodes without children's numbers")
    children = np.concatenate([left[inner], right[inner]])
    if children.size and (children.min() < 1 or children.max() >= len(left)):
        raise InternalError("a tree of the forest has a child that is not there")
    if len(np.unique(children)) != len(children):  # then no way from the root can meet itself
        raise InternalError("a tree of the forest has a node with two parents")
    seen = feature[inner]
    if seen.size and (seen.min() < 0 or seen.max() >= features):
        raise InternalError(f"a tree of the forest looks at a feature that is not among the {features}")
    return _depth(left, right, inner)


def _depth(left: Array, right: Array, inner: Array) -> int:
    level, depth = np.flatnonzero(inner[:1]), 0
    while level.size:
        depth += 1
        if depth > _DEEPEST:
            raise InternalError(f"a tree of the forest is deeper than {_DEEPEST}")
        level = np.concatenate([left[level], right[level]])
        level = level[inner[level]]
    return depth
