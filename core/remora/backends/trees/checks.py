"""Is every tree of a forest a tree? Pure; the law: libraries follow a file's child numbers unchecked, this does not.

A child that is not there, a feature that no row has, or a tree that leads back into itself ends the process or keeps it
busy for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from remora.errors import InternalError
from remora.messages import Array


def check_tree(left: Array, right: Array, feature: Array, inner: Array, features: int) -> None:
    """Check one tree whose nodes are numbered from 0, the root.

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


def check_xgboost(model: Mapping[str, Any], features: int, groups: int) -> None:
    """Check what XGBoost has read, as its own JSON tells it: ``learner.gradient_booster``. Raises InternalError."""
    inner = model.get("gbtree", model).get("model", {})
    if any(not 0 <= group < max(groups, 1) for group in inner.get("tree_info", ())):
        raise InternalError("a tree of the forest belongs to a class that is not there")
    for tree in inner.get("trees", ()):
        left, right, split = (
            np.array(tree[key], np.int64) for key in ("left_children", "right_children", "split_indices")
        )
        check_tree(left, right, split, left != -1, features)
        begins, sizes, nodes = (
            np.array(tree.get(key, ()), np.int64)
            for key in ("categories_segments", "categories_sizes", "categories_nodes")
        )
        if not len(begins) == len(sizes) == len(nodes):
            raise InternalError("a tree of the forest has categories without their sizes")
        ends = begins + sizes
        if begins.size and (
            min(begins.min(), sizes.min(), nodes.min()) < 0
            or ends.max() > len(tree["categories"])
            or nodes.max() >= len(left)
        ):
            raise InternalError("a tree of the forest has categories that are not there")


def check_lightgbm(text: str) -> None:
    """Check a model in LightGBM's text format. Raises InternalError."""
    head, *trees = text.partition("\nend of trees")[0].split("\nTree=")
    features = int(_rows(head).get("max_feature_idx", "-1")) + 1
    for tree in trees:
        rows = _rows(tree)
        leaves = int(rows.get("num_leaves", "0"))
        nodes = leaves - 1
        given = [
            np.array(list(_numbers(rows.get(key, ""))), np.int64)
            for key in ("left_child", "right_child", "split_feature")
        ]
        if leaves < 1 or any(len(each) != nodes for each in given) or len(rows.get("leaf_value", "").split()) != leaves:
            raise InternalError("a tree of the forest has nodes without children's numbers")
        left, right, feature = given
        # Leaves have numbers of their own, -1 and down: here they come after the nodes.
        left, right = (np.where(each < 0, nodes - 1 - each, each) for each in (left, right))
        whole = np.concatenate([left, np.zeros(leaves, np.int64)])
        inner = np.arange(nodes + leaves) < nodes
        right = np.concatenate([right, np.zeros(leaves, np.int64)])
        check_tree(whole, right, np.concatenate([feature, np.zeros(leaves, np.int64)]), inner, features)


def _rows(block: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in block.splitlines() if "=" in line)


def _numbers(text: str) -> Iterator[int]:
    for word in text.split():
        try:
            yield int(word)
        except ValueError as error:
            raise InternalError(f"a tree of the forest has '{word[:20]}' for a number") from error
