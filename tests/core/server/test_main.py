"""The order of a start: what listens when, and what a probe says meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from conftest import free_ports
from remora.engine import Engine
from remora.options import EngineOptions, ServerOptions
from remora.server.grpc import opening
from remora.server.grpc.opening import Grpcio
from remora.server.host import Host
from remora.server.main import Server, ready_table
from remora.server.option_checks import StartError
from remora.system import logs
from support.engine.fakes import WithoutItsPackage, write_model
from support.process.eventually import eventually
from support.servers.hosting import ask, running, write_scale

PATIENCE_S = 60.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that opens gRPC on grpcio when the test sets it."""
    gate = threading.Event()

    def start_server(_grpcio: Grpcio) -> int:
        assert gate.wait(PATIENCE_S)
        return 50051

    monkeypatch.setattr(Grpcio, "start_server", start_server)
    return gate


def get(port: int, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send GET, or POST with a body; return the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST" if body else "GET", path, body or None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_server_with_grpcio_is_ready_only_when_grpcio_listens(tmp_path: Path, gate: threading.Event) -> None:
    write_model(tmp_path, "m", config=None)

    async def run() -> None:
        options = ServerOptions(http_port=0, metrics_port=0, allow_metrics=False, grpc_transport="grpcio")
        engine = Engine(model_control_mode="explicit", model_repository=(tmp_path,))
        server = Server(engine, options)
        starting = asyncio.create_task(server.start())
        while not (server.ports.http and engine.readiness().waits_for == ("gRPC is being opened",)):
            await asyncio.sleep(0)  # until the models are there
        try:
            port = server.ports.http
            assert await asyncio.to_thread(get, port, "/readyz?verbose") == (
                503,
                b"not yet\nwaits for: gRPC is being opened\n",
            )
            for path, status in (("/livez", 200), ("/startupz", 503), ("/v2/health/ready", 400)):
                assert (await asyncio.to_thread(get, port, path))[0] == status, path
            gate.set()
            await starting
            for path in ("/livez", "/startupz", "/readyz", "/v2/health/ready"):
                assert (await asyncio.to_thread(get, port, path))[0] == 200, path
        finally:
            gate.set()
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_server_is_not_ready_before_our_own_grpc_listens_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")
    from remora.server.grpc.listener import OwnGrpc

    (port,) = free_ports(1)
    listen = OwnGrpc.listen

    async def run() -> None:
        gate = asyncio.Event()

        async def late(own: OwnGrpc) -> int:
            await gate.wait()
            return await listen(own)

        monkeypatch.setattr(OwnGrpc, "listen", late)
        options = ServerOptions(http_port=port, grpc_port=0, allow_metrics=False, grpc_transport="own")
        engine = Engine(model_control_mode="explicit", model_repository=(tmp_path,))
        loading: Future[Engine] = Future()
        loading.set_result(engine.start())
        server = Server(engine, options)
        starting = asyncio.create_task(server.start(loading))
        try:
            while engine.readiness().waits_for != ("gRPC is being opened",):
                await asyncio.sleep(0)
            assert not engine.readiness().ready
            gate.set()
            await starting
            assert engine.readiness().ready
            assert server.ports.grpc
        finally:
            gate.set()
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_an_inference_over_http_does_not_wait_for_the_import_of_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scale(tmp_path / "scale")
    gate = threading.Event()

    def import_late(*_parts: object) -> None:
        assert gate.wait(PATIENCE_S)

    monkeypatch.setattr(opening, "_open_own", import_late)

    async def run() -> None:
        options = ServerOptions(http_port=0, allow_metrics=False)
        server = Server(Engine(tmp_path / "scale"), options)
        starting = asyncio.create_task(server.start())
        try:
            while not server.ports.http:
                await asyncio.sleep(0)
            body = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
            assert (await asyncio.to_thread(get, server.ports.http, "/v2/models/scale/infer", body))[0] == 200
            while server.engine.readiness().waits_for != ("gRPC is being opened",):
                await asyncio.sleep(0)  # a model answers a moment before it counts as loaded
            gate.set()
            await starting
            assert server.engine.readiness().ready
        finally:
            gate.set()
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize("action", ["infer", "generate"])
def test_the_limits_of_json_and_chunks_are_the_operators(tmp_path: Path, action: str) -> None:
    write_scale(tmp_path / "scale")
    bodies = {
        "infer": b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[1, 2, 3, 4]]}]}',
        "generate": b'{"x": [[1], [2], [3], [4]]}',
    }
    body = bodies[action]
    for depth, chunks, text in (
        (3, 2, b"[2.0,4.0,6.0,8.0]"),
        (2, 2, b"JSON nesting depth exceeds maximum allowed limit (2)"),
        (3, 1, b"Chunked request body exceeds maximum of 1 non-empty chunks"),
    ):
        options = ServerOptions(
            allow_grpc=False, allow_metrics=False, http_max_json_depth=depth, http_max_chunks=chunks
        )
        with running(Host(EngineOptions(paths=(tmp_path,)), options)) as ports:
            connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=PATIENCE_S)
            connection.request("POST", f"/v2/models/scale/{action}", iter([body[:9], body[9:]]), encode_chunked=True)
            assert text in connection.getresponse().read()
            connection.close()


