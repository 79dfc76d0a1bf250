"""Both ends of the protocol between a front and its engine in one process, with a queue in the place of the channel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from remora.engine import Engine
from remora.server.fronts.client import EngineClient
from remora.server.fronts.codec import Message, Part, TooLargeError, decode, encode, size_of
from remora.server.fronts.link import FrontLink


class QueuedChannel:
    """Direction of a channel: messages are encoded when they are sent, and decoded by `deliver`."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.most_bytes = most_bytes
        self.records: deque[bytes] = deque()
        self.kinds: list[int] = []
        self.polls = 0
        self._collect: Callable[[], None] | None = None

    def before_flush(self, collect: Callable[[], None]) -> None:
        self._collect = collect

    def send(
        self,
        kind: int,
        number: int = 0,
        parts: Sequence[Part] = (),
        flags: int = 0,
        ref: int = 0,
        extra: int = 0,
        since: int = 0,
    ) -> None:
        if sum(map(size_of, parts)) > self.most_bytes:
            raise TooLargeError("too much")
        self.kinds.append(int(kind))
        self.records.append(encode(kind, number, parts, flags, ref, extra, since))

    def flush(self) -> None:
        """Do nothing, because `deliver` flushes."""

    def poll(self) -> None:
        self.polls += 1

    def deliver(self, receive: Callable[[Message], None]) -> bool:
        """Pass on what was sent; return True if there was anything."""
        collect, self._collect = self._collect, None
        if collect is not None:
            collect()
        count = len(self.records)
        for _ in range(count):
            for message in decode(bytearray(self.records.popleft())):
                receive(message)
        return bool(count)


class Port:
    """A port of the engine's process with the given services."""

    def __init__(self, service: Any = None, open_call: Any = None) -> None:
        self.service = service
        self.open_call = open_call


class Pair:
    """A front's client and the engine's link to it."""

    def __init__(self, engine: Engine, *ports: Port, most_bytes: int = 1 << 20) -> None:
        self.to_engine, self.to_front = QueuedChannel(most_bytes), QueuedChannel(most_bytes)
        self.control: list[Message] = []
        self.client = EngineClient()
        self.client.use(self.to_engine)  # type: ignore[arg-type]
        self.client.control = self.control.append
        self.link = FrontLink(engine, ports, None, self.control.append)  # type: ignore[arg-type]
        self.link.use(self.to_front)  # type: ignore[arg-type]

    def pump(self) -> None:
        """Deliver until nothing is on its way."""
        while self.to_engine.deliver(self.link.receive) or self.to_front.deliver(self.client.receive):
            pass
