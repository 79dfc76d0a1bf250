"""Uploads: a digest of the content in the location, and objects that are sent once."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.engine import Engine
from remora_deploy.deploy.plan import CallError
from remora_deploy.deploy.uploads import digest_of, files_of, source_of, upload, upload_steps
from support.servers.hosting import write_scale
from support.servers.object_store import ObjectStore, object_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models" / "digits" / "1").mkdir(parents=True)
    (tmp_path / "models" / "digits" / "1" / "model.onnx").write_bytes(b"weights")
    (tmp_path / "models" / "digits" / "config.pbtxt").write_text("")
    return tmp_path / "models"


def test_a_changed_model_has_another_location_and_the_same_model_the_same(folder: Path) -> None:
    first = source_of(str(folder), "s3://bucket/models", "digits", "s3://")
    os.utime(folder / "digits" / "config.pbtxt", (0, 0))
    assert source_of(str(folder), "s3://bucket/models/", "digits", "s3://") == first
    assert first.location == f"s3://bucket/models/digits/{digest_of(folder)}/"
    (folder / "digits" / "1" / "model.onnx").write_bytes(b"Weights")
    second = source_of(str(folder), "s3://bucket/models", "digits", "s3://")
    (folder / "digits" / "1" / "model.onnx").rename(folder / "digits" / "1" / "other.onnx")
    assert len({first, second, source_of(str(folder), "s3://bucket/models", "digits", "s3://")}) == 3


def test_files_are_listed_without_caches_in_a_fixed_order(folder: Path) -> None:
    (folder / "digits" / "__pycache__").mkdir()
    (folder / "digits" / "__pycache__" / "model.pyc").write_bytes(b"")
    assert [name for name, _ in files_of(folder)] == ["digits/1/model.onnx", "digits/config.pbtxt"]


def test_a_location_is_used_as_it_is_and_not_uploaded() -> None:
    source = source_of("s3://bucket/models/", "", "digits", "s3://")
    assert (source.location, upload_steps(source)) == ("s3://bucket/models/", ())


@pytest.mark.parametrize(
    ("model", "bucket", "text"),
    [
        ("gs://bucket/models", "", "a location such as s3://"),
        ("missing", "s3://bucket", "not a folder"),
        (".", "", "--bucket="),
        (".", "gs://bucket", "--bucket=gs://bucket"),
    ],
)
def test_a_model_or_bucket_of_another_platform_is_refused(model: str, bucket: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        source_of(model, bucket, "digits", "s3://")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files"):
        source_of(str(tmp_path), "s3://bucket", "digits", "s3://")


# -- S3 and Google Cloud Storage: a server of their XML APIs, because gcp-storage-emulator answers 501 to a listing ---

SCHEMES = ("s3", "gs")
LARGE_BYTES = 12 << 20
"""Size that the client sends in parts."""


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[s3]'")
    with object_store() as found:
        found.buckets["bucket"] = {}
        yield found


def environ(store: ObjectStore) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "very-secret-key", "AWS_REGION": "eu-west-1"}
    return {**keys, "AWS_ENDPOINT_URL": store.url, "STORAGE_EMULATOR_HOST": store.url}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_is_sent_whole_and_then_only_what_is_missing(store: ObjectStore, folder: Path, scheme: str) -> None:
    large = bytes(range(256)) * (LARGE_BYTES // 256)
    (folder / "digits" / "1" / "weights.bin").write_bytes(large)
    location = f"{scheme}://bucket/models/digits/abc/"
    assert upload(str(folder), location, environ(store)) == "3 files, 12.6 MB"
    base = "models/digits/abc/digits"
    assert store.buckets["bucket"] == {
        f"{base}/1/model.onnx": b"weights",
        f"{base}/1/weights.bin": large,
        f"{base}/config.pbtxt": b"",
    }
    assert any("partNumber" in seen.query for seen in store.requests), "a large file is sent in parts"
    assert upload(str(folder), location, environ(store)) == "already there"
    del store.buckets["bucket"][f"{base}/1/model.onnx"]
    store.requests.clear()
    assert upload(str(folder), location, environ(store)).startswith("1 files")
    assert [seen.key for seen in store.requests if seen.method == "PUT"] == [f"bucket/{base}/1/model.onnx"]


def test_a_folder_is_sent_as_one_archive_once(store: ObjectStore, folder: Path) -> None:
    source = source_of(str(folder), "s3://bucket/models", "digits", "s3://", packed=True)
    assert upload(source.folder, source.location, environ(store)).startswith("1 archive")
    assert upload(source.folder, source.location, environ(store)) == "already there"
    ((name, body),) = store.buckets["bucket"].items()
    assert name == f"models/digits/{digest_of(folder)}/model.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(body)) as packed:
        assert packed.getnames() == ["digits/1/model.onnx", "digits/config.pbtxt"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_uploaded_is_what_a_server_loads(
    store: ObjectStore, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    write_scale(tmp_path / "models" / "scale")
    source = source_of(str(tmp_path / "models"), f"{scheme}://bucket/models", "digits", f"{scheme}://")
    upload(source.folder, source.location, environ(store))
    for name, value in {**environ(store), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    with Engine(source.location) as engine:
        assert engine.infer("scale", {"x": [[1.0, 2.0, 3.0, 4.0]]})["y"].tolist() == [[2.0, 4.0, 6.0, 8.0]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_refused_upload_is_a_denial_without_secrets(store: ObjectStore, folder: Path, scheme: str) -> None:
    store.fail("403", on="PUT", times=100)
    with pytest.raises(CallError, match=f"cannot upload to {scheme}://bucket/models/") as caught:
        upload(str(folder), f"{scheme}://bucket/models/", environ(store))
    assert caught.value.kind == "denied"
    assert "very-secret-key" not in str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bucket_that_does_not_exist_is_a_failure(store: ObjectStore, folder: Path, scheme: str) -> None:
    with pytest.raises(CallError, match=f"{scheme}://nowhere/models/"):
        upload(str(folder), f"{scheme}://nowhere/models/", environ(store))
