"""Writers of CSV, JSON lines, .npy and Parquet, whole and in joined segments."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError, UnsupportedError
from remora.messages import DTYPES, Tensor
from remora_tools.scoring.sinks import join_segments, make_sink, write_empty

LABELS = np.array([b"a", b'b "c",\n', b""], object)


def batch(first: int, *outputs: Tensor, kept: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    count = len(outputs[0].data)
    return np.arange(first, first + count), kept or {}, outputs


def written(form: str, folder: Path, *segments: Sequence[tuple[Any, Any, Any]]) -> bytes:
    """Write segments of batches and join them."""
    paths = []
    for number, batches in enumerate(segments):
        path = folder / f"{number}"
        with path.open("w+b") as file:
            sink = make_sink(form, file)
            for rows, kept, outputs in batches:
                sink.write(rows, kept, outputs)
            if batches:
                sink.finish()
        paths.append(path)
    whole = io.BytesIO()
    join_segments(form, paths, whole)
    return whole.getvalue()


SCORES = Tensor("s", "FP32", np.array([[0.1, 2], [3, 4], [5, 1e-9]], "f4"))
LABEL = Tensor("l", "BYTES", LABELS[:, None])
KEPT = {"id": ["x", "y,z", 7]}


def test_csv_has_a_column_for_each_value(tmp_path: Path) -> None:
    text = written("csv", tmp_path, [batch(0, SCORES, LABEL, kept=KEPT)], [batch(3, SCORES, LABEL, kept=KEPT)])
    rows = list(csv.reader(io.StringIO(text.decode(), newline="")))
    assert rows[:4] == [
        ["row", "id", "s_0", "s_1", "l"],
        ["0", "x", "0.1", "2.0", "a"],
        ["1", "y,z", "3.0", "4.0", 'b "c",\n'],
        ["2", "7", "5.0", "1e-9", ""],
    ]
    assert [row[0] for row in rows[1:]] == list("012345")


def test_csv_and_json_lines_hold_values_that_are_no_numbers(tmp_path: Path) -> None:
    tensor = Tensor("s", "FP32", np.array([[np.nan], [np.inf], [1]], "f4"))
    assert written("csv", tmp_path, [batch(0, tensor)]) == b"row,s\n0,nan\n1,inf\n2,1.0\n"
    lines = written("jsonl", tmp_path, [batch(0, tensor)]).splitlines()
    assert [json.loads(line)["s"] for line in lines] == [None, None, 1.0]


def test_json_lines_keep_the_shapes(tmp_path: Path) -> None:
    cube = Tensor("c", "INT8", np.arange(12, dtype="i1").reshape(3, 2, 2))
    text = written("jsonl", tmp_path, [batch(0, SCORES, LABEL, cube, kept=KEPT)], [])
    rows = [json.loads(line) for line in text.splitlines()]
    assert rows[1] == {"row": 1, "id": "y,z", "s": [3.0, 4.0], "l": 'b "c",\n', "c": [[4, 5], [6, 7]]}
    assert len(rows) == 3


def test_parquet_keeps_shapes_and_types(tmp_path: Path) -> None:
    cube = Tensor("c", "INT8", np.arange(12, dtype="i1").reshape(3, 2, 2))
    segment = [batch(0, SCORES, LABEL, cube, kept=KEPT | {"id": ["x", "y", None]})]
    whole = written("parquet", tmp_path, segment, [], segment)
    table = pyarrow.parquet.read_table(io.BytesIO(whole))
    assert table.num_rows == 6
    assert table["c"].to_pylist()[4] == [[4, 5], [6, 7]]
    assert str(table.schema.field("s").type) == "fixed_size_list<element: float>[2]"
    assert table["l"].to_pylist()[:3] == LABELS.tolist()
    assert table["id"].to_pylist()[:3] == ["x", "y", None]


def test_kept_columns_of_parquet_may_be_empty_or_whole_numbers_in_a_part(tmp_path: Path) -> None:
    values: list[list[Any]] = [[None] * 3, [1, 2, 3], [1.5, 2, None]]
    parts = [batch(0, SCORES, kept={"id": each}) for each in values]
    for segments in ([parts], [parts[:1], parts[1:2], parts[2:]]):
        table = pyarrow.parquet.read_table(io.BytesIO(written("parquet", tmp_path, *segments)))
        assert table["id"].to_pylist() == [None] * 3 + [1.0, 2.0, 3.0] + [1.5, 2.0, None]
    text = [batch(0, SCORES, kept={"id": ["a", "b", "c"]})]
    with pytest.raises(InvalidArgumentError, match="do not fit into the same columns"):
        written("parquet", tmp_path, parts[1:2], text)


def test_parquet_holds_outputs_of_different_lengths(tmp_path: Path) -> None:
    wide = Tensor("s", "FP32", np.ones((1, 3), "f4"))
    for segments in ([[batch(0, SCORES), batch(3, wide)]], [[batch(0, SCORES)], [batch(3, wide)]]):
        table = pyarrow.parquet.read_table(io.BytesIO(written("parquet", tmp_path, *segments)))
        assert [len(row) for row in table["s"].to_pylist()] == [2, 2, 2, 3]


def test_npy_is_one_array(tmp_path: Path) -> None:
    whole = written("npy", tmp_path, [batch(0, SCORES), batch(3, SCORES)], [], [batch(6, SCORES)])
    array = np.load(io.BytesIO(whole))
    assert array.dtype == np.float32
    assert np.array_equal(array, np.concatenate([SCORES.data] * 3))


def test_sixteen_bits_are_written_as_numbers(tmp_path: Path) -> None:
    half = Tensor("h", "FP16", np.array([[1.5]], "f2"))
    brain = Tensor("b", "BF16", np.array([[0x3FC0]], "u2"))
    assert written("csv", tmp_path, [batch(0, half, brain)]) == b"row,h,b\n0,1.5,1.5\n"


def test_outputs_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    wide = Tensor("s", "FP32", np.ones((1, 3), "f4"))
    for form, text in (("csv", "outputs of another size"), ("npy", r"have the shape \[3\], not \[2\]")):
        with pytest.raises(InvalidArgumentError, match=text):
            written(form, tmp_path, [batch(0, SCORES), batch(3, wide)])
    words = Tensor("s", "BYTES", LABELS[:, None])
    with pytest.raises(InvalidArgumentError, match="do not fit into the same columns"):
        written("parquet", tmp_path, [batch(0, SCORES), batch(3, words)])
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        written("npy", tmp_path, [batch(0, SCORES)], [batch(3, wide)])
    with pytest.raises(UnsupportedError, match="choose it with --output NAME"):
        written("npy", tmp_path, [batch(0, SCORES, LABEL)])


EMPTY = [
    TensorInfo("s", "FP32", (2,)),
    TensorInfo("l", "BYTES", (1,)),
    TensorInfo("h", "FP16", ()),
    TensorInfo("c", "INT8", (-1, 2)),
    TensorInfo("t", "BOOL", (2,)),
    TensorInfo("w", "BYTES", (-1,)),
]


def test_csv_without_rows_has_its_header_line() -> None:
    file = io.BytesIO()
    write_empty("csv", ["id"], EMPTY, file)
    assert file.getvalue() == b"row,id,s_0,s_1,l,h,c_0,c_1,t_0,t_1,w\n"


def test_parquet_without_rows_has_the_schema_of_one_with_rows(tmp_path: Path) -> None:
    file = io.BytesIO()
    write_empty("parquet", ["id"], EMPTY, file)
    table = pyarrow.parquet.read_table(io.BytesIO(file.getvalue()))
    assert (table.num_rows, table.column_names) == (0, ["row", "id", "s", "l", "h", "c", "t", "w"])
    tensors = [
        SCORES,
        LABEL,
        Tensor("h", "FP16", np.ones(3, "f2")),
        Tensor("t", "BOOL", np.ones((3, 2), "?")),
        Tensor("w", "BYTES", np.array([[b"a", b"b"]] * 3, object)),
    ]
    filled = pyarrow.parquet.read_table(io.BytesIO(written("parquet", tmp_path, [batch(0, *tensors)])))
    for name in filled.column_names:
        assert table.schema.field(name).type == filled.schema.field(name).type
    assert str(table.schema.field("c").type) == "list<element: fixed_size_list<element: int8>[2]>"


@pytest.mark.parametrize(
    ("datatype", "shape", "found"), [("FP32", (3, 2), (0, 3, 2)), ("INT64", (), (0,)), ("FP64", (-1, 2), (0, 1, 2))]
)
def test_npy_without_rows_has_the_shape_and_type(datatype: str, shape: tuple[int, ...], found: tuple[int, ...]) -> None:
    file = io.BytesIO()
    write_empty("npy", [], [TensorInfo("s", datatype, shape)], file)
    array = np.load(io.BytesIO(file.getvalue()))
    assert (array.shape, array.dtype) == (found, DTYPES[datatype])


def test_json_lines_without_rows_are_an_empty_file() -> None:
    file = io.BytesIO()
    write_empty("jsonl", ["id"], EMPTY, file)
    assert file.getvalue() == b""


@pytest.mark.parametrize("form", ["csv", "parquet", "npy"])
def test_a_first_segment_without_rows_leaves_the_others_whole(form: str, tmp_path: Path) -> None:
    assert written(form, tmp_path, [], [batch(0, SCORES)]) == written(form, tmp_path, [batch(0, SCORES)])
