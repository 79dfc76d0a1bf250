"""Parsing of storage URLs in Triton's and KServe's notation [M19-M21].

s3://bucket/path                          AWS, or the server of AWS_ENDPOINT_URL
s3://host:port/bucket/path                another S3 (Triton: without TLS)
s3://https://host:port/bucket/path        the same, with TLS
gs://bucket/path                          Google Cloud Storage
as://account/container/path               Azure Blob Storage (Triton)
az://container/path                       the same, the account from the environment
abfs[s]://container@account.dfs.core.windows.net/path
https://account.blob.core.windows.net/container/path[?SAS]
https://host/path/model.tar.gz            one file from any web server
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from remora.errors import InvalidArgumentError
from remora.storage import Secret
from remora.system.url_secrets import shown_place

SCHEMES = ("s3", "gs", "as", "az", "azure", "abfs", "abfss", "https", "http")
"""The schemes that `parse_location` supports."""

_ENDPOINT = re.compile(
    r"(?P<scheme>https?://)?(?P<host>[\w.\-]+|\[[0-9a-fA-F:]+\])(?P<port>:\d+)?/(?P<rest>.*)", re.ASCII
)
_BUCKET = re.compile(r"[A-Za-z0-9$][\w.\-$]*", re.ASCII)
_BLOB_HOST = re.compile(r"(?P<account>[a-z0-9\-]+)\.(?:blob|dfs)\.[\w.\-]+", re.ASCII)
_EXPECTED = {
    "s3": "s3://BUCKET/PATH or s3://https://HOST:PORT/BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "as": "as://ACCOUNT/CONTAINER/PATH",
    "az": "az://CONTAINER/PATH",
    "abfss": "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
    "https": "https://ACCOUNT.blob.core.windows.net/CONTAINER/PATH, or the URL of one file",
}


class Location(NamedTuple):
    """A location in a cloud.

    Attributes:
        cloud: ``s3``, ``gs``, ``az`` or ``http``.
        bucket: bucket or container; "" for ``http``.
        path: the path in the bucket without surrounding slashes; "" for all of it.
        url: the URL as given, without secrets; the key for credential look-up.
        endpoint: the server's ``https://host``; "" for the cloud's default.
        account: Azure's storage account; "" if the environment provides it.
        sas: the signature of an Azure URL, or the query of any other.
    """

    cloud: str
    bucket: str
    path: str
    url: str
    endpoint: str = ""
    account: str = ""
    sas: Secret = Secret("")

    @property
    def name(self) -> str:
        """The last part of the path, or the bucket."""
        return self.path.rpartition("/")[2] or self.bucket


def is_url(text: str) -> bool:
    """Return True for a storage URL, False for a local path."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and scheme.lower() in SCHEMES


def parse_location(url: str) -> Location:
    """Parse a storage URL.

    Raises InvalidArgumentError for an invalid one; the text omits user and query, which may be secrets.
    """
    scheme, mark, rest = url.partition("://")
    shown, _, query = url.partition("?")
    scheme = scheme.lower()
    is_container = scheme in ("abfs", "abfss") and ":" not in rest.partition("@")[0]
    safe_url = shown if is_container else shown_place(shown)
    if not mark or scheme not in SCHEMES:
        raise InvalidArgumentError(f"'{safe_url}' is not a supported model location: {', '.join(_EXPECTED.values())}")
    rest = rest.partition("?")[0]
    if any(part in (".", "..") for part in rest.split("/")):
        raise InvalidArgumentError(f"'{safe_url}' has '.' or '..' in its path, which is not allowed")
    match scheme:
        case "s3":
            found = _s3(rest)
        case "as":
            found = _as(rest)
        case "gs":
            found = Location("gs", *_bucket(rest), "")
        case "az" | "azure":
            found = Location("az", *_bucket(rest), "")
        case "abfs" | "abfss":
            found = _abfs(rest)
        case _:
            found = _web(scheme, rest)
    if found is None or (found.cloud != "http" and not _BUCKET.fullmatch(found.bucket)):
        expected = (
            _EXPECTED.get(scheme) or _EXPECTED["az" if scheme == "azure" else "abfss" if scheme == "abfs" else "https"]
        )
        raise InvalidArgumentError(f"cannot read '{safe_url}' as a model location: expected {expected}")
    return found._replace(url=shown.rstrip("/"), sas=Secret(query))


def _bucket(rest: str) -> tuple[str, str]:
    bucket, _, path = rest.partition("/")
    return bucket, _clean(path)


def _clean(path: str) -> str:
    return "/".join(part for part in path.split("/") if part)


def _s3(rest: str) -> Location | None:
    match = _ENDPOINT.match(rest)
    if match is None or not (match["scheme"] or match["port"]):
        return Location("s3", *_bucket(rest), "")
    # Like Triton, a host without a scheme is contacted without TLS.
    return Location(
        "s3", *_bucket(match["rest"]), "", f"{match['scheme'] or 'http://'}{match['host']}{match['port'] or ''}"
    )


def _as(rest: str) -> Location | None:
    host, _, below = rest.partition("/")
    if not host:
        return None
    account, dot, _ = host.partition(".")
    return Location("az", *_bucket(below), "", f"https://{host}" if dot else "", account)


def _abfs(rest: str) -> Location | None:
    container, at, below = rest.partition("@")
    if not at:
        return Location("az", *_bucket(rest), "")
    host, _, path = below.partition("/")
    known = _BLOB_HOST.fullmatch(host)
    return Location("az", container, _clean(path), "", "", known["account"]) if known else None


def _web(scheme: str, rest: str) -> Location | None:
    parts = urlsplit(f"{scheme}://{rest}")
    host = parts.hostname or ""
    known = _BLOB_HOST.fullmatch(host)
    if known and host.split(".")[1] in ("blob", "dfs"):
        return Location(
            "az", *_bucket(unquote(parts.path).strip("/")), "", f"{scheme}://{parts.netloc}", known["account"]
        )
    if not host or parts.username or not _clean(parts.path):
        return None
    return Location("http", "", _clean(unquote(parts.path)), "", f"{scheme}://{parts.netloc}")
