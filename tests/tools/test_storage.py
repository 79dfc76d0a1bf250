"""`remora pull` and `remora cache`, against a double of a cloud."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.cli import main
from remora.repository.local import LocalRepository
from support.servers.object_store import ObjectStore, store_of_environment


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectStore]:
    with store_of_environment(monkeypatch) as store:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for key in ("m/config.pbtxt", "m/1/model.onnx", "m/2/model.onnx", "n/1/model.onnx"):
            store.put("bucket", f"r/{key}", key.encode())
        yield store


def test_pull_brings_a_repository_that_can_be_served(
    clouds: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models"
    assert main(["pull", "s3://bucket/r", str(target)]) == 0
    assert {name: set(folder.versions) for name, (folder,) in LocalRepository(target).models().items()} == {
        "m": {1, 2},
        "n": {1},
    }
    assert (target / "m/2/model.onnx").read_text() == "m/2/model.onnx"
    assert (target / "m/2/model.onnx").stat().st_mode & 0o200
    assert sorted(path.name for path in target.iterdir()) == ["m", "n"]
    assert "1,2" in capsys.readouterr().out


def test_pull_brings_what_is_named_and_says_what_there_is(
    clouds: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "s3://bucket/r", str(tmp_path / "x"), "--model=n"]) == 0
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["n"]
    assert main(["pull", "s3://bucket/r", str(tmp_path / "x"), "--model=o"]) == 1
    assert "has no model 'o'; it has m, n" in capsys.readouterr().err


def test_pull_replaces_only_on_request(clouds: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pull", "s3://bucket/r", str(tmp_path / "x"), "--model=n"]
    assert main(words) == 0
    clouds.put("bucket", "r/n/1/model.onnx", b"newer")
    assert main(words) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert (tmp_path / "x/n/1/model.onnx").read_bytes() == b"newer"


def test_a_model_file_alone_becomes_a_model(clouds: ObjectStore, tmp_path: Path) -> None:
    clouds.put("bucket", "files/resnet.onnx", b"weights")
    assert main(["pull", "s3://bucket/files/resnet.onnx", str(tmp_path / "x")]) == 0
    assert (tmp_path / "x/resnet/1/model.onnx").read_bytes() == b"weights"


def test_a_pull_that_was_stopped_goes_on(clouds: ObjectStore, tmp_path: Path) -> None:
    clouds.fail("403", key="2/model.onnx", times=2)
    words = ["pull", "s3://bucket/r", str(tmp_path / "x"), "--model=m"]
    assert main(words) == 1
    assert not (tmp_path / "x/m").exists()
    assert main(words) == 0
    assert (tmp_path / "x/m/2/model.onnx").exists()


def test_what_is_pulled_into_the_cache_is_listed_and_cleared(
    clouds: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "s3://bucket/r"]) == 0
    capsys.readouterr()
    assert main(["cache", "list", "--json-out"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["source"] for row in listed["files"]} == {
        f"s3://bucket/r/{key}" for key in ("m/config.pbtxt", "m/1/model.onnx", "m/2/model.onnx", "n/1/model.onnx")
    }
    assert main(["cache", "list"]) == 0
    assert "4 files" in capsys.readouterr().out


def test_an_unused_cache_can_be_cleared(
    clouds: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], child_environment: dict[str, str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": child_environment["PYTHONPATH"]}
    subprocess.run([sys.executable, "-m", "remora", "pull", "s3://bucket/r"], env=environment, check=True)
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "list"]) == 0
    assert "0 files, 0.0 MB" in capsys.readouterr().out
