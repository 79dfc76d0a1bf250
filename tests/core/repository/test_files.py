"""Files and folders of other libraries: which are recognised, and the model folders that are written for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Serving, needs
from remora.engine import Engine
from remora.errors import ConfigError, NotFoundError
from remora.repository.files import file_repository, recognise
from remora.repository.sources import open_repository
from support.models.device_models import double
from support.servers.live_server import client

XGBOOST = '{"learner": {"attributes": {}}, "version": [3, 0, 0]}'
LIGHTGBM = "tree\nversion=v4\n"


def _place(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("a.joblib", "", "a pickle"),
        ("a.pkl", "", "a pickle"),
        ("a.skops", "", "a file of skops"),
        ("a.cbm", "CBM1", "a CatBoost model"),
        ("a.json", XGBOOST, "an XGBoost model"),
        ("a.bst", "{L", "an XGBoost model"),
        ("xgboost-model", "{L", "an XGBoost model"),
        ("xgboost-model", "\x80\x04", "a pickle"),
        ("a.txt", LIGHTGBM, "a LightGBM model"),
        ("a.bst", LIGHTGBM, "a LightGBM model"),
        ("a.xml", "<?xml?><net name='m'>", "an OpenVINO model"),
    ],
)
def test_files_are_recognised_alone_and_as_the_only_model_of_a_folder(
    tmp_path: Path, name: str, text: str, title: str
) -> None:
    folder = _place(tmp_path / "m", {name: text, "README.md": "# The model", "labels.txt": "cat\ndog\n"})
    for place in (folder / name, folder):
        found = recognise(place)
        assert found is not None
        assert (found.title, found.path) == (title, folder / name)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"backend": "onnxruntime"}', "model.onnx": ""},
        {"genai_config.json": "{}", "config.json": '{"model_type": "llama"}', "model.onnx": ""},
        {"1/model.onnx": ""},
        {"m/1/model.onnx": "", "m/config.pbtxt": ""},
        {"a.onnx": "", "scaler.joblib": ""},
        {"a.joblib": "", "b.joblib": ""},
        {"notes.txt": "tree house", "data.json": '{"rows": []}'},
        {},
    ],
    ids=str,
)
def test_other_folders_stay_as_they_are(tmp_path: Path, files: dict[str, str]) -> None:
    assert recognise(_place(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("files", "title"),
    [
        ({"MLmodel": "flavors:\n  python_function:\n    data: m.pkl\n"}, "an MLflow model"),
        ({"MLmodel": "flavors:\n  onnx:\n    code: null\n    data: m.onnx\n", "m.onnx": ""}, "an ONNX model"),
        ({"MLmodel": "flavors:\n  onnx:\n    data: ../m.onnx\n", "../m.onnx": ""}, "an MLflow model"),
        ({"saved_model.pb": ""}, "a SavedModel"),
        ({"1/saved_model.pb": "", "2/saved_model.pb": ""}, "a SavedModel"),
        ({"config.json": '{"model_type": "bert"}', "model.safetensors": ""}, "a folder of transformers"),
        ({"config.json": '{"model_type": "bert"}', "model.onnx": ""}, "an ONNX model"),
        (
            {"modules.json": '[{"type": "sentence_transformers.models.Pooling"}]', "config.json": "{}"},
            "a folder of sentence-transformers",
        ),
    ],
    ids=str,
)
def test_folders_are_recognised(tmp_path: Path, files: dict[str, str], title: str) -> None:
    found = recognise(_place(tmp_path / "m", files))
    assert found is not None
    assert found.title == title


@pytest.mark.parametrize(
    ("name", "advice"),
    [("m.safetensors", "serve the folder of save_pretrained"), ("m.keras", "model.export"), ("m.mar", "TorchServe")],
)
def test_files_that_need_another_form_name_it(tmp_path: Path, name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        recognise(_place(tmp_path, {name: ""}) / name)


def test_other_files_are_refused_with_what_is_served(tmp_path: Path) -> None:
    path = _place(tmp_path, {"weights.bin": ""}) / "weights.bin"
    with pytest.raises(
        NotFoundError, match=r"is not a model file: expected \.onnx, .*\.joblib, .*or a model's directory"
    ):
        open_repository(path, any_layout=True).models()


def test_a_model_is_named_after_its_file_or_its_folder(tmp_path: Path) -> None:
    root = _place(tmp_path, {"churn/model.cbm": "CBM1", "prices.cbm": "CBM1"})
    names = [list(open_repository(root / each, any_layout=True).models()) for each in ("churn", "churn/model.cbm")]
    assert names == [["churn"], ["churn"]]
    assert list(open_repository(root / "prices.cbm", any_layout=True).models()) == ["prices"]
    assert list(open_repository(root / "prices.cbm", any_layout=True, bare_name="p").models()) == ["p"]


@pytest.mark.parametrize(
    "files",
    [
        {"model.cbm": "CBM1"},
        {"model.skops": ""},
        {"config.json": '{"model_type": "bert"}', "model.safetensors": ""},
        {"modules.json": '[{"type": "sentence_transformers.models.Transformer"}]'},
    ],
    ids=["catboost", "skops", "transformers", "sentence-transformers"],
)
def test_requirements_of_a_folder_are_used_only_with_trust(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: dict[str, str]
) -> None:
    place = _place(tmp_path / "churn", {**files, "requirements.txt": "./evil\n"})
    repository = open_repository(place, any_layout=True)
    repository.models()
    assert not (repository.fetch("churn").path / "requirements.txt").exists()
    assert "requirements.txt' is not installed, because packages run code that its author chose" in caplog.text
    trusted = open_repository(place, any_layout=True, trust_pickle=True)
    trusted.models()
    assert (trusted.fetch("churn").path / "requirements.txt").read_text() == "./evil\n"


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"model_type": "bert"}', "model.safetensors": ""},
        {"modules.json": '[{"type": "sentence_transformers.models.Transformer"}]'},
        {"saved_model.pb": ""},
        {"MLmodel": ""},
    ],
    ids=["transformers", "sentence-transformers", "saved model", "mlflow"],
)
def test_an_app_in_the_folder_of_another_library_runs_only_by_its_name(tmp_path: Path, files: dict[str, str]) -> None:
    code = "import remora\nraise SystemExit('this code ran')\n@remora.model\ndef f(): ...\n"
    place = _place(tmp_path / "m", {**files, "app.py": code})
    for trust in (False, True):
        with pytest.raises(ConfigError, match=r"has an app\.py that declares models, .*: serve '.*app\.py'"):
            open_repository(place, any_layout=True, trust_pickle=trust)


@pytest.mark.parametrize("prefix", ["m", "M", "a b"])
@pytest.mark.parametrize("member", ["data/aotinductor/model/m.so", "data/AOTInductor/model/m.wrapper.so"])
@pytest.mark.parametrize("suffix", ["pt", "pt2"])
def test_machine_code_in_a_file_is_refused_before_it_is_opened(
    tmp_path: Path, prefix: str, member: str, suffix: str
) -> None:
    path = tmp_path / f"m.{suffix}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{prefix}/archive_format", "pt2")
        archive.writestr(f"{prefix}/{member}", b"ELF")
    with pytest.raises(ConfigError, match="is an AOTInductor package, which contains machine code"):
        open_repository(path, any_layout=True)


def test_versions_of_a_saved_model_are_versions(tmp_path: Path) -> None:
    place = _place(tmp_path / "m", {"1/saved_model.pb": "", "3/saved_model.pb": "", "notes.txt": ""})
    repository = open_repository(place, any_layout=True)
    (model,) = repository.models()["m"]
    assert sorted(model.versions) == [1, 3]
    assert model.filenames(3) == ("model.savedmodel",)


def test_a_pickle_is_opened_only_with_trust(tmp_path: Path) -> None:
    place = _place(tmp_path, {"m.joblib": ""}) / "m.joblib"
    found = recognise(place)
    assert found is not None
    with pytest.raises(ConfigError, match=r"m\.joblib' is a pickle: reading a pickle runs code that its author chose"):
        file_repository(place, found)
    assert list(file_repository(place, found, trust_pickle=True).models()) == ["m"]


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    place = _place(tmp_path, {"m.cbm": "CBM1"}) / "m.cbm"
    repository = open_repository(place, any_layout=True)
    repository.models()
    before = repository.fingerprint("m")
    repository.models()
    assert repository.fingerprint("m") == before
    os.utime(place, (1e9, 1e9))
    repository.models()
    assert repository.fingerprint("m") != before


def test_an_onnx_file_of_mlflow_is_served_without_it(tmp_path: Path) -> None:
    place = _place(tmp_path / "twice", {"MLmodel": "flavors:\n  onnx:\n    data: model.onnx\n"})
    (place / "model.onnx").write_bytes(double().SerializeToString())
    with Engine(paths=[place]) as engine:
        assert engine.infer("twice", {"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[2, 2]]


@needs("remora_runtimes")
def test_a_joblib_file_is_served_over_http(tmp_path: Path, serving: Serving) -> None:
    joblib = pytest.importorskip("joblib", reason="scikit-learn is not installed here: make test-formats")
    linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed here: make test-formats")
    joblib.dump(linear.LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0]), tmp_path / "line.joblib")
    with serving(tmp_path / "line.joblib", "--trust-pickle") as server:
        body = {"inputs": [{"name": "input", "datatype": "FP64", "shape": [1, 1], "data": [3.0]}]}
        with client(server.http) as connection:
            connection.request("POST", "/v2/models/line/infer", json.dumps(body))
            answer = json.load(connection.getresponse())
        assert answer["outputs"][0]["data"] == [pytest.approx(6.0)]


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_boosters_are_served_by_the_backend_of_forests(tmp_path: Path, library: str) -> None:
    module: Any = pytest.importorskip(library, reason=f"{library} is not installed here: make test-formats")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(50, 3)).astype(np.float32), random.normal(size=50)
    if library == "xgboost":
        booster = module.train({}, module.DMatrix(x, y), 3)
        path, expected = tmp_path / "price.json", booster.predict(module.DMatrix(x[:4]))
    else:
        booster = module.train({"verbose": -1}, module.Dataset(x, y), 3)
        path, expected = tmp_path / "price.txt", booster.predict(x[:4])
    booster.save_model(str(path))
    with Engine(paths=[path]) as engine:
        (answer,) = engine.infer("price", {"input__0": x[:4]}).values()
    np.testing.assert_allclose(answer.ravel(), expected, rtol=1e-5)


def test_an_openvino_model_is_served_under_its_name(tmp_path: Path) -> None:
    openvino: Any = pytest.importorskip("openvino", reason="OpenVINO is not installed here: make test-formats")
    (tmp_path / "m.onnx").write_bytes(double().SerializeToString())
    openvino.save_model(openvino.convert_model(tmp_path / "m.onnx"), tmp_path / "twice.xml", compress_to_fp16=False)
    with Engine(paths=[tmp_path / "twice.xml"]) as engine:
        assert engine.infer("twice", {"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[2, 2]]


def test_a_folder_of_tensorflow_is_served(tmp_path: Path) -> None:
    tensorflow: Any = pytest.importorskip("tensorflow", reason="TensorFlow is not installed here: make test-tensorflow")
    module = tensorflow.Module()
    spec = tensorflow.TensorSpec([None, 2], tensorflow.float32, name="x")
    twice = tensorflow.function(lambda x: {"y": 2 * x}, input_signature=[spec])
    tensorflow.saved_model.save(module, str(tmp_path / "twice"), signatures={"serving_default": twice})
    with Engine(paths=[tmp_path / "twice"]) as engine:
        assert engine.infer("twice", {"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[2, 2]]


def test_the_written_configuration_is_a_plain_one(tmp_path: Path) -> None:
    repository = open_repository(_place(tmp_path, {"m.cbm": "CBM1"}) / "m.cbm", any_layout=True)
    (model,) = repository.models()["m"]
    config = json.loads((model.path / "config.json").read_bytes())
    assert config["backend"] == "python"
    assert config["parameters"]["MODEL_FILE"]["string_value"] == str((tmp_path / "m.cbm").resolve())


def test_the_server_imports_no_library_for_a_file(tmp_path: Path) -> None:
    place = _place(tmp_path, {"m.cbm": "CBM1"}) / "m.cbm"
    code = (
        "import sys; from remora.repository.sources import open_repository; "
        f"open_repository({str(place)!r}, any_layout=True).models(); "
        "print(sorted({'catboost', 'joblib', 'sklearn', 'torch', 'transformers', 'mlflow'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
