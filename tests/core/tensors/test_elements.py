"""Elements of BYTES tensors, joined and split in steps."""

from __future__ import annotations

import numpy as np
import pytest

from remora.tensors import elements


@pytest.mark.parametrize("count", [0, 1, elements.STEP, elements.STEP + 1, 3 * elements.STEP])
def test_elements_are_the_same_in_any_number_of_steps(count: int) -> None:
    values = [b"x" * (number % 5) for number in range(count)]
    array = elements.array_of(elements.steps_of(values), count)
    assert array.tolist() == values
    assert all(len(step) <= elements.STEP for step in elements.steps_of(values))
    wire = elements.packed(elements.array_steps(array))
    assert wire == b"".join(len(value).to_bytes(4, "little") + value for value in values)
    assert [step for step in elements.array_steps(array) if step] == [list(s) for s in elements.steps_of(values)]


def test_an_array_has_its_elements_in_row_major_order() -> None:
    array = np.array([[b"a", b"bb"], [b"ccc", b""]], object).T
    assert elements.packed(elements.array_steps(array)) == b"\1\0\0\0a\3\0\0\0ccc\2\0\0\0bb\0\0\0\0"


def test_fewer_elements_than_expected_make_a_shorter_array() -> None:
    assert elements.array_of([[b"a"], [b"b"]], 5).tolist() == [b"a", b"b"]
