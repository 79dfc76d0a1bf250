"""Model folders in every layout people have: repositories, one model, a bare file, files beside each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.errors import NotFoundError, UnavailableError
from remora.repository import ModelFolder
from remora.repository.local import LocalRepository, scan, scan_repository
from remora.repository.sources import open_repository
from support.engine.fakes import write_model


def only(found: dict[str, list[ModelFolder]], name: str) -> ModelFolder:
    (folder,) = found[name]
    return folder


def test_a_repository_has_its_models_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, "b", versions=("1", "3"))
    write_model(tmp_path, "a", config=None)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("x")
    for found in (scan([tmp_path]), scan_repository(tmp_path)):
        assert list(found) == ["a", "b"]
        folder = only(found, "b")
        assert folder.path == tmp_path / "b"
        assert folder.repository == tmp_path
        assert dict(folder.versions) == {1: tmp_path / "b" / "1", 3: tmp_path / "b" / "3"}
        assert folder.filenames(3) == ("fake.bin",)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("1", 1),
        ("0", 0),
        ("12", 12),
        ("1abc", 1),
        ("01", None),
        ("x", None),
        ("-1", None),
        ("warmup", None),
        ("configs", None),
    ],
)
def test_version_directories_are_read_as_triton_reads_them(tmp_path: Path, name: str, version: int | None) -> None:
    folder = only(scan_repository(write_model(tmp_path, "m", versions=(name,)).parent), "m")
    assert dict(folder.versions) == ({} if version is None else {version: tmp_path / "m" / name})


def test_a_file_with_a_number_for_its_name_is_not_a_version(tmp_path: Path) -> None:
    (write_model(tmp_path, "m", versions=()) / "7").write_text("x")
    assert only(scan_repository(tmp_path), "m").versions == {}


def test_of_two_directories_of_one_version_the_first_counts(tmp_path: Path) -> None:
    write_model(tmp_path, "m", versions=("1", "1abc"))
    assert dict(only(scan_repository(tmp_path), "m").versions) == {1: tmp_path / "m" / "1"}


def test_one_models_directory_is_that_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", versions=("1", "2"))
    found = only(scan([folder]), "m")
    assert list(found.versions) == [1, 2]
    assert found.path == folder


def test_one_models_directory_needs_no_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", config=None, file="model.onnx")
    assert list(only(scan([folder]), "m").versions) == [1]


def test_a_model_file_alone_is_version_1_and_called_like_the_file(tmp_path: Path) -> None:
    file = tmp_path / "digits.onnx"
    file.write_bytes(b"")
    folder = only(scan([file]), "digits")
    assert dict(folder.versions) == {1: file}
    assert folder.filenames(1) == ("model.onnx",), "what it is, whatever it is called"


def test_a_model_file_with_the_usual_name_is_called_like_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "digits" / "model.onnx"
    file.parent.mkdir()
    file.write_bytes(b"")
    assert list(scan([file])) == ["digits"]


@pytest.mark.parametrize("file", ["model.onnx", "model.py"])
def test_a_directory_with_the_model_file_directly_in_it_is_version_1(tmp_path: Path, file: str) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / file).write_bytes(b"")
    for found in (scan([tmp_path / "digits"]), scan_repository(tmp_path)):
        folder = only(found, "digits")
        assert dict(folder.versions) == {1: tmp_path / "digits"}
        assert folder.filenames(1) == (file,)


def test_bare_files_beside_each_other_are_a_model_each(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    write_model(tmp_path, "c")
    assert sorted(scan([tmp_path])) == ["a", "b", "c"]


def test_a_model_may_have_a_number_for_its_name(tmp_path: Path) -> None:
    write_model(tmp_path, "5")
    assert list(scan([tmp_path])) == ["5"]


def test_an_empty_repository_is_none_the_worse(tmp_path: Path) -> None:
    assert scan([tmp_path]) == {}


def test_a_name_in_two_places_keeps_both_folders(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "m")
    write_model(tmp_path / "two", "m")
    found = scan([tmp_path / "one", tmp_path / "two"])
    assert [folder.repository.name for folder in found["m"]] == ["one", "two"]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(NotFoundError, match=r"no such file or directory: '.*nope'"):
        scan([tmp_path / "nope"])
    with pytest.raises(NotFoundError, match=r"x\.txt' is not a model file: expected \.onnx, .* or a model's directory"):
        scan([tmp_path / "x.txt"])
    with pytest.raises(NotFoundError, match=r"failed to open model repository '.*x\.txt'"):
        scan_repository(tmp_path / "x.txt")


def test_a_misspelt_path_gets_the_nearest_name_beside_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(NotFoundError, match=r"'.*modles'; did you mean '.*/models'\?$"):
        scan([tmp_path / "modles"])
    with pytest.raises(NotFoundError, match=r"did you mean '.*/models'\?"):
        scan_repository(tmp_path / "modles")


@pytest.mark.parametrize("place", ["digits/3", "digits/3/model.onnx"])
def test_one_version_of_a_model_is_served_under_the_models_name(place: str, tmp_path: Path) -> None:
    (tmp_path / "digits" / "2").mkdir(parents=True)
    (tmp_path / "digits" / "3").mkdir()
    (tmp_path / "digits" / "3" / "model.onnx").touch()
    ((folder,),) = scan([tmp_path / place]).values()
    assert (folder.name, folder.path, dict(folder.versions)) == (
        "digits",
        (tmp_path / "digits").resolve(),
        {3: (tmp_path / "digits" / "3").resolve()},
    )


def test_a_folder_whose_name_only_begins_with_a_number_is_not_a_version(tmp_path: Path) -> None:
    (tmp_path / "3d").mkdir()
    (tmp_path / "3d" / "model.onnx").touch()
    assert list(scan([tmp_path / "3d"])) == ["3d"]


@pytest.mark.parametrize(
    ("file", "seen_as"),
    [
        ("net.onnx", "model.onnx"),
        ("net.pt", "model.pt"),
        ("net.pt2", "model.pt2"),
        ("net.plan", "model.plan"),
        ("net.ubj", "xgboost.ubj"),
    ],
)
def test_a_file_that_a_backend_can_open_is_a_model(file: str, seen_as: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    ((folder,),) = scan([tmp_path / file]).values()
    assert (folder.name, folder.filenames(1)) == ("net", (seen_as,))
    if file != "net.onnx":  # a directory may hold files of these kinds that are not models
        assert scan([tmp_path]) == {}


@pytest.mark.parametrize("file", ["model.py", "xgboost.json", "model.so", "model.xml"])
def test_a_file_whose_name_tells_its_backend_is_served_with_the_files_beside_it(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / file).touch()
    (folder / "config.pbtxt").touch()
    assert scan([folder / file]) == scan([folder])


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("app.py", "such as app/1/model.py for this file"),
        ("trees.json", "such as trees/1/xgboost.json for this file"),
        ("config.pbtxt", "is a configuration: give the directory that it lies in"),
    ],
)
def test_a_file_that_needs_a_folder_is_refused_with_the_folder_to_make(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    with pytest.raises(NotFoundError, match=said):
        scan([tmp_path / file])


# -- as a Repository ------------------------------------------------------------------------------------------------


def test_one_model_is_looked_up_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    repository = LocalRepository(tmp_path)
    assert list(repository.models()) == ["a", "b"]
    assert list(repository.models("b")) == ["b"]
    assert repository.models("c") == {}
    assert repository.location == str(tmp_path)


@pytest.mark.parametrize("name", ["../a", "..", ".", "/", "a/1", "", ".git"])
def test_a_name_is_never_a_path(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "in", "a")
    write_model(tmp_path, "a")
    (tmp_path / "in" / ".git" / "1").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="there is no model"):
        LocalRepository(tmp_path / "in").fetch(name or "..")


def test_what_is_fetched_is_the_folder_as_it_lies(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", versions=("1", "2"))
    for repository in (LocalRepository(tmp_path), LocalRepository(folder, any_layout=True)):
        assert repository.fetch("m", (2,)).versions == {1: folder / "1", 2: folder / "2"}


def test_the_fingerprint_names_every_file_and_sees_it_change(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m")
    repository = LocalRepository(tmp_path)
    before = repository.fingerprint("m")
    assert set(before) == {"config.pbtxt", "1/fake.bin"}
    assert repository.fingerprint("m") == before
    (folder / "1" / "fake.bin").write_bytes(b"longer than before")
    after = repository.fingerprint("m")
    assert after != before
    assert after["config.pbtxt"] == before["config.pbtxt"]
    assert repository.fingerprint("nope") == {}


def test_what_running_a_model_leaves_behind_is_not_a_change(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m")
    repository = LocalRepository(tmp_path)
    before = repository.fingerprint("m")
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").write_bytes(b"")
    (folder / ".lock").write_bytes(b"")
    assert repository.fingerprint("m") == before


def test_a_version_that_is_a_link_to_a_directory_is_seen(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "fake.bin").write_bytes(b"")
    folder = write_model(tmp_path / "repository", "m", versions=())
    (folder / "3").symlink_to(tmp_path / "elsewhere")
    assert "3/fake.bin" in LocalRepository(tmp_path / "repository").fingerprint("m")


def test_a_bare_file_has_its_own_fingerprint(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(b"")
    repository = LocalRepository(tmp_path, any_layout=True)
    assert set(repository.fingerprint("a")) == {"a.onnx"}


def test_a_path_opens_as_a_local_repository_and_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    assert isinstance(open_repository(tmp_path), LocalRepository)
    assert open_repository(str(tmp_path)).location == str(tmp_path)
    with pytest.raises(NotFoundError, match="there is no storage for 'ftp://'"):
        open_repository("ftp://host/models")


@pytest.mark.parametrize("layout", ["versions", "model file", "other file", "file itself"])
def test_a_model_without_its_own_folder_is_called_what_the_operator_says(tmp_path: Path, layout: str) -> None:
    file = tmp_path / {"versions": "3/model.onnx", "model file": "model.onnx"}.get(layout, "net.onnx")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"")
    place = file if layout == "file itself" else tmp_path
    found = LocalRepository(place, any_layout=True, bare_name="digits").models()
    assert list(found) == ["digits"]
    assert found["digits"][0].name == "digits"


def test_models_with_folders_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "a" / "1").mkdir(parents=True)
    (tmp_path / "b" / "1").mkdir(parents=True)
    assert set(LocalRepository(tmp_path, any_layout=True, bare_name="digits").models()) == {"a", "b"}


def test_a_folder_that_may_not_be_read_hides_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "m")
    (tmp_path / "closed").mkdir()
    entries = Path.iterdir

    def guarded(path: Path) -> Iterator[Path]:  # modes do not keep root out, as which tests may run
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return entries(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    repository = LocalRepository(tmp_path)
    assert list(only(repository.models(), "m").versions) == [1]
    assert not only(repository.models(), "closed").versions


@pytest.mark.parametrize("name", ["lost+found", "__pycache__", "__MACOSX", "$RECYCLE.BIN", ".git"])
@pytest.mark.parametrize("any_layout", [False, True])
def test_a_folder_that_a_file_system_or_a_tool_has_left_is_no_model(
    tmp_path: Path, name: str, any_layout: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "m")
    (tmp_path / name / "1").mkdir(parents=True)
    repository = LocalRepository(tmp_path, any_layout=any_layout)
    for _ in range(3):
        assert set(repository.models()) == {"m"}
    assert repository.models(name) == {}
    warnings = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(warnings) == (0 if name.startswith(".") else 1), "once, though it is scanned again and again"


@pytest.mark.parametrize("any_layout", [False, True])
def test_a_directory_that_cannot_be_read_now_is_unavailable_and_not_empty_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_layout: bool
) -> None:
    write_model(tmp_path, "m")

    def away(path: Path) -> Iterator[Path]:
        raise OSError(116, "Stale file handle", str(path))

    lstat = os.lstat
    monkeypatch.setattr(Path, "iterdir", away)
    monkeypatch.setattr(
        os, "lstat", lambda path, **_: away(Path(path)) if tmp_path in Path(path).parents else lstat(path)
    )
    repository = LocalRepository(tmp_path, any_layout=any_layout)
    for look in (repository.models, lambda: repository.fetch("m")):
        with pytest.raises(UnavailableError, match=r"cannot scan '.*': Stale file handle"):
            look()


def counted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Path]:
    """Return the list that gets each whole read of a folder."""
    reads: list[Path] = []
    iterdir, listdir, scandir = Path.iterdir, os.listdir, os.scandir

    def count(path: object) -> None:
        if Path(str(path)) == folder:
            reads.append(folder)

    monkeypatch.setattr(Path, "iterdir", lambda self: (count(self), iterdir(self))[1])
    monkeypatch.setattr(os, "listdir", lambda path=".": (count(path), listdir(path))[1])
    monkeypatch.setattr(os, "scandir", lambda path=".": (count(path), scandir(path))[1])
    return reads


def test_a_model_is_found_by_its_name_without_a_look_at_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write_model(tmp_path, f"m{number}")
    (tmp_path / "bare.onnx").write_bytes(b"x")
    repository = LocalRepository(tmp_path, any_layout=True)
    assert len(repository.models()) == 21
    reads = counted(monkeypatch, tmp_path)
    found = {name: repository.models(name) for name in ("m7", "bare", "no", "..", "m7/1", "a" * 300)}
    assert {name: list(each) for name, each in found.items()} == {
        "m7": ["m7"],
        "bare": ["bare"],
        **{name: [] for name in ("no", "..", "m7/1", "a" * 300)},
    }
    assert reads == []


def test_a_hint_names_only_what_can_be_served(tmp_path: Path) -> None:
    (tmp_path / "digits.log").write_text("")
    with pytest.raises(NotFoundError) as refused:
        scan([tmp_path / "digit"])
    assert "did you mean" not in str(refused.value)
    (tmp_path / "digits.pt").write_text("")
    with pytest.raises(NotFoundError, match=r"did you mean '.*digits\.pt'\?"):
        scan([tmp_path / "digit"])
