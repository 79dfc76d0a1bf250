"""`remora replay`: the files, folders and buckets that it reads, and the counts that it prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.cli import main
from remora.cli.client import ApiAnswer
from remora.cli.output import UsageError
from remora.errors import NotFoundError, RemoraError, UnavailableError, UnsupportedError
from remora_tools import replay
from remora_tools.traffic.captured import CapturedTensor, Exchange, line_of
from remora_tools.traffic.captured_parquet import write_parquet
from support.servers.object_store import ObjectStore, store_of_environment


def exchange(value: int) -> Exchange:
    tensor = CapturedTensor("IN", "INT32", (1, 1), np.int32(value).tobytes())
    time = "2026-01-02T03:04:05.678+00:00"
    return Exchange("m", "1", time, str(value), {}, [tensor], [], [[tensor]], "", 1)


def parquet_of(tmp_path: Path, *values: int) -> bytes:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    path = tmp_path / "made.parquet"
    write_parquet([exchange(value) for value in values], path)
    data = path.read_bytes()
    path.unlink()
    return data


def lines_of(*values: int) -> bytes:
    return b"".join(line_of(exchange(value)) for value in values)


def read(place: object) -> list[tuple[str, int]]:
    return [(where, int(found.id)) for where, found in replay.exchanges_of(str(place))]


def test_a_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "requests.parquet"
    folder.mkdir()
    (folder / "b.parquet").write_bytes(parquet_of(tmp_path, 3, 4))
    (folder / "a.jsonl").write_bytes(lines_of(1, 2))
    (folder / ".c.parquet").write_bytes(b"a part that is being written")
    (folder / "notes.txt").write_text("notes")
    expected = [("a.jsonl:1", 1), ("a.jsonl:2", 2), ("b.parquet:1", 3), ("b.parquet:2", 4)]
    assert [(where.rpartition("/")[2], value) for where, value in read(folder)] == expected
    assert [value for _, value in read(folder / "b.parquet")] == [3, 4]


def test_what_a_server_captures_during_a_replay_is_not_read(tmp_path: Path) -> None:
    for name, value in (("a.jsonl", 1), ("b.jsonl", 2)):
        (tmp_path / name).write_bytes(lines_of(value))
    found = []
    for _, each in replay.exchanges_of(str(tmp_path)):
        found.append(int(each.id))
        for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
            with (tmp_path / name).open("ab") as file:
                file.write(lines_of(100 + len(found)))
    assert found == [1, 2]


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.jsonl: cannot be read: No such file"):
        read(tmp_path / "absent.jsonl")


def test_a_folder_without_captured_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files of captured requests"):
        read(tmp_path)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(lines_of(1) + b"{}\n")
    with pytest.raises(UsageError, match=r"requests\.jsonl:2: not a captured request"):
        read(path)
    path = tmp_path / "requests.parquet"
    path.write_bytes(b"{}")
    with pytest.raises(UsageError, match=r"requests\.parquet:1: not a file of captured requests"):
        read(path)


def test_parquet_without_pyarrow_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "requests.parquet"
    path.write_bytes(b"PAR1")

    def missing(name: str) -> Any:
        raise UnsupportedError(f"'{name}': Parquet needs pyarrow")

    monkeypatch.setattr(replay, "import_parquet", missing)
    with pytest.raises(UnsupportedError, match="needs pyarrow"):
        read(path)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[s3]'")
    with store_of_environment(monkeypatch) as store:
        yield store


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_bucket_is_read_by_folder_and_by_file(store: ObjectStore, tmp_path: Path, scheme: str) -> None:
    for name, content in {
        "kept/today/1.jsonl": lines_of(1),
        "kept/today/2.parquet": parquet_of(tmp_path, 2, 3),
        "kept/today/notes.txt": b"notes",
        "kept/all.parquet/1.parquet": parquet_of(tmp_path, 4),
    }.items():
        store.put("bucket", name, content)
    root = f"{scheme}://bucket/kept"
    expected = [(f"{root}/today/1.jsonl:1", 1), (f"{root}/today/2.parquet:1", 2), (f"{root}/today/2.parquet:2", 3)]
    assert read(f"{root}/today/") == expected
    assert read(f"{root}/today/2.parquet") == expected[1:]
    assert read(f"{root}/today/1.jsonl") == expected[:1]
    assert [value for _, value in read(f"{root}/all.parquet")] == [4]
    with pytest.raises(NotFoundError, match="no files of captured requests"):
        read(f"{scheme}://bucket/none")


class ScriptedClient:
    """Client of a server whose answers are listed; an error stands for none."""

    name = "http://server"

    def __init__(self, *answers: ApiAnswer | RemoraError) -> None:
        self._answers = list(answers)
        self.closed = False

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        answer = self._answers.pop(0)
        if isinstance(answer, RemoraError):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


SAME = ApiAnswer(200, None, b'{"outputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}')


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ApiAnswer(401, None, b'{"error": "the key has expired"}'), "http://server answered 401: the key has expired"),
        (UnavailableError("cannot connect to http://server"), "cannot connect to http://server"),
    ],
)
def test_a_replay_that_ends_early_prints_what_it_has_counted(
    answer: ApiAnswer | RemoraError,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(lines_of(1, 1, 1))
    for before, shown in (([SAME, SAME], "2 answers are the same, 0 differ"), ([], "")):
        client = ScriptedClient(*before, answer)
        monkeypatch.setattr(replay, "open_client", lambda options, client=client: client)
        assert main(["replay", str(path), "--against", "http://server"]) == 1
        printed = capsys.readouterr()
        assert reason in printed.err
        assert printed.out.startswith(shown)
        assert bool(printed.out) == bool(shown), "without an answer there is nothing to count"
        assert client.closed
