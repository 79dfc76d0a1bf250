"""The scoring script for Azure's own server, with stand-ins for the two classes that it takes from that server."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.servers.hosting import retire_once, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

PACKAGE = "azureml_inference_server_http"


class Request:
    """The part of Azure's request that the script reads."""

    def __init__(self, body: bytes, **args: str) -> None:
        self.method, self.args, self.headers = "POST", args, dict[str, str]()
        self._body = body

    def get_data(self) -> bytes:
        return self._body


class Answer:
    """The part of Azure's response that the script fills in."""

    def __init__(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.body, self.status, self.headers = body, status, headers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Answer]]:
    """The script's ``run``, after its ``init``."""
    for name, members in {
        PACKAGE: {},
        f"{PACKAGE}.api": {},
        f"{PACKAGE}.api.aml_request": {"AMLRequest": Request, "rawhttp": lambda function: function},
        f"{PACKAGE}.api.aml_response": {"AMLResponse": Answer},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "remora_adapters.azureml.score", raising=False)
    mounted = tmp_path / "scale" / "1"
    write_scale(mounted / "repository" / "scale")
    monkeypatch.setenv("AZUREML_MODEL_DIR", str(mounted))
    script = importlib.import_module("remora_adapters.azureml.score")
    script.init()
    yield script.run
    for engine in script._engine:
        engine.stop()
    monkeypatch.delitem(sys.modules, "remora_adapters.azureml.score")


BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()


def test_a_request_is_answered_by_the_one_model(run: Callable[[Any], Answer]) -> None:
    answer = run(Request(BODY))
    assert answer.status == 200
    assert json.loads(answer.body)["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


def test_an_unknown_model_is_refused(run: Callable[[Any], Answer]) -> None:
    assert run(Request(BODY, model_name="none")).status == 404


def test_a_request_whose_version_is_replaced_is_answered_by_the_next_one(
    run: Callable[[Any], Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    retired = retire_once(monkeypatch)
    answer = run(Request(BODY))
    assert (answer.status, retired) == (200, [])
