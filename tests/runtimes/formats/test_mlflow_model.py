"""MLflow models, logged by MLflow itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.calls import ModelMetadata
from remora.engine import Engine
from remora.errors import ConfigError, InvalidArgumentError, RemoraError

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed here: make test-formats")
pandas = pytest.importorskip("pandas", reason="pandas is not installed here: make test-formats")
linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed here: make test-formats")
pytestmark = pytest.mark.filterwarnings("ignore")

FRAME = pandas.DataFrame({"height cm": [150.0, 160, 170, 180], "shoes": [36, 38, 42, 44]})
TARGET = np.array([50.0, 60, 70, 80])


def _saved(folder: Path, given: Any, answered: Any, *, signature: bool = True, requirements: bool = False) -> Path:
    model = linear.LinearRegression().fit(given, TARGET)
    described = mlflow.models.infer_signature(given, answered) if signature else None
    mlflow.sklearn.save_model(
        model, str(folder), signature=described, serialization_format="cloudpickle", pip_requirements=[]
    )
    if not requirements:
        (folder / "requirements.txt").unlink(missing_ok=True)
    return folder


def test_columns_are_inputs(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "weight", FRAME, TARGET)
    with Engine(paths=[folder], trust_pickle=True) as engine:
        metadata = engine.perform(ModelMetadata("weight"))
        assert {each.name: each.datatype for each in metadata.inputs} == {"height cm": "FP64", "shoes": "INT64"}
        inputs = {"height cm": np.array([[150.0], [180]]), "shoes": np.array([[36], [44]])}
        answer = engine.infer("weight", inputs)["output"]
    np.testing.assert_allclose(answer.ravel(), [50, 80], atol=1e-6)


def test_a_tensor_is_one_input(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "weight", FRAME.to_numpy(), TARGET)
    with Engine(paths=[folder], trust_pickle=True) as engine:
        answer = engine.infer("weight", {"input": FRAME.to_numpy()[1:3]})["output"]
    np.testing.assert_allclose(answer.ravel(), [60, 70], atol=1e-6)


def test_a_python_function_of_mlflow_answers_several_columns(tmp_path: Path) -> None:
    class Both(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            if (model_input["x"] < 0).any():
                raise ValueError("x must not be negative")
            return pandas.DataFrame({"root": np.sqrt(model_input["x"]), "word": ["w"] * len(model_input)})

    given = pandas.DataFrame({"x": [4.0, 9.0]})
    signature = mlflow.models.infer_signature(given, Both().predict(None, given))
    mlflow.pyfunc.save_model(str(tmp_path / "both"), python_model=Both(), signature=signature, pip_requirements=[])
    (tmp_path / "both" / "requirements.txt").unlink()
    with Engine(paths=[tmp_path / "both"], trust_pickle=True) as engine:
        answer = engine.infer("both", {"x": np.array([[16.0]])})
        with pytest.raises(InvalidArgumentError, match="x must not be negative"):
            engine.infer("both", {"x": np.array([[-1.0]])})
    assert answer["root"].item() == 4
    assert answer["word"].item() == b"w"


def test_a_model_without_a_signature_is_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "bare", FRAME, TARGET, signature=False)
    with pytest.raises(RemoraError, match=r"has no signature: .*infer_signature"), _trusting(folder):
        pass


def test_an_mlflow_model_is_refused_without_trust(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "weight", FRAME, TARGET)
    with pytest.raises(ConfigError, match=r"is an MLflow model: .*--trust-pickle"), Engine(paths=[folder]):
        pass


def _trusting(folder: Path) -> Engine:
    return Engine(paths=[folder], trust_pickle=True)
