"""What TLS costs: answers with the body of the request over TLS, beside a raw uvloop echo of as many bytes.

One client with one connection to each server sends requests to them in turn, so that other work of the machine delays
both. Separate runs of `remora bench load` do not ensure this. The results are medians over rounds. The server should
reach 0.9 of the rate of the raw echo over TLS.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

import uvloop

from remora.messages import Buffer
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.connections import Connections, PortSpec
from remora.server.http.exchange import Exchange

SIZES = {1 << 10: 1500, 64 << 10: 400, 1 << 20: 60}
"""Bytes of a body, and requests of a round."""
ROUNDS = 8


class Files(NamedTuple):
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Echo:
    """Service that answers with the body."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        exchange.respond(HttpAnswer(200, (), [bytes(body)]))


class RawEcho(asyncio.Protocol):
    """Protocol that sends each message back, whose first four bytes are its length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._left = (self._left or int.from_bytes(data[:4], "big")) - len(data)
        self._pieces.append(data)
        if not self._left:
            self._transport.write(b"".join(self._pieces))  # type: ignore[attr-defined]
            self._pieces.clear()


async def serve(pipe: Pipe, files: Files | None, *, raw: bool) -> None:
    """Serve until the process is terminated, and send the port."""
    if raw:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if files else None
        if context is not None and files is not None:
            context.load_cert_chain(*files)
        server = await asyncio.get_running_loop().create_server(RawEcho, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
    else:
        more = {"http_server_cert": files.cert, "http_server_key": files.key} if files else {}
        connections = Connections(ServerOptions(**more))  # type: ignore[arg-type]
        port = await connections.listen(Echo(), PortSpec("HTTP", "127.0.0.1", 0))
    pipe.send(port)
    await asyncio.Event().wait()


def run(pipe: Pipe, files: Files | None, raw: bool) -> None:
    uvloop.run(serve(pipe, files, raw=raw))


def connected(port: int, *, tls: bool) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not tls:
        return client
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(client)


def us_each(client: socket.socket, message: bytes, answer_bytes: int, count: int) -> float:
    """Return the time of one request and its answer."""
    begin = time.perf_counter()
    for _ in range(count):
        client.sendall(message)
        left = answer_bytes
        while left:
            left -= len(client.recv(1 << 20))
    return (time.perf_counter() - begin) / count * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = Files(str(Path(folder, "tls.crt")), str(Path(folder, "tls.key")))
        made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        subprocess.run([*made.split(), "-out", files.cert, "-keyout", files.key], check=True, capture_output=True)
        sides = {(raw, tls): multiprocessing.Pipe() for tls in (False, True) for raw in (True, False)}
        start = multiprocessing.get_context("spawn").Process
        processes = [
            start(target=run, args=(pipes[1], files if tls else None, raw)) for (raw, tls), pipes in sides.items()
        ]
        for each in processes:
            each.start()
        try:
            ports = {side: pipes[0].recv() for side, pipes in sides.items()}
            for size, count in SIZES.items():
                print(f"{size:8} bytes: {compared(ports, size, count)}", flush=True)
        finally:
            for each in processes:
                each.terminate()


def compared(ports: dict[tuple[bool, bool], int], size: int, count: int) -> str:
    """Return the times of a request of each side, and the rate over TLS in parts of the raw echo's."""
    request = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    message = len(request).to_bytes(4, "big") + request[4:]
    clients = {side: connected(port, tls=side[1]) for side, port in ports.items()}
    found: dict[tuple[bool, bool], list[float]] = {side: [] for side in ports}
    for _ in range(ROUNDS):
        for (raw, tls), client in clients.items():
            sent, answer = (message, len(message)) if raw else (request, len(head) + size)
            found[raw, tls].append(us_each(client, sent, answer, count))
    for client in clients.values():
        client.close()
    median = {side: statistics.median(times) for side, times in found.items()}
    plain, tls = (f"{median[True, on]:.0f} and {median[False, on]:.0f} us" for on in (False, True))
    return f"raw echo and server {plain}, over TLS {tls}; rate over TLS {median[True, True] / median[False, True]:.2f}"


if __name__ == "__main__":
    sys.exit(main())
