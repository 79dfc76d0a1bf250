"""The trial run that shows whether rows are independent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from remora.backends.batching_trial import try_rows
from remora.calls import TensorInfo
from remora.config.batching_choice import Trial
from remora.messages import DTYPES, Array, Tensor

Function = Callable[[Array], Array]


def tried(function: Function, datatype: str = "FP32", dims: tuple[int, ...] = (4,), gives: str = "") -> Trial:
    gives = gives or datatype

    def run(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        return [Tensor(name, gives, function(inputs["x"])) for name in wanted]

    return try_rows(run, [TensorInfo("x", datatype, (-1, *dims))], [TensorInfo("y", gives, (-1,))])


def softmax(x: Array, axis: int) -> Array:
    shifted = np.exp(x - x.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


INDEPENDENT: dict[str, Function] = {
    "relu": lambda x: np.maximum(x, 0),
    "softmax of a row": lambda x: softmax(x, 1),
    "rounding that depends on the batch size": lambda x: (x * np.float32(1 + 1e-5 * len(x))).astype("f4"),
    "logarithm": lambda x: np.log(np.abs(x)),
    "square root of a negative": np.sqrt,
    "always not a number": lambda x: x * np.nan,
}
DEPENDENT: dict[str, Function] = {
    "softmax down the column": lambda x: softmax(x, 0),
    "running sum": lambda x: np.cumsum(x, 0),
    "sorted": lambda x: np.sort(x, 0),
    "centred": lambda x: x - x.mean(0, keepdims=True),
    "reversed": lambda x: x[::-1] * np.arange(1, len(x) + 1)[:, None],
    "distances": lambda x: x @ x.T,
    "one row for all": lambda x: x.sum(0, keepdims=True),
    "only positive rows": lambda x: x[x.sum(1) > 0],
    "without duplicates": lambda x: np.unique(x, axis=0),
    "scalar": lambda x: x.sum(),
    "range of the batch": lambda x: np.round(x / np.abs(x).max() * 127) / 127 * np.abs(x).max(),
    "transposed": lambda x: x.T,
}


@pytest.mark.parametrize("name", INDEPENDENT)
@np.errstate(all="ignore")
def test_independent_rows_are_equal(name: str) -> None:
    assert tried(INDEPENDENT[name]) is Trial.EQUAL


@pytest.mark.parametrize("name", DEPENDENT)
@np.errstate(all="ignore")
def test_dependent_rows_are_different(name: str) -> None:
    assert tried(DEPENDENT[name]) is Trial.DIFFERENT


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_can_be_tried(datatype: str) -> None:
    assert tried(lambda x: x, datatype, (-1, 2)) is Trial.EQUAL
    assert tried(lambda x: np.roll(x, 1, axis=0), datatype, (-1, 2)) is Trial.DIFFERENT
    assert tried(lambda x: x, datatype, ()) is Trial.EQUAL


def test_a_model_that_refuses_generated_values_is_unknown() -> None:
    def refuse(x: Array) -> Array:
        raise ValueError("only 3 x 17 x 23")

    assert tried(refuse) is Trial.UNKNOWN


@pytest.mark.parametrize("size", [1, 32, 224])
def test_other_sizes_are_tried_when_one_is_refused(size: int) -> None:
    def picture(x: Array) -> Array:
        if x.shape[2:] != (size, size):
            raise ValueError("another size")
        return x.mean(axis=(2, 3))

    assert tried(picture, dims=(3, -1, -1)) is Trial.EQUAL


def test_small_numbers_are_tried_when_larger_ones_are_no_index() -> None:
    table = np.array([[0.5], [0.25]], "f4")
    assert tried(lambda x: table[x].sum(axis=1), "INT64", gives="FP32") is Trial.EQUAL


def test_a_model_with_other_outputs_in_each_run_is_unknown() -> None:
    random = np.random.default_rng(1)
    assert tried(lambda x: x + random.standard_normal(x.shape)) is Trial.UNKNOWN


def test_rows_of_gigabytes_are_not_tried() -> None:
    def never(x: Array) -> Array:
        raise AssertionError("not called")

    assert tried(never, dims=(1 << 30,)) is Trial.UNKNOWN