@pytest.mark.parametrize("status", ["500", "400"])
def test_the_status_of_what_cannot_be_read_is_the_operators(tmp_path: Path, status: str) -> None:
    write_scale(tmp_path / "scale")
    declared = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": %b}]}'
    options = ServerOptions(allow_grpc=False, allow_metrics=False, client_errors=status)
    with running(Host(EngineOptions(paths=(tmp_path,)), options)) as ports:
        for path, body, expected, text in (
            ("models/scale/infer", b"{bad", int(status), "failed to parse the request JSON buffer"),
            ("models/scale/infer", b"{}", int(status), "attempt to access non-existing object member 'inputs'"),
            ("models/scale/infer", declared % b"[1]", int(status), "Shape does not match true shape of 'data' field"),
            ("models/scale/generate", b"{bad", int(status), "failed to parse the request JSON buffer"),
            ("repository/models/scale/load", b"{bad", int(status), "failed to parse the request JSON buffer"),
            (
                "models/scale/infer",
                declared.replace(b'"x"', b'"z"') % b"[1, 2, 3, 4]",
                400,
                "unexpected inference input",
            ),
            ("models/nothing/infer", b"{}", 404, "unknown model"),
        ):
            reply = ask(ports.http, "POST", f"/v2/{path}", body)
            assert (reply.status, text in reply.json["error"]) == (expected, True), reply


def test_grpcio_is_opened_while_the_models_load(tmp_path: Path, gate: threading.Event) -> None:
    async def run() -> None:
        options = ServerOptions(http_port=0, metrics_port=0, allow_metrics=False, grpc_transport="grpcio")
        engine = Engine(model_control_mode="explicit", model_repository=(tmp_path,))
        server = Server(engine, options)
        gate.set()
        loading = Future[Engine]()
        starting = asyncio.create_task(server.start(loading))
        while not server.ports.grpc:
            await asyncio.sleep(0)
        assert not starting.done()
        loading.set_result(engine.start())
        await starting
        await server.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_processes_that_share_the_http_port_need_separate_metrics_ports(tmp_path: Path) -> None:
    http_port, metrics_port, other = free_ports(3)

    def server(metrics: int) -> Server:
        options = ServerOptions(http_port=http_port, metrics_port=metrics, reuse_http_port=True, allow_grpc=False)
        return Server(Engine(model_control_mode="explicit", model_repository=(tmp_path,)), options)

    async def run() -> None:
        first, second, third = server(metrics_port), server(metrics_port), server(other)
        try:
            await first.start()
            with pytest.raises(StartError, match=r"metrics on .* needs its own, or --allow-metrics=false"):
                await second.start()
            await third.start()
            assert third.ports.http == http_port
        finally:
            for each in (first, second, third):
                await each.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_the_table_names_no_grpc_on_the_http_port_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "remora.server.grpc.listener", WithoutItsPackage("listener"))

    async def run() -> None:
        options = ServerOptions(http_port=0, allow_grpc=False, allow_metrics=False, grpc_on_http_port=True)
        server = Server(Engine(model_control_mode="explicit", model_repository=(tmp_path,)), options)
        await server.start()
        try:
            last = ready_table(server, 1.0).splitlines()[-1]
            http = f"127.0.0.1:{server.ports.http}"
            assert last == f"READY after 1.00 s: HTTP {http}; try the models at http://{http}/"
            assert "gRPC is off" in caplog.text
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_call_that_the_exit_timeout_cuts_off_has_a_line_in_the_access_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")
    from support.wire.grpc_calls import PONG, UNFINISHED

    written: list[str] = []
    monkeypatch.setattr(logs.OURS, "write", written.append)

    async def run() -> None:
        options = ServerOptions(
            allow_http=False, allow_metrics=False, grpc_port=0, grpc_transport="own", access_log="all"
        )
        engine = Engine(model_control_mode="explicit", model_repository=(tmp_path,), exit_timeout_secs=0)
        server = Server(engine, options)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.ports.grpc)
        writer.write(UNFINISHED)
        await reader.readuntil(PONG)
        assert not await server.stop(announce=False)
        writer.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    eventually(lambda: written)  # the end waits for the thread that writes for a second at most
    (line,) = written
    assert " POST /inference.GRPCInferenceService/ModelInfer 1 bytes=0 " in line
