"""Buckets as repositories: which models a listing shows, what is brought of them, and what a look costs."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.errors import ConfigError, InvalidArgumentError, NotFoundError, UnavailableError
from remora.repository import CacheSettings, Repository
from remora.repository.files import holds_other_files
from remora.repository.local import LocalRepository
from remora.repository.remote import group, versions_of
from remora.repository.sources import open_repository
from remora.storage import StoredObject
from support.servers.object_store import ObjectStore, store_of_environment

Opened = Callable[..., Repository]
BIG = bytes(5 << 20)


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A double that the environment points at."""
    with store_of_environment(monkeypatch) as store:
        yield store


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return lambda place, **settings: open_repository(place, cache=CacheSettings(str(tmp_path / "cache")), **settings)


def put(clouds: ObjectStore, *keys: str, content: bytes = b"x") -> None:
    for key in keys:
        clouds.put("bucket", key, content)


def listing(*paths: str) -> list[StoredObject]:
    """Objects; those whose path ends with / are the empty ones that consoles make for folders."""
    return [StoredObject(path.rstrip("/"), 0 if path.endswith("/") else 1, "e") for path in paths]


GROUPS = [
    ("repository", ["m/config.pbtxt", "m/1/model.onnx", "n/2/model.pt"], "", {"m": {1: "1"}, "n": {2: "2"}}),
    ("files beside models", ["README.md", "m/1/model.onnx"], "", {"m": {1: "1"}}),
    ("hidden and Python's own", [".git/x", "m/1/model.py", "m/1/__pycache__/x", "m/.x/y"], "", {"m": {1: "1"}}),
    ("a version that is only a folder", ["ens/config.pbtxt", "ens/1/"], "", {"ens": {1: "1"}}),
    ("a model without versions", ["m/config.pbtxt"], "", {"m": {}}),
    ("a model's own folder", ["config.pbtxt", "1/model.onnx"], "it", {"it": {1: "1"}}),
    ("versions alone", ["1/model.onnx", "3/model.onnx"], "it", {"it": {1: "1", 3: "3"}}),
    ("a model file in a folder", ["model.onnx"], "it", {"it": {1: "."}}),
    ("another model file", ["resnet.onnx"], "it", {"resnet": {1: "resnet.onnx"}}),
    ("models called by numbers", ["1/config.pbtxt", "1/1/model.onnx"], "it", {"1": {1: "1"}}),
    ("a repository where anything may be", ["m/1/model.onnx"], "it", {"m": {1: "1"}}),
]


@pytest.mark.parametrize(("paths", "single", "expected"), [row[1:] for row in GROUPS], ids=[row[0] for row in GROUPS])
def test_a_listing_shows_models(paths: list[str], single: str, expected: dict[str, dict[int, str]]) -> None:
    found = group(listing(*paths), single)
    assert {name: versions_of(files) for name, files in found.items()} == expected


@pytest.mark.parametrize(
    "row", [row for row in GROUPS if row[0] not in ("hidden and Python's own",)], ids=lambda row: row[0]
)
def test_a_bucket_and_a_disk_with_the_same_files_show_the_same_models(
    row: tuple[str, list[str], str, object], tmp_path: Path
) -> None:
    _, paths, single, expected = row
    root = tmp_path / (single or "repository")
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).mkdir(parents=True) if path.endswith("/") else (root / path).write_text("x")
    local = LocalRepository(root, any_layout=bool(single)).models()
    shown = {
        name: {number: path.relative_to(folder.path).as_posix() for number, path in folder.versions.items()}
        for name, (folder,) in local.items()
    }
    assert shown == expected


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_model_is_fetched_with_the_versions_that_are_wanted(clouds: ObjectStore, opened: Opened, scheme: str) -> None:
    put(clouds, "r/m/1/model.onnx", "r/m/2/model.onnx", content=BIG)
    put(clouds, "r/m/config.pbtxt", "r/m/labels.txt", "r/other/1/model.onnx")
    repository = opened(f"{scheme}://bucket/r")
    assert set(repository.models()) == {"m", "other"}
    bare = repository.fetch("m", ())
    assert sorted(path.name for path in bare.path.iterdir()) == ["config.pbtxt", "labels.txt"]
    assert bare.filenames(2) == ("model.onnx",)
    folder = repository.fetch("m", [2])
    assert folder.name == folder.path.name == "m"
    assert (folder.versions[2] / "model.onnx").stat().st_size == len(BIG)
    assert not folder.versions[1].exists()
    assert not [seen for seen in clouds.requests if "other" in seen.key and seen.kind == "GET"]


