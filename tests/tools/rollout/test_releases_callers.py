"""Releases for ensembles, models that call models, open sequences, and streams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.calls import ModelRelease
from remora.engine import Engine
from remora.errors import RemoraError
from remora_tools.rollout.judgement import MISSING
from support.models.released_engine import released_engine
from support.process.eventually import eventually
from support.servers.live_server import CONFIG, SEQUENCES, STREAM, write_version

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling { step { model_name: "m" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }
"""
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="m",
                requested_output_names=["OUT"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
            ).exec()
            array = pb_utils.get_output_tensor_by_name(call, "OUT").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return answers
"""
STREAMING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * {number}
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
            with open({gate!r}) as gate:
                gate.read()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ONE = {"IN": np.array([[1]], np.int32)}


def _release(engine: Engine, action: str = "", **parameters: Any) -> dict[str, Any]:
    return engine.perform(ModelRelease("m", action, parameters))


def _value(engine: Engine, model: str, **how: Any) -> int:
    return int(engine.infer(model, ONE, **how)["OUT"][0, 0])


def _answers(engine: Engine) -> dict[int, int]:
    return {arm["version"]: arm.get("answers", 0) for arm in _release(engine)["arms"]}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_version(root, 1)
    write_version(root, 2)
    return root


def _write_caller(repository: Path, kind: str) -> None:
    folder = repository / kind / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(ENSEMBLE if kind == "ensemble" else CONFIG)
    if kind == "caller":
        (folder / "model.py").write_text(CALLER)


@pytest.mark.parametrize("kind", ["ensemble", "caller"])
def test_requests_of_other_models_are_divided_and_counted(repository: Path, kind: str) -> None:
    _write_caller(repository, kind)
    with released_engine(repository) as engine:
        assert _value(engine, kind) == 2
        _release(engine, "start", version=1, weight="50%")
        found = [_value(engine, kind) for _ in range(60)]
        assert set(found) == {1, 2}
        assert _answers(engine) == {1: found.count(1), 2: found.count(2)}
        _release(engine, "rollback")
        assert {_value(engine, kind) for _ in range(10)} == {2}


def test_an_ensemble_follows_a_promotion(repository: Path) -> None:
    _write_caller(repository, "ensemble")
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight="100%")
        assert _value(engine, "ensemble") == 1
        _release(engine, "promote")
        assert {_value(engine, "ensemble") for _ in range(10)} == {1}


def test_an_open_sequence_stays_with_its_version(repository: Path) -> None:
    (repository / "m" / "config.pbtxt").write_text(SEQUENCES)

    def step(engine: Engine, number: int, **ends: bool) -> int:
        parameters = {"sequence_id": number, **{f"sequence_{name}": value for name, value in ends.items()}}
        return _value(engine, "m", parameters=parameters)

    with released_engine(repository) as engine:
        assert step(engine, 7, start=True) == 2
        _release(engine, "start", version=1, weight="100%")
        assert step(engine, 7) == 2  # it began before the release
        assert step(engine, 8, start=True) == 1
        _release(engine, "weight", weight="0%")
        assert [step(engine, 8), step(engine, 7)] == [1, 2]
        assert step(engine, 9, start=True, end=True) == 2
        assert [step(engine, 8, end=True), step(engine, 7, end=True)] == [1, 2]
        assert step(engine, 8, start=True, end=True) == 2  # the same id is a new sequence


def test_open_sequences_of_the_stable_version_do_not_save_a_canary_that_gets_all_other_requests(
    repository: Path,
) -> None:
    (repository / "m" / "config.pbtxt").write_text(SEQUENCES)
    model = repository / "m" / "1" / "model.py"
    model.write_text(model.read_text().replace("arrays = [", "raise ValueError('bad')\n        arrays = ["))
    with released_engine(repository) as engine:
        assert _value(engine, "m", parameters={"sequence_id": 7, "sequence_start": True}) == 2
        _release(engine, "start", version=1, weight="100%", automatic=True)
        assert _value(engine, "m", parameters={"sequence_id": 7}) == 2
        for number in range(8, 8 + MISSING):
            with pytest.raises(RemoraError):
                _value(engine, "m", parameters={"sequence_id": number, "sequence_start": True, "sequence_end": True})
        status = eventually(lambda: found if (found := _release(engine))["stage"] == "settled" else None)
        assert (status["stable"], status["rejected"]) == (2, [1])
        assert "20 of 20, the stable version has no answers" in status["events"][-1]["reason"]


def test_a_version_that_is_rolled_back_finishes_its_sequences(repository: Path) -> None:
    (repository / "m" / "config.pbtxt").write_text(SEQUENCES)
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight="100%")
        assert _value(engine, "m", parameters={"sequence_id": 7, "sequence_start": True}) == 1
        _release(engine, "rollback")
        assert _value(engine, "m", parameters={"sequence_id": 7}) == 1
        assert _value(engine, "m", parameters={"sequence_id": 8, "sequence_start": True, "sequence_end": True}) == 2
        assert _value(engine, "m", parameters={"sequence_id": 7, "sequence_end": True}) == 1
        eventually(lambda: [model.version for model in engine.models()] == [2])


def test_a_stream_ends_with_the_version_that_began_it_and_counts_once(repository: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (repository / "m" / "config.pbtxt").write_text(STREAM)
    for number in (1, 2):
        (repository / "m" / str(number) / "model.py").write_text(STREAMING.format(number=number, gate=str(gate)))
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight="100%")

        def begun() -> Iterator[Any]:
            stream = iter(engine.infer_stream("m", ONE))
            found.append(next(stream).model_version)
            return stream

        found: list[int] = []
        whole = begun()
        gate.write_text("")
        assert [(int(each["OUT"][0, 0]), each.model_version) for each in whole] == [(1, 1)]
        eventually(lambda: _answers(engine) == {1: 1, 2: 0})
        open_stream = begun()
        _release(engine, "weight", weight="0%")
        gate.write_text("")
        assert [each.model_version for each in open_stream] == [1]
        later = begun()
        gate.write_text("")
        assert [each.model_version for each in later] == [2]
        assert found == [1, 1, 2]
        eventually(lambda: _answers(engine) == {1: 0, 2: 1})


def test_a_stream_that_its_client_cancels_is_not_compared(repository: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (repository / "m" / "config.pbtxt").write_text(STREAM)
    primary, shadow = (STREAMING.format(number=2, gate=each) for each in (str(gate), os.devnull))
    (repository / "m" / "2" / "model.py").write_text(primary)
    (repository / "m" / "1" / "model.py").write_text(shadow)
    with released_engine(repository) as engine:
        _release(engine, "shadow", version=1)
        for cancelled in (True, False):
            stream = iter(engine.infer_stream("m", ONE))
            next(stream)
            if cancelled:
                stream.close()
            gate.write_text("")
            assert len([*stream]) == (0 if cancelled else 1)
        found = eventually(lambda: row if (row := _release(engine)["shadow"])["compared"] else None)
        assert (found["compared"], found["differing"], found["dropped"]) == (1, 0, 0)
