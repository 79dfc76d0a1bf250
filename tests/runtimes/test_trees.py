"""Answers of the trees backend for a forest's values.

The forests here are functions, so no library is needed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from remora.backends import Placement, Source
from remora.config import infer_backend
from remora.errors import ConfigError, InternalError, NotFoundError
from remora.messages import Array, Response
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.install_advice import install_command
from remora.testing.backend import request_of, run
from remora_runtimes.trees import TreePlan, TreesBackend, TreesModel, finished, output_width, plan_trees
from remora_runtimes.trees.forests import Forest
from support.engine.fakes import config_of


def parameters(**given: str) -> ModelConfig:
    text = " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in given.items())
    return config_of(f'name: "m" backend: "fil" {text}')


def forest(classes: int, width: int) -> Forest:
    def predict(rows: Array) -> Array:
        return np.tile(np.arange(width, dtype="f4") / 10, (len(rows), 1))

    return Forest(4, classes, width, predict)


def source(tmp_path: Path) -> Source:
    (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
    return Source("m", 1, tmp_path / "m", tmp_path / "m" / "1", tmp_path)


def plan(*, classes: bool = False, probabilities: bool = False, threshold: float = 0.5) -> TreePlan:
    return TreePlan("", classes, probabilities, threshold)


@pytest.mark.parametrize(
    ("classes", "width", "labels", "probabilities"),
    [(2, 1, [[0], [0]], [[1, 0], [1, 0]]), (3, 3, [[2], [2]], [[0, 0.1, 0.2], [0, 0.1, 0.2]])],
)
def test_a_classifier_may_answer_under_the_names_of_estimators(
    tmp_path: Path, classes: int, width: int, labels: list[list[int]], probabilities: list[list[float]]
) -> None:
    config = parameters(named_outputs="true")
    made = forest(classes, width)
    model = TreesModel(source(tmp_path), made, plan_trees(config, {}, "xgboost_ubj", classes))
    model.complete(config)
    assert [(row.name, list(row.dims)) for row in config.output] == [("label", [1]), ("probabilities", [classes])]
    instance = model.instance(config, Placement("m"))
    (answer,) = run(instance, request_of({"input__0": np.zeros((2, 4), "f4")}, ("label", "probabilities")))
    assert isinstance(answer, Response)
    found = {tensor.name: tensor.data for tensor in answer.outputs}
    assert found["label"].tolist() == labels
    np.testing.assert_allclose(found["probabilities"], probabilities)


def test_a_regression_keeps_its_output_name(tmp_path: Path) -> None:
    config = parameters(named_outputs="true")
    model = TreesModel(source(tmp_path), forest(0, 1), plan_trees(config, {}, "xgboost_ubj", 0))
    model.complete(config)
    assert [row.name for row in config.output] == ["output__0"]


@pytest.mark.parametrize(
    ("values", "made", "classes", "width", "expected"),
    [
        ([[1.5], [-2.0]], plan(), 0, 1, [[1.5], [-2.0]]),  # a regression
        ([[0.4], [0.6]], plan(classes=True), 2, 1, [[0], [1]]),
        ([[0.4], [0.6]], plan(classes=True, threshold=0.7), 2, 1, [[0], [0]]),
        ([[0.25]], plan(classes=True, probabilities=True), 2, 2, [[0.75, 0.25]]),
        ([[0.25]], plan(classes=True, probabilities=True), 2, 1, [[0.25]]),
        ([[0.75, 0.25]], plan(classes=True, probabilities=True), 2, 2, [[0.75, 0.25]]),
        ([[0.4, 0.6]], plan(classes=True), 2, 1, [[1]]),  # one value for each of two classes
        ([[0.1, 0.7, 0.2]], plan(classes=True), 3, 1, [[1]]),
        ([[0.1, 0.7, 0.2]], plan(classes=True, probabilities=True), 3, 3, [[0.1, 0.7, 0.2]]),
    ],
)
def test_values_become_the_requested_type(
    values: list[list[float]], made: TreePlan, classes: int, width: int, expected: list[list[float]]
) -> None:
    found = finished(np.array(values, "f4"), made, classes, width)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array(expected, "f4"), rtol=1e-6)


def test_a_forest_says_what_it_takes_and_gives(tmp_path: Path) -> None:
    config = parameters(predict_proba="true")
    TreesModel(source(tmp_path), forest(2, 1), plan(classes=True, probabilities=True)).complete(config)
    assert (config.input[0].name, list(config.input[0].dims)) == ("input__0", [4])
    assert (config.output[0].name, list(config.output[0].dims)) == ("output__0", [2])
    assert config.max_batch_size == 4


EXPLAINED = """
name: "m" backend: "fil" max_batch_size: 8
output { name: "output__0" data_type: TYPE_FP32 dims: 1 }
output { name: "treeshap_output" data_type: TYPE_FP32 dims: [ %s ] }
"""


@pytest.mark.parametrize(("values", "dims"), [(1, "5"), (3, "3, 5")])
def test_contributions_are_a_further_output_where_the_configuration_has_it(
    values: int, dims: str, tmp_path: Path
) -> None:
    grown = forest(0, 1)._replace(contributions=lambda rows: np.full((len(rows), values * 5), 2, "f4"))
    model = TreesModel(source(tmp_path), grown, plan())
    config = config_of(EXPLAINED % dims)
    model.complete(config)
    instance = model.instance(config, Placement("m_0"))
    rows = np.zeros((2, 4), "f4")
    (whole,) = run(instance, request_of({"input__0": rows}, ("output__0", "treeshap_output")))
    assert isinstance(whole, Response)
    assert [tensor.data.shape for tensor in whole.outputs] == [(2, 1), (2, 5) if values == 1 else (2, 3, 5)]
    (alone,) = run(instance, request_of({"input__0": rows}, ("treeshap_output",)))
    assert isinstance(alone, Response)
    assert [tensor.name for tensor in alone.outputs] == ["treeshap_output"]
    with pytest.raises(ConfigError, match="treeshap_output"):
        model.complete(config_of(EXPLAINED % "4"))


def test_a_forest_without_contributions_is_refused_if_they_are_requested(tmp_path: Path) -> None:
    def refuse(rows: Array) -> Array:
        raise RuntimeError("not for linear trees\nStack trace: ...")

    with pytest.raises(ConfigError, match="which its library does not compute"):
        TreesModel(source(tmp_path), forest(0, 1), plan()).complete(config_of(EXPLAINED % "5"))
    grown = forest(0, 1)._replace(contributions=refuse)
    with pytest.raises(ConfigError, match="treeshap_output: not for linear trees; leave"):
        TreesModel(source(tmp_path), grown, plan()).complete(config_of(EXPLAINED % "5"))
    TreesModel(source(tmp_path), grown, plan()).complete(parameters())


def test_a_configuration_for_another_forest_is_refused(tmp_path: Path) -> None:
    config = config_of(
        'name: "m" backend: "fil" max_batch_size: 8 input { name: "input__0" data_type: TYPE_FP32 dims: 7 } '
        'output { name: "output__0" data_type: TYPE_FP32 dims: 1 }'
    )
    with pytest.raises(ConfigError, match=r"shape \[-1,4\]"):
        TreesModel(source(tmp_path), forest(0, 1), plan()).complete(config)


@pytest.mark.parametrize(("classes", "expected"), [(0, (False, False)), (2, (True, False)), (3, (True, False))])
def test_without_parameters_a_classifier_gives_class_numbers(classes: int, expected: tuple[bool, bool]) -> None:
    made = plan_trees(parameters(), {}, "xgboost_json", classes)
    assert (made.classes, made.probabilities, made.threshold) == (*expected, 0.5)
    assert output_width(made, forest(classes, max(classes, 1))) == 1


def test_parameters_that_do_not_fit_the_forest_are_refused() -> None:
    with pytest.raises(ConfigError, match="its forest is a regression"):
        plan_trees(parameters(output_class="true"), {}, "lightgbm", 0)
    with pytest.raises(ConfigError, match="'threshold' is 'half'"):
        plan_trees(parameters(threshold="half"), {}, "lightgbm", 2)
    assert plan_trees(parameters(threshold="0.3", storage_type="SPARSE"), {}, "lightgbm", 2).threshold == 0.3


@pytest.mark.parametrize(
    ("given", "reason"),
    [("xgboost", "removed its old binary format"), ("catboost", "must be one of xgboost_ubj, xgboost_json")],
)
def test_a_type_that_cannot_be_read_is_reported(tmp_path: Path, given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TreesBackend().open(source(tmp_path), parameters(model_type=given))


def test_the_file_name_depends_on_the_type(tmp_path: Path) -> None:
    made = source(tmp_path)
    for kind, name in (
        ("xgboost_ubj", "xgboost.ubj"),
        ("lightgbm", "model.txt"),
        ("treelite_checkpoint", "checkpoint.tl"),
    ):
        with pytest.raises(NotFoundError, match=f"unable to find '1/{name}'"):
            TreesBackend().open(made, parameters(model_type=kind))


def test_a_text_that_is_cut_short_never_reaches_lightgbm(tmp_path: Path) -> None:
    made = source(tmp_path)
    (made.path / "model.txt").write_text("tree\nversion=v4\nnum_class=1\n")
    with pytest.raises(InternalError, match="not a whole model in LightGBM's text format"):
        TreesBackend().open(made, parameters(model_type="lightgbm"))


def test_a_missing_library_is_reported_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    made = source(tmp_path)
    (made.path / "xgboost.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"needs XGBoost, .*: {re.escape(install_command('trees'))}"):
        TreesBackend().open(made, parameters())


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    model = TreesModel(source(tmp_path), forest(0, 1), plan())
    with pytest.raises(ConfigError, match="forests run on the CPU here"):
        model.instance(parameters(), Placement("m_0", "GPU", 0))


@pytest.mark.parametrize(
    ("filenames", "backend", "expected"),
    [
        (["xgboost.json"], "", ("fil", "xgboost.json")),
        (["checkpoint.tl"], "", ("fil", "checkpoint.tl")),
        (["model.txt"], "fil", ("fil", "model.txt")),
        ([], "fil", ("fil", "")),
        (["other.json"], "fil", ("fil", "")),
    ],
)
def test_a_file_tells_the_backend_where_its_name_is_telling(
    filenames: list[str], backend: str, expected: tuple[str, str]
) -> None:
    config = config_of(f'name: "m" backend: "{backend}"')
    infer_backend(config, "m", filenames)
    assert (config.backend, config.default_model_filename) == expected
