"""Refusal of documents that would make XGBoost read or write out of bounds.

Needs no library.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.errors import InternalError
from remora_runtimes.trees.xgboost_document import XGBoostModel, read_xgboost

NOBODY = 2**31 - 1


def tree(**changes: Any) -> dict[str, Any]:
    return {
        "base_weights": [0.0, 0.0, 0.1, 0.2, 0.3],
        "left_children": [1, 3, -1, -1, -1],
        "right_children": [2, 4, -1, -1, -1],
        "parents": [NOBODY, 0, 0, 1, 1],
        "split_indices": [0, 3, 0, 0, 0],
        "split_conditions": [0.5, 0.0, 0.1, 0.2, 0.3],
        "split_type": [0, 1, 0, 0, 0],
        "default_left": [0, 1, 0, 0, 0],
        "categories": [1, 2],
        "categories_segments": [0],
        "categories_sizes": [2],
        "categories_nodes": [1],
        "tree_param": {"num_nodes": "5", "num_feature": "4", "size_leaf_vector": "1"},
    } | changes


def vector_tree(**changes: Any) -> dict[str, Any]:
    """Leaves with two values: which of ``leaf_weights`` are theirs stands where a right child would."""
    plain = {"split_type": [0] * 5, "categories": [], "categories_segments": [], "categories_sizes": []}
    return (
        tree(
            **plain,
            categories_nodes=[],
            right_children=[2, 4, 0, 1, 2],
            base_weights=[0.0] * 10,
            leaf_weights=[0.0] * 6,
            loss_changes=[0.0] * 5,
            sum_hessian=[1.0] * 5,
            tree_param={"num_nodes": "5", "num_feature": "4", "size_leaf_vector": "2"},
        )
        | changes
    )


def document(*trees: dict[str, Any], param: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    grown = list(trees) or [tree()]
    model = {
        "gbtree_model_param": {"num_trees": str(len(grown))},
        "iteration_indptr": [0, len(grown)],
        "tree_info": [0] * len(grown),
        "trees": grown,
    } | changes
    return {
        "learner": {
            "learner_model_param": {"num_class": "0", "num_feature": "4", "num_target": "1"} | (param or {}),
            "objective": {"name": "binary:logistic"},
            "gradient_booster": {"model": model, "name": "gbtree"},
        }
    }


def read(made: dict[str, Any]) -> XGBoostModel:
    return read_xgboost(json.dumps(made).encode())


def test_forests_are_let_through() -> None:
    assert read(document()) == XGBoostModel("binary:logistic", 4, 0, 1)
    assert read(document(tree(), tree(), param={"num_class": "2"}, tree_info=[0, 1])).classes == 2
    assert read(document(vector_tree(), param={"num_target": "2"})).targets == 2
    dart = document()
    booster = dart["learner"]["gradient_booster"]
    dart["learner"]["gradient_booster"] = {"gbtree": booster, "name": "dart", "weight_drop": [1.0]}
    assert read(dart).features == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"left_children": [10**8, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left_children": [1, 1, -1, -1, -1]}, "two parents"),
        ({"right_children": [2, 4, 7, -1, -1]}, "a child that is not there"),
        ({"parents": [NOBODY, 0, 0, 1, 0]}, "two parents"),
        ({"left_children": [1]}, "without children's numbers"),
        ({"tree_param": {"num_nodes": "2147483647"}}, "without children's numbers"),
        ({"default_left": [0]}, "without children's numbers"),
        ({"left_children": ["1", 3, -1, -1, -1]}, "something else for whole numbers"),
        ({"left_children": [2**33, 3, -1, -1, -1]}, "too high"),
        ({"split_indices": [0, 4, 0, 0, 0]}, "not among the 4"),
        ({"split_type": [0, 9, 0, 0, 0]}, "a kind that is not there"),
        ({"tree_param": {"num_nodes": "5", "size_leaf_vector": "9"}}, "other rows, or other values"),
        ({"categories_sizes": [9]}, "categories that are not there"),
        ({"categories_segments": [-1]}, "categories that are not there"),
        ({"categories_sizes": []}, "without their sizes"),
        ({"categories_nodes": [2]}, "categories that are not there"),
        ({"categories": [1, -1]}, "categories that are not there"),
        ({"categories": [1, 2**32 - 1]}, "numbers too high to be kept"),
        ({"tree_param": {}}, "lacks something.*num_nodes"),
    ],
)
def test_an_invalid_tree_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        read(document(tree(**changes)))


@pytest.mark.parametrize(
    "changes",
    [{"right_children": [2, 4, 0, 1, 3]}, {"leaf_weights": [0.0] * 5}, {"leaf_weights": []}, {"base_weights": [0.0]}],
)
def test_a_leaf_of_several_values_has_them(changes: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="leaves without values"):
        read(document(vector_tree(**changes), param={"num_target": "2"}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tree_info": [3]}, "a class that is not there"),
        ({"tree_info": []}, "its counts contradict"),
        ({"gbtree_model_param": {"num_trees": "9"}}, "its counts contradict"),
        ({"iteration_indptr": [0, 9]}, "rounds are not those"),
        ({"iteration_indptr": []}, "rounds are not those"),
        ({"param": {"num_class": "1000000000"}}, "gives 1000000000 values and has 1 trees"),
        ({"param": {"num_feature": "-1"}}, "must be from 0"),
        ({"param": {"num_feature": "many"}}, "in another form"),
    ],
)
def test_an_invalid_forest_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        read(document(**changes))


def test_an_objective_for_other_classes_is_refused() -> None:
    made = document()
    made["learner"]["objective"] = {"name": "multi:softprob", "softmax_multiclass_param": {"num_class": "900"}}
    with pytest.raises(InternalError, match="objective is not for the 0 classes"):
        read(made)


def test_a_linear_model_is_refused() -> None:
    made = document()
    made["learner"]["gradient_booster"] = {"model": {"weights": [1.0]}, "name": "gblinear"}
    with pytest.raises(InternalError, match="'gblinear' grows no forest"):
        read(made)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "neither JSON nor UBJSON"), (b'{"a": 1, "a": 2}', "key twice"), (b"{}", "ends|lacks")],
)
def test_an_invalid_document_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        read_xgboost(data)
