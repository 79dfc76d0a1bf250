"""Triton's Python models as people write them, unchanged, served by a whole engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora import Engine
from remora.errors import RemoraError
from support.process.eventually import eventually

WAIT_S = 60.0

TOKENIZER = '''
"""Splits text into the ids of a vocabulary that lies beside the model."""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        if not any(each["name"] == "TEXT" for each in config.get("input", [])):
            auto_complete_model_config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        auto_complete_model_config.add_output({"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]})
        auto_complete_model_config.add_output({"name": "attention_mask", "data_type": "TYPE_INT64", "dims": [-1]})
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def initialize(self, args):
        self.logger = pb_utils.Logger
        self.model_config = json.loads(args["model_config"])
        parameters = self.model_config["parameters"]
        self.lower = parameters["lower_case"]["string_value"] == "true"
        output = pb_utils.get_output_config_by_name(self.model_config, "input_ids")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        path = os.path.join(args["model_repository"], args["model_version"], "vocabulary.json")
        with open(path) as file:
            self.vocabulary = json.load(file)
        self.logger.log_info(f"{args['model_name']} knows {len(self.vocabulary)} words")

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = [row[0].decode("utf-8") for row in pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()]
            if any(not text.strip() for text in texts):
                error = pb_utils.TritonError("TEXT must not be empty", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if any("crash" in text for text in texts):
                self.logger.log_error("about to fail")
                raise pb_utils.TritonModelException("cannot tokenize this")
            rows = [[self.vocabulary.get(word, 0) for word in self.words(text)] for text in texts]
            width = max(map(len, rows))
            ids = np.zeros((len(rows), width), dtype=self.dtype)
            mask = np.zeros_like(ids)
            for index, row in enumerate(rows):
                ids[index, : len(row)] = row
                mask[index, : len(row)] = 1
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]
                )
            )
        return responses

    def words(self, text):
        return (text.lower() if self.lower else text).split()

    def finalize(self):
        self.logger.log_verbose("tokenizer is gone")
'''
LENGTHS = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """How many words a text has, as the tokenizer counts them."""

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT")
        inner = pb_utils.InferenceRequest(
            model_name="tokenizer", requested_output_names=["attention_mask"], inputs=[text]
        )
        response = await inner.async_exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        mask = pb_utils.get_output_tensor_by_name(response, "attention_mask").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("LENGTH", mask.sum(axis=1, keepdims=True).astype(np.int32))])
'''
LENGTHS_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "LENGTH" data_type: TYPE_INT32 dims: 1 }
"""


def write(folder: Path, code: str, config: str = "") -> Path:
    version = folder / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    if config:
        (folder / "config.pbtxt").write_text(config)
    return version


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    config = 'backend: "python" parameters { key: "lower_case" value { string_value: "true" } }'
    version = write(tmp_path / "tokenizer", TOKENIZER, config)
    (version / "vocabulary.json").write_text(json.dumps({"hello": 1, "world": 2, "again": 3}))
    write(tmp_path / "lengths", LENGTHS, LENGTHS_CONFIG)
    with Engine(tmp_path) as started:
        yield started


def infer(engine: Engine, model: str, *texts: str) -> Any:
    return engine.infer(model, {"TEXT": np.array([[text] for text in texts], object)}, timeout_s=WAIT_S)


