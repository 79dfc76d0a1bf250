"""Captured requests of an engine: which are kept, what is left out, and where it ends."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.engine import Engine
from remora.errors import ConfigError, UnsupportedError
from remora.messages import Parameter
from remora.tracing.writer import DroppedError
from remora_tools.traffic import capture
from remora_tools.traffic.capture import CaptureSettings, PartFiles, QueuedExchange, capture_settings
from remora_tools.traffic.captured import CapturedTensor, Exchange
from remora_tools.traffic.captured_parquet import read_parquet
from support.engine.fakes import FakeClock
from support.servers.live_server import write_version
from support.servers.object_store import store_of_environment


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends with an engine is written, however long the machine takes."""
    monkeypatch.setattr(capture, "_END_S", 60.0)


def captured(
    tmp_path: Path, *values: int, parameters: dict[str, Parameter] | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """Return the lines of an engine that got requests with these values."""
    write_version(tmp_path / "models", 2)
    path = tmp_path / "captured.jsonl"
    options = {"backend_config": ("python,isolation=thread",), "capture": str(path), **settings}
    with Engine(model_repository=(tmp_path / "models",), **options) as engine:
        for value in values:
            engine.infer("m", {"IN": np.full((1, 1), value, np.int32)}, parameters=parameters)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_inputs_and_outputs_are_captured_in_the_order_of_their_answers(tmp_path: Path) -> None:
    found = captured(tmp_path, 1, 2)
    assert [each["inputs"][0]["data"] for each in found] == [[1], [2]]
    assert [each["answers"][0][0]["data"] for each in found] == [[2], [4]]
    assert all(each["duration_us"] >= 0 and each["version"] == "2" for each in found)


@pytest.mark.parametrize(
    ("redact", "inputs", "outputs"),
    [("m", True, True), ("*", True, True), ("m:IN", True, False), ("m:OUT", False, True), ("other", False, False)],
)
def test_values_of_redacted_tensors_are_left_out(tmp_path: Path, redact: str, inputs: bool, outputs: bool) -> None:
    (found,) = captured(tmp_path, 77_777, capture_redact=(redact,))
    assert (found["inputs"][0].get("redacted", False), "data" in found["inputs"][0]) == (inputs, not inputs)
    assert (found["answers"][0][0].get("redacted", False), "data" in found["answers"][0][0]) == (outputs, not outputs)
    if inputs:
        assert "77777" not in json.dumps(found)


@pytest.mark.parametrize(("redact", "kept"), [("m", {}), ("*", {}), ("m:IN", {"a": 1}), ("other", {"a": 1})])
def test_parameters_of_a_redacted_model_and_secret_headers_are_left_out(
    tmp_path: Path, redact: str, kept: dict[str, Parameter]
) -> None:
    parameters: dict[str, Parameter] = {"a": 1, "X-API-Key": "rk_secret", "authorization": "Bearer rk_secret"}
    (found,) = captured(tmp_path, 1, parameters=parameters, capture_redact=(redact,))
    assert found["parameters"] == kept
    assert "rk_secret" not in (tmp_path / "captured.jsonl").read_text()


def test_the_file_never_exceeds_its_limit(tmp_path: Path) -> None:
    assert 0 < len(captured(tmp_path, *range(20), capture_max_bytes=1_000)) < 5
    assert (tmp_path / "captured.jsonl").stat().st_size <= 1_000


def test_nothing_is_captured_without_the_option(tmp_path: Path) -> None:
    write_version(tmp_path / "models", 2)
    with Engine(model_repository=(tmp_path / "models",), backend_config=("python,isolation=thread",)) as engine:
        assert engine.capture is None


@pytest.mark.parametrize("share", ["0", "1.5", "x", "-1"])
def test_an_impossible_share_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match="--capture-share"):
        capture_settings("file", share, 1, ())


