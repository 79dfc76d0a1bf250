"""Connections of several ports: how they are counted, closed for room, and drained."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from remora.messages import Buffer, Ticket
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.connections import Connections, PortSpec
from remora.server.http.exchange import Exchange
from remora.server.option_checks import StartError

PATIENCE_S = 60.0
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Hello:
    """Answers at once, except on /later, whose exchange it keeps."""

    def __init__(self) -> None:
        self.kept: list[Exchange] = []

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
        if head.path == "/later":
            self.kept.append(exchange)
        else:
            exchange.respond(HttpAnswer(200, (), [b"hello"]))
        return None


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_connections_of_all_ports_are_counted_and_idle_ones_close_for_room() -> None:
    async def work() -> None:
        connections, service = Connections(ServerOptions()), Hello()
        ports = [await connections.listen(service, PortSpec(what, "127.0.0.1", 0)) for what in ("HTTP", "metrics")]
        assert not connections.is_alone()
        assert not connections.make_room()
        clients = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
        await until(lambda: connections.count() == {"http1": 2, "http2": 0})
        clients[0][1].write(GET % b"later")
        await until(lambda: bool(service.kept))
        assert connections.make_room()
        assert await clients[1][0].read() == b""
        await until(lambda: connections.count()["http1"] == 1)
        connections.stop_accepting()
        assert not connections.close()
        for _, writer in clients:
            writer.close()

    run(work)


def test_closed_connections_are_logged_by_reason_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        caplog.set_level(logging.INFO, "remora.http")
        connections = Connections(ServerOptions())
        port = await connections.listen(Hello(), PortSpec("HTTP", "127.0.0.1", 0))
        (listener,) = connections._listeners
        lines = []
        for now in (100.0, 130.0, 170.0, 240.0):
            if now != 240.0:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await until(lambda: connections.count()["http1"] == 1)
                listener.sweep(asyncio.get_running_loop().time() + 99.0, 98.0, 97.0)
                assert await reader.read() == b""
                writer.close()
            connections._report_closed(now)
            lines.append(caplog.messages[-1:])
            caplog.clear()
        assert lines == [["connections closed: 1 first_byte"], [], ["connections closed: 2 first_byte"], []]
        listener.closed["idle"] += 1
        connections._report_closed(300.0)
        assert caplog.messages == ["connections closed: 1 idle"]
        connections.stop_accepting()
        connections.close()

    run(work)


def test_a_request_is_alone_while_no_other_connection_that_infers_is_open() -> None:
    async def work() -> None:
        connections, service = Connections(ServerOptions()), Hello()
        ports = [
            await connections.listen(service, PortSpec(what, "127.0.0.1", 0)) for what in ("HTTP", "second", "metrics")
        ]
        alone, writers = [connections.is_alone()], []
        for count, port in enumerate((ports[2], ports[1], ports[0]), 1):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            await until(lambda count=count: connections.count()["http1"] == count)  # type: ignore[misc]
            alone.append(connections.is_alone())
        assert alone == [False, False, True, False]
        connections.stop_accepting()
        connections.close()
        for writer in writers:
            writer.close()

    run(work)


def test_draining_waits_for_the_answer_in_flight_and_refuses_new_connections() -> None:
    async def work() -> None:
        connections, service = Connections(ServerOptions()), Hello()
        port = await connections.listen(service, PortSpec("HTTP", "127.0.0.1", 0))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"later")
        await until(lambda: bool(service.kept))
        connections.stop_accepting()
        with pytest.raises(OSError):  # noqa: PT011
            await asyncio.open_connection("127.0.0.1", port)
        draining = asyncio.ensure_future(connections.drain(asyncio.get_running_loop().time() + PATIENCE_S))
        await asyncio.sleep(0)
        assert not draining.done()
        service.kept[0].respond(HttpAnswer(200, (), [b"late"]))
        assert (await reader.read()).endswith(b"late")
        assert await draining
        assert connections.close()
        writer.close()

    run(work)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_draining_answers_a_silent_client_whose_first_request_has_just_arrived(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.server.http.http1_state.SILENCE_S", -1.0)  # every client was silent for too long

    async def work() -> None:
        connections = Connections(ServerOptions())
        port = await connections.listen(Hello(), PortSpec("HTTP", "127.0.0.1", 0))
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            await until(lambda: connections.count()["http1"] == 1)
            client.sendall(GET % b"")  # the loop has no turn to read it before the drain begins
            connections.stop_accepting()
            await connections.drain(asyncio.get_running_loop().time() + PATIENCE_S)
            assert connections.close()
            assert client.recv(4_096).startswith(b"HTTP/1.1 200")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(work(), PATIENCE_S))


def test_memory_is_returned_to_the_system_when_a_connection_with_much_of_it_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr("remora.server.connections.give_back", lambda: returned.append(True))

    async def work() -> None:
        held = Connections(ServerOptions()).held
        for size in (1 << 20, 100 << 20):
            account = held.account()
            account.add(size)
            assert not returned
            account.close()
        await until(lambda: bool(returned))

    run(work)


def test_no_memory_is_returned_to_the_system_by_connections_that_the_end_closes() -> None:
    failed: list[object] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: failed.append(context["message"]))
        connections = Connections(ServerOptions())
        account = connections.held.account()
        account.add(100 << 20)
        connections.close()
        loop.call_soon(account.close)  # as connection_lost does in the next turn
        await loop.shutdown_default_executor()
        for _ in range(3):
            await asyncio.sleep(0)
        assert connections.held.total == 0

    run(work)
    assert not failed


def test_an_announced_end_tells_clients_to_close() -> None:
    async def work() -> None:
        connections = Connections(ServerOptions())
        port = await connections.listen(Hello(), PortSpec("HTTP", "127.0.0.1", 0))
        connections.announce()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"now")
        assert b"connection: close" in (await reader.read()).lower()
        connections.stop_accepting()
        assert connections.close()
        writer.close()

    run(work)


def test_an_address_in_use_is_named_with_its_flag() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            for what, remedy in (("HTTP", "Choose another --http-port$"), ("second", "in use$")):
                with pytest.raises(StartError, match=rf"^cannot listen for {what} on 127.0.0.1:{port}: .*{remedy}"):
                    await Connections(ServerOptions()).listen(Hello(), PortSpec(what, "127.0.0.1", port))

    run(work)


def test_an_exchange_knows_the_address_of_its_client() -> None:
    class Peers:
        """Answers each request with the address of its client."""

        def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
            exchange.respond(HttpAnswer(200, (), [exchange.peer.encode()]))

    async def work() -> None:
        connections = Connections(ServerOptions())
        port = await connections.listen(Peers(), PortSpec("HTTP", "127.0.0.1", 0))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"")
        assert (await reader.readuntil(b"127.0.0.1")).startswith(b"HTTP/1.1 200")
        writer.close()
        await until(lambda: connections.count()["http1"] == 0)
        connections.stop_accepting()
        connections.close()

    run(work)


def test_answers_are_counted_by_status_without_those_of_the_port_of_metrics() -> None:
    async def work() -> None:
        connections = Connections(ServerOptions())
        ports = [await connections.listen(Hello(), PortSpec(what, "127.0.0.1", 0)) for what in ("HTTP", "metrics")]
        for port in ports:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET % b"" * 2 + b"nonsense\r\n\r\n")
            assert (await reader.read()).count(b"HTTP/1.1 ") == 4  # the last text names the version, too
            writer.close()
        assert connections.answers() == {200: 2, 400: 1}
        connections.stop_accepting()
        connections.close()

    run(work)
