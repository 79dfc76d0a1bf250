"""Golden requests: which responses pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora_deploy.deploy.golden import Golden, golden_step, problem_of
from remora_deploy.deploy.plan import Call, CallError

OUTPUTS = {"outputs": [{"name": "y", "data": [1.0, 2.0]}, {"name": "z", "data": ["a"]}], "id": "1"}


def body(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        (body(OUTPUTS), b"", ""),
        (b"", b"", "is empty"),
        (b"text", b"", ""),
        (b"text", b"text", ""),
        (b"text", b"other", "the response is text, expected other"),
        (body({"error": "no such model"}), b"", "an error: no such model"),
        (body(OUTPUTS), body({**OUTPUTS, "id": "2", "model_version": "9"}), ""),
        (body(OUTPUTS), body({"outputs": [{"name": "y", "data": [1.00001, 2.0]}]}), ""),
        (body(OUTPUTS), body({"outputs": [{"name": "y", "data": [1.5, 2.0]}]}), "y[0] is 1.0, expected 1.5"),
        (body(OUTPUTS), body({"outputs": [{"name": "y", "data": [1.0]}]}), "has 2 values, expected 1"),
        (body(OUTPUTS), body({"outputs": [{"name": "w", "data": [1.0]}]}), "has no w"),
        (body(OUTPUTS), body({"outputs": [{"name": "z", "data": ["b"]}]}), "z[0] is a, expected b"),
        (body([True]), body([1]), "expected 1"),
        (body([1]), b"text", "the expected one is not"),
    ],
)
def test_a_response_is_compared_by_its_outputs(answer: bytes, expected: bytes, text: str) -> None:
    problem = problem_of(answer, expected)
    assert text in problem
    assert bool(problem) == bool(text)


def test_without_a_golden_request_there_is_no_step() -> None:
    assert golden_step(None, Call("x", "y", {}), lambda answer: answer) == ()


def test_a_failed_inference_is_the_reason() -> None:
    def fails(answer: Any) -> bytes:
        raise CallError("failed", "the model is broken")

    (step,) = golden_step(Golden(b"{}"), Call("x", "y", {}), fails)
    assert step.until is not None
    assert "the model is broken" in step.until({}).failure
