"""Captured requests: lines are read as they were written, requests are repeated exactly, differences are named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_tools.traffic.captured import (
    CapturedError,
    CapturedTensor,
    Exchange,
    answer_of,
    difference,
    elements,
    exchange_of,
    line_of,
    request_of,
)

DTYPES = {"INT8": "i1", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BOOL": "?", "BF16": "<u2"}


def wire(*items: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in items)


@st.composite
def tensors(draw: st.DrawFn) -> CapturedTensor:
    datatype = draw(st.sampled_from((*DTYPES, "BYTES")))
    if datatype == "BYTES":
        items = draw(st.lists(st.binary(max_size=20), max_size=5))
        return CapturedTensor("t", datatype, (len(items),), draw(st.sampled_from((wire(*items), None))))
    count = draw(st.integers(0, 5))
    if datatype == "BOOL":
        return CapturedTensor(
            "t", datatype, (count,), bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        )
    size = np.dtype(DTYPES[datatype]).itemsize
    return CapturedTensor("t", datatype, (count,), draw(st.binary(min_size=count * size, max_size=count * size)))


def exchange(*inputs: CapturedTensor, **fields: object) -> Exchange:
    known = {
        "model": "m", "version": "1", "time": "2026-01-01T00:00:00+00:00", "id": "", "parameters": {}, "outputs": [],
        "answers": [], "error": "", "duration_us": 5,
    }  # fmt: skip
    return Exchange(inputs=list(inputs), **(known | fields))  # type: ignore[arg-type]


@given(st.lists(tensors(), max_size=3), st.lists(st.lists(tensors(), max_size=2), max_size=2))
def test_a_line_is_read_as_it_was_written(inputs: list[CapturedTensor], answers: list[list[CapturedTensor]]) -> None:
    written = exchange(*inputs, answers=answers, parameters={"a": 1, "b": "x", "c": True}, error="e\n\u20ac")
    line = line_of(written)
    assert line.count(b"\n") == 1
    assert exchange_of(line) == written


def test_numbers_and_text_are_legible() -> None:
    (shown,) = json.loads(line_of(exchange(CapturedTensor("x", "FP32", (1, 2), np.array([1, 0.1], "<f4").tobytes()))))[
        "inputs"
    ]
    assert shown == {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, float(np.float32(0.1))]}


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"model":"m"}', line_of(exchange())[:-10], b'{"inputs":3}'])
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(CapturedError, match="not a captured request"):
        exchange_of(line)


def test_a_request_is_repeated_with_the_bytes_that_were_captured() -> None:
    one, text = CapturedTensor("x", "INT8", (3,), b"\1\2\3"), CapturedTensor("s", "BYTES", (1,), wire(b"a"))
    request = request_of(exchange(one, text, id="i", parameters={"p": 1}, outputs=["y"]))
    assert request is not None
    header = json.loads(request.body[: request.header_length])
    assert request.body[request.header_length :] == b"\1\2\3" + wire(b"a")
    assert [each["parameters"]["binary_data_size"] for each in header["inputs"]] == [3, 5]
    assert (header["id"], header["parameters"]) == ("i", {"p": 1, "binary_data_output": True})
    assert request_of(exchange(one._replace(content=None))) is None


def test_an_answer_is_read_in_both_forms() -> None:
    json_part = b'{"outputs":[{"name":"a","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":1}},' + (
        b'{"name":"b","datatype":"FP32","shape":[1],"data":[0.5]}]}'
    )
    assert answer_of(json_part + b"\7", len(json_part)) == [
        CapturedTensor("a", "INT8", (1,), b"\7"),
        CapturedTensor("b", "FP32", (1,), np.float32(0.5).tobytes()),
    ]
    with pytest.raises(CapturedError, match="not an answer"):
        answer_of(b"[]", None)


def floats(*values: float) -> CapturedTensor:
    return CapturedTensor("y", "FP32", (len(values),), np.array(values, "<f4").tobytes())


@pytest.mark.parametrize(
    ("before", "after", "tolerance", "expected"),
    [
        (floats(1.0), floats(1.0), (0.0, 0.0), ""),
        (floats(1.0, 2.0), floats(1.0, 2.1), (0.0, 0.0), "1 of 2 elements differ, first [1]"),
        (floats(100.0), floats(101.0), (0.02, 0.0), ""),
        (floats(0.0), floats(0.5), (0.0, 0.6), ""),
        (floats(float("nan")), floats(float("nan")), (0.0, 0.0), ""),
        (floats(1.0), floats(1.0, 1.0), (0.0, 0.0), "FP32[2] instead of FP32[1]"),
        (floats(1.0), floats(1.0)._replace(name="z"), (0.0, 0.0), "outputs ['z'] instead of ['y']"),
        (floats(1.0)._replace(content=None), floats(5.0), (0.0, 0.0), ""),
        (
            CapturedTensor("y", "BYTES", (1,), wire(b"a")),
            CapturedTensor("y", "BYTES", (1,), wire(b"b")),
            (9, 9),
            "b'b' instead of b'a'",
        ),
    ],
)
def test_differences_are_named(
    before: CapturedTensor, after: CapturedTensor, tolerance: tuple[float, float], expected: str
) -> None:
    found = difference([before], [after], *tolerance)
    assert expected in found
    assert bool(expected) == bool(found)


def test_elements_that_are_cut_short_are_refused() -> None:
    assert elements(wire(b"", b"ab")) == [b"", b"ab"]
    for cut in (wire(b"ab")[:-1], b"\1\0"):
        with pytest.raises(ValueError, match="ends within"):
            elements(cut)
