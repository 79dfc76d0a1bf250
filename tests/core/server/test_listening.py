"""Connections are accepted: the last ones of a server that ends, and those for which descriptors are missing."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import cast

import pytest
import uvloop

from remora.server.listening import Port, bind

PATIENCE_S = 60.0


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)
        self.transport.close()


class Starved(socket.socket):
    """A listening socket without a descriptor for a connection, for a number of attempts."""

    attempts = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.attempts:
            self.attempts -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> object:
    def run(main: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            runner.run(asyncio.wait_for(main, PATIENCE_S))

    return run


def connect(port: Port) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port.number), timeout=PATIENCE_S)
    client.sendall(b"hello")
    return client


def answer(client: socket.socket) -> bytes:
    with client:
        return client.recv(100)


def test_connections_that_were_made_before_the_port_closes_are_served(run: object) -> None:
    async def main() -> None:
        port = Port(await bind("127.0.0.1", 0, reuse_port=False), Echo, lambda: False)
        clients = [connect(port) for _ in range(100)]  # all in the backlog: the loop has not run meanwhile
        port.close()
        assert port.opening == 100
        assert [await asyncio.to_thread(answer, client) for client in clients] == [b"hello"] * 100
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(connect, port)
        assert not port.opening

    run(main())  # type: ignore[operator]


def test_a_name_may_stand_for_several_addresses(run: object) -> None:
    async def main() -> None:
        port = Port(await bind("localhost", 0, reuse_port=False), Echo, lambda: False)
        client = await asyncio.to_thread(connect, port)
        assert await asyncio.to_thread(answer, client) == b"hello"
        port.close()

    run(main())  # type: ignore[operator]


@pytest.mark.parametrize("made_room", [True, False])
def test_without_descriptors_idle_connections_go_and_the_log_tells_it_once(
    run: object, made_room: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.server.listening._PAUSE_S", 0.01)
    calls: list[int] = []

    def make_room() -> bool:
        calls.append(1)
        return made_room

    async def main() -> None:
        (listening,) = await bind("127.0.0.1", 0, reuse_port=False)
        starved = Starved(fileno=listening.detach())
        starved.attempts = 3
        port = Port([starved], Echo, make_room)
        client = await asyncio.to_thread(connect, port)
        assert await asyncio.to_thread(answer, client) == b"hello"
        port.close()

    with caplog.at_level(logging.WARNING):
        run(main())  # type: ignore[operator]
    assert len(calls) == 3, "one look for each attempt, and none without a pause"
    (record,) = [each for each in caplog.records if each.name == "remora.server"]
    assert "Too many open files" in record.getMessage()
    assert ("the longest idle connections are closed" in record.getMessage()) == made_room


@pytest.mark.parametrize(("limit", "is_near"), [(3, True), (1 << 30, False)])
def test_idle_connections_go_before_the_last_descriptors_are_used(
    run: object, limit: int, is_near: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def make_room() -> bool:
        calls.append(1)
        return True

    async def main() -> None:
        port = Port(await bind("127.0.0.1", 0, reuse_port=False), Echo, make_room)
        monkeypatch.setattr("remora.server.listening.resource.getrlimit", lambda _: (limit, limit))
        client = await asyncio.to_thread(connect, port)
        assert await asyncio.to_thread(answer, client) == b"hello"
        port.close()

    with caplog.at_level(logging.WARNING):
        run(main())  # type: ignore[operator]
    records = [each for each in caplog.records if each.name == "remora.server"]
    assert len(calls) == len(records) == is_near
    assert all("fewer than 16 descriptors left; the longest idle" in each.getMessage() for each in records)


def test_a_port_that_is_held_stays_so_when_its_rest_is_over(run: Callable[..., None]) -> None:
    async def main() -> None:
        made: list[Echo] = []

        def protocol() -> Echo:
            made.append(Echo())
            return made[-1]

        port = Port(await bind("127.0.0.1", 0, reuse_port=False), protocol, lambda: False)
        client = connect(port)
        port._rest(0.0)
        port.hold()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert made == []
        port.go_on()
        assert await asyncio.get_running_loop().run_in_executor(None, answer, client) == b"hello"
        port.close()

    run(main())
