"""Requests of the only model, for users who pass none: read from its documents, and accepted by our own adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from conftest import START_TIMEOUT_S
from remora_deploy.emulate import EmulateSettings, find_platform
from remora_deploy.emulate.examples import example_in, instances_of
from remora_deploy.emulate.running import PASSED, run_checks

FUNCTION = """
import numpy as np
import remora

@remora.model(batch=8)
def scale(x: remora.Array[np.float32, -1, 4]) -> remora.Array[np.float32, -1, 4]:
    return 2 * x
"""
CHECKS = {
    "azureml": {"scoring", "concurrency"},
    "cloud-run": {"requests", "first-request"},
    "knative": {"requests", "first-request"},
    "kserve": {"predict", "one-for-one", "cloud-events"},
    "lambda": {"invocations", "http"},
    "vertex": {"predict", "predictions"},
}


def test_the_path_and_the_body_come_from_the_only_model() -> None:
    example = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [0]}]}
    route = {"post": {"requestBody": {"content": {"application/json": {"example": example}}}}}
    paths = {"/v2": {"get": {}}, "/v2/models/m/infer": route}
    found = example_in(json.dumps({"paths": paths}).encode())
    assert (found.path, json.loads(found.v2)) == ("/v2/models/m/infer", example)
    content = route["post"]["requestBody"]["content"]["application/json"]
    content["examples"] = {"recorded": {"value": content.pop("example")}}  # type: ignore[dict-item]
    assert json.loads(example_in(json.dumps({"paths": paths}).encode()).v2) == example
    several = json.dumps({"paths": {**paths, "/v2/models/n/infer": route}})
    assert example_in(several.encode(), "/v2/models/n/infer").path == "/v2/models/n/infer"
    for document in (several, '{"paths": {}}', "[]", "not found"):
        assert example_in(document.encode()) == ("", b"", b"")


@pytest.mark.parametrize(
    ("sent", "declared", "instance"),
    [
        ({"x": ([1, 4], [1, 2, 3, 4])}, {"x": [-1, 4]}, [1, 2, 3, 4]),
        ({"x": ([1], ["a"])}, {"x": [-1]}, "a"),
        ({"x": ([2, 2], [1, 2, 3, 4])}, {"x": [2, 2]}, [[1, 2], [3, 4]]),
        ({"x": ([1, 1], [5]), "y": ([1], [6])}, {"x": [-1, 1], "y": [-1]}, {"x": [5], "y": 6}),
        ({"x": ([1, 1], [5])}, {"x": [-1, 1], "optional": [-1]}, {"x": [5]}),
    ],
)
def test_a_row_of_a_request_is_an_instance(
    sent: dict[str, tuple[list[int], list[object]]], declared: dict[str, list[int]], instance: object
) -> None:
    request = {"inputs": [{"name": name, "shape": shape, "data": data} for name, (shape, data) in sent.items()]}
    metadata = {"inputs": [{"name": name, "shape": shape} for name, shape in declared.items()]}
    made = instances_of(json.dumps(request).encode(), json.dumps(metadata).encode())
    assert json.loads(made) == {"instances": [instance]}


def test_an_unknown_request_has_no_instances() -> None:
    assert instances_of(b"", b"{}") == b""
    assert instances_of(b'{"inputs": [{"name": "x"}]}', b'{"inputs": [{"name": "x", "shape": [1]}]}') == b""


@pytest.mark.parametrize("platform", CHECKS)
def test_our_adapters_need_no_request_for_their_only_model(
    platform: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "app.py").write_text(FUNCTION)
    command = [sys.executable, "-m", f"remora_adapters.{platform.replace('-', '_')}"]
    if platform == "lambda":
        client = Path(__file__).parent / "faulty_lambda.py"
        command = [sys.executable, str(client), "remora_adapters.aws_lambda.handler"]
    settings = EmulateSettings(
        command=tuple(command),
        model=models,
        environ={"PYTHONPATH": child_environment["PYTHONPATH"]},
        startup_s=START_TIMEOUT_S,
        patience=15.0,
    )
    verdicts = run_checks(find_platform(platform), settings, CHECKS[platform])
    assert {(verdict.id, verdict.outcome, verdict.found) for verdict in verdicts} == {
        (name, PASSED, "") for name in CHECKS[platform]
    }
