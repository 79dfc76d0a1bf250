"""Is a model in LightGBM's text format a forest? Pure; the law: the library sees only what was looked at here.

Its reader trusts the lengths and numbers in a text, and ends the process over some that are wrong. So it is handed the
head and the trees and no more: neither the training parameters, which no answer depends on, nor ``tree_sizes``, without
which it reads in order and tells what it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from remora.backends.trees.checks import check_tree
from remora.errors import InternalError
from remora.messages import Array

_END = "\nend of trees"
_CATEGORICAL = 1  # of the bits of a decision_type
_KEY = re.compile(r"\w+", re.ASCII)


def checked_text(text: str) -> str:
    """What LightGBM may read of a model. Raises InternalError: it is no forest, or not a whole one."""
    if not text.startswith("tree\n") or _END not in text:
        raise InternalError("it is not a whole model in LightGBM's text format: 'end of trees' is not in it")
    if "\0" in text:  # where the library would take it to end
        raise InternalError("it has a zero byte, which no text in LightGBM's format has")
    head, *blocks = text.partition(_END)[0].split("\nTree=")
    rows, trees = _rows(head), [_rows(block.partition("\n")[2]) for block in blocks]
    features = _check_head(rows, len(trees))
    for tree in trees:
        _check_tree(tree, features)
    rows.pop("tree_sizes", None)
    average = "average_output\n" if "\naverage_output\n" in head else ""
    parts = [f"tree\n{average}{_text(rows)}", *(f"Tree={at}\n{_text(tree)}" for at, tree in enumerate(trees))]
    return "\n\n".join([*parts, "end of trees\n"])


def _check_head(rows: Mapping[str, str], trees: int) -> int:
    """How many features a row has."""
    features = _number(rows, "max_feature_idx") + 1
    classes = _number(rows, "num_class")
    if classes < 1 or classes != _number(rows, "num_tree_per_iteration") or (trees and classes > trees):
        raise InternalError(f"the forest has {classes} classes, which is not what its {trees} trees are for")
    objective, *settings = rows.get("objective", "").split()
    for setting in settings:  # so many values are written to where there is room for num_class
        name, _, value = setting.partition(":")
        if name == "num_class" and value != str(classes):
            raise InternalError(f"the forest's objective is for {value[:20]} classes, the forest for {classes}")
    if objective.startswith("multiclass") and f"num_class:{classes}" not in settings:
        raise InternalError("the forest's objective does not say for how many classes it is")
    for key in ("feature_names", "feature_infos"):
        if features < 1 or len(rows.get(key, "").split()) != features:
            raise InternalError(f"the forest has {features} features, but not as many {key}")
    return features


def _check_tree(rows: Mapping[str, str], features: int) -> None:
    leaves = _number(rows, "num_leaves")
    nodes = leaves - 1
    values = _floats(rows, "leaf_value")
    left, right, feature = (_integers(rows, key) for key in ("left_child", "right_child", "split_feature"))
    if leaves < 1 or len(values) != leaves or len(left) != nodes:
        raise InternalError("a tree of the forest has nodes without children's numbers")
    # Leaves have numbers of their own, -1 and down: here they come after the nodes.
    left, right = (np.where(each < 0, nodes - 1 - each, each) for each in (left, right))
    none = np.zeros(leaves, np.int64)
    left, right, feature = (np.concatenate([each, none]) for each in (left, right, feature))
    check_tree(left, right, feature, np.arange(len(left)) < nodes, features)
    thresholds, decisions = _floats(rows, "threshold"), _integers(rows, "decision_type")
    if not len(thresholds) == len(decisions) == nodes:
        raise InternalError("a tree of the forest has nodes without decisions")
    _check_categories(rows, thresholds[decisions & _CATEGORICAL != 0])
    if rows.get("is_linear", "0") != "0":
        _check_linear(rows, leaves, features)


def _check_categories(rows: Mapping[str, str], chosen: Array) -> None:
    """``chosen``: the thresholds of the nodes that ask for a category; each is the number of a set of them."""
    sets = _number(rows, "num_cat", "0")
    bounds, words = (_integers(rows, key) for key in ("cat_boundaries", "cat_threshold"))
    whole = not sets or (len(bounds) == sets + 1 and bounds[0] == 0 and bounds[-1] == len(words))
    # NaN is not among them either.
    if not whole or (np.diff(bounds) < 0).any() or not ((chosen >= 0) & (chosen < sets)).all():
        raise InternalError("a tree of the forest has categories that are not there")


def _check_linear(rows: Mapping[str, str], leaves: int, features: int) -> None:
    counts, looked_at = _integers(rows, "num_features"), _integers(rows, "leaf_features")
    sizes = len(_floats(rows, "leaf_const")), len(counts), len(looked_at), len(_floats(rows, "leaf_coeff"))
    total = int(counts.sum())
    if sizes != (leaves, leaves, total, total) or (counts < 0).any():
        raise InternalError("a tree of the forest has leaves without their coefficients")
    if not ((looked_at >= 0) & (looked_at < features)).all():
        raise InternalError(f"a tree of the forest looks at a feature that is not among the {features}")


def _rows(block: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    for line in block.split("\n"):
        key, equals, value = line.partition("=")
        if key in rows:
            raise InternalError(f"the forest says '{key[:20]}' twice")
        if equals:
            if not _KEY.fullmatch(key):  # the library skips '=' at the beginning, and would read another key
                raise InternalError(f"the forest says '{line[:20]}', which is no key and its value")
            rows[key] = value
    return rows


def _text(rows: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in rows.items())


def _number(rows: Mapping[str, str], key: str, default: str = "") -> int:
    found = _integers({key: rows.get(key, default)}, key)
    if len(found) != 1:
        raise InternalError(f"the forest does not say its {key}")
    return int(found[0])


def _integers(rows: Mapping[str, str], key: str) -> Array:
    return _array(rows.get(key, ""), np.int64)


def _floats(rows: Mapping[str, str], key: str) -> Array:
    return _array(rows.get(key, ""), np.float64)


def _array(text: str, dtype: Any) -> Array:
    try:
        if not text.isascii() or "_" in text:  # which are digits to Python alone
            raise ValueError(f"'{text[:20]}'")
        return np.array(text.split(), dtype)
    except (ValueError, OverflowError) as error:
        raise InternalError(f"a tree of the forest has a word for a number: {str(error)[-60:]}") from error
