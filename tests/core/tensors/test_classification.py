"""Class strings [X06]: order, labels, number formats, and what has no classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Array, OutputSpec, Response, Tensor
from remora.tensors.classification import classify

FRUIT = {"OUT": ["apple", "banana", "cherry"]}


def classes_of(
    data: Array, count: int, *, datatype: str = "FP32", labels: dict[str, list[str]] | None = None, batches: bool = True
) -> list[object]:
    response = Response([Tensor("OUT", datatype, data)], {"kept": 1})
    answer = classify(response, [OutputSpec("OUT", count)], labels or {}, batches=batches)
    assert isinstance(answer, Response)
    assert answer.parameters == {"kept": 1}
    (tensor,) = answer.outputs
    assert (tensor.name, tensor.datatype, tensor.data.dtype) == ("OUT", "BYTES", np.dtype(object))
    found: list[object] = tensor.data.tolist()
    return found


@pytest.mark.parametrize(
    ("values", "count", "expected"),
    [
        ([5, 5, 5, 5], 1, [b"5.000000:0:apple"]),
        ([1, 5, 3, 4], 2, [b"5.000000:1:banana", b"4.000000:3"]),
        ([1, 5, 3, 4], 99, [b"5.000000:1:banana", b"4.000000:3", b"3.000000:2:cherry", b"1.000000:0:apple"]),
        ([2, 2, 1, 2], 4, [b"2.000000:0:apple", b"2.000000:1:banana", b"2.000000:3", b"1.000000:2:cherry"]),
        ([-1, -2.5, -0.001, -4], 2, [b"-0.001000:2:cherry", b"-1.000000:0:apple"]),
        ([1e10, 1e-10, 123456.789, 0.1], 3, [b"10000000000.000000:0:apple", b"123456.789062:2:cherry", b"0.100000:3"]),
        ([np.inf, -np.inf, 0, 1], 4, [b"inf:0:apple", b"1.000000:3", b"0.000000:2:cherry", b"-inf:1:banana"]),
    ],
)
def test_the_best_values_come_first_with_index_and_label(
    values: list[float], count: int, expected: list[bytes]
) -> None:
    assert classes_of(np.array([values], "f4"), count, labels=FRUIT) == [expected]


def test_of_many_equal_values_the_first_come_first() -> None:
    found = classes_of(np.ones(100, "f4"), 50, batches=False)
    assert found == [f"1.000000:{index}".encode() for index in range(50)]


@pytest.mark.parametrize(("shape", "count"), [((1, 1_000_001), 1 << 31), ((1001, 1000), 1000), ((2, 600_000), 600_000)])
def test_too_many_results_are_refused_before_they_are_made(shape: tuple[int, int], count: int) -> None:
    response = Response([Tensor("OUT", "FP32", np.zeros(shape, "f4"))])
    answer = classify(response, [OutputSpec("OUT", count)], {}, batches=True)
    assert isinstance(answer, InvalidArgumentError)
    assert "the limit is 1000000: request fewer classes" in str(answer)
    assert classify(response, [OutputSpec("OUT", 1)], {}, batches=True) is not answer


def test_each_row_of_a_batch_is_sorted_by_itself() -> None:
    data = np.array([[1, 2, 3], [6, 5, 4]], "f4")
    assert classes_of(data, 2) == [[b"3.000000:2", b"2.000000:1"], [b"6.000000:0", b"5.000000:1"]]


def test_without_batching_all_values_are_one_row() -> None:
    data = np.array([[1, 2], [4, 3]], "f4")
    assert classes_of(data, 2, batches=False) == [b"4.000000:2", b"3.000000:3"]


def test_a_batch_of_matrices_counts_indices_through_the_row() -> None:
    assert classes_of(np.arange(8, dtype="f4").reshape(2, 2, 2), 1) == [[b"3.000000:3"], [b"7.000000:3"]]


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("INT32", [1, -2, 30], [b"30:2", b"1:0", b"-2:1"]),
        ("INT8", [-128, 127], [b"127:1", b"-128:0"]),
        ("UINT8", [0, 255], [b"255:1", b"0:0"]),
        ("UINT64", [3, 2**64 - 1], [b"18446744073709551615:1", b"3:0"]),
        (
            "INT64",
            [-(2**63), 2**63 - 1, 2**63 - 2],
            [b"9223372036854775807:1", b"9223372036854775806:2", b"-9223372036854775808:0"],
        ),
        ("FP64", [0.25, 1000.0], [b"1000.000000:1", b"0.250000:0"]),
    ],
)
def test_every_ordered_type_prints_as_it_should(datatype: str, values: list[float], expected: list[bytes]) -> None:
    assert classes_of(np.array(values, DTYPES[datatype]), 9, datatype=datatype, batches=False) == expected


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_a_type_without_an_order_is_refused_with_tritons_text(datatype: str) -> None:
    response = Response([Tensor("OUT", datatype, np.zeros(2, DTYPES[datatype]))])
    answer = classify(response, [OutputSpec("OUT", 1)], {}, batches=False)
    assert isinstance(answer, InvalidArgumentError)
    assert str(answer) == f"class result not available for output due to unsupported type '{datatype}'"
    assert answer.from_model


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)])
@pytest.mark.parametrize("batches", [False, True])
def test_an_output_without_values_is_refused(shape: tuple[int, ...], batches: bool) -> None:
    answer = classify(
        Response([Tensor("OUT", "FP32", np.zeros(shape, "f4"))]), [OutputSpec("OUT", 1)], {}, batches=batches
    )
    assert isinstance(answer, InvalidArgumentError)
    assert "'OUT'" in str(answer)


def test_outputs_that_asked_for_nothing_stay_as_they_are() -> None:
    plain = Tensor("OTHER", "FP32", np.zeros((1, 4), "f4"))
    zero = Tensor("ZERO", "FP16", np.zeros((1, 4), "f2"))
    answer = classify(Response([plain, zero]), [OutputSpec("ZERO", 0)], {}, batches=True)
    assert isinstance(answer, Response)
    assert answer.outputs[0] is plain
    assert answer.outputs[1] is zero


def test_an_empty_label_is_left_out() -> None:
    assert classes_of(np.array([1], "f4"), 1, labels={"OUT": [""]}, batches=False) == [b"1.000000:0"]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20), st.integers(1, 25))
def test_the_classes_are_the_largest_values_in_order(values: list[int], count: int) -> None:
    found = classes_of(np.array(values, "i4"), count, datatype="INT32", batches=False)
    pairs = [tuple(map(int, bytes(text).split(b":"))) for text in found]  # type: ignore[call-overload]
    assert [value for value, _ in pairs] == sorted(values, reverse=True)[:count]
    assert all(values[index] == value for value, index in pairs)
    assert len({index for _, index in pairs}) == len(pairs)
