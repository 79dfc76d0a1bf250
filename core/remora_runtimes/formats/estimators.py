"""Estimators with scikit-learn's interface in pickles, skops files and CatBoost's files.

The inputs follow from what the estimator was fitted on: ``input`` for an array, ``text`` for texts, ``rows`` with a
JSON object for each row for the named columns of a data frame. A classifier answers ``label`` and ``probabilities``,
all others ``output``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remora.api.functions import BadRequestError, InputField, Kind, Model, OutputField, Signature, kind_of
from remora_runtimes.formats import ROWS, needed, rows_of

_REMEDY = "save a fitted estimator, or describe the model in an app.py with @remora.model"
Method = Callable[[Any], Any]


def define_pickle(file: Path, name: str, trusted: bool) -> Model:
    """Describe an estimator in a pickle, which runs the code in the file. Raises ValueError."""
    if not trusted:
        raise ValueError(f"'{file}' is a pickle: reading it runs code; start the server with --trust-pickle")
    return _model(needed("joblib", file).load(file), file, name)


def define_skops(file: Path, name: str, trusted: bool) -> Model:
    """Describe an estimator in a file of skops.

    scikit-learn's own trees are safe once they are checked; skops, which checks no content, does not trust them.

    Raises ValueError for other types that skops does not know to be safe, and for damaged trees.
    """
    from remora_runtimes.formats.tree_checks import CHECKED_TYPES, PLAIN_TYPES, check_trees

    io = needed("skops.io", file)
    unknown = io.get_untrusted_types(file=file)
    unsafe = sorted(set(unknown) - CHECKED_TYPES - PLAIN_TYPES)
    if unsafe and not trusted:
        raise ValueError(
            f"'{file}' contains types that skops does not know to be safe: {', '.join(unsafe)}; if you trust the "
            "file, start the server with --trust-pickle"
        )
    estimator = io.load(file, trusted=unknown)
    if not trusted:
        try:
            check_trees(estimator)
        except ValueError as error:
            raise ValueError(f"'{file}' is damaged or forged: {error}") from error
    return _model(estimator, file, name)


def define_catboost(file: Path, name: str, trusted: bool) -> Model:
    """Describe a model in CatBoost's binary format."""
    del trusted  # the format contains no code
    catboost = needed("catboost", file)
    generic = catboost.CatBoost().load_model(str(file))
    loss = generic.get_all_params().get("loss_function", "RMSE").partition(":")[0]
    classifies = loss in ("Logloss", "CrossEntropy", "MultiClass", "MultiClassOneVsAll", "MultiLogloss")
    kind = catboost.CatBoostClassifier if classifies else catboost.CatBoostRegressor
    model = kind().load_model(str(file))
    columns = [str(each) for each in model.feature_names_]
    if model.get_cat_feature_indices() or model.get_text_feature_indices():
        return _of_rows(model, file, name, columns)
    return _of_array(model, file, name, len(columns), columns=())


def _model(estimator: Any, file: Path, name: str) -> Model:
    if not any(hasattr(estimator, each) for each in ("predict", "transform")):
        raise ValueError(f"'{file}' contains a {type(estimator).__name__}, which neither predicts nor transforms")
    first = estimator.steps[0][1] if hasattr(estimator, "steps") else estimator
    if type(first).__module__.startswith("sklearn.feature_extraction.text"):
        return _assembled(estimator, file, name, InputField("text", kind_of(list[str], batched=True), False), [""])
    columns = [str(each) for each in getattr(estimator, "feature_names_in_", ())]
    if columns and type(first).__name__ == "ColumnTransformer":
        return _of_rows(estimator, file, name, columns)
    features = getattr(estimator, "n_features_in_", None)
    if features is None:
        raise ValueError(f"'{file}' does not say how many features it takes: {_REMEDY}")
    return _of_array(estimator, file, name, int(features), columns)


def _of_array(estimator: Any, file: Path, name: str, features: int, columns: Sequence[str]) -> Model:
    field = InputField("input", rows_of(np.float64, features), False)
    framed = _framed(file, columns) if columns else None
    return _assembled(estimator, file, name, field, np.zeros((1, features)), framed)


