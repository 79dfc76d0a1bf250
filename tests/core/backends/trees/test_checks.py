"""Files that would lead a library out of its memory or round in circles are refused. Needs no library."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from remora.backends.trees.checks import check_lightgbm, check_xgboost
from remora.errors import InternalError

TREE: dict[str, Any] = {
    "left_children": [1, 3, -1, -1, -1],
    "right_children": [2, 4, -1, -1, -1],
    "split_indices": [0, 3, 0, 0, 0],
    "categories": [],
    "categories_segments": [],
    "categories_sizes": [],
    "categories_nodes": [],
}
TEXT = """tree
max_feature_idx=3
objective=binary sigmoid:1

Tree=0
num_leaves=3
split_feature=0 3
left_child=1 -1
right_child=-2 -3
leaf_value=0.1 0.2 0.3

Tree=1
num_leaves=1
leaf_value=0.5

end of trees
"""


def booster(**changes: Any) -> dict[str, Any]:
    return {"model": {"trees": [copy.deepcopy(TREE) | changes], "tree_info": [0]}}


def test_trees_are_let_through() -> None:
    check_xgboost(booster(), 4, 1)
    check_xgboost({"gbtree": booster()}, 4, 1)  # dart
    check_xgboost({"model": {"weights": [1.0]}}, 4, 1)  # a linear model has none
    check_xgboost(booster(categories=[1, 2], categories_segments=[0], categories_sizes=[2], categories_nodes=[1]), 4, 1)
    check_lightgbm(TEXT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"left_children": [10**8, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left_children": [-7, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left_children": [0, 3, -1, -1, -1]}, "a child that is not there"),  # back to the root
        ({"left_children": [1, 1, -1, -1, -1]}, "two parents"),
        ({"left_children": [1]}, "without children's numbers"),
        ({"split_indices": [0, 4, 0, 0, 0]}, "not among the 4"),
        ({"split_indices": [-1, 0, 0, 0, 0]}, "not among the 4"),
        (
            {"categories_segments": [0], "categories_sizes": [9], "categories_nodes": [1]},
            "categories that are not there",
        ),
        ({"categories_segments": [0], "categories_sizes": [], "categories_nodes": []}, "without their sizes"),
    ],
)
def test_what_is_no_tree_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        check_xgboost(booster(**changes), 4, 1)


def test_a_tree_of_a_class_that_is_not_there_is_refused() -> None:
    forest = booster()
    forest["model"]["tree_info"] = [3]
    with pytest.raises(InternalError, match="a class that is not there"):
        check_xgboost(forest, 4, 3)


@pytest.mark.parametrize(
    ("line", "other", "reason"),
    [
        ("left_child=1 -1", "left_child=9 -1", "a child that is not there"),
        ("left_child=1 -1", "left_child=0 -1", "a child that is not there"),
        ("right_child=-2 -3", "right_child=-2 -4", "a child that is not there"),
        ("right_child=-2 -3", "right_child=-2 -2", "two parents"),
        ("left_child=1 -1", "left_child=1", "without children's numbers"),
        ("leaf_value=0.1 0.2 0.3", "leaf_value=0.1", "without children's numbers"),
        ("split_feature=0 3", "split_feature=0 4", "not among the 4"),
        ("left_child=1 -1", "left_child=x -1", "'x' for a number"),
    ],
)
def test_a_text_that_is_no_forest_is_refused(line: str, other: str, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        check_lightgbm(TEXT.replace(line, other))
