"""What programs hand in: the parameters that V2 reserves mean the same to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remora.errors import InvalidArgumentError
from remora.in_process import as_form
from remora.messages import OutputSpec, Parameter


def test_reserved_parameters_become_what_they_stand_for_and_the_others_go_to_the_model() -> None:
    parameters: dict[str, Parameter] = {
        "sequence_id": "a", "sequence_start": True, "sequence_end": False, "priority": 2, "timeout": 30, "k": 0.5,
    }  # fmt: skip
    form = as_form((), ["OUT"], "r", parameters)
    assert (form.sequence_id, form.sequence_start, form.sequence_end) == ("a", True, False)
    assert (form.priority, form.timeout_us) == (2, 30)
    assert (form.id, form.outputs, form.parameters) == ("r", (OutputSpec("OUT"),), {"k": 0.5})
    assert len(parameters) == 6, "the caller's own"


def test_without_gpus_nothing_is_requested() -> None:
    form = as_form((), (), "", {})
    assert (form.sequence_id, form.sequence_start, form.priority, form.timeout_us, form.outputs) == (0, False, 0, 0, ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_id", True),
        ("sequence_id", 1.0),
        ("sequence_id", -1),
        ("sequence_start", 1),
        ("sequence_end", "true"),
        ("priority", False),
        ("timeout", -5),
        ("timeout", "5"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Parameter) -> None:
    with pytest.raises(InvalidArgumentError, match=f"parameter '{name}' is"):
        as_form((), (), "", {name: value})


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1 << 64, "an integer beyond 64 bits"), (None, "of type NoneType"), (object(), "of type object")],
)
def test_a_parameter_that_no_message_can_carry_is_refused(value: Any, shown: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"parameter 'a' is {shown}"):
        as_form((), (), "", {"a": value})


def test_a_parameter_of_numpy_is_its_plain_value() -> None:
    assert as_form((), (), "", {"a": np.int64(3)}).parameters == {"a": 3}  # type: ignore[dict-item]
