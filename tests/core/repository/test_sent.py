"""Models that come with the load request [M11]: their files, and the names that they must not have."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError, NotFoundError
from remora.repository.sent import SentModel, sent_files


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
