"""A server with a platform's front in this process, on a loopback port, and a plain client for it."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from remora.engine import Engine
from remora.server.doors import Host
from remora.server.main import Server


class Reply(NamedTuple):
    """An answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Door:
    """Where the server answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = server.ports.http

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Reply:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body or None, dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())
        finally:
            connection.close()


@contextmanager
def opened(host: Host) -> Iterator[Door]:
    """The host's server, ready, with its HTTP port alone; stopped at the end."""
    options = replace(host.server, http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False)
    server = Server(Engine(options=host.engine), options, host.front)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
        yield Door(server)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
