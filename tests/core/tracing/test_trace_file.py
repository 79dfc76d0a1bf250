"""Triton's trace file: what lies on the disk, and when."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remora.tracing import trace_file
from remora.tracing.context import SpanContext
from remora.tracing.records import Part, Trace
from remora.tracing.sampling import Sampling
from remora.tracing.settings import TraceSettings
from remora.tracing.trace_file import TraceFile
from remora.tracing.writer import Finished

ON = TraceSettings(("TIMESTAMPS",), trace_rate="1")


def finished(sampling: Sampling, id: int) -> Finished:
    part = Part(id, "m", 1, SpanContext(1, 2), start_ns=1, end_ns=2)
    return Finished(sampling, Trace("", 0, 0, SpanContext(1, 1), parts=[part]))


def ids(path: Path) -> list[int]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return [row["id"] for row in rows if "model_name" in row]


def test_the_file_is_a_whole_array_after_every_trace(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON)
    for number in (1, 2, 3):
        file.write([finished(sampling, number)])
        assert ids(tmp_path / "t") == list(range(1, number + 1))
    file.close()


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t")
    file.write([finished(Sampling(ON), 1)])
    file.write([finished(Sampling(ON._replace(log_frequency="1")), 2)])
    file.close()
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"t": 0o600, "t.0": 0o600}


def test_an_older_file_is_replaced_by_the_first_trace(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("old")
    file = TraceFile(tmp_path / "t")
    assert (tmp_path / "t").read_text() == "old"
    file.write([finished(Sampling(ON), 7)])
    file.close()
    assert ids(tmp_path / "t") == [7]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """As on a disk that is almost full: a write takes a part, and the next one nothing."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, allowed[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)


def test_a_disk_that_is_full_costs_traces_and_leaves_a_whole_array(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON)
    file.write([finished(sampling, 1)])
    with no_file_longer_than((tmp_path / "t").stat().st_size + 10), pytest.raises(OSError, match="too large"):
        file.write([finished(sampling, 2)])
    assert ids(tmp_path / "t") == [1]
    file.write([finished(sampling, 3)])
    assert ids(tmp_path / "t") == [1, 3]
    file.close()


def test_of_an_indexed_file_that_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON._replace(log_frequency="1"))
    with no_file_longer_than(10), pytest.raises(OSError, match="too large"):
        file.write([finished(sampling, 1)])
    file.write([finished(sampling, 2)])
    file.close()
    assert {path.name: ids(path) for path in tmp_path.iterdir()} == {"t.1": [2]}


def test_a_file_that_is_emptied_while_it_is_written_begins_anew(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON)
    file.write([finished(sampling, 1)])
    os.truncate(tmp_path / "t", 0)
    file.write([finished(sampling, 2)])
    file.write([finished(sampling, 3)])
    assert ids(tmp_path / "t") == [2, 3]
    file.close()


def test_what_comes_too_late_takes_nothing_of_the_file_away(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON)
    file.write([finished(sampling, 1)])
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write([finished(sampling, 2)])
    assert ids(tmp_path / "t") == [1]


def test_a_log_frequency_makes_files_of_that_many_traces_and_the_last_has_the_rest(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON._replace(log_frequency="2"))
    file.write([finished(sampling, number) for number in (1, 2, 3, 4, 5)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.1"]
    file.close()
    assert [ids(tmp_path / f"t.{index}") for index in (0, 1, 2)] == [[1, 2], [3, 4], [5]]


def test_the_last_of_a_count_of_traces_puts_them_into_an_indexed_file(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON._replace(trace_count="2"))
    assert [sampling.take() for _ in range(3)] == [True, True, False]
    file.write([finished(sampling, 1)])
    assert not list(tmp_path.iterdir())
    file.write([finished(sampling, 2)])
    assert ids(tmp_path / "t.0") == [1, 2]


def test_a_trace_of_settings_that_are_gone_waits_for_no_others(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON._replace(trace_count="9"))
    file.write([finished(sampling, 1), Finished(sampling, None)])
    file.write([finished(sampling, 2)])
    assert ids(tmp_path / "t") == [1, 2]
    file.close()


def test_no_more_is_gathered_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_GATHERED_BYTES", 200)
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON._replace(trace_count="9"))
    file.write([finished(sampling, number) for number in range(1, 5)])
    assert [ids(tmp_path / f"t.{index}") for index in (0, 1)] == [[1, 2], [3, 4]]
    file.close()


def test_what_a_count_of_traces_has_begun_is_kept_when_the_settings_change(tmp_path: Path) -> None:
    file, sampling = TraceFile(tmp_path / "t"), Sampling(ON._replace(trace_count="9"))
    file.write([finished(sampling, 1), Finished(sampling, None)])
    assert ids(tmp_path / "t") == [1]
    file.close()
