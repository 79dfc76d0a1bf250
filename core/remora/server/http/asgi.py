"""ASGI application with the V2 routes and the pages.

`V2App` needs no web framework: it converts a scope to a `Head`, passes it to `RestService`, and converts the exchange
to ASGI messages. `create_app` makes it the fallback of a FastAPI application, for additional routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from remora._version import __version__
from remora.engine import Engine
from remora.messages import Buffer
from remora.options import ServerOptions
from remora.protocols.cross_site import host_names
from remora.protocols.header_patterns import open_header_pattern
from remora.protocols.http1 import Head, too_large
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, body_length, failure, refusal_of
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.request import RequestLimits
from remora.protocols.restriction import Restrictions
from remora.server.http.asgi_transfers import (
    CLOSE,
    OverdueError,
    Receive,
    Scope,
    Send,
    Transfer,
    Transfers,
    send_at_once,
    start_of,
)
from remora.server.http.exchange import STREAM_BACKLOG, Cancellable, Exchange, Service, body_reader_of
from remora.server.http.held_bytes import FREE_BYTES, UNREAD_S, HeldBytes
from remora.server.http.large_bodies import LargeBodies
from remora.server.http.port_services import IdentifyingService
from remora.server.http.rest import Later, RestService
from remora.server.loop import LoopMailbox
from remora.server.option_checks import open_key_check
from remora.statistics import ServerLoad

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger("remora.http")

_PATH_SAFE = "/:@!$&'()*+,;=~-._%"
_REFRESH_S = 1.0
"""Interval at which the files of keys are looked at."""
_NO_LENGTH = "the Content-Length is not a number of at most 19 digits"


_LASTING = 32
"""Concurrent calls that run a model's code, such as loads."""


def answer_in_thread(loop: asyncio.AbstractEventLoop) -> Later:
    """Return a function that runs work in a thread and answers the exchange in ``loop``.

    Work with ``lasts`` has a separate pool, because loads that never return must not delay short calls.
    """
    lasting = ThreadPoolExecutor(_LASTING, thread_name_prefix="remora lasting call")

    def later(work: Callable[[], HttpAnswer], exchange: Exchange, *, lasts: bool = False) -> None:
        def respond(done: asyncio.Future[HttpAnswer]) -> None:
            error = done.exception()
            if error is not None:  # answer, or the client would wait forever
                _log.error("a request failed", exc_info=error)
                exchange.respond(failure(500, INTERNAL, plain=True))
            else:
                exchange.respond(done.result())

        loop.run_in_executor(lasting if lasts else None, work).add_done_callback(respond)

    return later


_DEFAULTS = ServerOptions()


