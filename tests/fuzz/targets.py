"""Readers of bytes from outside, each with a corpus and a check of what it does with an input."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import sys
import tarfile
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import contextlib

from remora.config.reading import parse_config
from remora.errors import ConfigError, RemoraError
from remora.model_files import CONFIG_SYNTAX
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.framing import Messages, framed
from remora.protocols.grpc.infer import InferMemo, decode_infer, read_infer
from remora.protocols.http2.frames import (
    CONTINUATION,
    DATA,
    HEADERS,
    INITIAL_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    frame,
    pack,
    window_update,
)
from remora.protocols.json.reader import JsonTextError, parse, parse_members
from remora.protocols.rest.answer import Refusal
from remora.protocols.rest.content_encoding import inflate
from remora.protocols.rest.infer import InferCodec
from remora.server.http.held_bytes import HeldBytes
from remora.server.http.http1_listener import Listener
from remora.server.http.http2 import Http2Listener
from remora.server.http.http2_requests import Requests
from remora.storage.archive import ArchiveLimits, unpack
from support.engine.fakes import FakeService, FakeTransport

LIMIT_BYTES = 1 << 20


class Target(ABC):
    """Reader of bytes from outside."""

    words: Sequence[bytes] = ()
    """Pieces that mean something in the format."""

    @abstractmethod
    def corpus(self) -> list[bytes]:
        """Return valid inputs."""

    def close(self) -> None:  # noqa: B027 - most targets hold nothing
        """Release what the target holds."""

    @abstractmethod
    def check(self, data: bytes) -> None:
        """Read an input. Raises for anything but the errors that the reader documents."""


class _Errors(logging.Handler):
    """Keeps the failures that connections log instead of raising them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class Wire(Target):
    """Connection over a fake transport, whose bytes arrive in pieces."""

    def __init__(self) -> None:
        self._errors = _Errors()
        self._log = logging.getLogger("remora.http")
        self._loop = asyncio.new_event_loop()

    def connection(self, service: FakeService, held: HeldBytes) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self._loop.close()

    def check(self, data: bytes) -> None:
        held, service, transport = HeldBytes(), FakeService(wait=zlib.crc32(data) % 2 == 0), FakeTransport()
        cuts = random.Random(data)

        async def play() -> None:
            connection = self.connection(service, held)
            connection.connection_made(transport)
            view = memoryview(data)
            while view and not transport.closing:
                if not transport.reading:
                    await asyncio.sleep(0)
                    if not transport.reading:
                        break
                receiver = transport.protocol or connection  # another one after a refusal
                buffer = receiver.get_buffer(-1)
                count = min(len(buffer), len(view), cuts.choice((1, 10, 1_000, 1 << 20)))
                assert count, "the transport was given an empty buffer"
                buffer[:count] = view[:count]
                receiver.buffer_updated(count)
                view = view[count:]
                if service.waiting and cuts.random() < 0.5:
                    service.answer()
            receiver = transport.protocol or connection
            keeps = receiver.eof_received()
            if keeps and cuts.random() < 0.8:  # the client has half-closed, and reads on
                for _ in range(len(data) + 10):
                    await asyncio.sleep(0)
                    if service.waiting:
                        service.answer()
                    if transport.closing:
                        break
                assert transport.closing, "a half-closed connection without a request stays open"
            await asyncio.sleep(0)
            receiver.connection_lost(None)

        self._log.addHandler(self._errors)
        try:
            self._loop.run_until_complete(play())
        finally:
            self._log.removeHandler(self._errors)
        found, self._errors.found = self._errors.found, []
        assert not found, found[0]
        assert held.total == 0, "bytes of a connection that has ended are still counted"


