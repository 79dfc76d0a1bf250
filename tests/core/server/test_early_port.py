"""The HTTP port before the server is there: /livez is answered, everything else waits and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import http.client
import selectors
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from remora.cli import open_early_port
from remora.engine import Engine
from remora.options import ServerOptions
from remora.server.early_port import EarlyPort
from remora.server.host import Host
from remora.server.main import Server

PATIENCE_S = 60.0


@pytest.fixture
def early() -> Iterator[tuple[EarlyPort, int]]:
    port = EarlyPort("127.0.0.1", 0)
    listening = port._listening
    yield port, listening.getsockname()[1]
    listening.close()


def connected(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    client.sendall(sent)
    return client


@pytest.mark.parametrize(("method", "body"), [("GET", b"ok\n"), ("HEAD", b"")])
def test_livez_is_answered_before_there_is_a_server(early: tuple[EarlyPort, int], method: str, body: bytes) -> None:
    port, number = early
    with closing(http.client.HTTPConnection("127.0.0.1", number, timeout=PATIENCE_S)) as connection:
        connection.request(method, "/livez")
        answer = connection.getresponse()
        assert (answer.status, answer.read(), answer.getheader("Connection")) == (200, body, "close")
    assert port.take()[1] == []


@pytest.mark.parametrize(
    "sent", [b"", b"GET /li", b"GET /livez HTTP/1.1\r\n", b"GET /v2 HTTP/1.1\r\n\r\n", b"\x16\x03"]
)
def test_what_is_no_whole_probe_waits_unread(early: tuple[EarlyPort, int], sent: bytes) -> None:
    port, number = early
    with connected(number, sent):
        with connected(number, b"GET /livez HTTP/1.1\r\n\r\n") as after:  # answered: the one before was met, too
            assert after.recv(12) == b"HTTP/1.1 200"
        _, held = port.take()
        (waiting,) = held
        with waiting:
            if sent:
                assert waiting.recv(100) == sent


def test_a_client_that_is_gone_again_does_no_harm(early: tuple[EarlyPort, int]) -> None:
    port, number = early
    connected(number, b"GET /livez HTTP/1.1\r\n\r\n").close()
    with connected(number, b"GET /livez HTTP/1.1\r\n\r\n") as after:
        assert after.recv(12) == b"HTTP/1.1 200"
    assert port.take()[1] == []


@pytest.mark.parametrize(
    ("failure", "left"), [(errno.EMFILE, True), (errno.ECONNABORTED, False), (errno.EAGAIN, False)]
)
def test_a_port_whose_connections_cannot_be_taken_is_left_to_the_server(
    early: tuple[EarlyPort, int], failure: int, left: bool
) -> None:
    class Listening:
        def accept(self) -> None:
            raise OSError(failure, "")

    port, _ = early
    with selectors.SelectSelector() as selector, socket.socket() as known:
        listening = Listening()
        listening.fileno = known.fileno  # type: ignore[attr-defined]
        selector.register(listening, selectors.EVENT_READ)  # type: ignore[arg-type]
        port._accept(listening, selector)  # type: ignore[arg-type]
        assert (not selector.get_map()) is left
    port.take()


def test_the_server_answers_those_who_came_before_it_and_those_who_come_later(tmp_path: Path) -> None:
    asked = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def run() -> None:
        early = EarlyPort("127.0.0.1", 0)
        number = early._listening.getsockname()[1]
        before = connected(number, asked)
        silent = connected(number)
        engine = Engine(model_control_mode="explicit", model_repository=(tmp_path,))
        options = ServerOptions(http_port=number, metrics_port=0, allow_grpc=False)
        server = Server(engine, options, early=early)
        await server.start()
        try:
            assert server.ports.http == number
            silent.sendall(asked)
            for client in (before, silent, connected(number, asked)):
                with client:
                    assert (await asyncio.to_thread(client.recv, 12)) == b"HTTP/1.1 200"
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize("address", ["localhost", "host.invalid"])
def test_a_name_may_mean_several_addresses_and_is_left_to_the_server(address: str) -> None:
    with pytest.raises(OSError, match=r"[a-z]"):
        EarlyPort(address, 0)
    assert open_early_port(Host(server=ServerOptions(http_address=address, http_port=0))) is None


@pytest.mark.parametrize("options", [{"allow_http": False}, {"http_restricted_api": ("health:key=value",)}])
def test_a_port_that_is_off_or_locked_is_not_opened_early(options: dict[str, object]) -> None:
    assert open_early_port(Host(server=ServerOptions(http_port=0, **options))) is None  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_the_servers_to_complain_about() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert open_early_port(Host(server=ServerOptions(http_port=taken.getsockname()[1]))) is None
