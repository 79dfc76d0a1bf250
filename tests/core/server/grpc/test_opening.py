"""Which gRPC transport a server opens, and what it does without one."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from remora.engine import Engine
from remora.options import ServerOptions
from remora.protocols.http2 import frames
from remora.protocols.restriction import Restrictions
from remora.server.grpc.opening import Grpcio, GrpcTransport, LateGrpc, NoGrpc, open_grpc
from remora.server.host import ServerContext
from remora.server.http.exchange import Service
from remora.tensors.shared_memory import DISABLED
from support.engine.fakes import WithoutItsPackage

PATIENCE_S = 60.0


def transport(tmp_path: Path, **options: Any) -> GrpcTransport:
    engine = Engine(model_control_mode="explicit", model_repository=(tmp_path,))
    context = ServerContext(engine, cast(Any, None), cast(Any, None), cast(Any, None), ServerOptions(**options))
    return open_grpc(context, Restrictions((), "--grpc-restricted-protocol"), DISABLED, lambda: False)


def test_the_options_select_the_transport(tmp_path: Path) -> None:
    pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")
    from remora.server.grpc.listener import OwnGrpc

    assert type(transport(tmp_path, allow_grpc=False)) is NoGrpc
    assert type(transport(tmp_path, grpc_transport="grpcio")) is Grpcio
    assert type(transport(tmp_path)) is LateGrpc
    own = transport(tmp_path, allow_grpc=False, grpc_on_http_port=True)
    assert isinstance(own, OwnGrpc)
    assert own.on_http_port
    assert asyncio.run(own.listen()) == 0


def test_a_broken_installation_does_not_count_as_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "remora.server.grpc.listener", None)
    with pytest.raises(ImportError, match=r"remora\.server\.grpc\.listener"):
        transport(tmp_path, grpc_on_http_port=True)


def test_without_its_package_http2_is_refused_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "remora.server.grpc.listener", WithoutItsPackage("listener"))
    grpc = transport(tmp_path, grpc_on_http_port=True)
    assert type(grpc) is NoGrpc
    assert not grpc.on_http_port
    assert "gRPC is off" in caplog.text

    class Wire:
        sent = b""
        closed = False

        def write(self, data: bytes) -> None:
            self.sent += data

        def close(self) -> None:
            self.closed = True

    wire = Wire()
    grpc.share_port(cast(Service, None))(cast(asyncio.Transport, wire), b"PRI * HTTP/2.0")
    assert wire.sent.endswith(b"gRPC is off, its package is not installed: use HTTP/1.1")
    assert frames.HTTP_1_1_REQUIRED.to_bytes(4) in wire.sent
    assert wire.closed


def test_without_its_package_the_dedicated_port_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "remora.server.grpc.listener", WithoutItsPackage("listener"))
    grpc = transport(tmp_path)
    assert asyncio.run(grpc.start()) == 0
    assert "gRPC is off" in caplog.text
    assert not grpc.ports
    grpc.stop_accepting()
    assert grpc.close()


def test_a_drain_waits_for_grpcio_that_is_still_being_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, stopped = threading.Event(), []

    class Fake:
        def stop(self, grace_s: float) -> bool:
            stopped.append(grace_s)
            return False

    def start_server(grpcio: Grpcio) -> int:
        assert gate.wait(PATIENCE_S)
        grpcio._server = cast(Any, Fake())
        return 50051

    monkeypatch.setattr(Grpcio, "start_server", start_server)

    async def run() -> None:
        grpc = transport(tmp_path, grpc_transport="grpcio")
        starting = asyncio.create_task(grpc.start())
        await asyncio.sleep(0)
        draining = asyncio.create_task(grpc.drain(asyncio.get_running_loop().time() + PATIENCE_S))
        await asyncio.sleep(0)
        assert not draining.done()
        gate.set()
        assert await starting == 50051
        assert not await draining
        assert stopped
        assert 0 < stopped[0] <= PATIENCE_S

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
