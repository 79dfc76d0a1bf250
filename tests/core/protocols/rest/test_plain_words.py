"""Errors for people: the values, what was expected, and none of Triton's prefixes or the server's paths."""

from __future__ import annotations

import pytest

from remora.calls import TensorInfo
from remora.errors import FAILED_EXECUTION, InternalError, InvalidArgumentError, QueueFullError, UnavailableError, about
from remora.protocols.rest.plain_words import check_shape, in_plain_words, names_code


@pytest.mark.parametrize(
    ("datatype", "wanted", "got", "text"),
    [
        ("FP32", (-1, 2), (1, 3), "input 'x': each row has 2 numbers, this one has 3"),
        ("INT64", (-1, 1), (4, 2), "input 'x': each row has 1 integer, this one has 2"),
        ("BYTES", (3,), (2,), "input 'x': takes 3 texts, here are 2"),
        ("FP32", (-1, 28, 28), (1, 27, 28), "input 'x': expected numbers of shape [28, 28] in each row, got [27, 28]"),
        ("BOOL", (2, 2), (3, 2), "input 'x': expected truth values of shape [2, 2], got [3, 2]"),
        ("BF16", (-1, 2), (1, 2, 2), "input 'x': expected numbers of shape [any, 2], got shape [1, 2, 2]"),
    ],
)
def test_a_wrong_shape_is_told_in_counts(
    datatype: str, wanted: tuple[int, ...], got: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_shape(TensorInfo("x", datatype, wanted), got)
    assert str(refused.value) == text


def test_a_fitting_shape_passes() -> None:
    check_shape(TensorInfo("x", "FP32", (-1, 2)), (7, 2))


def test_an_exception_of_a_model_has_the_models_name_and_no_paths() -> None:
    text = FAILED_EXECUTION.format("big_0_0", "MemoryError: it's full\n\nAt:\n  /srv/app.py(3): big\n")
    error = InternalError(about("", text), from_model=True)
    assert names_code(error)
    plain = in_plain_words(error, "big")
    assert (str(plain), type(plain), plain.from_model) == (
        "model 'big' failed: MemoryError: it's full",
        InternalError,
        True,
    )


def test_prefixes_go_and_all_else_stays() -> None:
    full = in_plain_words(QueueFullError(about("", "Exceeds maximum queue size"), retry_after_s=3), "m")
    assert (str(full), full.code, full.retry_after_s) == ("Exceeds maximum queue size", "UNAVAILABLE", 3)
    other = UnavailableError("the server stops")
    assert in_plain_words(other, "m") is other
