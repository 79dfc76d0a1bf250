"""Checks of scikit-learn's trees from a file.

Its compiled code follows the indices of nodes and features without bounds.

skops cannot judge the content of `sklearn.tree._tree.Tree` and therefore does not trust it. After these checks every
branch leads to a later node of its tree, and every node reads a feature that the estimator has, so that a prediction
ends and stays within the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_LEAF = -1
_OBJECTS_AT_MOST = 10_000_000
"""Parts of an estimator that are looked at; the largest forests have a few hundred thousand."""

CHECKED_TYPES = frozenset(
    {"sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"}
)
"""Types that are safe once `check_trees` has passed."""

PLAIN_TYPES = frozenset(
    {
        "sklearn._loss.loss.HalfTweedieLossIdentity",
        "sklearn.calibration._CalibratedClassifier",
        "sklearn.calibration._SigmoidCalibration",
        "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
        "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
        "sklearn.utils._bunch.Bunch",
    }
)
"""Types of scikit-learn that hold numbers and other estimators, in Python alone."""


def check_trees(estimator: Any) -> None:
    """Check all trees in an estimator and in the estimators that it consists of.

    Raises ValueError with the first fault.
    """
    for part in _parts(estimator):
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        if kind == "sklearn.tree._tree.Tree":
            _check_tree(part)
        elif hasattr(part, "tree_"):
            _match(part.tree_.n_features, getattr(part, "n_features_in_", None), type(part).__name__)
        if kind.startswith("sklearn.ensemble._gb.") and hasattr(part, "estimators_"):
            _check_boosting(part)
        elif kind.startswith("sklearn.ensemble._hist_gradient_boosting.") and hasattr(part, "_predictors"):
            _check_histogram_boosting(part)


def _parts(estimator: Any) -> Iterator[Any]:
    """Yield an estimator and all objects in it, each once."""
    waiting, seen = [estimator], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(part))
        if len(seen) > _OBJECTS_AT_MOST:
            raise ValueError(f"the estimator has more than {_OBJECTS_AT_MOST} parts")
        yield part
        if isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            waiting.extend(part)
        elif isinstance(part, np.ndarray):
            if part.dtype.hasobject:
                waiting.extend(part.ravel().tolist())
        else:
            waiting.extend(getattr(part, "__dict__", {}).values())


def _check_tree(tree: Any) -> None:
    nodes = tree.__getstate__()["nodes"]
    inner = nodes["left_child"] != _LEAF
    _check_nodes(nodes, inner, "left_child", "right_child", "feature", int(tree.n_features))


def _check_nodes(nodes: Any, inner: Any, left: str, right: str, feature: str, features: int) -> None:
    """Raise ValueError unless the inner nodes lead to later nodes and read existing features."""
    count = len(nodes)
    if not count:
        raise ValueError("a tree has no nodes")
    places = np.arange(count)[inner]
    for branch in (left, right):
        follows = nodes[branch][inner].astype(np.int64)
        if ((follows <= places) | (follows >= count)).any():
            raise ValueError(f"a tree of {count} nodes has a branch that leads to no later node")
    used = nodes[feature][inner]
    if ((used < 0) | (used >= features)).any():
        raise ValueError(f"a tree reads a feature that does not exist: the estimator has {features}")


def _match(features: int, declared: Any, kind: str) -> None:
    if declared != features:
        raise ValueError(f"a {kind} takes {declared} features and has a tree for {features}")


def _check_boosting(boosting: Any) -> None:
    """Check that all trees take the same features, one tree for each value of a stage."""
    stages = np.asarray(boosting.estimators_, object)
    if stages.ndim != 2 or not stages.size:
        raise ValueError("the estimators of gradient boosting are not a table")
    features = getattr(boosting, "n_features_in_", None)
    for each in stages.ravel():
        _match(each.tree_.n_features, features, type(boosting).__name__)
        _match(each.n_features_in_, features, type(boosting).__name__)
        if int(each.tree_.n_outputs) != 1:
            raise ValueError("a tree of gradient boosting has several outputs")
    values = boosting._raw_predict_init(np.zeros((1, int(features or 0)), np.float32)).shape[1]
    if values != stages.shape[1]:
        raise ValueError(f"gradient boosting has {stages.shape[1]} trees for {values} values")


def _check_histogram_boosting(boosting: Any) -> None:
    features = int(boosting.n_features_in_)
    known, places = boosting._bin_mapper.make_known_categories_bitsets()
    if len(places) < features:
        raise ValueError(f"the bins of {len(places)} features belong to an estimator of {features}")
    for predictor in (each for stage in boosting._predictors for each in stage):
        nodes = predictor.nodes
        inner = nodes["is_leaf"] == 0
        _check_nodes(nodes, inner, "left", "right", "feature_idx", features)
        categorical = inner & (nodes["is_categorical"] != 0)
        if (nodes["bitset_idx"][categorical] >= len(predictor.raw_left_cat_bitsets)).any():
            raise ValueError("a tree has a set of categories that does not exist")
        if (places[nodes["feature_idx"][categorical]] >= len(known)).any():
            raise ValueError("a tree splits a feature by categories that has none")
