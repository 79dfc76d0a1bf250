"""Load generator of `remora bench load`: a plan, and processes that send requests by it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from remora_tools.deciders.latencies import Histogram, from_json, merge

HTTP, GRPC, GRPC_STREAM = "http", "grpc", "grpc-stream"
MOST_WAITING = 100_000
"""Most requests of an open loop in one process that are due and not sent; the schedule goes on after them."""
_TIMES = ("latency", "service", "first", "between")


class Answer(NamedTuple):
    """Answer to a request.

    ``failure`` is empty for a good one; ``events_ns`` are the times of streamed events, ``tokens`` the number of
    generated tokens from the usage in the stream, 0 without one. ``body`` is that of a failure over HTTP, which may
    have the reason.
    """

    failure: str
    events_ns: tuple[int, ...] = ()
    closes: bool = False
    tokens: int = 0
    body: bytes = b""


class Codec(Protocol):
    """Client side of a protocol on one connection with one request in flight. Knows no sockets."""

    def opening(self) -> bytes:
        """Return what is sent at once after connecting."""

    def request(self, message: bytes) -> bytes:
        """Return the bytes of a request, as far as the peer accepts them now."""

    def feed(self, data: bytes, now_ns: int) -> Answer | None:
        """Take received bytes, and return the answer if it is complete.

        Raises ValueError for damaged bytes.
        """

    def outgoing(self) -> bytes:
        """Return the bytes to send after `feed`, such as acknowledgements."""

    def end(self) -> Answer | None:
        """Return the answer that the end of the connection completes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process sends.

    Attributes:
        protocol: ``http``, ``grpc`` or ``grpc-stream``.
        host, port, tls: address of the server.
        messages: requests in the form of the protocol's codec, sent in turn.
        connections: connections with one request in flight each.
        rate_per_s: rate of all processes together; 0 for a closed loop.
        shape: schedule of an open loop.
        seed, part, parts: see `remora_tools.deciders.arrivals.arrivals`.
        sequence: number of requests of a sequence, 0 without sequences; ``messages`` are then the first, a middle
            and the last request of a sequence.
        window_ns: length of a window.
        timeout_s: time after which an unanswered request fails.
        metadata: sent with each gRPC call; the messages of HTTP contain their headers.
    """

    protocol: str
    host: str
    port: int
    tls: bool
    messages: tuple[bytes, ...]
    connections: int
    rate_per_s: float
    shape: str
    seed: int
    part: int
    parts: int
    sequence: int
    window_ns: int
    timeout_s: float
    metadata: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**document, "messages": [base64.b64encode(each).decode() for each in self.messages]}


def plan_from_json(document: dict[str, Any]) -> Plan:
    """Return the plan of `Plan.to_json`."""
    messages = tuple(base64.b64decode(each) for each in document["messages"])
    metadata = tuple((name, value) for name, value in document["metadata"])
    return Plan(**{**document, "messages": messages, "metadata": metadata})


@dataclass(slots=True)
class Results:
    """Counts and times of the answers in a window.

    Attributes:
        seconds: length of the window.
        latency: from the scheduled time of a request (open loop) or its sending (closed loop) to its answer.
        service: from its sending to its answer.
        first: from its sending to its first event, for streams.
        between: between the events of a stream.
        tokens: generated tokens, from the usage in the streams.
        failures: number of failed requests by reason or status. They count in no histogram.
        details: reason that the server gave for the first failure of a status.
        cpu: share of a processor that the busiest process used.
        waiting: requests that were due and not sent at the end, because all connections were busy; at most
            `MOST_WAITING` for each process.
    """

    seconds: float = 0.0
    latency: Histogram = field(default_factory=Histogram)
    service: Histogram = field(default_factory=Histogram)
    first: Histogram = field(default_factory=Histogram)
    between: Histogram = field(default_factory=Histogram)
    tokens: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    cpu: float = 0.0
    waiting: int = 0
    details: dict[str, str] = field(default_factory=dict)

    @property
    def rate_per_s(self) -> float:
        """Good answers per second."""
        return self.latency.count / self.seconds if self.seconds else 0.0

    @property
    def events_per_s(self) -> float:
        """Streamed events per second."""
        return (self.first.count + self.between.count) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, 0 if the streams state none."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the results as a JSON document."""
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: each.to_json() if isinstance(each, Histogram) else each for name, each in document.items()}


def results_from_json(document: dict[str, Any]) -> Results:
    """Return the results of `Results.to_json`."""
    times = {name: from_json(document[name]) for name in _TIMES}
    return Results(**{**document, **times})


def merge_results(parts: list[Results], *, same_time: bool) -> Results:
    """Return the results of several processes, or of several windows one after the other."""
    failures: dict[str, int] = {}
    details: dict[str, str] = {}
    for part in parts:
        details = {**part.details, **details}
        for reason, count in part.failures.items():
            failures[reason] = failures.get(reason, 0) + count
    seconds = [part.seconds for part in parts]
    return Results(
        sum(seconds) / (len(parts) if same_time else 1),
        merge(part.latency for part in parts),
        merge(part.service for part in parts),
        merge(part.first for part in parts),
        merge(part.between for part in parts),
        sum(part.tokens for part in parts),
        failures,
        max(part.cpu for part in parts),
        sum(part.waiting for part in parts) if same_time else parts[-1].waiting,
        details,
    )
