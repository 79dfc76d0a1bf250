"""Service of OpenAI's routes, which turns requests into tasks of language models.

The pieces of all requests of a step reach the event loop in one wake-up. Decoding of large bodies, and what compiles a
grammar, runs in another thread.

Invariants: each exchange ends once; a client that disconnects frees its rows; the model of a request stays open until
its last task has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import orjson

from remora._version import __version__
from remora.api.http import deadlines, inflate
from remora.api.models import LoadingError
from remora.engine import Engine
from remora.errors import ConfigError, NotFoundError, RemoraError
from remora.messages import Buffer
from remora.models.served_model import ServedModel
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, Headers, HttpAnswer
from remora.server.http.exchange import Answerer, Cancellable, Exchange, VersionExchange, arrival_of
from remora.system.clock import SystemClock
from remora_llm.generation import Generation
from remora_llm.generation.expectation import refuse_if_late
from remora_llm.generation.tasks import ContextError, ParameterError
from remora_llm.openai.mapping import TensorUse, derive_use
from remora_llm.openai.replies import Heading
from remora_llm.openai.requests import Query, decode
from remora_llm.openai.responses import decode_response
from remora_llm.openai.routes import ApiError, Route, context_exceeded, denied, error_answer
from remora_llm.openai.vectors import VECTORS, VectorQuery, decode_vectors
from remora_llm.routes.delivery import (
    ErrorExchange,
    ManagedExchange,
    answer_to,
    cancelled,
    not_managed,
    tokens_answer,
    unloaded,
)
from remora_llm.routes.tasks import PieceDelivery, TaskRequest

if TYPE_CHECKING:
    from remora.api.models import RoutedModel
    from remora.server.http.route_groups import RouteParts

_log = logging.getLogger("remora.http")

_LARGE = 8_192
"""Bytes of a body from which decoding, templates and tokenization run in another thread."""
_LARGE_PACKED = 1_024
"""The same for a compressed body, which may become 1,032 times as large."""
_JSON_TYPES = (b"application/json", b"text/json")
_GENERATES = ("chat", "completions", "responses")


class OpenAiRoutes:
    """Handler of OpenAI's routes. Use it in the event loop's thread.

    Args:
        parts: parts of the server; ``--openai-unknown`` says whether unknown fields are ignored and named in the
            answer's header.
    """

    def __init__(self, parts: RouteParts) -> None:
        self.large = parts.large
        self._access = parts.access
        self._engine = parts.engine
        self.mailbox = parts.mailbox
        self._wait = parts.when_loaded
        self._limit = parts.options.http_max_input_size
        self._ignore_unknown = parts.options.openai_unknown == "ignore"
        self._clock = SystemClock()
        self._pieces: PieceDelivery | None = None
        self._uses: WeakKeyDictionary[ServedModel, TensorUse | None] = WeakKeyDictionary()

    def handle(
        self, where: Route, head: Head, body: Buffer, exchange: Exchange, default_model: str = ""
    ) -> Cancellable | None:
        """Answer one request through ``exchange``, now or later. The rules of access permit it.

        Returns a cancellable if the request is still pending. ``default_model`` is the model of a request that names
        none, for hosts whose endpoints have one model.
        """
        try:
            self._check_head(where, head)
            if where.method == "GET":
                exchange.respond(self._schema(head) if where.action == "schema" else self._list(where))
                return None
            call = _Call(self, where, head, exchange, default_model)
            self._decode(call, head.get(b"content-encoding") or b"", body, exchange)
            return call
        except LoadingError:
            raise
        except Exception as error:
            exchange.respond(answer_to(error))
            return None

    def manage(
        self, where: Route, head: Head, body: Buffer, exchange: Exchange, bind: Callable[[Head], Answerer]
    ) -> Cancellable | None:
        """Load or unload a model by V2's repository API, with the answer in OpenAI's form.

        ``bind`` binds the head of a request to that API.
        """
        if not self._engine.loads_on_request:
            exchange.respond(not_managed())
            return None
        v2 = head.to(f"/v2/repository/models/{where.model}/{where.action}", method="POST")
        return bind(v2)(body, ManagedExchange(exchange, where))

    def handle_hosted(
        self, where: Route, head: Head, body: Buffer, exchange: Exchange, default_model: str
    ) -> Cancellable | None:
        """Answer one request on a host's path, by the rules of access; see `handle`."""
        denial = self._access.refusal(where.v2_action, head)
        if denial is not None:
            exchange.respond(denied(denial.answer, denial.header))
            return None
        return self.handle(where, head, body, exchange, default_model)

    def _decode(self, call: _Call, encoding: bytes, body: Buffer, exchange: Exchange) -> None:
        """Decode a body and begin its call, both in the loop if the body is small."""
        if not encoding or len(body) <= _LARGE_PACKED:
            if len(plain := inflate(body, encoding, self._limit)) > _LARGE:
                call.in_thread(lambda: call.decode(plain), call.resolve)
            else:
                call.decode(plain)
                call.resolve()
        elif self.large is None:
            call.in_thread(lambda: call.decode(inflate(body, encoding, self._limit)), call.resolve)
        else:  # few inflate at once, and what they hold is counted
            unpack = partial(call.unpack, encoding, body, self._limit)
            self.large.decode(ErrorExchange(exchange), unpack, call.go_on, answer_to)

    def _check_head(self, where: Route, head: Head) -> None:
        """Raise ApiError for another method or content type."""
        if head.method != where.method and not (where.method == "GET" and head.method == "HEAD"):
            allowed: Headers = ((b"Allow", where.method.encode()),)
            raise ApiError(405, f"{head.method} is not allowed here: send {where.method}", headers=allowed)
        kind = head.get(b"content-type")
        if where.method == "POST" and kind is not None:
            name = kind.split(b";")[0].strip().lower()
            if name not in _JSON_TYPES and not name.endswith(b"+json"):
                shown = name[:80].decode("latin-1")
                raise ApiError(415, f"the body has the content type {shown!r}: send application/json")

    # -- Models --------------------------------------------------------------------------------------------------------

    def _rows(self) -> dict[str, dict[str, object]]:
        """Return the models that the routes serve, by name."""
        rows: dict[str, dict[str, object]] = {}
        for model in self._engine.models():
            generation = model.generation
            if generation is None:
                if self.use_of(model) is not None:
                    rows[model.name] = _row(model.name, model)
                continue
            facts = generation.engine.facts
            names = (model.name, *generation.served_names, *(f"{model.name}:{each}" for each in facts.adapters))
            for name in names:
                rows[name] = {**_row(name, model), "max_model_len": facts.context}
        return rows

    def use_of(self, model: ServedModel) -> TensorUse | None:
        """Return how the routes use an ordinary model's tensors, None if they cannot."""
        if model not in self._uses:
            try:
                self._uses[model] = derive_use(model.config)
            except ConfigError as error:
                _log.error("OpenAI's routes do not serve a model: %s", error)
                self._uses[model] = None
        return self._uses[model]

    def _schema(self, head: Head) -> HttpAnswer:
        from remora_llm.openai.schema import openapi_document  # imported here, because few clients read it

        root = head.path.removesuffix("/v1/openapi.json")
        document = openapi_document(__version__, root, ignore_unknown=self._ignore_unknown)
        return HttpAnswer(200, (JSON,), [orjson.dumps(document)])

    def _list(self, where: Route) -> HttpAnswer:
        rows = self._rows()
        if where.action == "models":
            return HttpAnswer(200, (JSON,), [orjson.dumps({"object": "list", "data": list(rows.values())})])
        if where.model not in rows:
            raise self._unknown(where.model)
        return HttpAnswer(200, (JSON,), [orjson.dumps(rows[where.model])])

    def _unknown(self, name: str) -> RemoraError:
        is_starting, rows = not self._engine.readiness().started, self._rows()
        if is_starting or name in rows:  # it has become ready since it was looked up
            return ApiError(
                503, f"the model '{name}' is not ready: models are being loaded", headers=((b"Retry-After", b"1"),)
            )
        names = ", ".join(f"'{each}'" for each in rows) or "none"
        return ApiError(
            404, f"the model '{name}' does not exist; available: {names}", param="model", reason="model_not_found"
        )

    def find(self, name: str) -> tuple[ServedModel, str]:
        """Return a model and the name of an adapter, "" for none.

        Raises:
            ApiError: there is no such model.
            LoadingError: the model is being loaded.
        """
        try:
            return self._engine.resolve(name), ""
        except NotFoundError:
            found = self._by_other_name(name)
            if found is None:
                raise self._unknown(name) from None
            return found

    def _by_other_name(self, name: str) -> tuple[ServedModel, str] | None:
        base, _, adapter = name.rpartition(":")
        for model in self._engine.models():
            generation = model.generation
            if generation is None:
                continue
            if name in generation.served_names:
                return model, ""
            if adapter in generation.engine.facts.adapters and base in (model.name, *generation.served_names):
                return model, adapter
        return None

    # -- For calls -----------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def ignores_unknown(self) -> bool:
        """True if unknown fields are ignored."""
        return self._ignore_unknown

    @property
    def pieces(self) -> PieceDelivery:
        """Sink of all tasks, which delivers in the current event loop."""
        if self._pieces is None:
            self._pieces = PieceDelivery(asyncio.get_running_loop())
        return self._pieces

    def heading(self, model: str, fingerprint: str) -> Heading:
        """Return the heading of a new answer."""
        return Heading(secrets.token_hex(12), self._clock.wall_ms() // 1000, model, fingerprint)

    def now_ns(self) -> int:
        """Return the time of the clock of deadlines."""
        return self._clock.monotonic_ns()

    def when_loaded(self, work: Callable[[], Cancellable | None], head: Head, exchange: Exchange) -> Cancellable | None:
        """Run work that may raise LoadingError, again after the load."""
        return self._wait(lambda _head, _body, _exchange: work(), head, b"", ErrorExchange(exchange))


def _row(name: str, model: ServedModel) -> dict[str, object]:
    """Return a model as it is listed."""
    created = model.load_record.ended_ms // 1000
    return {"id": name, "object": "model", "created": created, "owned_by": "remora", "root": model.name}


class _Call:
    """One request between its arrival and the begin of its tasks, and what it became."""

    def __init__(self, routes: OpenAiRoutes, where: Route, head: Head, exchange: Exchange, default_model: str) -> None:
        self._routes = routes
        self._where = where
        self._head = head
        self._exchange = exchange
        self._default_model = default_model
        self._received_ns = routes.now_ns()
        self._query: Query | VectorQuery | None = None
        self._size = 0  # of the decompressed body
        self._became: Cancellable | None = None
        self._count: Callable[[object], None] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the request, because its client has disconnected."""
        self._cancelled = True
        if self._became is not None:
            self._became.cancel()

    def in_thread(self, work: Callable[[], object], go_on: Callable[[], object]) -> None:
        """Run ``work`` in another thread, then ``go_on`` in the loop.

        The exchange is answered with an error of either.
        """

        def ended(done: asyncio.Future[object]) -> None:
            error = done.exception()
            try:
                if error is not None:
                    raise error
                go_on()
            except Exception as failure:
                self._exchange.respond(answer_to(self._renamed(failure)))

        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(ended)

    def decode(self, body: Buffer) -> None:
        """Decode the body. May run in another thread."""
        self._size = len(body)
        action, ignores = self._where.action, self._routes.ignores_unknown
        if action in ("responses", "input_tokens"):
            self._query = decode_response(body, action=action, ignore_unknown=ignores)
        else:
            self._query = (decode_vectors if action in VECTORS else decode)(action, body, ignore_unknown=ignores)

    def unpack(self, encoding: bytes, body: Buffer, limit: int) -> tuple[Exception | None, int]:
        """Decompress and decode the body in any thread.

        Returns the error, if any, and the decompressed size.
        """
        try:
            self.decode(inflate(body, encoding, limit))
        except Exception as error:
            return error, 0
        return None, self._size

    def go_on(self, error: Exception | None, exchange: Exchange) -> Cancellable | None:
        """Begin the request after `unpack`, or answer its error, through ``exchange``."""
        self._exchange = exchange
        if error is None:
            self.resolve()
        else:
            exchange.respond(answer_to(self._renamed(error)))
        return self._became

    def resolve(self) -> None:
        """Begin the request once its model is loaded."""
        if self._cancelled:  # while the body was being decoded
            self._exchange.respond(error_answer(cancelled()))
        else:
            self._became = self._routes.when_loaded(self._begin, self._head, self._exchange)

    def _begin(self) -> Cancellable | None:
        """Begin the request. Raises LoadingError."""
        query = self._query
        assert query is not None
        try:
            name = query.model or self._default_model
            if not name:
                raise ParameterError("model", "the parameter model is missing")
            model, adapter = self._routes.find(name)
            timeout_ns = deadlines.timeout_ns(self._head.get(deadlines.HEADER), plain=True)
            routed = cast("RoutedModel", model) if model.is_routed else None
            if routed is not None:
                # One version from here on: its tokenizer encodes what its engine reads, and its vectors have one space.
                model = routed.bind_to(self._head.get)
                if routed.is_divided:
                    self._exchange = VersionExchange(self._exchange, routed)
            generation = model.generation
            if generation is None:
                return self._begin_tensors(query, model, timeout_ns, keeps_version=routed is not None)
            if routed is not None:
                self._count = routed.counter()
            if isinstance(query, VectorQuery):
                raise ApiError(400, f"the model '{name}' writes text and gives no vectors or scores", param="model")
            if query.action not in _GENERATES:
                self._count_tokens(query, generation)
                return None
            return self._begin_tasks(query, model, generation, adapter, timeout_ns)
        except LoadingError:
            raise
        except Exception as error:
            self._exchange.respond(answer_to(self._renamed(error)))
            return None

    def _count_tokens(self, query: Query, generation: Generation) -> None:
        """Answer tokenize or detokenize, large bodies in another thread. May raise ParameterError."""
        if self._size <= _LARGE:
            self._exchange.respond(tokens_answer(query, generation))
            return
        answers: list[HttpAnswer] = []
        self.in_thread(
            lambda: answers.append(tokens_answer(query, generation)), lambda: self._exchange.respond(answers[0])
        )

    def _begin_tasks(
        self, query: Query, model: ServedModel, generation: Generation, adapter: str, timeout_ns: int
    ) -> Cancellable:
        if timeout_ns and self._routes.engine.options.refuse_late:
            try:
                refuse_if_late(generation.engine.stats(), timeout_ns)
            except RemoraError as error:
                if self._count is not None:
                    self._count(error)
                raise
        if not model.acquire():
            raise unloaded(model)
        traces = self._routes.engine.traces
        trace = traces.begin_task(model, arrival_of(self._head, self._exchange)) if traces.on else None
        request = TaskRequest(self._exchange, query, model, generation, self._routes.pieces)
        request.count = self._count
        request.follow(trace, self._routes.now_ns)
        deadline_ns = self._received_ns + timeout_ns if timeout_ns else 0
        changes = {
            "adapter": adapter,
            "caller": _caller_of(self._head),
            "deadline_ns": deadline_ns,
            "received_ns": self._received_ns,
        }
        begin = partial(request.begin, changes, self._routes.heading)
        if query.is_constrained or self._size > _LARGE:
            self.in_thread(begin, partial(self._began, request))
        else:
            begin()
        return request

    def _begin_tensors(
        self, query: Query | VectorQuery, model: ServedModel, timeout_ns: int, *, keeps_version: bool
    ) -> Cancellable | None:
        from remora_llm.routes.tensors import (  # imported here, because few servers need it
            Origin,
            TensorRequests,
        )

        use = self._routes.use_of(model)
        if use is None:
            raise ApiError(
                400,
                f"the model '{model.name}' has no tensors that these routes can use: its configuration may declare "
                "them in the parameter openai",
                param="model",
            )
        origin = Origin(self._exchange, self._head, timeout_ns, self._routes.heading, self._routes.large)
        requests = TensorRequests(self._routes.engine, self._routes.mailbox, model, use, origin)
        if self._size <= _LARGE:
            return requests.begin(query, keeps_version=keeps_version)

        def begin() -> None:
            became = self._became = requests.begin(query, keeps_version=keeps_version)
            if self._cancelled:
                became.cancel()

        self.in_thread(lambda: requests.prepare(query), begin)
        return None

    def _began(self, request: TaskRequest) -> None:
        if self._cancelled:  # while the tasks were being begun
            request.cancel()

    def _renamed(self, error: Exception) -> Exception:
        """Return an error with the name of the parameter in the request."""
        query = self._query
        if not isinstance(query, Query) or not isinstance(error, ParameterError):
            return error
        name = query.renamed.get(error.parameter, error.parameter)
        if isinstance(error, ContextError) and query.action in _GENERATES:
            return context_exceeded(error, name, is_chat=query.chat is not None)
        return ParameterError(name, error.message.replace(f"{error.parameter} is", f"{name} is"))


def _caller_of(head: Head) -> str:
    """Return the name of the checked key or token; see `remora.models.callers`."""
    return "" if head.caller is None else head.caller.name
