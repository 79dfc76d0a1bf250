"""Files and folders as other libraries save them, each served by `remora serve PATH` and asked over HTTP.

`make test-formats` and `make test-tensorflow` install the libraries.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import Serving
from support.models.device_models import double
from support.process.small_wheels import write_wheel
from support.servers.live_server import client

ROWS = [[0.0, 1.0, 2.0], [3.0, 1.0, 0.0], [1.0, 5.0, 2.0], [4.0, 4.0, 1.0]]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "anna", "in", "bern"]
TEXTS = ["good film", "bad bad film in bern"]


class Case(NamedTuple):
    """A saved model, a request in plain JSON, and a check of the answer."""

    path: Path
    body: Any
    holds: Callable[[Any], bool]
    flags: tuple[str, ...] = ()


def _library(name: str, target: str = "test-formats") -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed here: make {target}")


def _near(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, np.asarray(expected).tolist(), rtol=1e-4, atol=1e-5))


def _bert(folder: Path, kind: str, **options: Any) -> Path:
    _library("torch").manual_seed(0)
    transformers = _library("transformers")
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=32).save_pretrained(folder)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZES, **options)
    getattr(transformers, kind)(config).eval().save_pretrained(folder)
    return folder


def _text_classification(folder: Path) -> Case:
    path = _bert(folder / "mood", "BertForSequenceClassification", id2label={0: "sad", 1: "glad"})
    expected = _library("transformers").pipeline("text-classification", model=str(path))(TEXTS)
    labels, scores = [each["label"] for each in expected], [each["score"] for each in expected]
    return Case(path, {"text": TEXTS}, lambda found: found["label"] == labels and _near(found["score"], scores))


def _token_classification(folder: Path) -> Case:
    path = _bert(folder / "names", "BertForTokenClassification", id2label={0: "PER", 1: "LOC"})
    expected = _library("transformers").pipeline("token-classification", model=str(path))(TEXTS[0])
    entities = [(each["entity"], each["start"], each["end"]) for each in expected]
    return Case(
        path,
        {"text": TEXTS[0]},
        lambda found: [(each["entity"], each["start"], each["end"]) for each in found["entities"]] == entities,
    )


def _embeddings(folder: Path) -> Case:
    path = _bert(folder / "base", "BertModel")
    return Case(path, {"text": TEXTS}, lambda found: np.shape(found["embedding"]) == (2, SIZES["hidden_size"]))


def _image_classification(folder: Path) -> Case:
    transformers = _library("transformers")
    config = transformers.ViTConfig(image_size=8, patch_size=4, id2label={0: "dark", 1: "light"}, **SIZES)
    transformers.ViTForImageClassification(config).save_pretrained(folder / "pictures")
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder / "pictures")
    content = io.BytesIO()
    _library("PIL.Image").new("RGB", (20, 10), "red").save(content, "PNG")
    body = {"image": {"b64": base64.b64encode(content.getvalue()).decode()}}
    return Case(folder / "pictures", body, lambda found: found["label"] in ("dark", "light"))


def _sentence_transformers(folder: Path) -> Case:
    library = _library("sentence_transformers")
    parts = _library("sentence_transformers.sentence_transformer.modules")
    words = parts.Transformer(str(_bert(folder / "base", "BertModel")))
    model = library.SentenceTransformer(modules=[words, parts.Pooling(SIZES["hidden_size"])], device="cpu")
    model.save(str(folder / "sentences"))
    expected = model.encode(TEXTS)
    return Case(folder / "sentences", {"text": TEXTS}, lambda found: _near(found["embedding"], expected))


def _classifier() -> Any:
    return _library("sklearn.linear_model").LogisticRegression().fit(ROWS, ["low", "low", "high", "high"])


def _joblib(folder: Path) -> Case:
    model = _classifier()
    _library("joblib").dump(model, folder / "risk.joblib")
    expected = model.predict(ROWS).tolist()
    return Case(folder / "risk.joblib", {"input": ROWS}, lambda found: found["label"] == expected, ("--trust-pickle",))


def _skops(folder: Path) -> Case:
    model = _classifier()
    _library("skops.io").dump(model, folder / "risk.skops")
    expected = model.predict_proba(ROWS)
    return Case(folder / "risk.skops", {"input": ROWS}, lambda found: _near(found["probabilities"], expected))


def _xgboost(folder: Path) -> Case:
    library = _library("xgboost")
    booster = library.train({}, library.DMatrix(np.array(ROWS), np.arange(4.0)), 3)
    booster.save_model(folder / "price.json")
    expected = booster.predict(library.DMatrix(np.array(ROWS)))
    return Case(folder / "price.json", {"input__0": ROWS}, lambda found: _near(np.ravel(found["output__0"]), expected))


def _lightgbm(folder: Path) -> Case:
    library = _library("lightgbm")
    rows = np.random.default_rng(1).normal(size=(50, 3))
    booster = library.train({"verbose": -1}, library.Dataset(rows, rows[:, 0]), 3)
    booster.save_model(folder / "price.txt")
    expected = booster.predict(np.array(ROWS))
    return Case(folder / "price.txt", {"input__0": ROWS}, lambda found: _near(np.ravel(found["output__0"]), expected))


def _catboost(folder: Path) -> Case:
    model = _library("catboost").CatBoostRegressor(iterations=3, verbose=False, allow_writing_files=False)
    model.fit(ROWS, [1.0, 2.0, 3.0, 4.0])
    model.save_model(str(folder / "price.cbm"))
    expected = model.predict(ROWS)
    return Case(folder / "price.cbm", {"input": ROWS}, lambda found: _near(np.ravel(found["output"]), expected))


def _mlflow(folder: Path) -> Case:
    """A model with columns as its signature, and requirements that only a folder of wheels has."""
    library, pandas = _library("mlflow"), _library("pandas")

    class Cost(library.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            import remora_probe

            return model_input["price"] * model_input["pieces"] + remora_probe.ANSWER

    frame = pandas.DataFrame({"price": [1.5, 2.0], "pieces": [2, 3]})
    signature = library.models.infer_signature(frame, pandas.DataFrame({"cost": [1.5, 2.0]}))
    library.pyfunc.save_model(str(folder / "cost"), python_model=Cost(), signature=signature, pip_requirements=[])
    (folder / "wheels").mkdir()
    write_wheel(folder / "wheels", "remora-probe", "1.2", "ANSWER = 42\n")
    requirements = f"--no-index\n--find-links {folder / 'wheels'}\nremora-probe>=1\n"
    (folder / "cost" / "requirements.txt").write_text(requirements)
    return Case(
        folder / "cost",
        {"price": [1.5, 2.0], "pieces": [2, 3]},
        lambda found: _near(np.ravel(found["cost"]), [45, 48]),
        ("--trust-pickle", f"--backend-config=python,environment-cache-directory={folder / 'cache'}"),
    )


def _onnx(folder: Path) -> Case:
    _library("onnxruntime")
    (folder / "twice.onnx").write_bytes(double().SerializeToString())
    return Case(folder / "twice.onnx", {"x": [[1, 2]]}, lambda found: _near(found["y"], [[2, 4]]))


def _exported_program(folder: Path) -> Case:
    torch = _library("torch")
    program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.tensor(ROWS),))
    torch.export.save(program, folder / "linear.pt2")
    expected = program.module()(torch.tensor(ROWS)).detach().numpy()
    return Case(folder / "linear.pt2", [ROWS], lambda found: _near(next(iter(found[0].values())), expected))


def _torchscript(folder: Path) -> Case:
    """TorchScript declares no types: a folder with a configuration."""
    torch = _library("torch")
    (folder / "linear" / "1").mkdir(parents=True)
    model = torch.nn.Linear(3, 2).eval()
    torch.jit.script(model).save(str(folder / "linear" / "1" / "model.pt"))
    (folder / "linear" / "config.pbtxt").write_text(
        'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 }'
        ' output { name: "y" data_type: TYPE_FP32 dims: 2 }'
    )
    expected = model(torch.tensor(ROWS)).detach().numpy()
    return Case(folder / "linear", {"x": ROWS}, lambda found: _near(found["y"], expected))


def _openvino(folder: Path) -> Case:
    library = _library("openvino")
    (folder / "m.onnx").write_bytes(double().SerializeToString())
    library.save_model(library.convert_model(folder / "m.onnx"), folder / "twice.xml", compress_to_fp16=False)
    return Case(folder / "twice.xml", {"x": [[1, 2]]}, lambda found: _near(found["y"], [[2, 4]]))


def _saved_model(folder: Path) -> Case:
    library = _library("tensorflow", "test-tensorflow")
    spec = library.TensorSpec([None, 2], library.float32, name="x")
    twice = library.function(lambda x: {"y": 2 * x}, input_signature=[spec])
    library.saved_model.save(library.Module(), str(folder / "twice"), signatures={"serving_default": twice})
    return Case(folder / "twice", {"x": [[1, 2]]}, lambda found: _near(found["y"], [[2, 4]]))


CASES: dict[str, Callable[[Path], Case]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_text_classification, _token_classification, _embeddings, _image_classification, _sentence_transformers),
        *(_joblib, _skops, _xgboost, _lightgbm, _catboost, _mlflow),
        *(_onnx, _exported_program, _torchscript, _openvino, _saved_model),
    )
}


WARNINGS = {
    "mlflow": "ignore:.*(type hint|input example|integer column):UserWarning",
    "torchscript": r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning",
}
"""Filters of what a library warns of while it saves the model."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.filterwarnings(WARNINGS[name])] if name in WARNINGS else [])
        for name in CASES
    ],
)
def test_what_a_library_saved_is_served_by_its_path_alone(name: str, tmp_path: Path, serving: Serving) -> None:
    case = CASES[name](tmp_path)
    with serving(case.path, *case.flags, "--allow-grpc=false", "--allow-metrics=false") as server:
        with client(server.http) as connection:
            connection.request("POST", f"/models/{case.path.stem}", json.dumps(case.body))
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        log = server.log.read_text()
    assert reply.status == 200, answer
    assert case.holds(answer), answer
    assert "%|" not in log, "a progress bar"
    if name == "mlflow":
        assert "making an environment for" in log
        assert "installing remora" in log