def test_a_small_model_comes_whole_at_once(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx", "r/m/config.pbtxt")
    repository = opened("s3://bucket/r")
    repository.models()
    assert repository.fetch("m", ()).path == repository.fetch("m", [1]).path
    assert (clouds.count("LIST"), clouds.count("GET")) == (1, 2)


def test_an_unchanged_look_is_one_list_and_no_get(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx", "r/m/config.pbtxt", "r/n/1/model.onnx")
    repository = opened("s3://bucket/r")
    repository.models()
    before = {name: repository.fingerprint(name) for name in ("m", "n")}
    repository.fetch("m")
    clouds.requests.clear()
    repository.models()
    assert {name: repository.fingerprint(name) for name in ("m", "n")} == before
    assert [seen.kind for seen in clouds.requests] == ["LIST"]


def test_a_fingerprint_changes_with_content_and_files(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx")
    repository = opened("s3://bucket/r")
    stamps = []
    for change in ({}, {"r/m/1/model.onnx": b"y"}, {"r/m/2/model.onnx": b"z"}):
        for key, content in change.items():
            clouds.put("bucket", key, content)
        repository.models("m")
        stamps.append(repository.fingerprint("m"))
    assert len({str(stamp) for stamp in stamps}) == 3
    assert set(stamps[2]) == {"1/model.onnx", "2/model.onnx"}


def test_what_is_replaced_while_it_is_fetched_is_looked_at_again(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx")
    repository = opened("s3://bucket/r")
    repository.models()
    clouds.put("bucket", "r/m/1/model.onnx", b"another")
    assert (repository.fetch("m").versions[1] / "model.onnx").read_bytes() == b"another"


def test_a_folder_that_was_fetched_stays_as_it_is(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx")
    repository = opened("s3://bucket/r")
    before = repository.fetch("m").versions[1] / "model.onnx"
    clouds.put("bucket", "r/m/1/model.onnx", b"another")
    repository.models()
    after = repository.fetch("m").versions[1] / "model.onnx"
    assert (before.read_bytes(), after.read_bytes()) == (b"x", b"another")


def test_one_model_is_looked_at_without_the_others(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx", "r/n/1/model.onnx")
    repository = opened("s3://bucket/r")
    assert set(repository.models("m")) == {"m"}
    assert clouds.requests[-1].query["prefix"] == ["r/m/"]
    assert repository.models("absent") == {}
    with pytest.raises(NotFoundError, match="no model 'absent'"):
        repository.fetch("absent")


def test_a_model_that_went_is_gone(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/m/1/model.onnx")
    repository = opened("s3://bucket/r")
    repository.models()
    del clouds.buckets["bucket"]["r/m/1/model.onnx"]
    with pytest.raises(NotFoundError, match=r"no files below it|no model 'm'"):
        repository.fetch("m")


def test_an_empty_location_is_distinguished_from_a_forbidden_one(clouds: ObjectStore, opened: Opened) -> None:
    with pytest.raises(NotFoundError, match="no files below it"):
        opened("s3://bucket/nothing").models()
    clouds.fail("403", on="LIST", times=2)
    with pytest.raises(UnavailableError, match="may not be read"):
        opened("s3://bucket/nothing").models()


def test_an_empty_version_is_a_folder(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "r/ens/config.pbtxt")
    put(clouds, "r/ens/1", content=b"")
    assert opened("s3://bucket/r").fetch("ens").versions[1].is_dir()


def test_tritons_variables_name_where_models_are_brought(
    clouds: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path / "mount"))
    put(clouds, "r/m/1/model.onnx")
    assert open_repository("s3://bucket/r").fetch("m").path.is_relative_to(tmp_path / "mount")


def packed(*names: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    return raw.getvalue()


ARCHIVES = [
    ("a repository", ["m/config.pbtxt", "m/1/model.onnx", "n/1/model.onnx"], {"m", "n"}),
    ("a repository in a folder", ["models/m/1/model.onnx", "models/n/1/model.onnx"], {"m", "n"}),
    ("one model of a repository", ["m/1/model.onnx"], {"m"}),
    ("a model", ["config.pbtxt", "1/model.onnx"], {"packed"}),
    ("a model file", ["model.onnx"], {"packed"}),
]


@pytest.mark.parametrize(("names", "models"), [row[1:] for row in ARCHIVES], ids=[row[0] for row in ARCHIVES])
@pytest.mark.parametrize("where", ["s3", "http", "disk"])
def test_an_archive_is_a_repository(
    clouds: ObjectStore,
    opened: Opened,
    tmp_path: Path,
    names: list[str],
    models: set[str],
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Unpacking may take minutes, so that a line of the log precedes it, wherever the archive is."""
    caplog.set_level("INFO", logger="remora.models")
    clouds.put("bucket", "a/packed.tar.gz", packed(*names))
    (tmp_path / "packed.tar.gz").write_bytes(packed(*names))
    places = {
        "s3": "s3://bucket/a/packed.tar.gz",
        "http": f"{clouds.url}/bucket/a/packed.tar.gz",
        "disk": str(tmp_path / "packed.tar.gz"),
    }
    repository = opened(places[where], any_layout=True)
    assert set(repository.models()) == models
    assert "packed.tar.gz, 1 MB (once)" in caplog.text
    for name in models:
        assert repository.fetch(name).filenames(1) == ("model.onnx",)
        assert repository.fingerprint(name)


@pytest.mark.parametrize("names", [["config.pbtxt", "1/model.onnx"], ["model.onnx"], ["digits.onnx"]])
def test_a_model_at_the_place_itself_is_called_what_the_user_says(
    clouds: ObjectStore, opened: Opened, tmp_path: Path, names: list[str]
) -> None:
    put(clouds, *(f"one/place/{name}" for name in names))
    clouds.put("bucket", "a/packed.tar.gz", packed(*names))
    for name in names:
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(b"x")
    places = ("s3://bucket/one/place", "s3://bucket/a/packed.tar.gz", str(tmp_path / "local"))
    for place in places:
        repository = opened(place, any_layout=True, bare_name="named")
        assert set(repository.models()) == {"named"}, place
        assert repository.fetch("named").filenames(1)


def test_the_users_name_is_not_for_the_models_of_a_repository(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "repo/m/1/model.onnx", "repo/n/1/model.onnx")
    assert set(opened("s3://bucket/repo", any_layout=True, bare_name="named").models()) == {"m", "n"}


def test_an_archive_is_brought_again_only_when_it_changed(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "a.tgz", packed("m/1/model.onnx"))
    repository = opened("s3://bucket/a.tgz")
    repository.models()
    clouds.requests.clear()
    assert set(repository.models()) == {"m"}
    assert [seen.kind for seen in clouds.requests] == ["HEAD"]
    clouds.put("bucket", "a.tgz", packed("n/1/model.onnx"))
    assert set(repository.models()) == {"n"}


@pytest.mark.parametrize("place", ["hdfs://host/path", "s3://", "as://account"])
def test_a_place_that_nothing_understands_is_refused(opened: Opened, place: str) -> None:
    with pytest.raises((NotFoundError, InvalidArgumentError)):
        opened(place)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert set(open_repository(f"file://{tmp_path}").models()) == {"m"}


# -- files of other libraries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "place", "name"),
    [
        (["churn/iris.skops"], "churn/iris.skops", "iris"),
        (["churn/model.skops"], "churn/model.skops", "churn"),
        (["churn/iris.skops"], "churn", "churn"),
        (["churn/iris.skops", "churn/requirements.txt"], "churn", "churn"),
        (["churn/model.ubj"], "churn/model.ubj", "churn"),
        (["saved/saved_model.pb", "saved/variables/variables.index"], "saved", "saved"),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_file_or_folder_of_another_library_in_a_bucket_is_served_as_on_a_disk(
    clouds: ObjectStore, opened: Opened, keys: list[str], place: str, name: str, scheme: str
) -> None:
    put(clouds, *keys, content=b"{L" if "ubj" in place else b"x")
    repository = opened(f"{scheme}://bucket/{place}", any_layout=True)
    assert set(repository.models()) == {name}
    assert set(repository.fetch(name).versions) == {1}
    assert repository.fingerprint(name)
    assert set(opened(f"{scheme}://bucket/{place}", any_layout=True, bare_name="named").models()) == {"named"}


def test_a_changed_file_of_another_library_is_fetched_again(clouds: ObjectStore, opened: Opened) -> None:
    put(clouds, "churn/iris.skops", content=b"old")
    repository = opened("s3://bucket/churn", any_layout=True)
    repository.models()
    first = repository.fetch("churn").path
    repository.models()
    assert repository.fetch("churn").path == first
    put(clouds, "churn/iris.skops", content=b"another")
    repository.models()
    assert repository.fetch("churn").path != first


@pytest.mark.parametrize("place", ["churn", "churn/iris.joblib"])
def test_a_pickle_in_a_bucket_needs_trust_too(clouds: ObjectStore, opened: Opened, place: str) -> None:
    put(clouds, "churn/iris.joblib")
    with pytest.raises(ConfigError, match=r"reading a pickle runs code that its author chose.*--trust-pickle"):
        opened(f"s3://bucket/{place}", any_layout=True).models()
    assert set(opened(f"s3://bucket/{place}", any_layout=True, bare_name="m", trust_pickle=True).models()) == {"m"}


@pytest.mark.parametrize("where", ["s3", "disk"])
def test_an_archive_of_another_library_is_served_as_its_folder(
    clouds: ObjectStore, opened: Opened, tmp_path: Path, where: str
) -> None:
    clouds.put("bucket", "a/churn.tar.gz", packed("iris.joblib"))
    (tmp_path / "churn.tar.gz").write_bytes(packed("iris.joblib"))
    place = "s3://bucket/a/churn.tar.gz" if where == "s3" else str(tmp_path / "churn.tar.gz")
    with pytest.raises(ConfigError, match="--trust-pickle"):
        opened(place, any_layout=True).models()
    trusted = opened(place, any_layout=True, trust_pickle=True)
    assert set(trusted.models()) == {"churn"}
    assert set(trusted.fetch("churn").versions) == {1}


def test_several_files_of_other_libraries_are_no_repository(
    clouds: ObjectStore, opened: Opened, tmp_path: Path
) -> None:
    put(clouds, "both/a.skops", "both/b.skops")
    (tmp_path / "both").mkdir()
    for name in ("a.skops", "b.skops"):
        (tmp_path / "both" / name).write_bytes(b"x")
    for place in ("s3://bucket/both", str(tmp_path / "both")):
        with pytest.raises(ConfigError, match=r"it has a\.skops, b\.skops\. Serve one of the files"):
            opened(place, any_layout=True).models()


@pytest.mark.parametrize(
    "paths", [["notes.txt", "m/1/model.onnx"], ["a.joblib", "m/1/model.onnx"], ["1/model.joblib"], ["m.onnx", "m.pkl"]]
)
def test_files_among_models_make_no_folder_of_another_library(paths: list[str]) -> None:
    assert not holds_other_files(paths)
