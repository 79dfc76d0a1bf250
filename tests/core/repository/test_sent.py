"""Models that come with the load request [M11]: their files, and the names that they must not have."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError, NotFoundError
from remora.repository.sent import SentModel, remove_left_behind, sent_files


def test_the_files_of_a_request_are_separated_from_its_other_parameters() -> None:
    assert sent_files({"config": "{}", "file:1/model.onnx": b"x", "file:labels.txt": "y"}) == {
        "1/model.onnx": b"x",
        "labels.txt": b"y",
    }


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "1/../../x", "1//x", "1/.", "a\\..\\b", "1/x\0", "1/", "x" * 256, "/".join("a" * 17)],
)
def test_a_name_that_is_not_a_path_inside_the_folder_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a path inside a model's folder"):
        sent_files({f"file:{path}": b""})


def test_a_file_cannot_be_a_directory_too() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'file:1' is sent as a file, and 'file:1/model.py' lies inside"):
        sent_files({"file:1": b"", "file:1/model.py": b""})


@given(st.dictionaries(st.text(st.sampled_from("a1./\\"), max_size=8), st.binary(max_size=4), max_size=4))
def test_whatever_is_accepted_is_written_inside_the_folder(files: dict[str, bytes]) -> None:
    try:
        accepted = sent_files({f"file:{path}": content for path, content in files.items()})
    except InvalidArgumentError:
        return
    model = SentModel("m", accepted)
    home = model.fetch("m").path
    written = {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert written == files


def test_it_is_a_repository_of_one_model() -> None:
    model = SentModel("m", {"7/model.onnx": b"x"})
    assert list(model.fetch("m").versions) == [7]
    assert list(model.models()) == ["m"]
    assert model.models("other") == {}
    assert model.fingerprint("m") == SentModel("m", {"7/model.onnx": b"x"}).fingerprint("m")
    assert model.fingerprint("m") != SentModel("m", {"7/model.onnx": b"y"}).fingerprint("m")
    with pytest.raises(NotFoundError):
        model.fetch("other")


def test_the_folder_goes_with_the_last_that_holds_it() -> None:
    model = SentModel("m", {"1/model.onnx": b"x"})
    place: Path = model.fetch("m").path
    assert place.is_dir()
    del model
    gc.collect()
    assert not place.parent.exists()


KILLED = """
import os, signal, sys
from remora.repository.sent import SentModel
model = SentModel("m", {"1/model.onnx": b"x"})
print(model.fetch("m").path.parent, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lives = SentModel("m", {"1/model.onnx": b"x"})
    (tmp_path / "remora-sent-of-another").mkdir()
    (tmp_path / "remora-sent-link").symlink_to(tmp_path / "remora-sent-of-another")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True)
    left = Path(ended.stdout.strip())
    assert left.parent == tmp_path
    assert left.is_dir()
    remove_left_behind()
    assert not left.exists()
    kept = lives.fetch("m").path
    assert kept.is_dir()
    names = {"remora-sent-link", "remora-sent-of-another", kept.relative_to(tmp_path).parts[0]}
    assert {path.name for path in tmp_path.iterdir()} == names
