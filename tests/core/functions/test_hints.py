"""Type hints as tensors: which tensor a hint is, and that values survive both directions."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.functions.errors import BadRequestError, HintError
from remora.functions.hints import Array, kind_of


@dataclass
class Point:
    x: float
    y: float = 0.0


@dataclass
class Line:
    points: list[Point]


ONE = [
    (int, "INT64", (1,), 7),
    (float, "FP64", (1,), 1.5),
    (bool, "BOOL", (1,), True),
    (str, "BYTES", (1,), "grüße"),
    (bytes, "BYTES", (1,), b"\x00\xff"),
    (list[float], "FP64", (-1,), [1.0, 2.5]),
    (list[list[int]], "INT64", (-1, -1), [[1, 2], [3, 4]]),
    (list[str], "BYTES", (-1,), ["a", "ä"]),
    (dict, "BYTES", (1,), {"a": [1, None]}),
    (dict[str, int], "BYTES", (1,), {"a": 1}),
    (Any, "BYTES", (1,), [1, "two"]),
    (float | None, "FP64", (1,), 0.5),
    (Literal["a", "b"], "BYTES", (1,), "a"),
    (Point, "BYTES", (1,), Point(1.0, 2.0)),
    (list[Point], "BYTES", (1,), [Point(1.0), Point(2.0)]),
    (Line, "BYTES", (1,), Line([Point(1.0)])),
]

BATCH = [
    (list[float], "FP64", (1,), [1.0, 2.5]),
    (list[int], "INT64", (1,), [1, 2, 3]),
    (list[str], "BYTES", (1,), ["a", "ä"]),
    (list[bytes], "BYTES", (1,), [b"a"]),
    (list[dict], "BYTES", (1,), [{"a": 1}, {}]),
    (list[Point], "BYTES", (1,), [Point(1.0), Point(2.0)]),
    (list[list[float]], "FP64", (-1,), [[1.0, 2.0], [3.0, 4.0]]),
    (list, "BYTES", (1,), [1, "x"]),
]


@pytest.mark.parametrize(("hint", "datatype", "dims", "value"), ONE, ids=[str(row[0]) for row in ONE])
def test_a_value_survives_the_way_into_a_tensor_and_back(hint: Any, datatype: str, dims: Any, value: Any) -> None:
    kind = kind_of(hint)
    assert (kind.datatype, kind.dims) == (datatype, dims)
    tensor = kind.encode(value)
    assert tensor.ndim == len(dims)
    assert kind.decode(tensor) == value


@pytest.mark.parametrize(("hint", "datatype", "dims", "value"), BATCH, ids=[str(row[0]) for row in BATCH])
def test_a_batch_has_one_row_for_each_item(hint: Any, datatype: str, dims: Any, value: Any) -> None:
    kind = kind_of(hint, batched=True)
    assert (kind.datatype, kind.dims) == (datatype, dims)
    tensor = kind.encode(value)
    assert tensor.shape[0] == len(value)
    assert tensor.ndim == 1 + len(dims)
    assert kind.decode(tensor) == value


@pytest.mark.parametrize(
    ("hint", "batched", "datatype", "dims"),
    [
        (Array[np.float32, 28, 28], False, "FP32", (28, 28)),
        (Array["uint8", -1, 3], False, "UINT8", (-1, 3)),
        (Annotated[npt.NDArray[np.float32], 28, 28], False, "FP32", (28, 28)),
        (npt.NDArray[np.int32], False, "INT32", (-1,)),
        (np.ndarray, False, "FP32", (-1,)),
        (Array[np.float32, -1, 28, 28], True, "FP32", (28, 28)),
        (Array[np.float32, -1], True, "FP32", (1,)),
        (npt.NDArray[np.float64], True, "FP64", (-1,)),
    ],
)
def test_an_array_has_the_dtype_and_shape_of_its_annotation(hint: Any, batched: bool, datatype: str, dims: Any) -> None:
    kind = kind_of(hint, batched=batched)
    assert (kind.datatype, kind.dims) == (datatype, dims)


def test_a_batch_of_numbers_is_a_flat_array_for_the_function() -> None:
    kind = kind_of(Array[np.float32, -1], batched=True)
    assert kind.decode(np.ones((4, 1), np.float32)).shape == (4,)
    assert kind.encode(np.ones(4, np.float32)).shape == (4, 1)


@pytest.mark.parametrize(
    ("hint", "batched", "text"),
    [
        (complex, False, "complex is not a tensor"),
        (float, True, r"list\[float\]"),
        (npt.NDArray[np.str_], False, "no datatype"),
        (set, False, "set is not a tensor"),
    ],
)
def test_a_hint_that_no_tensor_holds_is_refused_with_an_alternative(hint: Any, batched: bool, text: str) -> None:
    with pytest.raises(HintError, match=text):
        kind_of(hint, batched=batched)


@pytest.mark.parametrize("shape", [(1.5,), ("n",), (-2,)])
def test_a_dimension_is_a_size_or_minus_one(shape: Any) -> None:
    with pytest.raises(HintError, match="is not a dimension"):
        Array[(np.float32, *shape)]


@pytest.mark.parametrize(
    ("hint", "text", "message"),
    [
        (dict, b"{", "not JSON"),
        (dict, b"[1]", r"expected a JSON object, got \[1\]"),
        (Point, b'{"z": 1}', "there is no field 'z'; there is x, y"),
        (Point, b"{}", "the field 'x' is missing"),
        (Line, b'{"points": [{"x": 1}, {"y": 1}]}', r"points\[1\]: the field 'x' is missing"),
        (Line, b'{"points": 3}', "points: expected a list, got 3"),
        (str, b"\xff", "not UTF-8"),
    ],
)
def test_an_invalid_value_is_the_clients_error_and_names_the_place(hint: Any, text: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        kind_of(hint).decode(np.array([text], object))


def test_deep_json_is_the_clients_error() -> None:
    with pytest.raises(BadRequestError, match="nested too deeply"):
        kind_of(Any).decode(np.array([b"[" * 100_000], object))


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (float, "x", "expected float64"),
        (int, 1.5, "expected int64, got float64"),
        (str, 5, "expected str, got int"),
        (list[float], [[1.0]], "expected 1 dimensions"),
        (dict, {"a": {1}}, "set is not a JSON value"),
    ],
)
def test_a_wrong_result_is_an_error_of_the_function(hint: Any, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kind_of(hint).encode(value)


def test_a_result_is_cast_within_its_kind_of_number() -> None:
    kind = kind_of(Array[np.float32, 2])
    assert kind.encode([1.0, 2.0]).dtype == np.float32
    assert kind.encode(np.arange(2)).dtype == np.float32


def test_arrays_and_dataclasses_are_json_values_of_results() -> None:
    encoded = kind_of(dict).encode({"a": np.arange(2), "p": Point(1.0), "n": np.float32(2)})
    assert encoded.item() == b'{"a": [0, 1], "p": {"x": 1.0, "y": 0.0}, "n": 2.0}'


def test_an_image_is_its_encoded_bytes() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    kind = kind_of(image.Image)
    file = io.BytesIO()
    image.new("RGB", (3, 2), (255, 0, 0)).save(file, "PNG")
    opened = kind.decode(np.array([file.getvalue()], object))
    assert (opened.size, opened.getpixel((0, 0))) == ((3, 2), (255, 0, 0))
    assert kind.decode(kind.encode(opened)).size == (3, 2)
    with pytest.raises(BadRequestError, match="not an image"):
        kind.decode(np.array([b"nonsense"], object))


@given(st.lists(st.text()), st.booleans())
def test_any_texts_survive(texts: list[str], batched: bool) -> None:
    kind = kind_of(list[str], batched=batched)
    assert kind.decode(kind.encode(texts)) == texts