def _of_rows(estimator: Any, file: Path, name: str, columns: Sequence[str]) -> Model:
    frame = _framed(file, columns)

    def prepare(rows: Sequence[Any]) -> Any:
        return frame([_values(row, columns) for row in rows])

    return _assembled(
        estimator, file, name, InputField("rows", kind_of(list[dict[str, Any]], batched=True), False), None, prepare
    )


def _framed(file: Path, columns: Sequence[str]) -> Method:
    """Return the function that makes a data frame of rows."""
    pandas = needed("pandas", file)
    return lambda rows: pandas.DataFrame(rows, columns=list(columns))


def _values(row: dict[str, Any], columns: Sequence[str]) -> list[Any]:
    """Return the values of a row in the order of the columns.

    Raises BadRequestError for an unknown or missing column.
    """
    from difflib import get_close_matches

    unknown = [key for key in row if key not in columns]
    if unknown:
        near = get_close_matches(unknown[0], columns, 1) or columns[:1]
        raise BadRequestError(f"there is no column '{unknown[0]}'; did you mean '{near[0]}'?")
    missing = [column for column in columns if column not in row]
    if missing:
        raise BadRequestError(f"the column '{missing[0]}' is missing")
    return [row[column] for column in columns]


def _assembled(
    estimator: Any, file: Path, name: str, field: InputField, sample: Any, prepare: Method | None = None
) -> Model:
    """Return the model of an estimator with one input.

    Args:
        estimator: has ``predict`` or ``transform``.
        file: shown in errors.
        name: the model's name.
        field: the input.
        sample: a row on which the estimator is tried, to find the types of its results; None for no trial.
        prepare: converts the input to what the estimator takes.
    """
    classes = getattr(estimator, "classes_", None)
    probable = isinstance(classes, np.ndarray) and classes.ndim == 1 and hasattr(estimator, "predict_proba")
    predict: Method = estimator.predict if hasattr(estimator, "predict") else estimator.transform
    methods: dict[str, Method] = {"label" if probable else "output": predict}
    if probable:
        methods["probabilities"] = estimator.predict_proba
    outputs = []
    for output, method in methods.items():
        if sample is not None:
            result = _dense(method(prepare(sample) if prepare else sample))
        elif output == "label":
            result = np.asarray(classes)[:1]
        else:
            result = np.zeros((1, len(classes)) if output == "probabilities" and classes is not None else 1)
        outputs.append(OutputField(output, _kind_like(result)))
    run = list(methods.values())

    def answer(**inputs: Any) -> tuple[Any, ...]:
        try:
            given = prepare(inputs[field.name]) if prepare else inputs[field.name]
            results = [_dense(method(given)) for method in run]
        except BadRequestError:
            raise
        except (ValueError, TypeError) as error:  # such as an unknown category
            raise BadRequestError(str(error)) from None
        return tuple(_like(each, output.kind) for each, output in zip(results, outputs, strict=True))

    return Model(answer, name, ROWS, signature=Signature((field,), tuple(outputs), lambda result: result, False))


def _dense(result: Any) -> np.ndarray[Any, Any]:
    """Return a result as an array whose first dimension is the batch."""
    array = np.asarray(result.toarray() if hasattr(result, "toarray") else result)
    if array.ndim == 2 and array.shape[1] == 1:  # one column, as in CatBoost's labels
        array = array[:, 0]
    return array


def _kind_like(result: np.ndarray[Any, Any]) -> Kind:
    """Return the kind of a result, with one row for each item of its first dimension."""
    if result.dtype.kind in "OUS":
        hint: Any = list[str]
        for _ in result.shape[1:]:
            hint = list[hint]
        return kind_of(hint, batched=True)
    dtype = {"i": np.int64, "u": np.int64, "b": np.bool_}.get(result.dtype.kind, result.dtype.type)
    return rows_of(dtype, *result.shape[1:])


def _like(result: np.ndarray[Any, Any], kind: Kind) -> Any:
    if kind.datatype != "BYTES":
        return result
    return result.astype(str).tolist()