class Http1(Wire):
    """Connections of HTTP/1.1."""

    words = (
        b"\r\n", b"\n", b"\r", b": ", b",", b";", b"\0", b"chunked", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1",
        b"HTTP/1.0", b"Content-Length: ", b"Expect: 100-continue\r\n", b"0\r\n\r\n", b"\r\n\r\n",
        b"Connection: close\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"\x16\x03\x01", b"POST /a HTTP/1.1\r\nHost: h\r\n",
    )  # fmt: skip

    def connection(self, service: FakeService, held: HeldBytes) -> Any:
        return Listener(service, max_body_bytes=LIMIT_BYTES, held=held).connection()

    def corpus(self) -> list[bytes]:
        get, post = (
            b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n",
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n",
        )
        return [
            get,
            get * 40,
            post + b"Content-Length: 5\r\n\r\nhello" + get,
            post + b"Content-Length: 30000\r\n\r\n" + b"x" * 30_000 + get,
            post + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n" + get,
            post + b"Transfer-Encoding: chunked\r\n\r\n5000\r\n" + b"y" * 0x5000 + b"\r\n0\r\n\r\n",
            post + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
            b"GET /a?b=c HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + get,
            b"HEAD http://h/a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        ]


class Http2(Wire):
    """Connections of HTTP/2."""

    def __init__(self) -> None:
        super().__init__()
        fields = ((":method", "POST"), (":scheme", "http"), (":authority", "h"), (":path", "/v2/models/m/infer"))
        self._blocks = [
            pack(tuple((name.encode(), value.encode()) for name, value in fields)),
            hpack.Encoder().encode([*fields, ("x-more", "a" * 50), ("content-length", "5")]),
        ]
        self.words = (
            *(frame(kind, flags, 1, b"") for kind in range(12) for flags in (0, 1, 4, 5, 8, 32)),
            window_update(0, 1), window_update(1, 65_535), frame(RST_STREAM, 0, 1, b"\0\0\0\x08"),
            frame(PING, 0, 0, bytes(8)), *(frame(HEADERS, 5, number, self._blocks[0]) for number in (1, 3, 5, 7)),
        )  # fmt: skip

    def connection(self, service: FakeService, held: HeldBytes) -> Any:
        return Http2Listener(
            lambda _fields: lambda _stream: None, Requests(service, LIMIT_BYTES).open, held=held
        ).connection()

    def corpus(self) -> list[bytes]:
        greeting, closed = PREFACE + frame(SETTINGS, 0, 0, b""), SETTING.pack(INITIAL_WINDOW, 0)
        plain, packed = self._blocks
        body = b"".join(frame(DATA, 0, 3, b"x" * 16_384) for _ in range(3)) + frame(DATA, 1, 3, b"x")
        return [
            greeting + frame(HEADERS, 5, 1, plain),
            greeting + frame(HEADERS, 4, 1, packed) + frame(DATA, 1, 1, b"hello"),
            greeting + frame(HEADERS, 4, 3, plain) + body,
            greeting + frame(HEADERS, 0, 1, plain[:9]) + frame(CONTINUATION, 4, 1, plain[9:]) + frame(DATA, 1, 1, b"x"),
            PREFACE
            + frame(SETTINGS, 0, 0, closed)
            + frame(HEADERS, 5, 1, plain)
            + window_update(1, 5)
            + window_update(1, 100),
            greeting + b"".join(frame(HEADERS, 5, number, plain) for number in range(1, 60, 2)),
            greeting
            + frame(HEADERS, 4, 1, plain)
            + frame(RST_STREAM, 0, 1, b"\0\0\0\x08")
            + frame(PING, 0, 0, bytes(8)),
            greeting
            + frame(HEADERS, 4, 1, plain)
            + frame(DATA, 8, 1, b"\x03abc\0\0\0")
            + frame(HEADERS, 5, 1, b"\0\x01a\x01b"),
        ]


class Protobuf(Target):
    """Messages of gRPC inference, framed."""

    words = (
        b"\0\0\0\0\x05",
        b"\x01",
        b"\x0a\x01m",
        b"\x2a",
        b"\x32",
        b"\x3a",
        b"\xff\xff\xff\xff\x0f",
        b"FP32",
        b"BYTES",
    )

    def corpus(self) -> list[bytes]:
        tensor: Any = pb.ModelInferRequest.InferInputTensor
        asked: Any = pb.ModelInferRequest.InferRequestedOutputTensor
        contents = pb.InferTensorContents(fp32_contents=[1.0, 2.0])
        parameters: Any = {"priority": pb.InferParameter(int64_param=1), "x": pb.InferParameter(string_param="y")}
        requests = [
            pb.ModelInferRequest(
                model_name="m", inputs=[tensor(name="A", datatype="FP32", shape=[2])], raw_input_contents=[bytes(8)]
            ),
            pb.ModelInferRequest(
                model_name="m", model_version="1", id="i", parameters=parameters,
                inputs=[tensor(name="A", datatype="FP32", shape=[2], contents=contents)], outputs=[asked(name="B")],
            ),
            pb.ModelInferRequest(
                model_name="m", raw_input_contents=[b"\x02\0\0\0ab\0\0\0\0"],
                inputs=[tensor(name="A", datatype="BYTES", shape=[2])],
            ),
        ]  # fmt: skip
        messages = [request.SerializeToString() for request in requests]
        return [
            *(framed(each) for each in messages),
            framed(messages[0] * 50, b"gzip"),
            framed(messages[1], b"deflate"),
        ]

    def check(self, data: bytes) -> None:
        reader = Messages(LIMIT_BYTES, b"gzip")
        try:
            messages = [reader.plain(each) for each in reader.feed(data)]
        except RemoraError:
            messages = [data[5:]]
        memo = InferMemo()
        for message in messages:
            try:
                request = read_infer(message)
                memo.learn(message, request, request.decode())
                memo.recall(message)
            except RemoraError:
                pass
            with contextlib.suppress(RemoraError):
                decode_infer(message)


class Json(Target):
    """JSON texts and V2 requests over HTTP."""

    words = (
        b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"\\u0000",
        b"\\ud800", b"\xff", b'"data"', b'"shape"', b'"binary_data_size"', b'"parameters"', b"9223372036854775808",
    )  # fmt: skip

    def corpus(self) -> list[bytes]:
        inputs: list[dict[str, Any]] = [
            {"name": "A", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3e5, 0]]},
            {"name": "B", "datatype": "BYTES", "shape": [2], "data": ["a", "\u20ac\n"]},
            {"name": "C", "datatype": "BOOL", "shape": [1], "data": [True]},
            {"name": "D", "datatype": "INT64", "shape": [1], "data": [-1]},
        ]
        request = {
            "id": "i", "parameters": {"sequence_id": 1, "sequence_start": True, "x": 1.5}, "inputs": inputs,
            "outputs": [{"name": "O", "parameters": {"binary_data": True}}],
        }  # fmt: skip
        binary = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
        texts = [json.dumps(each).encode() for each in (request, binary, inputs[0], [], "a", 1)]
        return [
            *texts,
            texts[1] + bytes(8),
            zlib.compress(texts[0]),
            b'{"inputs":[{"name":"A","datatype":"FP32","shape":[1],"data":[NaN]}]}',
        ]

    def check(self, data: bytes) -> None:
        for read in (parse, parse_members):
            try:
                read(data)
            except JsonTextError as error:
                offset = error.offset
            else:
                offset = 0
            assert 0 <= offset <= len(data) + 8
        codec = InferCodec()
        stop = data.rfind(b"}") + 1
        for length in (None, b"%d" % stop, b"0", b"-1"):
            with contextlib.suppress(Refusal, RemoraError):
                codec.decode(data, length, {}, "m")
        with contextlib.suppress(Refusal, RemoraError):
            inflate(data, b"deflate", LIMIT_BYTES)


