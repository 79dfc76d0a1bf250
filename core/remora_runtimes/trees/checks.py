"""Checks of a forest's tree structure, because libraries follow child numbers unchecked.

A missing child, an invalid feature, or a cycle would crash the process or keep it busy forever. Pure.
"""

from __future__ import annotations

import numpy as np

from remora.errors import InternalError
from remora.messages import Array

_DEEPEST = 4096
"""Deepest accepted tree, far above real ones, because libraries recurse into trees and would overflow the stack."""


def check_tree(left: Array, right: Array, feature: Array, inner: Array, features: int) -> int:
    """Check a tree whose nodes are numbered from 0, the root, and return its depth.

    Args:
        left: left child of each node.
        right: right child of each node.
        feature: feature that each node tests.
        inner: True for nodes with children.
        features: number of features in a row.

    Raises:
        InternalError: the nodes do not form a tree.
    """
    if not len(left) == len(right) == len(feature) == len(inner):
        raise InternalError("a tree of the forest has nodes without children's numbers")
    children = np.concatenate([left[inner], right[inner]])
    if children.size and (children.min() < 1 or children.max() >= len(left)):
        raise InternalError("a tree of the forest has a child that is not there")
    if len(np.unique(children)) != len(children):  # with one parent each, no path from the root can form a cycle
        raise InternalError("a tree of the forest has a node with two parents")
    tested = feature[inner]
    if tested.size and (tested.min() < 0 or tested.max() >= features):
        raise InternalError(f"a tree of the forest tests a feature that is not among the {features}")
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
