"""Readers of CSV, JSON lines, .npy and Parquet files."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora_tools.scoring.sources import open_source
from support.engine.counted_reads import CountedReads


def rows_of(content: bytes, name: str, first: int = 0, size: int = 3) -> tuple[list[tuple[int, Any]], list[Any]]:
    """Return the rows as (number, values) and the refused ones as (number, reason)."""
    source = open_source(io.BytesIO(content), name, len(content))
    rows: list[tuple[int, Any]] = []
    refused: list[Any] = []
    ends = [first]
    for chunk in source.chunks(first, source.columns, size):
        ends.append(chunk.end)
        values = zip(*(list(chunk.columns[column]) for column in source.columns), strict=True)
        rows += zip(chunk.rows.tolist(), ([_plain(each) for each in row] for row in values), strict=True)
        refused += [(each.row, each.reason) for each in chunk.refused]
        assert len(chunk.rows) + len(chunk.refused) == ends[-1] - ends[-2] <= size
    assert source.fraction() == 1.0
    source.close()
    return rows, refused


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=4)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


NUMBERS = list(range(10))
FILES = {
    "a.csv": b"\xef\xbb\xbfn\n" + b"".join(b"%d\n" % number for number in NUMBERS),
    "a.jsonl": b"".join(b'{"n": %d}\n' % number for number in NUMBERS),
    "a.npy": npy(np.array(NUMBERS)),
    "a.parquet": parquet(n=NUMBERS),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("first", [0, 1, 3, 4, 9, 10, 11])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_all_formats_give_the_rows_from_any_number_on(name: str, first: int, size: int) -> None:
    rows, refused = rows_of(FILES[name], name, first, size)
    assert [(number, int(values[0])) for number, values in rows] == [(each, each) for each in NUMBERS[first:]]
    assert refused == []


def test_lines_of_another_length_are_bad_rows_and_blank_lines_no_rows() -> None:
    rows, refused = rows_of(b'a,b\n1,"x\ny"\n\n2\n3,4,5\n6,7\n', "a.csv")
    assert rows == [(0, ["1", "x\ny"]), (3, ["6", "7"])]
    assert refused == [
        (1, "the line has 1 values, the header line 2"),
        (2, "the line has 3 values, the header line 2"),
    ]


def test_lines_that_are_not_json_objects_are_bad_rows() -> None:
    rows, refused = rows_of(b'{"a": 1}\n{"a"\n[1]\n\n{"b": 2}\n', "a.jsonl")
    assert rows == [(0, [1]), (3, [None])]
    assert [row for row, _ in refused] == [1, 2]
    assert refused[0][1].startswith("the line is not JSON")
    assert refused[1][1] == "the line is not a JSON object"


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        (b"", "a.csv", "is empty: expected a header line"),
        (b"a,a\n1,2\n", "a.csv", "names a column twice"),
        (b"", "a.jsonl", "not a JSON object with members"),
        (b"[1]\n", "a.jsonl", "not a JSON object with members"),
        (b"{\n", "a.jsonl", "is not JSON"),
        (b"no array", "a.npy", "is not an .npy file"),
        (npy(np.array([object()], object)), "a.npy", "expected numbers"),
        (npy(np.asfortranarray(np.ones((2, 2)))), "a.npy", "expected numbers in C order"),
        (npy(np.float32(1)), "a.npy", "with a first dimension"),
        (b"no parquet", "a.parquet", "is not a Parquet file"),
        (b"", "a.txt", "expected a file that ends in .csv"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(content: bytes, name: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        open_source(io.BytesIO(content), name, len(content))
    assert text in str(refused.value)


@pytest.mark.parametrize("name", ["a.npy", "a.parquet"])
def test_a_file_that_ends_early_is_refused(name: str, tmp_path: Path) -> None:
    content = FILES[name][:-8] if name == "a.npy" else parquet(n=list(range(10_000)))
    if name == "a.parquet":  # zeros in a page, because a file without its end is not Parquet at all
        content = content[:1000] + bytes(20_000) + content[21_000:]
    with pytest.raises(InvalidArgumentError, match=r"ends in row 9|cannot be read after row|is not a Parquet"):
        rows_of(content, name)


def test_lists_of_equal_length_become_arrays_and_missing_values_none() -> None:
    nested = [[[1.0, 2.0], [3.0, 4.0]]] * 2
    fixed = pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2))
    rows, _ = rows_of(parquet(a=nested, b=fixed, c=["t", None], d=[1, None], e=[[1], [1, 2]]), "a.parquet")
    assert rows == [(0, [nested[0], [1, 2], "t", 1, [1]]), (1, [nested[1], [3, 4], None, None, [1, 2]])]


@given(
    table=st.lists(
        st.tuples(st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53)),
        min_size=1,
    ),
    first=st.integers(0, 20),
    size=st.integers(1, 7),
)
def test_json_lines_are_read_as_they_were_written(table: list[tuple[str, float, int]], first: int, size: int) -> None:
    content = b"".join(json.dumps({"a": a, "b": b, "c": c}).encode() + b"\n" for a, b, c in table)
    rows, refused = rows_of(content, "a.jsonl", min(first, len(table)), size)
    assert rows == [(number, list(row)) for number, row in enumerate(table)][first:]
    assert not refused


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [10, 40_000])
def test_a_chunk_of_long_rows_ends_early(name: str, length: int) -> None:
    texts = [f"{number:0{length}}" for number in range(60)]
    content = {
        "a.csv": ("n\n" + "".join(f"{text}\n" for text in texts)).encode(),
        "a.jsonl": "".join(f'{{"n": "{text}"}}\n' for text in texts).encode(),
        "a.npy": npy(np.array([list(text.encode()) for text in texts], "u1")),
        "a.parquet": parquet(n=texts),
    }[name]
    source = open_source(io.BytesIO(content), name, len(content))
    counts = [len(chunk.rows) for chunk in source.chunks(0, source.columns, 60, 100_000)]
    assert sum(counts) == 60
    if length > 10:
        assert max(counts) <= 16  # lines are counted by 16
    elif name != "a.parquet":  # whose row groups have four rows
        assert counts == [60]


@pytest.mark.parametrize("first", [0, 399_000])
def test_a_large_row_group_is_read_in_pieces(first: int) -> None:
    values = np.random.default_rng(0).random((2, 400_000))
    file = io.BytesIO()
    table = pyarrow.table({"a": values[0], "b": values[1]})
    pyarrow.parquet.write_table(table, file, use_dictionary=False, compression="none", data_page_size=20_000)
    content = file.getvalue()
    counted = CountedReads(content)
    source = open_source(io.BufferedReader(counted, 8 << 20), "a.parquet", len(content))
    opened = counted.count
    chunks = source.chunks(first, ["a", "b"], 1_000, 400_000)
    rows = [next(chunks)]
    if not first:
        assert 16_000 < counted.count - opened < 600_000, "a piece of each column, and no more for the file's buffer"
    rows += chunks
    assert counted.count - opened < 1.2 * len(content)
    for place, name in enumerate("ab"):
        assert np.array_equal(np.concatenate([chunk.columns[name] for chunk in rows]), values[place, first:])
    source.close()
    assert counted.closed


def test_a_footer_that_would_end_the_process_is_refused() -> None:
    content = parquet(lists=[[1, 2]] * 4)
    histogram, shorter = b"\x46\x00\x00\x00\x10", b"\x36\x00\x00\x80\x10"  # of four levels, and of three
    if histogram not in content:
        pytest.skip(f"pyarrow {pyarrow.__version__} writes no histograms of levels")
    damaged = content.replace(histogram, shorter)
    with pytest.raises(
        InvalidArgumentError, match=r"'a\.parquet' has a damaged description of its columns: .*histogram"
    ):
        open_source(io.BytesIO(damaged), "a.parquet", len(damaged))


def test_a_type_that_the_reader_does_not_know_is_an_error_of_the_file() -> None:
    content = parquet(a=pyarrow.array([1, 2], pyarrow.int8()))
    found = re.search(rb"/////[A-Za-z0-9+/]+=*", content)  # the schema of Arrow in the footer
    assert found is not None
    schema = base64.b64decode(found[0])
    bits = schema.rindex((8).to_bytes(4, "little"))
    narrow = base64.b64encode(schema[:bits] + b"\1" + schema[bits + 1 :])
    damaged = content.replace(found[0], narrow)
    with pytest.raises(InvalidArgumentError, match=r"'a\.parquet' is not a Parquet file: .*8 bits"):
        open_source(io.BytesIO(damaged), "a.parquet", len(damaged))
