"""CSV and .npy: what goes out comes back, and what a body claims is held against its length."""

from __future__ import annotations

import io
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from remora_adapters.sagemaker import arrays
from remora_adapters.sagemaker.arrays import (
    array_of_csv,
    array_of_json,
    array_of_npy,
    csv_of_arrays,
    npy_of_array,
    tables_of_csv,
)

SHAPES = npst.array_shapes(max_dims=3, max_side=4)
NUMBERS = st.sampled_from(["<f4", "<f8", "<i8", "u1", "?"]).flatmap(lambda dtype: npst.arrays(dtype, SHAPES))


@given(NUMBERS)
def test_an_array_survives_npy(array: np.ndarray) -> None:
    found = array_of_npy(npy_of_array(array))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_an_array_in_fortran_order_is_read_in_its_own_order() -> None:
    file = io.BytesIO()
    np.save(file, np.asfortranarray(np.arange(6).reshape(2, 3)))
    np.testing.assert_array_equal(array_of_npy(file.getvalue()), np.arange(6).reshape(2, 3))


@given(st.binary(max_size=200))
def test_bytes_that_are_not_npy_are_refused_and_nothing_else_happens(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any text
        array_of_npy(b"\x93NUMPY" + body)


@pytest.mark.parametrize("more", [-1, 1])
def test_an_array_that_is_shorter_or_longer_than_it_claims_is_refused(more: int) -> None:
    body = npy_of_array(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="claims 4 elements"):
        array_of_npy(body[:more] if more < 0 else body + b"x")


def test_a_claim_of_more_than_memory_takes_none() -> None:
    body = npy_of_array(np.zeros(4, np.float32)).replace(b"(4,)", b"(9223372036854775807,)".ljust(4))
    with pytest.raises(ValueError, match=r"claims|not a \.npy"):
        array_of_npy(body)


@pytest.mark.parametrize("body", ["[[1, 2], [3, 4]]", "[1.5, 2]", '["a", "bc"]', '{"a": 1}', "3", "[]", "[true]"])
def test_json_becomes_what_numpy_makes_of_it(body: str) -> None:
    found, expected = array_of_json(body), np.array(json.loads(body))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_one_long_text_in_json_takes_no_room_beside_the_short_ones() -> None:
    texts = ["x" * 100_000, *["y"] * 9_999]  # 110 KB; 4 GB as numpy's own texts
    tracemalloc.start()
    try:
        found = array_of_json(json.dumps([texts]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.tolist() == [texts]
    assert peak < 4 << 20


@pytest.mark.parametrize("body", [json.dumps([["x" * 5_000_000], ["y", "z"]]), "[" * 200 + "]" * 200, "[1,"])
def test_json_that_is_not_an_array_is_refused(body: str) -> None:
    with pytest.raises(ValueError, match=r"rows differ|dimension|unexpected end|column"):
        array_of_json(body)


def test_an_array_of_objects_is_never_read() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="objects"):
        array_of_npy(file.getvalue())


@given(
    npst.arrays("<f4", npst.array_shapes(min_dims=2, max_dims=2, max_side=4), elements=st.floats(-1e6, 1e6, width=32))
)
def test_floats_survive_csv_bit_for_bit(array: np.ndarray) -> None:
    np.testing.assert_array_equal(array_of_csv(csv_of_arrays([array])).astype(np.float32), array)


def test_outputs_stand_side_by_side_in_a_row() -> None:
    columns = [
        np.array([1, 2]),
        np.array([[0.5, 1.5], [2.5, 3.5]], np.float32),
        np.array([b"a", b'b,"c']).astype(object),
    ]
    assert csv_of_arrays(columns) == b'1,0.5,1.5,a\n2,2.5,3.5,"b,""c"\n'


def test_outputs_of_different_lengths_have_no_rows() -> None:
    with pytest.raises(ValueError, match="2, 3 rows"):
        csv_of_arrays([np.zeros(2), np.zeros(3)])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no rows"),
        (b"\n\n", "no rows"),
        (b"1,2\n3\n", "1 to 2 cells"),
        (b"1,2\n\n3,4\n", "0 to 2 cells"),
        (b"1,2\n" * 40_000 + b"1,2,3\n", "2 to 3 cells"),
        (b"\xff\n", "decode"),
    ],
)
def test_csv_that_is_not_a_table_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(tables_of_csv(body))


def test_lines_may_end_as_windows_has_them_and_the_last_one_may_be_empty() -> None:
    (table,) = tables_of_csv(b"1,2\r\n3,4\r\n\r\n")
    assert table.tolist() == [["1", "2"], ["3", "4"]]


def test_a_long_body_is_read_some_rows_at_a_time() -> None:
    tables = tables_of_csv(b"".join(b'%d,"a\nb"\n' % row for row in range(50_000)))
    first = next(tables)
    assert 0 < len(first) < 50_000
    rows = [*first.tolist(), *(row for table in tables for row in table.tolist())]
    assert rows == [[str(row), "a\nb"] for row in range(50_000)]


@pytest.mark.parametrize("cells", [1, 5, 7])
def test_rows_are_printed_in_steps_as_at_once(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    columns = [np.arange(12).reshape(6, 2), np.linspace(0, 1, 6, dtype=np.float32)]
    expected = csv_of_arrays(columns)
    monkeypatch.setattr(arrays, "_CELLS_AT_ONCE", cells)
    assert csv_of_arrays(columns) == expected


def test_a_byte_order_mark_is_no_part_of_the_first_cell() -> None:
    assert array_of_csv(b"\xef\xbb\xbf1,2\n").tolist() == [[1.0, 2.0]]


def test_a_row_of_very_many_cells_is_read() -> None:
    assert array_of_csv(b",".join([b"0.5"] * 800_000)).shape == (1, 800_000)


def test_a_text_as_long_as_the_body_is_one_cell() -> None:
    (table,) = tables_of_csv(b'"' + b"a" * 800_000 + b'",1\n')
    assert [len(cell) for cell in table[0]] == [800_000, 1]
