"""The cache of models: whole files only, shared by processes, the longest unused goes first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from remora.errors import UnavailableError
from remora.storage.cache import Fetched, Layout, ModelCache
from remora.storage.downloads import Downloads
from remora.storage.objects import ObjectStorage
from support.servers.object_store import ObjectStore

Opened = Callable[[str], ObjectStorage]
FILES = {"config.pbtxt": b"name: 'm'", "1/model.onnx": bytes(range(256)) * 40}


def put(clouds: ObjectStore, model: str = "m", **changed: bytes) -> None:
    for path, content in {**FILES, **changed}.items():
        clouds.put("bucket", f"r/{model}/{path}", content)


def fetch(cache: ModelCache, storage: ObjectStorage, model: str = "m", layout: Layout = Layout()) -> Fetched:  # noqa: B008
    files = {item.path.removeprefix(f"{model}/"): item for item in storage.listing(model)}
    return cache.fetch(storage, model, files, layout)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_arrives_under_its_names(clouds: ObjectStore, opened: Opened, cache: ModelCache) -> None:
    put(clouds)
    fetched = fetch(cache, opened("s3://bucket/r"), layout=Layout(["2"]))
    assert content_of(fetched.path) == FILES
    assert fetched.path.name == "m"
    assert (fetched.path / "2").is_dir()
    assert fetched.fetched_bytes == fetched.total_bytes == sum(map(len, FILES.values()))


def test_a_second_time_costs_no_request(clouds: ObjectStore, opened: Opened, cache: ModelCache, tmp_path: Path) -> None:
    put(clouds)
    storage = opened("s3://bucket/r")
    first = fetch(cache, storage)
    gets = clouds.count("GET")
    other_process = ModelCache(tmp_path / "cache", 1 << 30, "boot-1")
    for again in (fetch(cache, storage), fetch(other_process, storage)):
        assert again == Fetched(first.path, 0, first.total_bytes)
    assert clouds.count("GET") == gets


def test_what_did_not_change_is_not_brought_again(clouds: ObjectStore, opened: Opened, cache: ModelCache) -> None:
    put(clouds)
    storage = opened("s3://bucket/r")
    before = fetch(cache, storage)
    put(clouds, **{"2/model.onnx": b"new"})
    after = fetch(cache, storage)
    assert (after.fetched_bytes, content_of(after.path)) == (3, {**FILES, "2/model.onnx": b"new"})
    assert content_of(before.path) == FILES, "who uses the older one is not disturbed"


def test_two_clouds_with_the_same_etag_are_two_files(clouds: ObjectStore, opened: Opened, cache: ModelCache) -> None:
    clouds.put("bucket", "r/m/x", b"one", etag='"same"')
    clouds.put("other", "r/m/x", b"two", etag='"same"')
    one, two = (fetch(cache, opened(f"s3://{bucket}/r")) for bucket in ("bucket", "other"))
    assert (content_of(one.path), content_of(two.path)) == ({"x": b"one"}, {"x": b"two"})


def test_a_file_from_before_a_restart_of_the_machine_is_checked_first(
    clouds: ObjectStore, opened: Opened, cache: ModelCache, tmp_path: Path
) -> None:
    put(clouds)
    storage = opened("s3://bucket/r")
    fetch(cache, storage)
    gets = clouds.count("GET")
    fine = ModelCache(tmp_path / "cache", 1 << 30, "boot-2")
    assert content_of(fetch(fine, storage).path) == FILES
    assert clouds.count("GET") == gets
    (damaged,) = (path for path in (tmp_path / "cache" / "objects").iterdir() if path.stat().st_size == 10_240)
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(10_240))  # what a file system may leave of a file after a loss of power
    after = ModelCache(tmp_path / "cache", 1 << 30, "boot-3")
    assert content_of(fetch(after, storage).path) == FILES


@pytest.mark.parametrize("harm", ["description gone", "description cut", "file cut", "file gone"])
def test_a_cache_that_was_harmed_mends_itself(
    clouds: ObjectStore, opened: Opened, cache: ModelCache, tmp_path: Path, harm: str
) -> None:
    put(clouds)
    storage = opened("s3://bucket/r")
    fetch(cache, storage)
    shutil.rmtree(tmp_path / "cache" / "models")
    for path in list((tmp_path / "cache" / "objects").iterdir()):
        if path.suffix == ".json" and harm.startswith("description"):
            path.unlink() if harm.endswith("gone") else os.truncate(path, 10)
        elif path.suffix != ".json" and harm.startswith("file"):
            path.chmod(0o644)
            path.unlink() if harm.endswith("gone") else os.truncate(path, 1)
    assert content_of(fetch(ModelCache(tmp_path / "cache", 1 << 30, "boot-1"), storage).path) == FILES


def test_many_threads_bring_a_model_once(clouds: ObjectStore, opened: Opened, cache: ModelCache) -> None:
    put(clouds)
    storage = opened("s3://bucket/r")
    with ThreadPoolExecutor(8) as pool:
        folders = {future.result().path for future in [pool.submit(fetch, cache, storage) for _ in range(8)]}
    assert len(folders) == 1
    assert clouds.count("GET") == 12


CHILD = """
import json, sys
from pathlib import Path
from remora.storage.cache import ModelCache
from remora.storage.credentials import StorageSettings
from remora.storage.downloads import Downloads
from remora.storage.location import parse_location
from remora.storage.objects import ObjectStorage
url, folder = sys.argv[1:]
config = {"endpoint": url, "region": "us-east-1", "skip_signature": True}
storage = ObjectStorage(parse_location("s3://bucket/r"), lambda: StorageSettings(config, None, True))
cache = ModelCache(Path(folder), 1 << 30, "boot-1", Downloads("boot-1", range_bytes=1000, connections=2))
fetched = cache.fetch(storage, "m", {item.path[2:]: item for item in storage.listing("m")})
print(json.dumps([str(fetched.path), fetched.fetched_bytes]))
"""


def child(clouds: ObjectStore, folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", CHILD, clouds.url, str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)


def test_two_processes_fill_one_cache_with_one_download(
    clouds: ObjectStore, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    put(clouds)
    processes = [child(clouds, tmp_path, child_environment) for _ in range(3)]
    answers = [json.loads(process.communicate()[0]) for process in processes]
    assert len({path for path, _ in answers}) == 1
    assert sorted(fetched for _, fetched in answers)[:2] == [0, 0]
    assert content_of(Path(answers[0][0])) == FILES
    assert clouds.count("GET") == 12


def test_a_killed_download_leaves_nothing_that_can_be_loaded_and_is_gone_on_with(
    clouds: ObjectStore, opened: Opened, cache: ModelCache, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    put(clouds)
    half, go_on = threading.Event(), threading.Event()

    def before(seen: object) -> None:
        if clouds.count("GET") > 6:
            half.set()
            go_on.wait(60)

    clouds.before = before
    process = child(clouds, tmp_path / "cache", child_environment)
    assert half.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    clouds.before = lambda seen: None
    go_on.set()
    models = tmp_path / "cache" / "models"
    assert not [path for path in models.rglob("*") if path.is_file() and path.suffix != ".using"]
    clouds.requests.clear()
    assert content_of(fetch(cache, opened("s3://bucket/r")).path) == FILES
    assert clouds.count("GET") < 12, "the ranges that were there are not fetched again"


def test_an_object_that_is_replaced_between_listing_and_reading_spoils_nothing(
    clouds: ObjectStore, opened: Opened, cache: ModelCache
) -> None:
    put(clouds)
    storage = opened("s3://bucket/r")
    files = {item.path[2:]: item for item in storage.listing("m")}
    put(clouds, **{"1/model.onnx": b"another"})
    with pytest.raises(UnavailableError):
        cache.fetch(storage, "m", files)
    assert content_of(fetch(cache, storage).path) == {**FILES, "1/model.onnx": b"another"}


def small_cache(folder: Path) -> ModelCache:
    return ModelCache(folder, 25_000, "boot-1", Downloads("boot-1"))


def test_the_longest_unused_model_goes_first(clouds: ObjectStore, opened: Opened, tmp_path: Path) -> None:
    storage = opened("s3://bucket/r")
    for number, model in enumerate("abc"):
        put(clouds, model)
        cache = small_cache(tmp_path)
        path = fetch(cache, storage, model).path
        os.utime(f"{path.parent}.using", (number, number))
        cache.release(path)
    kept = {entry.source for entry in small_cache(tmp_path).entries()}
    assert {source.split("/")[4] for source in kept} == {"b", "c"}
    assert small_cache(tmp_path).held_bytes() <= 25_000


def test_a_model_in_use_is_never_removed(clouds: ObjectStore, opened: Opened, tmp_path: Path) -> None:
    storage, cache = opened("s3://bucket/r"), small_cache(tmp_path)
    paths = []
    for model in "abc":
        put(clouds, model)
        paths.append(fetch(cache, storage, model).path)
    assert all(content_of(path) == FILES for path in paths)
    assert cache.clear() == 0
    cache.release(paths[0])
    assert cache.clear() > 0
    assert [path.is_dir() for path in paths] == [False, True, True]


def test_a_disk_without_room_is_told_before_a_byte_is_fetched(
    clouds: ObjectStore, opened: Opened, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(clouds)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match=r"10249 bytes and .* has 10 left"):
        fetch(cache, opened("s3://bucket/r"))
    assert clouds.count("GET") == 0


def test_a_folder_that_cannot_be_written_says_which_option_helps(
    clouds: ObjectStore, opened: Opened, tmp_path: Path
) -> None:
    put(clouds)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="--model-cache-directory"):
        fetch(ModelCache(tmp_path / "file", 1 << 30, ""), opened("s3://bucket/r"))


def test_clearing_removes_what_was_left_in_the_middle(
    clouds: ObjectStore, opened: Opened, cache: ModelCache, tmp_path: Path
) -> None:
    put(clouds)
    clouds.fail("403", key="onnx", times=100)
    with pytest.raises(UnavailableError):
        fetch(cache, opened("s3://bucket/r"))
    assert any((tmp_path / "cache" / "partial").iterdir())
    cache.clear()
    assert not list((tmp_path / "cache" / "partial").iterdir())
