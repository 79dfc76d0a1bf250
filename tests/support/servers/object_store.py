"""Double of S3, Google's XML API and Azure's Blob service on loopback, with request counts and faults.

It supports what readers need, paged listings, HEAD and GET with ranges and If-Match, and uploads: PUT of a whole
object, the three calls of a multipart upload, as S3 and Google's XML API document them, and Azure's blocks. It checks
no signatures, but keeps the headers of requests for tests.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

MODIFIED = "Sat, 01 Nov 2025 00:00:00 GMT"


@dataclass
class Seen:
    """Received request."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]

    @property
    def kind(self) -> str:
        """Kind of request: LIST, HEAD or GET."""
        is_listing = "list-type" in self.query or self.query.get("comp") == ["list"]
        return "LIST" if self.method == "GET" and is_listing else self.method


@dataclass
class ObjectStore:
    """Buckets by name with contents by key."""

    buckets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    parts: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """Parts of multipart uploads that are not complete, by key and number or name."""
    requests: list[Seen] = field(default_factory=list)
    page: int = 1000
    port: int = 0
    before: Callable[[Seen], None] = lambda seen: None
    """Called before each request is answered; may wait."""
    connected: Callable[[], object] = lambda: None
    """Called when a client connects; may wait."""
    bytes_per_s: float = 0.0
    pause: Callable[[float], object] = threading.Event().wait
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process finds this double and has keys for it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AK",
            "AWS_SECRET_ACCESS_KEY": "very-secret-key",
            "STORAGE_EMULATOR_HOST": self.url,
            "AZURE_STORAGE_ENDPOINT": self.url,
            "AZURE_STORAGE_ACCOUNT": "account",
            "AZURE_STORAGE_KEY": "dmVyeS1zZWNyZXQta2V5",
        }

    def put(self, bucket: str, key: str, content: bytes, etag: str = "") -> None:
        with self._lock:
            self.buckets.setdefault(bucket, {})[key] = content
            self.etags[f"{bucket}/{key}"] = etag or f'"{hashlib.md5(content).hexdigest()}"'

    def fail(self, kind: str, on: str = "GET", key: str = "", times: int = 1) -> None:
        """Make the next ``times`` such requests fail: 503, 403, reset, truncated or damaged."""
        self.faults += [(kind, on, key)] * times

    def count(self, kind: str) -> int:
        return sum(seen.kind == kind for seen in self.requests)

    def fault_for(self, seen: Seen) -> str:
        with self._lock:
            self.requests.append(seen)
            for fault in self.faults:
                if seen.kind == fault[1] and fault[2] in seen.key:
                    self.faults.remove(fault)
                    return fault[0]
        return ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: ObjectStore

    def setup(self) -> None:
        super().setup()
        self.store.connected()

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_PUT(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        seen = Seen("PUT", f"{bucket}/{key}", query, {})
        if self.store.fault_for(seen):
            return self._send(403, b"<Error><Code>AccessDenied</Code><Message>on order</Message></Error>")
        if bucket not in self.store.buckets:
            return self._send(404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
        match query:
            case {"uploadId": _, "partNumber": [name]} | {"comp": ["block"], "blockid": [name]}:
                self.store.parts[f"{bucket}/{key}", name] = content
                etag = f'"{hashlib.md5(content).hexdigest()}"'
            case _:
                if query.get("comp") == ["blocklist"]:
                    names = re.findall(r"<Uncommitted>([^<]+)</Uncommitted>", content.decode())
                    content = b"".join(self.store.parts.pop((f"{bucket}/{key}", name)) for name in names)
                self.store.put(bucket, key, content)
                etag = self.store.etags[f"{bucket}/{key}"]
        return self._send(201 if "x-ms-version" in self.headers else 200, b"", {"ETag": etag})

    def do_POST(self) -> None:
        """Begin a multipart upload, or complete it with the parts that the body lists."""
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.store.requests.append(Seen("POST", f"{bucket}/{key}", query, {}))
        if "uploads" in query:
            named = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>1</UploadId>"
            answer = f"<InitiateMultipartUploadResult>{named}</InitiateMultipartUploadResult>"
            return self._send(200, answer.encode())
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body)]
        assert numbers == sorted(numbers)
        content = b"".join(self.store.parts.pop((f"{bucket}/{key}", str(number))) for number in numbers)
        self.store.put(bucket, key, content)
        etag = escape(self.store.etags[f"{bucket}/{key}"])
        answer = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        return self._send(200, answer.encode())

    def _answer(self, *, body: bool) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        seen = Seen(
            self.command, f"{bucket}/{key}", query, {name.lower(): value for name, value in self.headers.items()}
        )
        fault = self.store.fault_for(seen)
        self.store.before(seen)
        if fault in ("503", "403"):
            return self._send(int(fault), b"<Error><Code>Fault</Code><Message>on order</Message></Error>")
        if bucket not in self.store.buckets:
            return self._send(404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
        if seen.kind == "LIST":
            listing = self._s3_listing if "list-type" in query else self._azure_listing
            return self._send(200, listing(bucket, query))
        return self._object(bucket, key, fault, body=body)

    def _page(self, bucket: str, query: dict[str, list[str]], token: str) -> tuple[list[str], list[str], str]:
        """Return the keys and the folders of a page, and the last key if there is another page."""
        prefix = query.get("prefix", [""])[0]
        keys = sorted(key for key in self.store.buckets[bucket] if key.startswith(prefix) and key > token)
        folders: list[str] = []
        if "delimiter" in query:
            parts = {key: key.removeprefix(prefix).split("/") for key in keys}
            folders = sorted({f"{prefix}{pieces[0]}/" for pieces in parts.values() if len(pieces) > 1})
            keys = [key for key, pieces in parts.items() if len(pieces) == 1]
        page = keys[: self.store.page]
        return page, folders, page[-1] if len(keys) > self.store.page else ""

    def _s3_listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        page, folders, more = self._page(bucket, query, query.get("continuation-token", [""])[0])
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.store.buckets[bucket][key])}</Size>"
            f"<LastModified>2025-11-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.store.etags[f'{bucket}/{key}'])}</ETag></Contents>"
            for key in page
        )
        after = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{after}{rows}"
            + "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
            + "</ListBucketResult>"
        ).encode()

    def _azure_listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        page, folders, more = self._page(bucket, query, query.get("marker", [""])[0])
        rows = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified>"
            f"<Etag>{escape(self.store.etags[f'{bucket}/{key}'])}</Etag>"
            f"<Content-Length>{len(self.store.buckets[bucket][key])}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key in page
        )
        rows += "".join(f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in folders)
        return (
            f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker>{escape(more)}</NextMarker></EnumerationResults>"
        ).encode()

    def _object(self, bucket: str, key: str, fault: str, *, body: bool) -> None:
        content = self.store.buckets[bucket].get(key)
        if content is None:
            return self._send(404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")
        etag = self.store.etags[f"{bucket}/{key}"]
        if self.headers.get("If-Match") not in (None, etag):
            return self._send(412, b"<Error><Code>PreconditionFailed</Code><Message>other</Message></Error>")
        status, extra, data = 200, {}, content
        if self.headers.get("Range"):
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            data = content[int(first) : int(last) + 1]
            end = int(first) + len(data) - 1
            status, extra = 206, {"Content-Range": f"bytes {first}-{end}/{len(content)}"}
        if fault == "damaged":
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self._send(status, data, {"ETag": etag, "Last-Modified": MODIFIED, **extra}, fault, body=body)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, fault: str = "", *, body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body or self.command == "HEAD":
            return
        if fault in ("reset", "truncated"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        view = memoryview(data)
        piece = 1 << 16 if self.store.bytes_per_s else len(data)
        for start in range(0, len(data), piece or 1):
            self.wfile.write(view[start : start + piece])
            if self.store.bytes_per_s:
                self.store.pause(piece / self.store.bytes_per_s)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Ignore disconnects, which some tests cause."""


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a listening double."""
    store = ObjectStore()
    handler = type("Handler", (_Handler,), {"store": store})
    server = _Server(("127.0.0.1", 0), handler)
    store.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def store_of_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Run a double with an empty ``bucket``, at which the variables of this process point."""
    for name in ("AWS_PROFILE", "TRITON_CLOUD_CREDENTIAL_PATH", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3",
                 "AZURE_STORAGE_AUTH_TYPE", "AZURE_STORAGE_CLIENT_ID"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    with object_store() as store:
        store.buckets["bucket"] = {}
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store