def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        captured(tmp_path, capture=str(tmp_path / "none" / "file"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The objects of a bucket that the process can write."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[s3]'")
    with store_of_environment(monkeypatch) as store:
        yield store.buckets["bucket"]


def captured_in(bucket: dict[str, bytes], tmp_path: Path, *values: int, scheme: str = "s3") -> list[list[int]]:
    """The inputs in each object of the bucket, in order, after an engine has answered these values."""
    write_version(tmp_path / "models", 2)
    options = {"backend_config": ("python,isolation=thread",), "capture": f"{scheme}://bucket/kept/today/"}
    with Engine(model_repository=(tmp_path / "models",), **options) as engine:
        assert engine.capture is not None
        for value in values:
            engine.infer("m", {"IN": np.full((1, 1), value, np.int32)})
            assert engine.capture.flush(30.0)
    assert all(name.startswith("kept/today/") and name.endswith(".jsonl") for name in bucket)
    rows = [[json.loads(line) for line in bucket[name].splitlines()] for name in sorted(bucket)]
    return [[row["inputs"][0]["data"][0] for row in part] for part in rows]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_bucket_gets_what_was_captured_when_the_server_ends(
    bucket: dict[str, bytes], tmp_path: Path, scheme: str
) -> None:
    assert captured_in(bucket, tmp_path, 1, 2, 3, scheme=scheme) == [[1, 2, 3]]


@pytest.mark.parametrize("limit", ["PART_BYTES", "PART_NS"])
def test_a_part_that_is_full_or_old_is_an_object(
    bucket: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(capture, limit, 1)
    assert captured_in(bucket, tmp_path, 1, 2, 3) == [[1], [2], [3]]


def test_a_bucket_that_cannot_be_written_keeps_no_request_from_its_answer(
    tmp_path: Path, bucket: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    write_version(tmp_path / "models", 2)
    options = {"backend_config": ("python,isolation=thread",), "capture": "s3://none/kept"}
    with Engine(model_repository=(tmp_path / "models",), **options) as engine:
        assert engine.infer("m", {"IN": np.full((1, 1), 3, np.int32)})["OUT"].tolist() == [[6]]
    assert "the last captured requests cannot be written" in caplog.text


def test_a_web_server_is_no_place_for_captured_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file or a bucket"):
        captured(tmp_path, capture="https://example.com/kept")


def in_parquet(tmp_path: Path, *values: int, **settings: Any) -> list[list[Exchange]]:
    """The exchanges in each file of the folder that an engine writes."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    write_version(tmp_path / "models", 2)
    folder = tmp_path / "requests.parquet"
    options = {"backend_config": ("python,isolation=thread",), "capture": str(folder), **settings}
    with Engine(model_repository=(tmp_path / "models",), **options) as engine:
        assert engine.capture is not None
        for value in values:
            engine.infer("m", {"IN": np.full((1, 1), value, np.int32)})
            assert engine.capture.flush(30.0)
    assert all(file.suffix == ".parquet" and not file.name.startswith(".") for file in folder.iterdir())
    return [list(read_parquet(io.BytesIO(file.read_bytes()))) for file in sorted(folder.iterdir())]


def test_a_folder_gets_parquet_files(tmp_path: Path) -> None:
    (found,) = in_parquet(tmp_path, 1, 2)
    assert [each.inputs[0].values().tolist() for each in found] == [[1], [2]]
    assert [each.answers[0][0].values().tolist() for each in found] == [[2], [4]]


def test_a_parquet_file_ends_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "PART_BYTES", 1)
    assert [len(part) for part in in_parquet(tmp_path, 1, 2, 3)] == [1, 1, 1]


def test_a_full_disk_keeps_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "part").write_bytes(b"x" * 100)
    upload = capture.folder_upload(tmp_path / "requests")
    with monkeypatch.context() as full:
        full.setattr("shutil.copyfile", fill_disk)
        for name in ("1.parquet", "2.parquet"):
            with pytest.raises(OSError, match="No space left"):
                upload(name, tmp_path / "part")
    assert list((tmp_path / "requests").iterdir()) == []
    upload("3.parquet", tmp_path / "part")
    (file,) = (tmp_path / "requests").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("3.parquet", 0o600)


def test_values_of_redacted_tensors_are_not_in_a_parquet_file(tmp_path: Path) -> None:
    ((found,),) = in_parquet(tmp_path, 77_777, capture_redact=("m:IN",))
    assert found.inputs[0].content is None
    assert found.answers[0][0].content is not None


def test_parquet_files_never_exceed_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "PART_BYTES", 1)
    found = in_parquet(tmp_path, *range(20), capture_max_bytes=40_000)
    assert 0 < len(found) < 20
    assert sum(file.stat().st_size for file in (tmp_path / "requests.parquet").iterdir()) <= 40_000


def test_a_file_in_the_place_of_the_folder_ends_the_start(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    (tmp_path / "requests.parquet").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        in_parquet(tmp_path)


def test_parquet_without_pyarrow_ends_the_start_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UnsupportedError, match=r"needs pyarrow, which is not installed.*pip install.*parquet"):
        captured(tmp_path, capture=str(tmp_path / "requests.parquet"))


def test_a_bucket_gets_parquet_files(bucket: dict[str, bytes], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    write_version(tmp_path / "models", 2)
    options = {"backend_config": ("python,isolation=thread",), "capture": "s3://bucket/today.parquet"}
    with Engine(model_repository=(tmp_path / "models",), **options) as engine:
        engine.infer("m", {"IN": np.full((1, 1), 5, np.int32)})
    ((name, data),) = bucket.items()
    assert name.startswith("today.parquet/")
    (found,) = read_parquet(io.BytesIO(data))
    assert found.inputs[0].values().tolist() == [5]


def line(name: str, content: bytes = b"", size: int = 1) -> QueuedExchange:
    tensor = CapturedTensor("IN", "UINT8", (len(content),), content)
    return QueuedExchange(Exchange("m", "1", "2026-01-01T00:00:00.000+00:00", name, {}, [tensor], [], [], "", 1), size)


def parts(upload: Callable[[str, Path], None], clock: FakeClock, name: str = "x", most: int = 1 << 30) -> PartFiles:
    return PartFiles(CaptureSettings(Path(name), 1.0, most, {}), upload, clock, lambda: None)


class Store:
    """Object store that fails at will, and records the tries."""

    def __init__(self) -> None:
        self.works = False
        self.tries: list[tuple[str, int]] = []
        self.found: list[list[str]] = []

    def upload(self, name: str, part: Path) -> None:
        self.tries.append((name, part.stat().st_mtime_ns))
        if not self.works:
            raise OSError("unreachable")
        self.found.append([json.loads(row)["id"] for row in part.read_text().splitlines()])


def refused(sink: PartFiles, name: str) -> int:
    """The number of exchanges that are dropped when another one is written."""
    with pytest.raises(DroppedError, match="unreachable") as raised:
        sink.write([line(name, bytes(100))])
    return raised.value.count


@pytest.fixture
def three_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have room for three exchanges of a hundred zeros."""
    monkeypatch.setattr(capture, "PART_BYTES", 3 * len(capture.line_of(line("a", bytes(100)).exchange)))


@pytest.mark.usefixtures("three_a_part")
def test_a_part_that_cannot_be_uploaded_is_written_once_and_tried_again_after_a_wait() -> None:
    store, clock = Store(), FakeClock()
    sink = parts(store.upload, clock)
    sink.write([line(name, bytes(100)) for name in "abc"])
    assert not store.tries
    assert [refused(sink, name) for name in "defgh"] == [0, 0, 0, 1, 1]
    assert len(store.tries) == 1
    clock.advance(capture.RETRY_NS)
    assert refused(sink, "i") == 1
    assert len(store.tries) == 2
    assert len(set(store.tries)) == 1, "one name, one file"
    store.works = True
    assert refused(sink, "j") == 1
    clock.advance(capture.RETRY_NS)
    sink.write([line("k", bytes(100))])
    assert store.found == [["a", "b", "c"], ["d", "e", "f"]]
    sink.close()
    assert store.found[2:] == [["k"]]


@pytest.mark.usefixtures("three_a_part")
def test_what_cannot_be_uploaded_at_the_end_is_counted_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = Store()
    sink = parts(store.upload, FakeClock())
    sink.write([line(name, bytes(100)) for name in "abc"])
    assert refused(sink, "d") == 0
    assert list(tmp_path.iterdir())
    with pytest.raises(DroppedError, match="unreachable") as raised:
        sink.close()
    assert raised.value.count == 4
    assert not list(tmp_path.iterdir())


def test_a_part_with_more_bytes_than_are_left_is_counted() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    store = Store()
    sink = parts(store.upload, FakeClock(), "x.parquet", 20_000)
    sink.write([line("a", os.urandom(20_000)), line("b", os.urandom(20_000))])
    with pytest.raises(DroppedError, match="exceed --capture-max-bytes") as raised:
        sink.close()
    assert raised.value.count == 2
    assert not store.tries
