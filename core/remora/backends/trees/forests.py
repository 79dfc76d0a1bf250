"""Forests of decision trees, each run by the library that grew it; the law: formats that hold data only, no pickles.

A forest gives one row of values for each row of features: regression values, or probabilities of classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.backends.opening import import_framework
from remora.backends.trees.checks import check_lightgbm, check_xgboost
from remora.errors import InternalError
from remora.messages import Array

_EXTRA = "'remora[trees]'"


Predict = Callable[[Array], Array]
"""Rows of features, FP32, to rows of values, FP32; any number of threads may call it."""


class Forest(NamedTuple):
    """What a forest is. ``classes`` is 0 for a regression, 2 for a binary classifier.

    ``width`` is how many values `Predict` gives for a row: 1 for a binary classifier, the probability of the second
    class.
    """

    features: int
    classes: int
    width: int
    predict: Predict


def xgboost_forest(model: str, path: Path, threads: int) -> Forest:
    """A model that XGBoost saved as JSON or UBJSON. Raises ConfigError without XGBoost, and its own errors."""
    xgboost = import_framework("xgboost", model, "XGBoost", _EXTRA)
    booster = xgboost.Booster({"nthread": threads})
    booster.load_model(path)
    learner = json.loads(booster.save_config())["learner"]
    objective = str(learner["objective"]["name"])
    if objective == "multi:softmax":  # the same trees; only the last step would throw the probabilities away
        booster.set_param({"objective": "multi:softprob"})
    declared = int(learner["learner_model_param"].get("num_class", "0"))
    classes = declared if declared > 1 else 2 if objective.startswith("binary:") else 0
    targets = int(learner["learner_model_param"].get("num_target", "1"))

    def predict(rows: Array) -> Array:
        return _table(booster.inplace_predict(rows, validate_features=False), len(rows))

    width = classes if classes > 2 else max(targets, 1)
    told = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]
    check_xgboost(told, int(booster.num_features()), width)
    return Forest(int(booster.num_features()), classes, width, predict)


def lightgbm_forest(model: str, path: Path, threads: int) -> Forest:
    """A model in LightGBM's text format. Raises ConfigError without LightGBM, and its own errors."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("tree\n") or "\nend of trees" not in text:
        # Its reader takes the process down on some texts that are cut short.
        raise InternalError("it is not a whole model in LightGBM's text format: 'end of trees' is not in it")
    check_lightgbm(text)
    lightgbm = import_framework("lightgbm", model, "LightGBM", _EXTRA)
    booster = lightgbm.Booster(model_str=text)
    head = dict(line.split("=", 1) for line in text.partition("\nTree=")[0].splitlines() if "=" in line)
    objective = head.get("objective", "").partition(" ")[0]
    width = int(booster.num_model_per_iteration())
    classes = width if width > 1 and objective.startswith("multiclass") else 2 if objective == "binary" else 0

    def predict(rows: Array) -> Array:
        return _table(booster.predict(rows, num_threads=threads), len(rows))

    return Forest(int(booster.num_feature()), classes, width, predict)


def treelite_forest(model: str, path: Path, threads: int) -> Forest:
    """A checkpoint of Treelite: how forests of scikit-learn come here. Raises ConfigError without Treelite."""
    treelite = import_framework("treelite", model, "Treelite", _EXTRA)
    inner = treelite.Model.deserialize(str(path))
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
