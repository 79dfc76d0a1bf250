"""Check of an XGBoost model, JSON or UBJSON, before the library reads it.

XGBoost trusts the numbers of nodes, categories and classes in a file, and crashes the process on some wrong ones. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from remora.errors import InternalError
from remora.messages import Array
from remora.system.json_text import read_json
from remora_runtimes.trees.checks import check_tree
from remora_runtimes.trees.ubjson import read_ubjson

_PER_NODE = ("right_children", "split_indices", "split_conditions", "parents", "default_left", "split_type",
             "loss_changes", "sum_hessian")  # fmt: skip
_MOST_CATEGORY_BYTES = 256 << 20
"""Largest memory for the sets of categories, each a bit set up to its highest category."""
_MOST_INTEGER = 2**32 - 1


class XGBoostModel(NamedTuple):
    """Parameters of a model. ``classes`` is 0 for a regression."""

    objective: str
    features: int
    classes: int
    targets: int


def read_xgboost(data: bytes) -> XGBoostModel:
    """Check a model and return its parameters. Raises InternalError."""
    if not data.startswith(b"{"):
        raise InternalError("it is neither JSON nor UBJSON")
    is_json = data[1:2] in (b'"', b" ", b"\n", b"\r", b"\t")  # XGBoost's own rule
    document = read_json(data, pairs=_once) if is_json else read_ubjson(data)
    try:
        return _check_learner(document["learner"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InternalError(f"the forest lacks something, or has it in another form: {error!r:.100}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise InternalError("the document has a key twice")
    return members


def _check_learner(learner: Mapping[str, Any]) -> XGBoostModel:
    params = learner["learner_model_param"]
    features, classes, targets = (
        int(params["num_feature"]),
        int(params.get("num_class", 0)),
        int(params.get("num_target", 1)),
    )
    groups = max(classes, targets, 1)
    if min(features, classes, targets) < 0 or max(features, groups) > _MOST_INTEGER // 2:
        raise InternalError(f"num_feature, num_class and num_target must be from 0 to {_MOST_INTEGER // 2}")
    objective = learner["objective"]
    for settings in objective.values():  # the library writes this number of values into room for the model's classes
        if isinstance(settings, dict) and int(settings.get("num_class", classes)) != classes:
            raise InternalError(f"the forest's objective is not for the {classes} classes that the forest has")
    booster = learner["gradient_booster"]
    model = booster["gbtree"]["model"] if "gbtree" in booster else booster["model"]
    if "trees" not in model:
        raise InternalError(f"'{str(booster.get('name'))[:20]}' grows no forest: use the booster gbtree or dart")
    _check_forest(model, features, groups)
    if len(booster.get("weight_drop", model["trees"])) != len(model["trees"]):
        raise InternalError("the forest has trees without a weight")
    return XGBoostModel(str(objective["name"]), features, classes if classes > 1 else 0, targets)


def _check_forest(model: Mapping[str, Any], features: int, groups: int) -> None:
    trees, groups_of_trees = model["trees"], _integers(model["tree_info"])
    if len(groups_of_trees) != len(trees) or int(model["gbtree_model_param"]["num_trees"]) != len(trees):
        raise InternalError(f"the forest has {len(trees)} trees, which its counts contradict")
    if groups_of_trees.size and (groups_of_trees.min() < 0 or groups_of_trees.max() >= groups):
        raise InternalError("a tree of the forest belongs to a class that is not there")
    rounds = _integers(model.get("iteration_indptr", [0, len(trees)]))
    if not rounds.size or rounds[0] != 0 or rounds[-1] != len(trees) or (np.diff(rounds) < 0).any():
        raise InternalError("the forest's rounds are not those of its trees")
    wide = max((int(tree["tree_param"].get("size_leaf_vector", 1)) for tree in trees), default=1)
    if groups > max(len(trees), wide, 1):  # checked first, because a row of the output has this number of values
        raise InternalError(f"the forest gives {groups} values and has {len(trees)} trees")
    room = _MOST_CATEGORY_BYTES
    for tree in trees:
        room -= _check_tree(tree, features, groups)
        if room < 0:
            raise InternalError("the forest's categories have numbers too high to be kept as sets")


def _check_tree(tree: Mapping[str, Any], features: int, groups: int) -> int:
    """Check a tree and return the bytes of its sets of categories."""
    param, left = tree["tree_param"], _integers(tree["left_children"])
    nodes, vector = len(left), int(param.get("size_leaf_vector", 1))
    lengths = {len(tree[key]) for key in _PER_NODE if key in tree}
    if not nodes or nodes != int(param["num_nodes"]) or lengths != {nodes}:
        raise InternalError("a tree of the forest has nodes without children's numbers or other fields")
    if not 0 <= vector <= groups or int(param.get("num_feature", features)) > features:
        raise InternalError("a tree of the forest is for other rows, or other values")
    right, split = _integers(tree["right_children"]), _integers(tree["split_indices"])
    inner = left != -1
    check_tree(left, right, split, inner, features)
    if vector > 1:
        _check_vectors(tree, right[~inner], nodes, vector)
    elif (right[~inner] != -1).any() or len(tree.get("base_weights", left)) != nodes:
        raise InternalError("a tree of the forest has a child that is not there")
    at = np.arange(nodes)[inner]
    parents = _integers(tree["parents"])
    if (parents[left[inner]] != at).any() or (parents[right[inner]] != at).any():
        raise InternalError("a tree of the forest has a node with two parents")
    kinds = _integers(tree.get("split_type", np.zeros(nodes, np.int64)))
    if not np.isin(kinds, (0, 1)).all() or not np.isin(_integers(tree["default_left"]), (0, 1)).all():
        raise InternalError("a tree of the forest has a decision of a kind that is not there")
    return _check_categories(tree, np.flatnonzero(inner & (kinds == 1)))


def _check_vectors(tree: Mapping[str, Any], places: Array, nodes: int, vector: int) -> None:
    """Check the vectors of a tree whose leaves have a value for each target."""
    if not tree.keys() >= set(_PER_NODE):
        raise InternalError("a tree of the forest has nodes without required fields")
    if "leaf_weights" not in tree:
        if len(tree["base_weights"]) != nodes * vector:
            raise InternalError("a tree of the forest has leaves without values")
        return
    if len(tree["leaf_weights"]) % vector or len(tree["base_weights"]) % vector:
        raise InternalError("a tree of the forest has leaves without values")
    if places.size and (places.min() < 0 or places.max() >= len(tree["leaf_weights"]) // vector):
        raise InternalError("a tree of the forest has leaves without values")


def _check_categories(tree: Mapping[str, Any], asking: Array) -> int:
    begins, sizes, nodes, values = (
        _integers(tree.get(key, ()))
        for key in ("categories_segments", "categories_sizes", "categories_nodes", "categories")
    )
    if not len(begins) == len(sizes) == len(nodes):
        raise InternalError("a tree of the forest has categories without their sizes")
    if not np.array_equal(nodes, asking) or (values.size and values.min() < 0):
        raise InternalError("a tree of the forest has categories that are not there")
    taken = 0
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        if begin < 0 or size < 1 or begin + size > len(values):
            raise InternalError("a tree of the forest has categories that are not there")
        taken += int(values[begin : begin + size].max()) // 8 + 8
    return taken


def _integers(values: Any) -> Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise InternalError("a tree of the forest has something else for whole numbers")
    whole = array.astype(np.int64)
    if whole.size and (whole.min() < -1 or whole.max() > _MOST_INTEGER):
        raise InternalError("a tree of the forest has a number that is too high")
    return whole
