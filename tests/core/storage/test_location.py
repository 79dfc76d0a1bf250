"""What URLs mean, in every spelling that Triton and KServe have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora.storage.location import is_url, parse_location

ROWS = [
    ("s3://bucket/a/b", ("s3", "bucket", "a/b", "", "")),
    ("s3://bucket", ("s3", "bucket", "", "", "")),
    ("s3://bucket.with.dots/a//b/", ("s3", "bucket.with.dots", "a/b", "", "")),
    ("s3://localhost:9000/bucket/a", ("s3", "bucket", "a", "http://localhost:9000", "")),
    ("s3://http://10.0.0.1:9000/bucket/a", ("s3", "bucket", "a", "http://10.0.0.1:9000", "")),
    ("s3://https://minio.example:443/bucket/a", ("s3", "bucket", "a", "https://minio.example:443", "")),
    ("s3://https://minio.example/bucket", ("s3", "bucket", "", "https://minio.example", "")),
    ("gs://bucket/a", ("gs", "bucket", "a", "", "")),
    ("as://account/container/a/b", ("az", "container", "a/b", "", "account")),
    (
        "as://account.blob.core.windows.net/container/a",
        ("az", "container", "a", "https://account.blob.core.windows.net", "account"),
    ),
    ("az://container/a", ("az", "container", "a", "", "")),
    ("abfss://container@account.dfs.core.windows.net/a", ("az", "container", "a", "", "account")),
    (
        "https://account.blob.core.windows.net/container/a",
        ("az", "container", "a", "https://account.blob.core.windows.net", "account"),
    ),
    ("https://example.org/models/m.tar.gz", ("http", "", "models/m.tar.gz", "https://example.org", "")),
]


@pytest.mark.parametrize(("url", "meaning"), ROWS, ids=[url for url, _ in ROWS])
def test_a_url_means_one_place(url: str, meaning: tuple[str, ...]) -> None:
    place = parse_location(url)
    assert (place.cloud, place.bucket, place.path, place.endpoint, place.account) == meaning
    assert is_url(url)


BAD = ["s3://", "s3:///a", "gs://", "as://account", "as:///c", "az://", "abfss://c@x/p", "https://", "ftp://x/y", "x"]


@pytest.mark.parametrize("url", BAD)
def test_what_is_no_place_is_refused_with_what_was_expected(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="://"):
        parse_location(url)


@pytest.mark.parametrize("url", ["s3://b/../other", "gs://b/a/./c", "as://a/c/.."])
def test_a_path_cannot_climb(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'\.' or '\.\.'"):
        parse_location(url)


SIGNED = "https://account.blob.core.windows.net/container/a?sv=2024&sig=very%2Fsecret"


def test_a_signature_is_kept_but_never_shown() -> None:
    place = parse_location(SIGNED)
    assert place.sas.reveal() == "sv=2024&sig=very%2Fsecret"
    assert "secret" not in f"{place} {place!r} {place.url}"


def test_an_error_does_not_show_the_query() -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        parse_location("ftp://host/path?sig=verysecret")
    assert "verysecret" not in str(failed.value)


@given(
    st.sampled_from(["s3", "gs", "az"]),
    st.from_regex(r"[a-z0-9]{3,10}", fullmatch=True),
    st.lists(
        st.text(st.characters(exclude_characters="/?#\0", exclude_categories=["C"]), min_size=1).filter(
            lambda part: part not in (".", "..")
        ),
        max_size=4,
    ),
)
def test_bucket_and_path_come_back_as_they_were_written(scheme: str, bucket: str, parts: list[str]) -> None:
    place = parse_location(f"{scheme}://{'/'.join((bucket, *parts))}")
    assert (place.bucket, place.path) == (bucket, "/".join(parts))
