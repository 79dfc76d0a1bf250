"""Trees of scikit-learn in skops files: genuine ones are served without trust, forged ones never predict."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.engine import Engine
from remora.errors import RemoraError

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed here: make test-formats")
skops = pytest.importorskip("skops.io", reason="skops is not installed here: make test-formats")

from sklearn import ensemble, tree  # noqa: E402
from sklearn.calibration import CalibratedClassifierCV  # noqa: E402
from sklearn.neural_network import MLPClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

from remora_runtimes.formats.tree_checks import check_trees  # noqa: E402

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(80, 4))
CATEGORIES = np.concatenate([X, RANDOM.integers(0, 4, (80, 1))], axis=1)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int64)
THREE = np.digitize(X[:, 0], [-0.5, 0.5])

ESTIMATORS = {
    "tree": tree.DecisionTreeClassifier(max_depth=4),
    "extra tree": tree.ExtraTreeRegressor(max_depth=4),
    "forest": ensemble.RandomForestClassifier(5, random_state=0),
    "forest of numbers": ensemble.RandomForestRegressor(5, random_state=0),
    "extra trees": ensemble.ExtraTreesClassifier(5, random_state=0),
    "gradient boosting": ensemble.GradientBoostingClassifier(n_estimators=5),
    "gradient boosting of numbers": ensemble.GradientBoostingRegressor(n_estimators=5, init="zero"),
    "histogram boosting": ensemble.HistGradientBoostingClassifier(max_iter=5),
    "histogram boosting of numbers": ensemble.HistGradientBoostingRegressor(max_iter=5),
    "ada boost": ensemble.AdaBoostClassifier(n_estimators=5),
    "bagging": ensemble.BaggingClassifier(n_estimators=5, max_features=2),
    "isolation": ensemble.IsolationForest(n_estimators=5, max_features=3),
    "voting": ensemble.VotingClassifier(
        [("a", tree.DecisionTreeClassifier(max_depth=3)), ("b", ensemble.RandomForestClassifier(3, random_state=1))],
        voting="soft",
    ),
    "pipeline": make_pipeline(StandardScaler(), ensemble.RandomForestClassifier(3, random_state=0)),
    "calibrated": CalibratedClassifierCV(ensemble.RandomForestClassifier(3, random_state=0), cv=2),
    "perceptron": MLPClassifier(4, max_iter=300, random_state=0, tol=0.1),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.filterwarnings("ignore")
def test_estimators_with_trees_are_served_without_trust(tmp_path: Path, name: str) -> None:
    estimator = sklearn.clone(ESTIMATORS[name]).fit(X, Y)
    skops.dump(estimator, tmp_path / "m.skops")
    with Engine(tmp_path / "m.skops") as engine:
        answer = engine.infer("m", {"input": X[:6]})
    if hasattr(estimator, "predict_proba"):
        np.testing.assert_array_equal(answer["label"].ravel(), estimator.predict(X[:6]))
        np.testing.assert_allclose(answer["probabilities"], estimator.predict_proba(X[:6]))
    else:
        np.testing.assert_allclose(answer["output"].ravel(), estimator.predict(X[:6]))


def test_splits_by_categories_pass_the_checks() -> None:
    model = ensemble.HistGradientBoostingClassifier(max_iter=5, categorical_features=[4])
    check_trees(model.fit(CATEGORIES, (CATEGORIES[:, 4] % 2).astype(int)))


def _nodes(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a change of the first tree's nodes."""

    def apply(model: Any) -> None:
        inner = model.estimators_[0].tree_
        state = inner.__getstate__()
        change(state["nodes"])
        made = tree._tree.Tree(inner.n_features, np.array(inner.n_classes, np.intp), inner.n_outputs)
        made.__setstate__(state)
        model.estimators_[0].tree_ = made

    return apply


def _set(field: str, value: int) -> Callable[[Any], None]:
    def change(nodes: Any) -> None:
        nodes[field][0] = value

    return _nodes(change)


def _narrow(model: Any) -> None:
    model.estimators_[0].n_features_in_ = 2


FORGED: dict[str, Callable[[Any], None]] = {
    "a branch beyond the nodes": _set("left_child", 1 << 40),
    "a branch before the nodes": _set("right_child", -7),
    "a branch to itself": _set("left_child", 0),
    "a feature beyond the row": _set("feature", 1 << 40),
    "a negative feature": _set("feature", -2),
    "a row that is too narrow": _narrow,
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_trees_are_refused_before_they_predict(tmp_path: Path, name: str) -> None:
    model = ensemble.RandomForestClassifier(3, random_state=0).fit(X, Y)
    FORGED[name](model)
    skops.dump(model, tmp_path / "m.skops")
    with pytest.raises(RemoraError, match="is damaged or forged"), Engine(tmp_path / "m.skops"):
        pass


def test_gradient_boosting_needs_a_tree_for_each_value() -> None:
    model = ensemble.GradientBoostingClassifier(n_estimators=3).fit(X, Y)
    wide = ensemble.GradientBoostingClassifier(n_estimators=3).fit(X, THREE)
    check_trees(model)
    check_trees(wide)
    model.estimators_ = wide.estimators_
    with pytest.raises(ValueError, match="3 trees for 1 values"):
        check_trees(model)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("left", 4_000_000_000, "leads to no later node"),
        ("right", 0, "leads to no later node"),
        ("feature_idx", 99, "a feature that does not exist"),
        ("is_categorical", 1, "categories"),
    ],
)
def test_histogram_boosting_stays_within_its_arrays(field: str, value: int, reason: str) -> None:
    model = ensemble.HistGradientBoostingClassifier(max_iter=3).fit(X, Y)
    model._predictors[0][0].nodes[field][0] = value
    with pytest.raises(ValueError, match=reason):
        check_trees(model)


def test_other_types_are_still_refused_by_name(tmp_path: Path) -> None:
    model = ensemble.RandomForestClassifier(2, random_state=0).fit(X, Y)
    skops.dump(model, tmp_path / "m.skops")
    content = io.BytesIO((tmp_path / "m.skops").read_bytes())
    with zipfile.ZipFile(content) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(files["schema.json"])
    schema["content"]["content"]["criterion"] = {
        "__class__": "system", "__module__": "os", "__loader__": "FunctionNode", "content": "os.system", "__id__": 1
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / "m.skops", "w") as archive:
        for name, data in {**files, "schema.json": json.dumps(schema).encode()}.items():
            archive.writestr(name, data)
    with (
        pytest.raises(RemoraError, match=r"does not know to be safe: (os|posix)\.system"),
        Engine(tmp_path / "m.skops"),
    ):
        pass
