"""Repositories of `remora export`, served by a real Triton where one can run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.servers.live_server import client
from support.servers.real_triton import needs_triton, triton_server

pytestmark = needs_triton

APP = """
import numpy as np
import remora

@remora.model(batch=8, max_delay="1ms")
def total(x: remora.Array[np.float32, -1, 3]) -> remora.Array[np.float32, -1]:
    return x.sum(axis=1)

@remora.model
def count(n: int):
    for index in range(n):
        yield {"index": index}

@remora.model
async def shout(text: str, mark: str = "!") -> str:
    return text.upper() + mark

@remora.model(batch=4)
def refuse(x: list[float]) -> list[float]:
    raise remora.BadRequestError("not today")

@remora.model(batch=8)
def negate(y: list[float]) -> list[float]:
    return [-each for each in y]

@remora.model(batch=8)
def double(y: list[float]) -> list[float]:
    return [2 * each for each in y]

@remora.model(batch=8)
def describe(y: list[float]) -> list[dict]:
    return [{"value": each} for each in y]

both = negate >> double
told = negate >> describe
"""
GOLDEN = {
    "tests": [
        {
            "name": "one",
            "inputs": [{"name": "y", "shape": [1, 1], "datatype": "FP64", "data": [1]}],
            "outputs": [{"name": "output", "shape": [1, 1], "datatype": "FP64", "data": [-1]}],
        }
    ]
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "app.py").write_text(APP)
    (folder / "negate.tests.json").write_text(json.dumps(GOLDEN))
    words = [sys.executable, "-m", "remora", "export", str(folder / "models"), str(folder / "app.py")]
    subprocess.run(words, check=True, capture_output=True)
    with triton_server(folder / "models", folder / "triton.log") as ports:
        yield ports[0]


def _ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    with client(port) as connection:
        connection.request("POST", f"/v2/models/{path}", json.dumps(body))
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def _infer(port: int, model: str, name: str, datatype: str, shape: list[int], data: list[Any]) -> tuple[int, Any]:
    tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    status, text = _ask(port, f"{model}/infer", {"inputs": [tensor]})
    return status, json.loads(text)


def test_a_batching_function_answers(port: int) -> None:
    status, answer = _infer(port, "total", "x", "FP32", [2, 3], [1, 2, 3, 4, 5, 6])
    assert (status, answer["outputs"][0]["data"]) == (200, [6.0, 15.0])


def test_a_generator_streams(port: int) -> None:
    status, events = _ask(port, "count/generate_stream", {"n": 2})
    assert (status, events.count("data: ")) == (200, 2)


@pytest.mark.parametrize(("body", "text"), [({"text": "hi"}, "HI!"), ({"text": "hi", "mark": "?"}, "HI?")])
def test_a_coroutine_answers_with_and_without_its_optional_input(port: int, body: dict[str, Any], text: str) -> None:
    status, answer = _ask(port, "shout/generate", body)
    assert (status, json.loads(answer)["output"]) == (200, text)


def test_a_refusal_has_its_text(port: int) -> None:
    status, answer = _infer(port, "refuse", "x", "FP64", [1, 1], [1])
    assert (status, answer) == (400, {"error": "not today"})


def test_a_pipeline_is_an_ensemble(port: int) -> None:
    status, answer = _infer(port, "both", "y", "FP64", [2, 1], [1, 2])
    assert (status, answer["outputs"][0]["data"]) == (200, [-2.0, -4.0])


def test_a_pipeline_may_answer_json_beside_golden_tests(port: int) -> None:
    status, answer = _infer(port, "told", "y", "FP64", [1, 1], [1])
    assert (status, [json.loads(each) for each in answer["outputs"][0]["data"]]) == (200, [{"value": -1.0}])
