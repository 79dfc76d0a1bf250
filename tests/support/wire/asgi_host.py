"""ASGI host that sends one request to an application and keeps what it is answered."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from remora.server.http.asgi import V2App
from remora.server.http.asgi_transfers import Message, Scope


class Spoken(NamedTuple):
    """What an app sent, and how many messages it took."""

    sent: list[Message]
    received: int

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def scope_of(method: str, path: str, *headers: tuple[bytes, bytes], **more: Any) -> Scope:
    raw, _, query = path.partition("?")
    found = {"raw_path": raw.encode(), "query_string": query.encode(), "headers": list(headers), **more}
    return {"type": "http", "method": method, "path": raw, "root_path": "", **found}


def messages_of(*pieces: bytes) -> list[Message]:
    last = len(pieces) - 1
    return [{"type": "http.request", "body": piece, "more_body": at < last} for at, piece in enumerate(pieces)]


async def speak(app: V2App, scope: Scope, messages: list[Message]) -> Spoken:
    """Call an app as a host does; when the messages are over, nothing more comes."""
    sent: list[Message] = []
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return Spoken(sent, len(messages) - len(left))
