"""What a server makes another client wait while one client sends as much work as its connection takes.

Two figures have a bound, which a busy machine can judge too: the part of a wait that the server caused
(`processor_time`), and the time for which one step of the server kept the interpreter (`hold_probe`). The wait itself
and the processor time of the server are printed. `make test-security` asserts 0.1 s for both figures, other runs 0.5 s.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import free_ports
from remora.proto import inference_pb2 as pb
from remora.protocols.http2.frames import DATA, HEADERS, PREFACE, SETTINGS, frame, pack, window_update
from support.process.eventually import eventually
from support.process.processor_time import Account
from support.servers.bystanders import Bystander, Holds
from support.servers.live_server import CONFIG, PATIENCE_S, process, until, write_version
from support.wire.grpc_infer_requests import request

hpack = pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

MODELS = 20
ATTACK_S = 2.0
LIMIT_S = float(os.environ.get("BYSTANDER_S", "0.5"))
IDLE_LOOKS = 5
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
"""
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


def pipelined(path: bytes) -> bytes:
    return GET % path * (256_000 // len(GET % path))


def opened(path: bytes, streams: int) -> bytes:
    block = pack(((b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", path)))
    return b"".join(frame(HEADERS, 5, 2 * number + 1, block) for number in range(streams))


def no_window() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0")


def posted(body: bytes, *headers: bytes, path: bytes = b"/v2/models/m0/infer") -> bytes:
    lines = (b"POST %b HTTP/1.1" % path, b"Host: localhost", b"Content-Length: %d" % len(body), *headers)
    return b"\r\n".join((*lines, b"", body))


def numbers(text: bytes, size: int) -> bytes:
    count = size // (len(text) + 1)
    head = b'{"inputs":[{"name":"IN","datatype":"INT32","shape":[%d,1],"data":[' % count
    return head + b",".join([text] * count) + b"]}]}"


def echoed(text: bytes, size: int, datatype: bytes) -> bytes:
    """A request to a model that returns its inputs."""
    count = size // (len(text) + 1)
    head = b'{"inputs":[{"name":"IN","datatype":"%b","shape":[%d],"data":[' % (datatype, count)
    return head + b",".join([text] * count) + b"]}]}"


def posted_over_http2(body: bytes, count: int) -> bytes:
    """The same as `posted` on ``count`` streams of one connection."""
    names, path = (b":method", b":scheme", b":authority", b":path"), b"/v2/models/m0/infer"
    block = pack(tuple(zip(names, (b"POST", b"http", b"localhost", path), strict=True)))
    parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    requests = [
        frame(HEADERS, 4, 2 * number + 1, block)
        + b"".join(frame(DATA, int(part is parts[-1]), 2 * number + 1, part) for part in parts)
        for number in range(count)
    ]
    return PREFACE + frame(SETTINGS, 0, 0, b"") + b"".join(requests)


def grpc_bombs(count: int) -> bytes:
    """Calls with messages of 15 kB that inflate to 15 MB."""
    packed = gzip.compress(bytes(15 << 20))
    message = b"\1" + len(packed).to_bytes(4, "big") + packed
    calls = [grpc_call(message, 2 * call + 1) for call in range(count)]
    return PREFACE + frame(SETTINGS, 0, 0, b"") + b"".join(calls)


def grpc_call(message: bytes, stream: int) -> bytes:
    """A call of ModelInfer with a message in its frame of gRPC."""
    names = (b":method", b":scheme", b":authority", b":path", b"content-type", b"te", b"grpc-encoding")
    path = b"/inference.GRPCInferenceService/ModelInfer"
    fields = zip(names, (b"POST", b"http", b"localhost", path, b"application/grpc", b"trailers", b"gzip"), strict=True)
    parts = [message[at : at + 16_384] for at in range(0, len(message), 16_384)]
    frames = [frame(DATA, int(number == len(parts)), stream, part) for number, part in enumerate(parts, 1)]
    return frame(HEADERS, 4, stream, pack(tuple(fields))) + b"".join(frames)


def element(text: bytes) -> bytes:
    """An element of BYTES as raw data."""
    return len(text).to_bytes(4, "little") + text


def raw_texts(text: bytes, size: int, model: bytes = b"texts") -> bytes:
    """A request with elements of BYTES as raw data, which asks for its answer in the same form."""
    data = element(text) * (size // len(element(text)))
    count, name = size // len(element(text)), b"/v2/models/%b/infer" % model
    head = (
        b'{"inputs":[{"name":"IN","datatype":"BYTES","shape":[%d],"parameters":{"binary_data_size":%d}}],'
        b'"parameters":{"binary_data_output":true}}' % (count, len(data))
    )
    return posted(head + data, b"Inference-Header-Content-Length: %d" % len(head), path=name)


def grpc_texts(text: bytes, size: int) -> bytes:
    """The same as a call of ModelInfer, for an answer that is read."""
    data = element(text) * (size // len(element(text)))
    request = pb.ModelInferRequest(model_name="texts", raw_input_contents=[data])
    request.inputs.add(name="IN", datatype="BYTES", shape=[size // len(element(text))])
    message = request.SerializeToString()
    return PREFACE + frame(SETTINGS, 0, 0, b"") + grpc_call(b"\0" + len(message).to_bytes(4, "big") + message, 1)


def long_to_decode(count: int) -> bytes:
    """Requests with a header of 15 kB in Huffman's code."""
    names, answers = (b":method", b":scheme", b":authority", b":path"), (b"GET", b"http", b"localhost", b"/readyz")
    field = hpack.NeverIndexedHeaderTuple(b"x", b"a" * 24_000)
    block = pack(tuple(zip(names, answers, strict=True))) + hpack.Encoder().encode([field], huffman=True)
    frames = b"".join(frame(HEADERS, 5, 2 * number + 1, block) for number in range(count))
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frames


def unread_answers(count: int) -> bytes:
    """Calls of a model that returns their 4 MB, by a client that opens no window for answers."""
    size = 1_000_000
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[size])
    message = request(tensor, raw=(bytes(4 * size),), model_name="numbers")
    names = (b":method", b":scheme", b":authority", b":path", b"content-type", b"te")
    path = b"/inference.GRPCInferenceService/ModelInfer"
    block = pack(
        tuple(zip(names, (b"POST", b"http", b"localhost", path, b"application/grpc", b"trailers"), strict=True))
    )
    body = b"\0" + len(message).to_bytes(4, "big") + message
    parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    calls = [
        frame(HEADERS, 4, 2 * call + 1, block)
        + b"".join(frame(DATA, int(part is parts[-1]), 2 * call + 1, part) for part in parts)
        for call in range(count)
    ]
    return no_window() + b"".join(calls)


def values(text: bytes, size: int) -> bytes:
    """An object with the input of the model, as plain JSON and generate take it."""
    return b'{"IN":[' + b",".join([text] * (size // (len(text) + 1))) + b"]}"


ATTACKS: dict[str, tuple[str, bytes, str]] = {
    "metrics, pipelined on their port": ("metrics", pipelined(b"/metrics"), "200"),
    "metrics, pipelined on the HTTP port": ("http", pipelined(b"/v2/metrics"), "200"),
    "statistics, pipelined": ("http", pipelined(b"/v2/models/stats"), "200"),
    "metrics over HTTP/2": ("http", PREFACE + frame(SETTINGS, 0, 0, b"") + opened(b"/v2/metrics", 1_000), "200"),
    "updates of windows with 1,000 paused streams": (
        "http",
        no_window() + opened(b"/v2/models/stats", 1_000) + window_update(0, 1) * 20_000,
        "200",
    ),
    "chunks of one byte": (
        "http",
        b"POST /v2/models/m0/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nx\r\n" * 65_000
        + b"0\r\n\r\n",
        "500",
    ),
    "16 MB of numbers as JSON": ("http", posted(numbers(b"1234567", 16 << 20)), "400"),
    "16 MB of rows as plain JSON": ("http", posted(values(b"[1234567]", 16 << 20), path=b"/models/m0"), "400"),
    "16 MB of numbers for generate": (
        "http",
        posted(values(b"1234567", 16 << 20), path=b"/v2/models/m0/generate"),
        "400",
    ),
    "16 MB of texts as JSON": ("http", posted(numbers(b'"abcdefg"', 16 << 20)), "500"),
    "16 MB of members as JSON": (
        "http",
        posted(b"{%b}" % b",".join(b'"a%d":1' % number for number in range(1_400_000))),
        "400",
    ),
    "16 MB of spaces as JSON": ("http", posted(b" " * (16 << 20)), "500"),
    "4 MB of NaN as JSON": ("http", posted(numbers(b"NaN", 4 << 20)), "500"),
    "240 kB of NaN as JSON, pipelined": ("http", posted(numbers(b"NaN", 240_000)) * 40, "500"),
    "240 kB of empty arrays with a fault at the end, pipelined": (
        "http",
        posted(numbers(b"[]", 240_000)[:-4] + b",x]}]}") * 40,
        "500",
    ),
    "60 kB of NaN as JSON on each stream of HTTP/2": ("http", posted_over_http2(numbers(b"NaN", 60_000), 200), "500"),
    "200 bytes that inflate to 60 kB of NaN, pipelined": (
        "http",
        posted(gzip.compress(numbers(b"NaN", 60_000)), b"Content-Encoding: gzip") * 400,
        "500",
    ),
    "240 kB of one name for generate, pipelined": (
        "http",
        posted(b"{%b}" % b",".join([b'"x":1'] * 40_000), path=b"/v2/models/m0/generate") * 40,
        "400",
    ),
    "16 MB of NaN for the settings of logs": (
        "http",
        posted(b"[%bNaN]" % (b"NaN," * (4 << 20)), path=b"/v2/logging"),
        "500",
    ),
    "16 kB that inflate to 4 MB of arrays": (
        "http",
        posted(gzip.compress(b"[" + b"[]," * 1_300_000), b"Content-Encoding: gzip"),
        "500",
    ),
    "16 MB of rows as JSON": ("http", posted(numbers(b"[1234567]", 16 << 20)), "400"),
    "16 MB of empty arrays as JSON": ("http", posted(numbers(b"[]", 16 << 20)), "500"),
    "16 MB of numbers with a fault at the end": (
        "http",
        posted(numbers(b"1234567", 16 << 20)[:-4] + b",NaN,x]}]}"),
        "500",
    ),
    "16 MB of numbers, answered as JSON": (
        "http",
        posted(echoed(b"12345.67", 16 << 20, b"FP32"), path=b"/v2/models/numbers/infer"),
        "200",
    ),
    "16 MB of numbers, answered by generate": (
        "http",
        posted(values(b"12345.67", 16 << 20), path=b"/v2/models/numbers/generate"),
        "200",
    ),
    "16 MB of numbers, answered as plain JSON": (
        "http",
        posted(values(b"12345.67", 16 << 20), path=b"/models/numbers"),
        "200",
    ),
    "16 MB of texts with escapes, answered as JSON": (
        "http",
        posted(echoed(b'"a\\n\\"c:"', 16 << 20, b"BYTES"), path=b"/v2/models/texts/infer"),
        "200",
    ),
    "16 MB of one text, answered as JSON": (
        "http",
        posted(echoed(b'"%b"' % (b"x" * ((16 << 20) - 256)), 16 << 20, b"BYTES"), path=b"/v2/models/texts/infer"),
        "200",
    ),
    "gRPC messages of 15 kB that inflate to 15 MB": ("http", grpc_bombs(4), "200 8"),
    "9 MB of header blocks that take long to decode": ("http", long_to_decode(600), "200"),
    "32 MB of gRPC answers that are not read": ("http", unread_answers(8), "200"),
    "63 MB of numbers as JSON": ("http", posted(numbers(b"1234567", 63 << 20)), "400"),
    "63 MB of numbers, answered as JSON": (
        "http",
        posted(echoed(b"12345.67", 63 << 20, b"FP32"), path=b"/v2/models/numbers/infer"),
        "200",
    ),
    "16 MB of texts as raw data": ("http", raw_texts(b"abc", 16 << 20), "200"),
    "16 MB of texts as raw data over gRPC": ("http", grpc_texts(b"abc", 16 << 20), "200"),
    "16 MB of numbers, answered as an event": (
        "http",
        posted(values(b"12345.67", 16 << 20), path=b"/v2/models/numbers/generate_stream"),
        "200",
    ),
    "16 MB of JSON, compressed": (
        "http",
        posted(gzip.compress(numbers(b"1234567", 16 << 20), 1), b"Content-Encoding: gzip"),
        "400",
    ),
}
"""By name: the port, the bytes, and the status of the first answer, with that of gRPC."""


class Attacked(NamedTuple):
    """A running server: its ports, its process, and what its probe writes."""

    ports: dict[str, int]
    process: int
    holds: Holds

    def wait_until_idle(self) -> None:
        """Wait until the server has no work: all its threads sleep at several looks in a row."""
        eventually(lambda: all(self._is_asleep() for _ in range(IDLE_LOOKS)))

    def _is_asleep(self) -> bool:
        threads = Path(f"/proc/{self.process}/task").glob("*/stat")
        return {thread.read_text().rpartition(") ")[2][0] for thread in threads} == {"S"}

    def holds_s(self) -> list[float]:
        """Return all holds of the interpreter until now."""
        return self.holds.of(self.process)

    def processor_s(self) -> float:
        """Return the processor time of the server until now."""
        with closing(Account(self.process, ())) as account:
            return account.look().processor_s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, child_environment: dict[str, str]) -> Iterator[Attacked]:
    repository = tmp_path_factory.mktemp("models")
    for number in range(MODELS):
        write_version(repository, 1, name=f"m{number}")
    for name, datatype in (("numbers", "FP32"), ("texts", "STRING")):
        write_version(repository, 1, name=name)
        config = CONFIG.replace("max_batch_size: 8", "").replace("INT32", datatype).replace("dims: 1", "dims: -1")
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(ECHO)
    holds = Holds(tmp_path_factory.mktemp("holds"))
    environment = holds.environment(child_environment)
    http, metrics = free_ports(2)
    flags = ("--allow-metrics=true", f"--metrics-port={metrics}", "--allow-grpc=true", "--grpc-on-http-port=true")
    with process(repository, http, environment, *flags, "--grpc-port=0") as server:
        until(http, "/v2/health/ready", server)
        yield Attacked({"http": http, "metrics": metrics}, server.pid, holds)


def send(attacker: socket.socket, data: memoryview, ended: threading.Event) -> memoryview:
    """Send until a server takes no more for a while, and return the rest."""
    with contextlib.suppress(TimeoutError):
        while data and not ended.is_set():
            data = data[attacker.send(data) :]
    return data


def attack(port: int, data: bytes, ended: threading.Event, statuses: list[str]) -> None:
    """Send the bytes on one connection after another, and keep the status of the first answer."""
    while not ended.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as attacker:
            rest = send(attacker, memoryview(data), ended)
            head = b""
            while not ended.is_set():
                try:
                    part = attacker.recv(1 << 16)
                except TimeoutError:
                    if statuses:
                        break
                    rest = send(attacker, rest, ended)  # of a server that is slow, and does not wait for its reader
                    continue
                if not part:
                    break
                if not statuses:
                    head += part
                    statuses.extend(status_in(head))


def status_in(head: bytes) -> list[str]:
    """Return the status of the first answer, with that of gRPC if it has one, or []."""
    if head.startswith(b"HTTP/1.1 "):
        return [head[9:12].decode()] if len(head) >= 12 else []
    while len(head) >= 9:
        size, kind = int.from_bytes(head[:3], "big"), head[3]
        if kind == HEADERS and len(head) >= 9 + size:
            fields = dict(hpack.Decoder().decode(head[9 : 9 + size]))
            return [" ".join(fields[name] for name in (":status", "grpc-status") if name in fields)]
        head = head[9 + size :]
    return []


@pytest.mark.parametrize("name", ATTACKS)
def test_another_client_is_served_during_an_attack(server: Attacked, name: str) -> None:
    which, data, status = ATTACKS[name]
    server.wait_until_idle()
    ended, before, used_s = threading.Event(), len(server.holds_s()), server.processor_s()
    statuses: list[str] = []
    attacker = threading.Thread(target=attack, args=(server.ports[which], data, ended, statuses))
    other = Bystander(server.ports["http"], server.process, path="/v2/health/live", every_s=0.0, timeout_s=PATIENCE_S)
    attacker.start()
    try:
        end = time.monotonic() + ATTACK_S
        other.ask_until(lambda _: time.monotonic() > end)
        eventually(lambda: statuses)
    finally:
        ended.set()
        attacker.join(PATIENCE_S)
    server.wait_until_idle()
    held_s, caused_s = max(server.holds_s()[before:], default=0.0), max(other.caused_s, default=0.0)
    waits = f"{max(other.waits_s, default=0.0) * 1e3:.0f} ms at worst, {caused_s * 1e3:.0f} ms of one by the server"
    used = f"{held_s * 1e3:.0f} ms by one step, {server.processor_s() - used_s:.1f} s of processor time"
    print(f"{name}: {len(other.waits_s)} requests of another client, {waits}, {used}")
    assert statuses == [status]
    assert not other.failed
    assert other.waits_s
    assert held_s < LIMIT_S
    assert caused_s < LIMIT_S
