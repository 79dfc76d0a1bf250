"""The example request of a model comes from its folder, and only if it fits the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remora.calls import TensorInfo
from remora.models.example_requests import MAX_ELEMENTS, ExampleRequest, find_example

INPUTS = (TensorInfo("x", "FP32", (-1, 2)), TensorInfo("mark", "BYTES", (-1, 1)))


def tensor(data: Any, **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": data, **more}


def found_in(folder: Path) -> ExampleRequest | None:
    return find_example(folder, INPUTS, frozenset(("x",)))


def write(file: Path, document: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))


def test_the_first_golden_test_precedes_the_requests_in_their_order(tmp_path: Path) -> None:
    assert found_in(tmp_path) is None
    write(tmp_path / "requests" / "b.json", {"inputs": [tensor([3, 4])]})
    write(tmp_path / "requests" / "a.json", {"inputs": [tensor([[1, 2]], parameters={"unused": 1})]})
    assert found_in(tmp_path) == ("requests/a.json", [tensor([1, 2])])
    write(tmp_path / "tests.json", {"tests": [{"inputs": [tensor([5, 6])], "outputs": []}, {}]})
    assert found_in(tmp_path) == ("tests.json", [tensor([5, 6])])


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"inputs": []},
        {"inputs": [tensor([1])]},
        {"inputs": [tensor([1, 2], shape=[1, 3])]},
        {"inputs": [tensor([1, 2], shape=[2])]},
        {"inputs": [tensor([1, 2], datatype="INT64")]},
        {"inputs": [tensor([1, 2], name="y")]},
        {"inputs": [tensor([1, 2]), tensor([1, 2], name="y")]},
        {"inputs": [{"name": "mark", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]},
        {"inputs": [tensor([0] * (MAX_ELEMENTS + 2), shape=[MAX_ELEMENTS // 2 + 1, 2])]},
    ],
)
def test_a_request_that_does_not_fit_the_model_is_passed_over(document: Any, tmp_path: Path) -> None:
    write(tmp_path / "requests" / "a.json", document)
    (tmp_path / "tests.json").write_text("{")
    assert found_in(tmp_path) is None
    write(tmp_path / "requests" / "b.json", {"inputs": [tensor([3, 4])]})
    assert found_in(tmp_path) == ("requests/b.json", [tensor([3, 4])])
