"""Arguments of ``pb_utils`` are converted and refused as Triton's C++ binding does, by a table recorded from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from remora import Engine
from support.programs.pb_utils_probes import DIFFERENCES, TRITON, write_model


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Evaluate an expression in a model."""
    repository = tmp_path_factory.mktemp("models")
    write_model(repository)
    with Engine(repository) as engine:

        def verdict(expression: str) -> str:
            found = engine.infer("probe", {"EXPRESSION": np.array([expression.encode()], object)})
            return str(found["VERDICT"][0].decode())

        yield verdict


@pytest.mark.parametrize("expression", TRITON)
def test_an_argument_is_taken_as_tritons_binding_takes_it(expression: str, evaluate: Callable[[str], str]) -> None:
    known = DIFFERENCES.get(expression)
    expected = {TRITON[expression]} if known is None else {known["remora"]}
    if known is not None and "numpy 2" in known["reason"]:  # numpy 1 does as Triton
        expected.add(TRITON[expression])
    assert evaluate(expression) in expected


def test_each_known_difference_is_one_and_has_a_reason() -> None:
    for expression, known in DIFFERENCES.items():
        assert known["remora"] != TRITON[expression], expression
        assert known["reason"]
