"""Buckets through the real obstore against a double: listings, exact reads, and what failures say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.errors import NotFoundError, UnavailableError
from remora.storage import ChangedError, Secret, StoredObject
from remora.storage.credentials import AwsKeys, StorageSettings
from remora.storage.location import parse_location
from remora.storage.objects import ObjectStorage
from support.servers.object_store import ObjectStore

Opened = Callable[[str], ObjectStorage]
SCHEMES = ("s3", "gs", "az")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_listing_has_paths_sizes_and_etags_below_the_location(
    clouds: ObjectStore, opened: Opened, scheme: str
) -> None:
    for key in ("repo/m/1/model.onnx", "repo/m/config.pbtxt", "repository/x", "other"):
        clouds.put("bucket", key, key.encode())
    found = {item.path: item for item in opened(f"{scheme}://bucket/repo").listing()}
    assert set(found) == {"m/1/model.onnx", "m/config.pbtxt"}
    assert found["m/config.pbtxt"].size == len("repo/m/config.pbtxt")
    assert found["m/config.pbtxt"].etag == clouds.etags["bucket/repo/m/config.pbtxt"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_long_listing_is_read_to_its_end(clouds: ObjectStore, opened: Opened, scheme: str) -> None:
    clouds.page = 10
    for number in range(35):
        clouds.put("bucket", f"r/m{number:02}/config.pbtxt", b"x")
    assert len(opened(f"{scheme}://bucket/r").listing()) == 35
    assert clouds.count("LIST") == 4


def test_a_part_of_the_place_is_listed_alone(clouds: ObjectStore, opened: Opened) -> None:
    for key in ("r/one/a", "r/two/b"):
        clouds.put("bucket", key, b"x")
    assert [item.path for item in opened("s3://bucket/r").listing("two")] == ["two/b"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("key", ["r/with space/ä.bin", "r/a+b/c=d", "r/per%20cent/x"])
def test_names_arrive_as_they_are(clouds: ObjectStore, opened: Opened, scheme: str, key: str) -> None:
    clouds.put("bucket", key, b"content")
    storage = opened(f"{scheme}://bucket/r")
    (item,) = storage.listing()
    assert item.path == key.removeprefix("r/")
    assert storage.read(item, 0, 7) == b"content"


def test_a_name_that_would_climb_costs_its_folder_alone(
    clouds: ObjectStore, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("r/a/1/model.onnx", "r/m/config.pbtxt", "r/m/1/../../etc/passwd", "r/m/2/x", "r/z/1/model.onnx"):
        clouds.put("bucket", key, b"x")
    found = [item.path for item in opened("s3://bucket/r").listing()]
    assert sorted(found) == ["a/1/model.onnx", "m/2/x", "m/config.pbtxt", "z/1/model.onnx"]
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.getMessage().startswith("'m/1' of 's3://bucket/r' is left out: ")
    assert "etc/passwd" in record.getMessage()
    with pytest.raises(UnavailableError, match="etc/passwd"):
        opened("s3://bucket/r/m/1").listing()


def test_a_location_that_is_a_file_has_one_object(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "r/model.tar.gz", b"packed")
    storage = opened("s3://bucket/r/model.tar.gz")
    (item,) = storage.listing()
    assert (item.path, item.size, clouds.count("LIST")) == ("model.tar.gz", 6, 0)
    assert storage.read(item, 0, 6) == b"packed"


def test_a_folder_may_have_the_name_of_a_file(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "r/model.onnx/1/model.onnx", b"x")
    assert [item.path for item in opened("s3://bucket/r/model.onnx").listing()] == ["1/model.onnx"]


def test_one_file_of_a_web_server_is_a_place(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "m.tar.gz", b"packed")
    storage = opened(f"{clouds.url}/bucket/m.tar.gz")
    (item,) = storage.listing()
    assert (item.path, storage.read(item, 2, 6)) == ("m.tar.gz", b"cked")


def test_reads_are_exact(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "r/x", bytes(range(200)))
    storage = opened("s3://bucket/r")
    (item,) = storage.listing()
    assert storage.read(item, 10, 20) == bytes(range(10, 20))
    assert clouds.requests[-1].headers["range"] == "bytes=10-19"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_object_that_was_replaced_is_not_mixed(clouds: ObjectStore, opened: Opened, scheme: str) -> None:
    clouds.put("bucket", "r/x", b"first")
    storage = opened(f"{scheme}://bucket/r")
    (item,) = storage.listing()
    clouds.put("bucket", "r/x", b"later")
    with pytest.raises(ChangedError):
        storage.read(item, 0, 5)


def test_an_object_that_grew_is_not_mixed_without_etags(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "r/x", b"first", etag="W/weak")
    storage = opened("s3://bucket/r")
    (item,) = storage.listing()
    clouds.put("bucket", "r/x", b"longer than before", etag="W/weak")
    with pytest.raises(ChangedError, match="has 18 bytes, not 5"):
        storage.read(item, 0, 5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fault", ["503", "reset", "truncated"])
def test_passed_requests_are_sent_again(clouds: ObjectStore, opened: Opened, fault: str, scheme: str) -> None:
    clouds.put("bucket", "r/x", b"x" * 1000)
    storage = opened(f"{scheme}://bucket/r")
    (item,) = storage.listing()
    clouds.fail(fault, times=2)
    assert storage.read(item, 0, 1000) == b"x" * 1000
    assert clouds.count("GET") == 3


def test_what_does_not_pass_ends(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "r/x", b"x" * 1000)
    storage = opened("s3://bucket/r")
    (item,) = storage.listing()
    clouds.fail("truncated", times=1000)
    with pytest.raises(UnavailableError, match="'s3://bucket/r'"):
        storage.read(item, 0, 1000)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bucket_that_is_not_there_says_so(opened: Opened, scheme: str) -> None:
    with pytest.raises(NotFoundError, match=rf"no '{scheme}://absent/r'.*NoSuchBucket: no such bucket"):
        opened(f"{scheme}://absent/r").listing()


def test_a_cloud_that_cannot_be_reached_says_so() -> None:
    place = parse_location("s3://127.0.0.1:1/bucket/r")
    storage = ObjectStorage(
        place, lambda: StorageSettings({"endpoint": place.endpoint, "skip_signature": True}, None, True), retries=0
    )
    with pytest.raises(UnavailableError, match="cannot reach 's3://127"):
        storage.listing()


def test_credentials_that_are_refused_are_read_again_once(clouds: ObjectStore) -> None:
    clouds.put("bucket", "r/x", b"x")
    reads: list[str] = []

    def settings() -> StorageSettings:
        reads.append("read")
        keys = AwsKeys(f"AK{len(reads)}", Secret("sk"))
        return StorageSettings({"endpoint": clouds.url, "region": "us-east-1"}, keys, allow_http=True)

    storage = ObjectStorage(parse_location("s3://bucket/r"), settings, retries=0)
    clouds.fail("403", on="LIST")
    assert len(storage.listing()) == 1
    assert ["AK1" in seen.headers["authorization"] for seen in clouds.requests] == [True, False]
    clouds.fail("403", on="LIST", times=2)
    with pytest.raises(UnavailableError, match="Check the credentials and their rights"):
        storage.listing()


def test_keys_of_the_settings_are_not_mixed_with_the_environment(
    clouds: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stray")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "STRAY")
    settings = StorageSettings(
        {"endpoint": clouds.url, "region": "us-east-1"}, AwsKeys("AK", Secret("sk")), allow_http=True
    )
    ObjectStorage(parse_location("s3://bucket/r"), lambda: settings).listing()
    headers = clouds.requests[-1].headers
    assert "Credential=AK/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


def test_no_error_shows_a_signature_or_a_key(clouds: ObjectStore) -> None:
    place = parse_location(f"{clouds.url}/bucket/m.tar.gz?sig=very-secret")
    config = {"endpoint": clouds.url, "account_name": "acct", "sas_key": Secret("sig=very-secret")}
    blob = parse_location("as://acct/absent/p")
    for storage in (
        ObjectStorage(place, lambda: StorageSettings({}, None, True), retries=0),
        ObjectStorage(blob, lambda: StorageSettings(config, None, True), retries=0),
    ):
        with pytest.raises((NotFoundError, UnavailableError)) as failed:
            storage.listing()
        assert "very-secret" not in f"{failed.value} {failed.value!r} {storage.location}"


def test_two_environments_are_two_places(clouds: ObjectStore, opened: Opened) -> None:
    place = parse_location("s3://bucket/r")
    here, there = (
        ObjectStorage(place, lambda url=url: StorageSettings({"endpoint": url})) for url in ("http://a", "http://b")
    )
    assert here.identity != there.identity
    assert here.location == there.location


def test_a_stored_object_is_plain_data() -> None:
    assert StoredObject("a", 1, "e") == ("a", 1, "e")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_refused_upload_is_named_as_such(clouds: ObjectStore, opened: Opened, tmp_path: Path, scheme: str) -> None:
    clouds.buckets["bucket"] = {}
    (tmp_path / "out.csv").write_text("row")
    clouds.fail("403", on="PUT", times=2)
    with pytest.raises(UnavailableError, match="may not be written"):
        opened(f"{scheme}://bucket/out.csv").upload(tmp_path / "out.csv")