class Config(Target):
    """Model configurations in three notations."""

    words = (
        b"{", b"}", b"[", b"]", b":", b'"', b"name", b"input", b"dims", b"instance_group", b"KIND_GPU", b"TYPE_FP32",
        b"dynamic_batching", b"&a", b"*a", b"!!python/object", b"\n- ", b"\n  ", b"#", b"\\x", b"\xc3\x28", b"<<: ",
    )  # fmt: skip

    def corpus(self) -> list[bytes]:
        text = (
            b'name: "m" backend: "onnxruntime" max_batch_size: 8\n'
            b'input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]\n'
            b'output { name: "B" data_type: TYPE_STRING dims: 1 }\ninstance_group [ { kind: KIND_CPU count: 2 } ]\n'
            b"dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }\n"
            b'parameters { key: "a" value { string_value: "b" } }\nversion_policy { specific { versions: [ 1 ] } }\n'
        )
        tree = {
            "name": "m",
            "backend": "python",
            "max_batch_size": 4,
            "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1]}],
        }
        yaml = b"name: m\nbackend: python\ninput:\n  - name: A\n    data_type: TYPE_FP32\n    dims: [-1, 2]\n"
        return [text, json.dumps(tree).encode(), yaml]

    def check(self, data: bytes) -> None:
        text = data[:8_192].decode("utf-8", "replace")
        for syntax in set(CONFIG_SYNTAX.values()):
            with contextlib.suppress(ConfigError):
                parse_config(text, path="config", syntax=syntax)


class Archives(Target):
    """Archives of models and environments."""

    words = (
        b"../",
        b"/",
        b"\0",
        b"ustar",
        b"PK\x03\x04",
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"\x1f\x8b\x08",
        b"0000777\0",
        b"2",
        b"1",
    )

    def corpus(self) -> list[bytes]:
        made = []
        for mode in ("w", "w:gz"):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode=mode) as tar:  # type: ignore[call-overload]
                for name, kind, link in (
                    ("a", tarfile.DIRTYPE, ""),
                    ("a/b", tarfile.REGTYPE, ""),
                    ("c", tarfile.SYMTYPE, "a/b"),
                ):
                    info = tarfile.TarInfo(name)
                    info.type, info.linkname, info.size = kind, link, 20 if kind == tarfile.REGTYPE else 0
                    tar.addfile(info, io.BytesIO(b"x" * info.size))
            made.append(packed.getvalue()[:4_096] if mode == "w" else packed.getvalue())
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w", method) as zipped:
                zipped.writestr("a/b", b"x" * 50)
                zipped.writestr("c", b"")
            made.append(packed.getvalue())
        return made

    def check(self, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            archive, inside = root / "archive", root / "inside"
            archive.write_bytes(data)
            with contextlib.suppress(ConfigError):
                unpack(archive, inside, ArchiveLimits(total_bytes=LIMIT_BYTES))
            assert {each.name for each in root.iterdir()} <= {"archive", "inside"}, "a member left the archive"
            for path in inside.rglob("*"):
                assert path.resolve().is_relative_to(inside.resolve()), "a link leads outside"


TARGETS: dict[str, type[Target]] = {
    "http1": Http1,
    "http2": Http2,
    "protobuf": Protobuf,
    "json": Json,
    "config": Config,
    "archives": Archives,
}
