"""Captured requests as Parquet: what was written is read again."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from remora_tools.traffic.captured import CapturedError, CapturedTensor, Exchange
from remora_tools.traffic.captured_parquet import read_parquet, write_parquet
from support.engine.counted_reads import CountedReads

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")

NUMBERS = CapturedTensor("x", "FP16", (2, 1), b"\0\1\2\3")
WORDS = CapturedTensor("words", "BYTES", (1,), b"\2\0\0\0\xff\0")
HIDDEN = CapturedTensor("secret", "INT8", (3,), None)
EMPTY = CapturedTensor("none", "FP32", (0, 4), b"")
ANSWERED = Exchange(
    model="m",
    version="3",
    time="2026-01-02T03:04:05.678+00:00",
    id="id",
    parameters={"priority": 2, "text": "\u00e9", "on": True, "share": 0.5},
    inputs=[NUMBERS, WORDS, HIDDEN, EMPTY],
    outputs=["y"],
    answers=[[NUMBERS], [WORDS, HIDDEN]],
    error="",
    duration_us=1_234,
)
FAILED = ANSWERED._replace(inputs=[], outputs=[], answers=[], parameters={}, error="no", id="")


def test_exchanges_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    exchanges = [ANSWERED, FAILED] * 20
    write_parquet(exchanges, path)
    assert list(read_parquet(io.BytesIO(path.read_bytes()))) == exchanges


def test_an_id_that_is_not_utf8_does_not_lose_its_request(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    write_parquet([ANSWERED._replace(id="a\udcff")], path)
    (found,) = read_parquet(io.BytesIO(path.read_bytes()))
    assert found == ANSWERED._replace(id="a?")


def test_other_files_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "other.parquet")
    write_parquet([ANSWERED], tmp_path / "damaged.parquet")
    damaged = (tmp_path / "damaged.parquet").read_bytes()[:-20]
    for data in (b"{}", b"", damaged, (tmp_path / "other.parquet").read_bytes()):
        with pytest.raises(CapturedError, match="not a file of captured requests"):
            list(read_parquet(io.BytesIO(data)))


def test_a_large_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "requests.parquet"
    contents = [os.urandom(500_000) for _ in range(60)]
    inputs = [[CapturedTensor("x", "UINT8", (500_000,), content)] for content in contents]
    write_parquet([ANSWERED._replace(inputs=each) for each in inputs], path)
    parquet.write_table(parquet.read_table(path), path, write_batch_size=1)  # the least rows of a page
    file = CountedReads(path.read_bytes())
    found = read_parquet(io.BufferedReader(file))
    assert next(found).inputs == inputs[0]
    assert file.count < 20_000_000
    assert [each.inputs for each in found] == inputs[1:]
