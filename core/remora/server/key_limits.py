"""Refusals of callers, and the requests of callers with limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from remora.protocols.api_keys import Limits
from remora.protocols.rates import TokenBucket
from remora.protocols.rest.answer import BEARER, Headers, HttpAnswer, failure
from remora.server.http.exchange import Exchange, ForwardingExchange

UNAUTHENTICATED, PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAVAILABLE = 16, 7, 8, 14
_HTTP_STATUS = {UNAUTHENTICATED: 401, PERMISSION_DENIED: 403, RESOURCE_EXHAUSTED: 429, UNAVAILABLE: 503}


class Denial(NamedTuple):
    """Refusal of a request: the gRPC status, its text, and when to try again."""

    status: int
    text: str
    retry_after_s: float = 0.0

    def answer(self) -> HttpAnswer:
        """Return the refusal over HTTP."""
        headers: Headers = ()
        if self.status == UNAUTHENTICATED:
            headers = (BEARER,)
        elif self.retry_after_s:
            headers = ((b"Retry-After", b"%d" % (self.retry_after_s + 1)),)
        return failure(_HTTP_STATUS[self.status], self.text, plain=False, headers=headers)


class Usage:
    """Requests of one limited key or subject of tokens. Thread-safe."""

    def __init__(self, title: str, limits: Limits, now: Callable[[], float]) -> None:
        self.limits = limits
        self._title = title
        self._now = now
        self._lock = threading.Lock()
        self._running = 0
        rate = limits.requests_per_second
        self._bucket = TokenBucket(rate, limits.burst or max(rate, 1.0), now()) if rate else None

    def begin(self) -> Denial | None:
        """Count a request, or return why its key has too many; `end` ends one that was counted."""
        with self._lock:
            if self.limits.concurrent and self._running >= self.limits.concurrent:
                return self._deny(f"{self._running} requests in flight", 1.0)
            wait_s = 0.0 if self._bucket is None else self._bucket.take(self._now())
            if wait_s:
                return self._deny(f"{self.limits.requests_per_second:g} requests a second", wait_s)
            self._running += 1
        return None

    def end(self) -> None:
        """Count a request as ended."""
        with self._lock:
            self._running -= 1

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight."""
        return not self._running

    def _deny(self, limit: str, wait_s: float) -> Denial:
        return Denial(RESOURCE_EXHAUSTED, f"the {self._title} has its limit of {limit}: try again later", wait_s)


class CountedExchange(ForwardingExchange):
    """Exchange that ends its request's count with the answer, or when it is dropped."""

    __slots__ = ("_usage",)

    def __init__(self, exchange: Exchange, usage: Usage) -> None:
        super().__init__(exchange)
        self._usage: Usage | None = usage

    def respond(self, answer: HttpAnswer) -> None:
        self._end()
        self._exchange.respond(answer)

    def finish(self) -> None:
        self._end()
        self._exchange.finish()

    def _end(self) -> None:
        usage, self._usage = self._usage, None
        if usage is not None:
            usage.end()

    def __del__(self) -> None:
        self._end()  # a client that disconnects amid a stream gets no end