def test_the_tokenizer_completes_its_configuration_and_reads_its_parameters(engine: Engine) -> None:
    config = engine.resolve("tokenizer").config
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (8, True)
    assert [(row.name, list(row.dims)) for row in (*config.input, *config.output)] == [
        ("TEXT", [1]),
        ("input_ids", [-1]),
        ("attention_mask", [-1]),
    ]
    answer = infer(engine, "tokenizer", "Hello world", "HELLO big world again")
    assert answer["input_ids"].tolist() == [[1, 2, 0, 0], [1, 0, 2, 3]]
    assert answer["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_the_tokenizers_refusals_keep_their_code_and_its_exceptions_their_text(engine: Engine) -> None:
    with pytest.raises(RemoraError, match=r"^TEXT must not be empty$") as caught:
        infer(engine, "tokenizer", " ")
    assert caught.value.code == "INVALID_ARG"
    with pytest.raises(RemoraError, match="message: TritonModelException: cannot tokenize this\n\nAt:\n") as caught:
        infer(engine, "tokenizer", "please crash")
    assert caught.value.code == "INTERNAL"


def test_what_the_tokenizer_logs_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "remora")
    config = 'backend: "python" parameters { key: "lower_case" value { string_value: "false" } }'
    version = write(tmp_path / "tokenizer", TOKENIZER, config)
    (version / "vocabulary.json").write_text("{}")
    with Engine(tmp_path) as started, pytest.raises(RemoraError):
        infer(started, "tokenizer", "crash")
    expected = [
        ("INFO", "tokenizer knows 0 words"),
        ("ERROR", "about to fail"),
        ("DEBUG", "tokenizer is gone"),
    ]

    def logged() -> list[tuple[str, str]]:
        lines = [(row.levelname, row.message) for row in caplog.records if row.name == "remora.model.tokenizer"]
        return [line for line in lines if line in expected]

    eventually(lambda: logged() == expected)  # a model is closed in a thread


def test_a_model_of_business_logic_calls_the_tokenizer(engine: Engine) -> None:
    assert infer(engine, "lengths", "one", "one two three")["LENGTH"].tolist() == [[1], [3]]
    with pytest.raises(RemoraError, match="TritonModelException: TEXT must not be empty"):
        infer(engine, "lengths", " ")


# -- backends made of Python ----------------------------------------------------------------------------------------

SCALER = '''
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Multiplies; the factor lies with each model."""

    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    @staticmethod
    def validate_config(config):
        if config.as_dict()["max_batch_size"]:
            raise ValueError("scaler models do not batch")

    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "model.json")) as file:
            self.factor = json.load(file)["factor"]

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * self.factor)]
            )
            for request in requests
        ]
'''


def scalers(root: Path, more: str = "") -> dict[str, Any]:
    (root / "backends" / "scaler").mkdir(parents=True)
    (root / "backends" / "scaler" / "model.py").write_text(SCALER.replace("self.factor)", "np.float32(self.factor))"))
    for name, factor in (("twice", 2), ("half", 0.5)):
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(f'backend: "scaler" {more}')
        (root / "models" / name / "1" / "model.json").write_text(json.dumps({"factor": factor}))
    return {"backend_directory": str(root / "backends")}


def test_a_folder_of_the_backend_directory_serves_the_models_that_name_it(tmp_path: Path) -> None:
    with Engine(tmp_path / "models", **scalers(tmp_path)) as engine:
        for name, expected in (("twice", [2.0, 4.0]), ("half", [0.5, 1.0])):
            answer = engine.infer(name, {"IN": np.array([1, 2], np.float32)}, timeout_s=WAIT_S)
            assert answer["OUT"].tolist() == expected
            assert engine.resolve(name).config.backend == "scaler"


def test_such_a_backend_may_refuse_a_configuration(tmp_path: Path) -> None:
    options = scalers(tmp_path, "max_batch_size: 4")
    with (
        pytest.raises(RemoraError, match="ValueError: scaler models do not batch"),
        Engine(tmp_path / "models", **options),
    ):
        pass


def test_without_the_directory_the_backend_is_unknown(tmp_path: Path) -> None:
    scalers(tmp_path)
    with (
        pytest.raises(RemoraError, match="unable to find backend library for backend 'scaler'"),
        Engine(tmp_path / "models"),
    ):
        pass


@pytest.mark.parametrize("name", ["../outside", "python", "missing"])
def test_only_plain_names_that_are_not_built_in_are_looked_for(tmp_path: Path, name: str) -> None:
    from remora.backends.registry import backend_in

    for folder in ("outside", "backends/python"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.py").write_text(SCALER)
    assert backend_in(tmp_path / "backends", name) is None


def test_a_requirement_that_the_server_does_not_meet_stops_the_load_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "m", TOKENIZER, 'backend: "python"')
    (tmp_path / "m" / "requirements.txt").write_text("remora-probe-that-is-nowhere==1.0\n")
    with (
        pytest.raises(RemoraError, match=r"line 1: remora-probe-that-is-nowhere==1.0 \(not installed\)"),
        Engine(tmp_path),
    ):
        pass
