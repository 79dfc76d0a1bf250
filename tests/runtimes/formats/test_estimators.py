"""Estimators as files: which tensors they get, and their answers compared with the estimator's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.engine import Engine
from remora.errors import ConfigError, InvalidArgumentError, RemoraError

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed here: make test-formats")
joblib = pytest.importorskip("joblib", reason="joblib is not installed here: make test-formats")

from sklearn.cluster import KMeans  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402
from sklearn.linear_model import LinearRegression, LogisticRegression  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(60, 4))
NUMBERS = (X[:, 0] > 0).astype(np.int64)
WORDS = np.where(X[:, 0] > 0, "yes", "no")


def _saved(folder: Path, estimator: Any) -> Path:
    path = folder / "model.joblib"
    joblib.dump(estimator, path)
    return path


def _engine(path: Path, name: str = "m") -> Engine:
    return Engine(paths=[path], model_name=name, trust_pickle=True)


def test_a_classifier_answers_labels_and_probabilities(tmp_path: Path) -> None:
    forest = RandomForestClassifier(n_estimators=5, random_state=0).fit(X, NUMBERS)
    with _engine(_saved(tmp_path, forest)) as engine:
        answer = engine.infer("m", {"input": X[:5]})
    np.testing.assert_array_equal(answer["label"].ravel(), forest.predict(X[:5]))
    np.testing.assert_allclose(answer["probabilities"], forest.predict_proba(X[:5]))


def test_labels_may_be_text(tmp_path: Path) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, WORDS)
    with _engine(_saved(tmp_path, model)) as engine:
        answer = engine.infer("m", {"input": X[:5]})
    assert [each.decode() for each in answer["label"].ravel()] == model.predict(X[:5]).tolist()


@pytest.mark.parametrize("targets", [X[:, 1], X[:, :2]], ids=["one", "two"])
def test_a_regressor_answers_its_output(tmp_path: Path, targets: Any) -> None:
    model = LinearRegression().fit(X, targets)
    with _engine(_saved(tmp_path, model)) as engine:
        answer = engine.infer("m", {"input": X[:5]})
    np.testing.assert_allclose(answer["output"].reshape(5, -1), model.predict(X[:5]).reshape(5, -1))


def test_clusters_and_transformations_are_outputs(tmp_path: Path) -> None:
    clusters = KMeans(2, n_init=1, random_state=0).fit(X)
    scaler = StandardScaler().fit(X)
    joblib.dump(clusters, tmp_path / "clusters.joblib")
    joblib.dump(scaler, tmp_path / "scaler.pkl")
    with Engine(paths=[tmp_path / "clusters.joblib", tmp_path / "scaler.pkl"], trust_pickle=True) as engine:
        assert engine.infer("clusters", {"input": X[:3]})["output"].ravel().tolist() == clusters.predict(X[:3]).tolist()
        np.testing.assert_allclose(engine.infer("scaler", {"input": X[:3]})["output"], scaler.transform(X[:3]))


def test_a_vectorizer_takes_texts(tmp_path: Path) -> None:
    texts = ["good film", "bad film", "good book", "bad book"]
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, ["up", "down", "up", "down"])
    with _engine(_saved(tmp_path, model)) as engine:
        answer = engine.infer("m", {"text": np.array([["good"], ["bad"]], object)})
    assert answer["label"].ravel().tolist() == [b"up", b"down"]


def test_named_columns_are_rows_of_json(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here: make test-formats")
    from sklearn.compose import ColumnTransformer
    from sklearn.preprocessing import OneHotEncoder

    frame = pandas.DataFrame({"age": [20.0, 30, 40, 50], "city": ["Bern", "Rome", "Bern", "Rome"]})
    columns = ColumnTransformer([("age", "passthrough", ["age"]), ("city", OneHotEncoder(), ["city"])])
    model = make_pipeline(columns, LogisticRegression()).fit(frame, [0, 1, 0, 1])
    rows = np.array([[b'{"age": 25, "city": "Bern"}'], [b'{"city": "Rome", "age": 45}']], object)
    with _engine(_saved(tmp_path, model)) as engine:
        assert engine.infer("m", {"rows": rows})["label"].ravel().tolist() == [0, 1]
        with pytest.raises(InvalidArgumentError, match="there is no column 'town'; did you mean"):
            engine.infer("m", {"rows": np.array([[b'{"age": 1, "town": "Bern"}']], object)})
        with pytest.raises(InvalidArgumentError, match="the column 'city' is missing"):
            engine.infer("m", {"rows": np.array([[b'{"age": 1}']], object)})
        with pytest.raises(InvalidArgumentError, match="unknown categor"):
            engine.infer("m", {"rows": np.array([[b'{"age": 1, "city": "Oslo"}']], object)})


def test_a_value_that_the_estimator_refuses_is_the_clients_mistake(tmp_path: Path) -> None:
    with (
        _engine(_saved(tmp_path, LinearRegression().fit(X, X[:, 0]))) as engine,
        pytest.raises(InvalidArgumentError, match="NaN"),
    ):
        engine.infer("m", {"input": np.full((1, 4), np.nan)})


def test_a_pickle_is_refused_without_trust(tmp_path: Path) -> None:
    path = _saved(tmp_path, LinearRegression().fit(X, X[:, 0]))
    with (
        pytest.raises(ConfigError, match=r"is a pickle: reading a pickle runs code.*--trust-pickle"),
        Engine(paths=[path]),
    ):
        pass


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(RemoraError, match="contains a dict, which neither predicts nor transforms"),
        _engine(_saved(tmp_path, {"weights": [1]})),
    ):
        pass


def test_skops_files_need_no_trust(tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io", reason="skops is not installed here: make test-formats")
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, NUMBERS)
    skops.dump(model, tmp_path / "churn.skops")
    with Engine(paths=[tmp_path / "churn.skops"]) as engine:
        assert engine.infer("churn", {"input": X[:9]})["label"].ravel().tolist() == model.predict(X[:9]).tolist()


def test_skops_files_with_unknown_types_name_them(tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io", reason="skops is not installed here: make test-formats")
    from sklearn.preprocessing import FunctionTransformer

    skops.dump(make_pipeline(FunctionTransformer(_halved), LinearRegression()).fit(X, X[:, 0]), tmp_path / "m.skops")
    with (
        pytest.raises(RemoraError, match=r"types that skops does not know to be safe: .*_halved"),
        Engine(paths=[tmp_path / "m.skops"]),
    ):
        pass
    with Engine(paths=[tmp_path / "m.skops"], trust_pickle=True) as engine:
        assert engine.infer("m", {"input": X[:2]})["output"].shape == (2, 1)


def _halved(values: Any) -> Any:
    return values / 2


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_catboost_models_answer_as_catboost(tmp_path: Path, kind: str) -> None:
    catboost = pytest.importorskip("catboost", reason="CatBoost is not installed here: make test-formats")
    options = {"iterations": 5, "verbose": False, "allow_writing_files": False}
    chosen = catboost.CatBoostClassifier if kind == "classifier" else catboost.CatBoostRegressor
    model = chosen(**options).fit(X, NUMBERS if kind == "classifier" else X[:, 0])
    model.save_model(str(tmp_path / "boost.cbm"))
    with Engine(paths=[tmp_path / "boost.cbm"]) as engine:
        answer = engine.infer("boost", {"input": X[:5]})
    output = "label" if kind == "classifier" else "output"
    np.testing.assert_allclose(answer[output].ravel(), model.predict(X[:5]))


def test_catboost_models_with_categories_take_rows(tmp_path: Path) -> None:
    catboost = pytest.importorskip("catboost", reason="CatBoost is not installed here: make test-formats")
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here: make test-formats")
    frame = pandas.DataFrame({"size": [1.0, 2, 3, 4], "colour": ["red", "blue", "red", "blue"]})
    model = catboost.CatBoostClassifier(iterations=5, verbose=False, allow_writing_files=False, cat_features=["colour"])
    model.fit(frame, ["a", "b", "a", "b"]).save_model(str(tmp_path / "boost.cbm"))
    with Engine(paths=[tmp_path / "boost.cbm"]) as engine:
        answer = engine.infer("boost", {"rows": np.array([[b'{"size": 1, "colour": "red"}']], object)})
    assert answer["label"].ravel().tolist() == [model.predict(frame)[0].encode()]
