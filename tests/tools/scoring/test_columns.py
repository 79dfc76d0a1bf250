"""Mapping of columns to inputs and conversion of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from remora.calls import ModelInfo, TensorInfo
from remora.errors import InvalidArgumentError
from remora_tools.scoring import Chunk
from remora_tools.scoring.columns import InputColumns, convert_chunk, map_columns, tensor_rows


def info(*inputs: TensorInfo) -> ModelInfo:
    return ModelInfo("m", ("1",), "onnx", inputs, (TensorInfo("y", "FP32", (-1, 2)), TensorInfo("z", "INT64", (-1,))))


X = TensorInfo("x", "FP32", (-1, 2))
Y = TensorInfo("y", "INT32", (-1, 1))


def mapped(model: ModelInfo, columns: Sequence[str], given: Mapping[str, list[str]] | None = None, **more: Any) -> Any:
    found = map_columns(model, columns, given or {}, more.get("kept", ()), batches=more.get("batches", True))
    return {each.name: (each.columns, each.shape) for each in found}


def test_inputs_take_the_columns_of_their_names_the_given_ones_or_all() -> None:
    assert mapped(info(X, Y), ["y", "x"]) == {"x": (("x",), (2,)), "y": (("y",), (1,))}
    assert mapped(info(X), ["id", "a", "b"], kept=("id",)) == {"x": (("a", "b"), (2,))}
    assert mapped(info(X), ["id", "a", "b"], {"x": ["b", "a"]}) == {"x": (("b", "a"), (2,))}
    assert mapped(info(X), ["a"], batches=False) == {"x": (("a",), (-1, 2))}


@pytest.mark.parametrize(
    ("columns", "given", "kept", "text"),
    [
        (["x"], {}, (), "no column for input 'y': pass --column y=COLUMN,...; the file has x"),
        (["x", "y"], {"z": ["x"]}, (), "model 'm' has no input 'z'; its inputs are x, y"),
        (["x", "y"], {"x": ["w"]}, (), "the file has no column 'w'; it has x, y"),
        (["x", "y"], {}, ("id",), "the file has no column 'id'; it has x, y"),
        (["a", "b", "c", "y"], {"x": ["a", "b", "c"]}, (), "input 'x' takes 2 values a row, but 3 columns are chosen"),
    ],
)
def test_a_mapping_that_cannot_work_is_refused(columns: list[str], given: Any, kept: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        map_columns(info(X, Y), columns, given, kept, batches=True)
    assert text in str(refused.value)


def converted(each: InputColumns, columns: Mapping[str, Any], first: int = 0) -> tuple[Any, list[int], list[Any]]:
    count = len(next(iter(columns.values())))
    chunk = Chunk(np.arange(first, first + count), columns, (), first + count)
    arrays, good, refused = convert_chunk(chunk, [each])
    assert arrays[each.name].shape[0] == len(good)
    return arrays[each.name].tolist(), good.tolist(), [(row.row, row.reason) for row in refused]


@pytest.mark.parametrize(
    ("datatype", "texts", "values"),
    [
        ("FP32", ["1", " 2.5", "-1e3"], [1.0, 2.5, -1000.0]),
        ("INT8", ["1", "-128", "127"], [1, -128, 127]),
        ("BOOL", ["true", "False", "1"], [True, False, True]),
        ("BYTES", ["a", "", "ö"], [b"a", b"", "ö".encode()]),
        ("UINT64", [str(2**64 - 1), "0", "1"], [2**64 - 1, 0, 1]),
    ],
)
def test_text_becomes_the_datatype_of_the_input(datatype: str, texts: list[str], values: list[Any]) -> None:
    found, good, refused = converted(InputColumns("x", datatype, (), ("c",)), {"c": texts})
    assert (found, good, refused) == (values, [0, 1, 2], [])


def test_bad_values_make_bad_rows_with_a_reason_and_the_others_stay() -> None:
    each = InputColumns("x", "FP32", (2,), ("a", "b"))
    found, good, refused = converted(each, {"a": ["1", "zwei", "3", ""], "b": ["1", "2", "3", "4"]}, first=10)
    assert (found, good) == ([[1.0, 1.0], [3.0, 3.0]], [0, 2])
    assert refused == [(11, "column 'a' holds 'zwei', which is not FP32"), (13, "column 'a' is empty")]


def test_numbers_beyond_the_datatype_make_bad_rows() -> None:
    each = InputColumns("x", "INT8", (), ("c",))
    assert converted(each, {"c": np.array([1, 300, 2])}) == (
        [1, 2],
        [0, 2],
        [(1, "column 'c' holds 300, which is not a valid INT8")],
    )
    assert converted(each, {"c": [1, None, 2]}) == ([1, 2], [0, 2], [(1, "column 'c' is empty")])


def test_lists_of_another_length_make_bad_rows() -> None:
    each = InputColumns("x", "FP32", (2,), ("c",))
    found, good, refused = converted(each, {"c": [[1, 2], [1, 2, 3], [3, 4]]})
    assert (found, good) == ([[1.0, 2.0], [3.0, 4.0]], [0, 2])
    assert refused[0][0] == 1
    assert "does not hold the 3 values" in refused[0][1]
    each = each._replace(shape=(-1,))
    found, good, refused = converted(each, {"c": [[1, 2], [1, 2, 3]]})
    assert refused == [(1, "column 'c' has 3 values, not 2 as in the first row of its chunk")]


def test_values_are_reshaped_to_the_input() -> None:
    flat = np.arange(8, dtype="f4").reshape(2, 4)
    found, _, _ = converted(InputColumns("x", "FP32", (2, 2), ("c",)), {"c": flat})
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    found, _, _ = converted(InputColumns("x", "FP32", (2, -1), ("c",)), {"c": flat})
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(InvalidArgumentError, match=r"input 'x' of shape \[3\] does not hold the 4 values"):
        converted(InputColumns("x", "FP32", (3,), ("c",)), {"c": flat})


def test_outputs_are_chosen_by_name() -> None:
    assert [tensor.name for tensor in tensor_rows(info(X), [])] == ["y", "z"]
    assert [tensor.name for tensor in tensor_rows(info(X), ["z"])] == ["z"]
    with pytest.raises(InvalidArgumentError, match="has no output 'q'; it has y, z"):
        tensor_rows(info(X), ["q"])