def create_app(engine: Engine, options: ServerOptions = _DEFAULTS) -> FastAPI:
    """Return a FastAPI application with all V2 routes and the pages of ``engine``.

    Routes can be added to it. Start the engine before the first request and stop it after the last. Bodies of more than
    ``options.http_max_input_size`` bytes are refused while they arrive, and so are those for which
    ``options.max_held_bytes`` leaves no room. Long bodies are decoded in threads. API keys and tokens of the options
    are checked for remora's routes, not for added ones.

    Raises ValueError for an invalid ``http_header_forward_pattern``, and for invalid restrictions and keys.
    """
    from fastapi import FastAPI  # imported here, because neither `remora serve` nor the Lambda adapter needs it

    app = FastAPI(
        title="remora", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    # The fallback in place of "not found", so that routes added to the app later take precedence.
    app.router.default = V2App(engine, options)
    return app


class V2App:
    """ASGI app with the V2 protocol and the pages.

    It uses the service and codecs of remora's HTTP listener. ASGI passes header names in lower case, so forwarded
    headers [H25] become parameters with lower-case names. Call it from one event loop at a time; the loop may change
    between calls (a host may run each request in a new loop).

    Args:
        engine: the engine; the caller starts and stops it.
        options: limits of a body and of held bytes, pattern of forwarded headers, metrics, restrictions, API keys and
            tokens.

    Raises ValueError for an invalid pattern, and for invalid restrictions and keys.
    """

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        pattern = options.http_header_forward_pattern
        try:
            self._forward = open_header_pattern(pattern) if pattern else None
        except ValueError as error:
            raise ValueError(
                f"http_header_forward_pattern={pattern[:200]!r} is not a regular expression: {error}"
            ) from error
        self._restrictions = Restrictions(options.http_restricted_api, "--http-restricted-api")
        self._allowed_hosts = host_names(options.allowed_host)
        self._open: _Opened | None = None
        self._keys = open_key_check(options, time.monotonic)
        self._refresh_at = 0.0
        if options.allow_metrics:
            engine.measure_load(self._load)
        if self._keys is not None:
            engine.measure_denials(self._keys.denied)
            engine.traces.key_of = self._keys.name_by

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        It is cancelled if the client disconnects before the end of its answer.
        """
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
            return
        if scope["type"] != "http":
            raise ValueError(f"V2 is spoken over HTTP: a connection of type {scope['type']!r} cannot be answered")
        with_body = scope["method"] != "HEAD"
        head = self._head_of(scope)
        if isinstance(head, HttpAnswer):
            await send_at_once(head, send, with_body=with_body)
            return
        loop = asyncio.get_running_loop()
        try:
            opened = self._opened(loop)
        except Exception:
            await send_at_once(_failed(head), send, with_body=with_body)
            return
        exchange = _FutureExchange(loop, (scope.get("client") or ("",))[0], opened.transfers)
        try:
            answer = await self._answer(opened, head, receive, exchange)
            if answer is None:
                return
            if exchange.streaming:
                await _send_stream(answer, exchange, receive, send)
            elif with_body and body_length(answer.body) > FREE_BYTES:
                await exchange.transfer().send(answer, send)
            else:
                exchange.give_back()
                await send_at_once(answer, send, with_body=with_body)
        finally:
            exchange.close()

    def _head_of(self, scope: Scope) -> Head | HttpAnswer:
        """Return the head of a request, or its refusal for the length that it declares."""
        length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"0")
        if not length.isdigit() or len(length) > 19:
            return failure(400, _NO_LENGTH, plain=True, headers=CLOSE)
        head = Head(scope["method"], target_of(scope), tuple(scope["headers"]))
        head.scheme, head.root = scope.get("scheme", "http"), scope.get("root_path", "").rstrip("/")
        size, limit = head.content_length, self._options.http_max_input_size
        return refusal_of(too_large(size, limit, head), headers=CLOSE) if size > limit else head

    async def _answer(
        self, opened: _Opened, head: Head, receive: Receive, exchange: _FutureExchange
    ) -> HttpAnswer | None:
        """Return the answer, the head of a stream, or None if the client disconnected."""
        try:
            head.unread = not opened.reads_body(head)
            body = b"" if head.unread else await exchange.receive(receive, head)
            if body is None or isinstance(body, HttpAnswer):
                return body
            exchange.ticket = opened.service.handle(head, body, exchange)
            del body  # which would otherwise exist until the request is answered
        except Exception:
            exchange.streaming = False
            return _failed(head)
        return await exchange.outcome(receive)

    def _opened(self, loop: asyncio.AbstractEventLoop) -> _Opened:
        """Return the service for the requests of a loop."""
        opened, keys = self._open, self._keys
        if opened is None or opened.loop is not loop:
            transfers = Transfers(loop, self._options)
            rest = self._rest(loop, transfers.held)
            service = IdentifyingService(rest if keys is None else keys.over(rest))
            opened = self._open = _Opened(loop, service, body_reader_of(service), transfers)
        if keys is not None:
            now = time.monotonic()
            if now >= self._refresh_at:  # without a timer, because the loop may run for single requests only
                self._refresh_at = now + _REFRESH_S
                keys.refresh()
        return opened

    def _rest(self, loop: asyncio.AbstractEventLoop, held: HeldBytes) -> RestService:
        options = self._options
        limit = options.http_max_input_size
        return RestService(
            self._engine,
            InferCodec(
                RequestLimits(limit, options.http_max_json_depth),
                forward_pattern=self._forward,
                withholds=None if self._keys is None else self._keys.withholds,
            ),
            LoopMailbox(loop),
            answer_in_thread(loop),
            options,
            restrictions=self._restrictions,
            allowed_hosts=self._allowed_hosts,
            deny=None if self._keys is None else self._keys.deny_action,
            large=LargeBodies(loop, held),
        )

    def _load(self) -> ServerLoad:
        """Return the held bytes of the loop that was last in use."""
        opened = self._open
        return ServerLoad({}) if opened is None else opened.transfers.load()


class _Opened(NamedTuple):
    """Service of a loop, with `body_reader_of` that service, and the loop's transfers."""

    loop: asyncio.AbstractEventLoop
    service: Service
    reads_body: Callable[[Head], bool]
    transfers: Transfers


class _FutureExchange:
    """Exchange that a coroutine awaits.

    For a stream, ``answer`` is the head and `pieces` yields the body. Short bodies and answers need no transfer.
    """

    __slots__ = (
        "_held",
        "_resume",
        "_transfer",
        "_transfers",
        "_waiting",
        "answer",
        "ended",
        "gone",
        "peer",
        "streaming",
        "ticket",
    )

    receiving_since = 0.0  # not observed here

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: str, transfers: Transfers) -> None:
        self.peer = peer
        self.ticket: Cancellable | None = None
        self._transfers = transfers
        self._transfer: Transfer | None = None
        self.answer: asyncio.Future[HttpAnswer] = loop.create_future()
        self.streaming = False
        self.ended = False  # the answer is complete
        self.gone = False  # the client has disconnected
        self._waiting: asyncio.Queue[Buffer] = asyncio.Queue()
        self._held = 0
        self._resume: Callable[[], None] | None = None  # called when the client has read all bytes

    def transfer(self) -> Transfer:
        if self._transfer is None:
            self._transfer = self._transfers.open()
            self._transfer.set_unread(self._held)
        return self._transfer

    def give_back(self) -> None:
        """Give back the bytes of the request, and those of its answer."""
        if self._transfer is not None:
            self._transfer.close()

    def close(self) -> None:
        """End the exchange, and cancel a request that is not answered."""
        self.give_back()
        if self.ticket is not None and not self.ended:
            self.ticket.cancel()

    async def receive(self, receive: Receive, head: Head) -> Buffer | HttpAnswer | None:
        """Receive the whole body; see `Transfer.receive`."""
        message = None
        if head.content_length <= FREE_BYTES:
            message = await receive()
            piece: bytes = message.get("body", b"")
            if len(piece) <= self._transfers.max_short and not message.get("more_body", False):
                return piece if message["type"] != "http.disconnect" else None
        return await self.transfer().receive(receive, head, message)

    def respond(self, answer: HttpAnswer) -> None:
        if not self.answer.done():
            self.ended = True
            self.answer.set_result(answer)

    def begin(self, status: int, headers: Headers) -> None:
        if not self.answer.done():
            self.streaming = True
            self.answer.set_result(HttpAnswer(status, headers, []))

    def send(self, piece: Buffer) -> None:
        if self._held > STREAM_BACKLOG and not self.gone:
            self.give_up(f"left {STREAM_BACKLOG} bytes of its stream unread")
        if not self.gone and len(piece):
            self._held += len(piece)
            self._waiting.put_nowait(piece)
            if self._transfer is not None:
                self._transfer.set_unread(self._held)

    def finish(self) -> None:
        self.ended = True
        self._waiting.put_nowait(b"")

    def leave(self) -> None:
        """Drop the client, which has disconnected or does not read."""
        self.gone = True
        self._waiting.put_nowait(b"")
        self._notify()

    @property
    def flow(self) -> _FutureExchange:
        return self

    @property
    def unsent(self) -> int:
        return 0 if self.gone else self._held

    def when_sent(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def give_up(self, reason: str) -> None:
        _log.warning("a client %s: its request is cancelled", reason)
        self.leave()

    def _notify(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    async def pieces(self) -> AsyncIterator[Buffer]:
        """Yield the pieces of a stream as they arrive.

        Ends with the stream or when the client disconnects.
        """
        while not self.gone:
            piece = await self._waiting.get()
            if not len(piece):
                return
            yield piece
            self._held -= len(piece)
            self.transfer().set_unread(self._held)
            if not self._held:
                self._notify()

    async def outcome(self, receive: Receive) -> HttpAnswer | None:
        """Return the answer, or None if the client disconnected first."""
        if self.answer.done():
            return self.answer.result()
        watch = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((self.answer, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
        if not self.answer.done() and watch.result()["type"] == "http.disconnect":
            return None
        return await self.answer


async def _send_stream(answer: HttpAnswer, exchange: _FutureExchange, receive: Receive, send: Send) -> None:
    """Send a stream piece by piece; stop when the client disconnects or does not read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.leave()

    async def send_all() -> None:
        await send(start_of(answer.status, answer.headers))
        async for piece in exchange.pieces():
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
        if not exchange.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    watching = asyncio.ensure_future(watch())
    try:
        await exchange.transfer().in_time(send_all())
    except OverdueError:
        exchange.give_up(f"has read nothing of its answers for {UNREAD_S:g} s")
    finally:
        watching.cancel()


def _failed(head: Head) -> HttpAnswer:
    """Log the current exception and return the answer to the request that has failed with it."""
    _log.exception("%s %s", head.method, head.path)
    return failure(500, INTERNAL, plain=True, headers=CLOSE)


def target_of(scope: Scope) -> str:
    """Return the request target relative to the app's mount path.

    It is undecoded if the host provides it.
    """
    raw = scope.get("raw_path")
    # Some hosts drop the raw path; the decoded path is then percent-encoded again.
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(scope["path"], _PATH_SAFE)
    root = quote(scope.get("root_path", ""), _PATH_SAFE).rstrip("/")
    if root and path.startswith(f"{root}/"):
        path = path[len(root) :]
    query = scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path
