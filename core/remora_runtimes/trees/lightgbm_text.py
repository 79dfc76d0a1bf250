"""Check of a model in LightGBM's text format before the library reads it.

The library trusts lengths and numbers in a text and crashes the process on some wrong ones. It therefore gets only the
checked head and trees: neither the training parameters, which no answer depends on, nor ``tree_sizes``, without which
it reads in order and reports what it cannot parse. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from remora.errors import InternalError
from remora.messages import Array
from remora_runtimes.trees.checks import check_tree

_END = "\nend of trees"
_CATEGORICAL = 1  # a bit of decision_type
_KEY = re.compile(r"\w+", re.ASCII)


def checked_text(text: str) -> str:
    """Return the part of a model that LightGBM may read.

    Raises InternalError for an invalid or incomplete forest.
    """
    if not text.startswith("tree\n") or _END not in text:
        raise InternalError("it is not a whole model in LightGBM's text format: 'end of trees' is not in it")
    if "\0" in text:  # the library would take it as the end
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
    """Return the number of features in a row."""
    features = _number(rows, "max_feature_idx") + 1
    classes = _number(rows, "num_class")
    if classes < 1 or classes != _number(rows, "num_tree_per_iteration") or (trees and classes > trees):
        raise InternalError(f"the forest has {classes} classes, which is not what its {trees} trees are for")
    objective, *settings = rows.get("objective", "").split()
    for setting in settings:  # the library writes this number of values into room for num_class
        name, _, value = setting.partition(":")
        if name == "num_class" and value != str(classes):
            raise InternalError(f"the forest's objective is for {value[:20]} classes, the forest for {classes}")
    if objective.startswith("multiclass") and f"num_class:{classes}" not in settings:
        raise InternalError("the forest's objective has no number of classes")
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
    # Leaves have separate numbers, -1 and down; here they follow the nodes.
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
    """Check a tree's sets of categories.

    ``chosen`` are the thresholds of the nodes that test a category; each is the number of a set.
    """
    sets = _number(rows, "num_cat", "0")
    bounds, words = (_integers(rows, key) for key in ("cat_boundaries", "cat_threshold"))
    whole = not sets or (len(bounds) == sets + 1 and bounds[0] == 0 and bounds[-1] == len(words))
    # The last comparison is False for NaN too.
    if not whole or (np.diff(bounds) < 0).any() or not ((chosen >= 0) & (chosen < sets)).all():
        raise InternalError("a tree of the forest has categories that are not there")


def _check_linear(rows: Mapping[str, str], leaves: int, features: int) -> None:
    counts, tested = _integers(rows, "num_features"), _integers(rows, "leaf_features")
    sizes = len(_floats(rows, "leaf_const")), len(counts), len(tested), len(_floats(rows, "leaf_coeff"))
    total = int(counts.sum())
    if sizes != (leaves, leaves, total, total) or (counts < 0).any():
        raise InternalError("a tree of the forest has leaves without their coefficients")
    if not ((tested >= 0) & (tested < features)).all():
        raise InternalError(f"a tree of the forest tests a feature that is not among the {features}")


def _rows(block: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    for line in block.split("\n"):
        key, equals, value = line.partition("=")
        if key in rows:
            raise InternalError(f"the forest has the key '{key[:20]}' twice")
        if equals:
            if not _KEY.fullmatch(key):  # the library skips a leading '=' and would read another key
                raise InternalError(f"the forest has the line '{line[:20]}', which is not key=value")
            rows[key] = value
    return rows


def _text(rows: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in rows.items())


def _number(rows: Mapping[str, str], key: str, default: str = "") -> int:
    numbers = _integers({key: rows.get(key, default)}, key)
    if len(numbers) != 1:
        raise InternalError(f"the forest has no {key}")
    return int(numbers[0])


def _integers(rows: Mapping[str, str], key: str) -> Array:
    return _array(rows.get(key, ""), np.int64)


def _floats(rows: Mapping[str, str], key: str) -> Array:
    return _array(rows.get(key, ""), np.float64)


def _array(text: str, dtype: Any) -> Array:
    try:
        if not text.isascii() or "_" in text:  # only Python accepts these as numbers
            raise ValueError(f"'{text[:20]}'")
        return np.array(text.split(), dtype)
    except (ValueError, OverflowError) as error:
        raise InternalError(f"a tree of the forest has a word for a number: {str(error)[-60:]}") from error
