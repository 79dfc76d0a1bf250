"""Forests of decision trees, each run by the library that grew it.

Only formats that hold data are read, never pickles. A forest gives one row of values for each row of features:
regression values, or probabilities of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.backends.model_files import import_framework
from remora.messages import Array
from remora_runtimes.trees.lightgbm_text import checked_text
from remora_runtimes.trees.treelite_checkpoint import check_checkpoint
from remora_runtimes.trees.xgboost_document import read_xgboost

_EXTRA = "trees"


Predict = Callable[[Array], Array]
"""Maps rows of features, FP32, to rows of values, FP32. Any number of threads may call it."""


class Forest(NamedTuple):
    """Loaded forest.

    ``classes`` is 0 for a regression, 2 for a binary classifier. ``width`` is the number of values that `Predict`
    returns for a row: 1 for a binary classifier, the probability of the second class. ``contributions`` returns the
    SHAP values of a row: the part of each feature and the base value, ``features`` + 1 for each value. None if the
    library cannot compute them.
    """

    features: int
    classes: int
    width: int
    predict: Predict
    contributions: Predict | None = None


def xgboost_forest(model: str, path: Path, threads: int) -> Forest:
    """Load a model that XGBoost saved as JSON or UBJSON.

    Raises ConfigError without XGBoost, and XGBoost's own errors.
    """
    xgboost = import_framework("xgboost", model, "XGBoost", _EXTRA)
    data = path.read_bytes()
    document = read_xgboost(data)
    booster = xgboost.Booster({"nthread": threads})
    booster.load_model(bytearray(data))
    if document.objective == "multi:softmax":  # the same trees, without the last step that would drop the probabilities
        booster.set_param({"objective": "multi:softprob"})
    classes = document.classes or (2 if document.objective.startswith("binary:") else 0)

    def predict(rows: Array) -> Array:
        return _table(booster.inplace_predict(rows, validate_features=False), len(rows))

    def contributions(rows: Array) -> Array:
        table = xgboost.DMatrix(rows, feature_types=booster.feature_types, nthread=threads)
        return _table(booster.predict(table, pred_contribs=True, validate_features=False), len(rows))

    return Forest(
        document.features, classes, classes if classes > 2 else max(document.targets, 1), predict, contributions
    )


def lightgbm_forest(model: str, path: Path, threads: int) -> Forest:
    """Load a model in LightGBM's text format.

    Raises ConfigError without LightGBM, and LightGBM's own errors.
    """
    text = checked_text(path.read_text(encoding="utf-8", errors="replace"))
    lightgbm = import_framework("lightgbm", model, "LightGBM", _EXTRA)
    booster = lightgbm.Booster(model_str=text)
    head = dict(line.split("=", 1) for line in text.partition("\nTree=")[0].splitlines() if "=" in line)
    objective = head.get("objective", "").partition(" ")[0]
    width = int(booster.num_model_per_iteration())
    classes = width if width > 1 and objective.startswith("multiclass") else 2 if objective == "binary" else 0

    def predict(rows: Array) -> Array:
        return _table(booster.predict(rows, num_threads=threads), len(rows))

    def contributions(rows: Array) -> Array:
        return _table(booster.predict(rows, pred_contrib=True, num_threads=threads), len(rows))

    return Forest(int(booster.num_feature()), classes, width, predict, contributions)


def treelite_forest(model: str, path: Path, threads: int) -> Forest:
    """Load a checkpoint of Treelite, the way to serve forests of scikit-learn.

    Raises ConfigError without Treelite.
    """
    treelite = import_framework("treelite", model, "Treelite", _EXTRA)
    data = path.read_bytes()
    check_checkpoint(data)
    inner = treelite.Model.deserialize_bytes(data)
    header = inner.get_header_accessor()
    task = int(np.asarray(header.get_field("task_type")).ravel()[0])
    most = int(np.max(header.get_field("num_class")))
    binary, multiclass = 0, 2
    classes = 2 if task == binary else most if task == multiclass else 0

    def predict(rows: Array) -> Array:
        return _table(treelite.gtil.predict(inner, rows, nthread=threads), len(rows))

    return Forest(int(inner.num_feature), classes, most if task == multiclass else 1, predict)


def _table(values: Any, rows: int) -> Array:
    table: Array = np.ascontiguousarray(values, np.float32).reshape(rows, -1) if rows else np.empty((0, 1), "f4")
    return table
