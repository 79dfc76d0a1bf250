"""V2 REST service that dispatches HTTP requests to the engine and encodes its answers.

It is independent of sockets and of ASGI: the HTTP listener and the ASGI app both pass a head, a body and an `Exchange`
for the answer. The codecs contain everything specific to the wire format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from copy import copy
from functools import partial
from typing import NamedTuple, Protocol

from remora import plugins
from remora.calls import Call, Metrics, ModelExplain, ModelLoad, ModelReady, ModelRelease, ModelUnload, RepositoryIndex
from remora.engine import Engine, FrontEnd
from remora.errors import MalformedError, RemoraError, RetiredError
from remora.messages import Buffer, Mailbox, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.options import ServerOptions
from remora.protocols.api_keys import LOAD_CONTENT
from remora.protocols.http1 import Head, HeadNote
from remora.protocols.json.reader import SlowTextError
from remora.protocols.rest.answer import INTERNAL, METRICS, HttpAnswer, Refusal, encode_error, failure
from remora.protocols.rest.content_encoding import compress, inflate
from remora.protocols.rest.infer import InferCodec, KnownHeader
from remora.protocols.rest.management import decode_call, encode_result
from remora.protocols.rest.response import BinaryHeaders, ReplyFormat, v2_binary_headers
from remora.protocols.rest.routes import HOME, METRICS_PATHS, PAGES, Route
from remora.protocols.restriction import Restrictions
from remora.server.http import deadlines
from remora.server.http.access_rules import AccessRules, Deny
from remora.server.http.exchange import Answerer, Cancellable, Exchange, arrival_of, name_version, respond
from remora.server.http.generate import GenerateRoutes
from remora.server.http.head_plan import HeadPlan, action_of_page
from remora.server.http.large_bodies import SLOW_BYTES, Body, InferParts, LargeBodies, LargeRequest, prints_large
from remora.server.http.probes import PATHS as PROBES
from remora.server.http.probes import probe
from remora.server.http.route_groups import OpenGroup, RouteParts, load_group, row_of
from remora.server.http.waiting import LoadWaiters
from remora.server.loop import PerTurn
from remora.server.turn_groups import SMALL_BYTES, TurnGroups

_log = logging.getLogger("remora.http")

_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"

_LASTING = (ModelLoad, ModelUnload, ModelRelease)
"""Calls that run a model's code, which may never return."""
_SLOW = (*_LASTING, RepositoryIndex, ModelExplain)
"""Calls that would block the event loop: they load models, scan repositories or simulate."""

HostsWork = Callable[[Head, Buffer, Exchange], Cancellable | None]
"""Answers an inference on a host's custom route; may raise LoadingError."""


class Later(Protocol):
    """Function that runs slow work in another thread and responds with its answer."""

    def __call__(self, work: Callable[[], HttpAnswer], exchange: Exchange, *, lasts: bool = False) -> None:
        """Run ``work``.

        With ``lasts``, it runs a model's code and must not delay work that does not.
        """


class _Forward(NamedTuple):
    """Answerer of a head rewritten for a V2 route, kept with the original head."""

    model: str
    answer: Answerer


_OPEN = Restrictions()
_OPTIONS = ServerOptions()


class RestService:
    """Service that answers V2 requests.

    Args:
        engine: performs the calls.
        codec: decodes and encodes inference bodies.
        mailbox: receives inference answers.
        later: runs work that would block the event loop.
        options: the server's options about bodies, metrics, the status of malformed requests and groups of routes.
        restrictions: groups of calls that need a secret header.
        allowed_hosts: hosts whose web pages may change the server's state.
        deny: returns the refusal of a request for an action by the roles of its API key, None if they permit it.
        large: threads for large bodies; None to decode and encode all in the loop.
    """

    def __init__(
        self,
        engine: Engine,
        codec: InferCodec,
        mailbox: Mailbox | None,
        later: Later,
        options: ServerOptions = _OPTIONS,
        *,
        restrictions: Restrictions = _OPEN,
        allowed_hosts: Container[str] = (),
        deny: Deny | None = None,
        large: LargeBodies | None = None,
    ) -> None:
        self.large = large
        self._engine = engine
        self._groups = TurnGroups.of(engine, mailbox, self._inferred, _contexts)
        self._opened: dict[plugins.Routes, OpenGroup] = {}
        self._options = options
        self.access = AccessRules(restrictions, allowed_hosts, deny)
        """Rules by which requests are refused, also those to a host's paths."""
        self._submit_to = engine.submit_to
        self._front_end = FrontEnd(self._submit, arrival_of, _DECOUPLED, name_version)
        self._codec = codec
        if large is not None:  # which reads slow text
            self._codec = codec.twin(limits=codec.limits._replace(slow_bytes=SLOW_BYTES))
        self._encode = self._codec.encode
        self._malformed = int(options.client_errors)
        self._generate = GenerateRoutes(engine, mailbox, codec.limits, self.when_loaded, self._malformed, large)
        self._mailbox = mailbox
        self._later = later
        self._waiting = LoadWaiters(engine.options.max_waiting_requests, engine.options.waiting_secs)
        self._metrics_text = PerTurn(lambda: engine.perform(Metrics()).encode(), mailbox)
        self._known_as = ""
        self._answerers = HeadNote[Answerer]()
        self._forwards = HeadNote[_Forward]()

    def over(
        self,
        engine: Engine,
        known_as: str = "",
        *,
        malformed: int = 0,
        binary_headers: BinaryHeaders = v2_binary_headers,
    ) -> RestService:
        """Return a copy of this service for another engine, for a host's port.

        Args:
            engine: performs the calls.
            known_as: model name in answers; "" for the model's real name.
            malformed: HTTP status of malformed bodies, for platforms that take Triton's 500 [H13] for a server fault;
                0 for the status of this service.
            binary_headers: headers by which the platform states the JSON length of an answer with raw tensors.
        """
        other = copy(self)
        other._engine = engine
        other._groups = TurnGroups.of(engine, self._mailbox, other._inferred, _contexts)
        other._submit_to = engine.submit_to
        other._front_end = FrontEnd(other._submit, arrival_of, _DECOUPLED, name_version)
        other._codec = self._codec.twin(binary_headers)
        other._encode = other._codec.encode
        other._malformed = malformed or self._malformed
        other._generate = GenerateRoutes(
            engine, self._mailbox, self._codec.limits, other.when_loaded, other._malformed, self.large
        )
        other._opened = {}
        other._known_as = known_as
        other._metrics_text = PerTurn(lambda: engine.perform(Metrics()).encode(), self._mailbox)
        other._answerers = HeadNote()
        other._forwards = HeadNote()
        return other

    open_paths = frozenset((HOME,))
    """See `remora.server.key_check.OpenService`."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request through ``exchange``, now or later.

        Returns a cancellable if the request is still pending.
        """
        answer = self._answerers.get(head) or self._answerers.put(head, self.bind(head))
        return answer(body, exchange)

    def bind(self, head: Head) -> Answerer:
        """Return what `handle` does with this head."""
        row = row_of(head.path)
        return self._bind(head) if row is None else self._bind_to(row, head)

    def _bind_to(self, row: plugins.Routes, head: Head) -> Answerer:
        """Bind a head of a group of routes, whose rules of access hold for all that it answers."""
        group = load_group(row)
        action = group.action_of(head.method, head.path)
        if action is None:
            return partial(self._answer_unknown, row, head)
        denied = self.access.refusal(action, head)
        return self._open(row).bind(head) if denied is None else partial(respond, group.refuse(denied, head.path))

    def _answer_unknown(self, row: plugins.Routes, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer a request for a path of a group that has no route there."""
        answer = self._open(row).unknown(head)
        if answer is None:
            return self._bind(head)(body, exchange)
        exchange.respond(answer)
        return None

    def opened(self, path: str) -> OpenGroup | None:
        """Return the service of the group of a path, None without one."""
        row = row_of(path)
        return None if row is None else self._open(row)

    def _open(self, row: plugins.Routes) -> OpenGroup:
        if row not in self._opened:
            parts = RouteParts(
                self._engine,
                self._mailbox,
                self._options,
                self.large,
                self.access,
                self.when_loaded,
                self._bind,
            )
            self._opened[row] = load_group(row).serve(parts)
        return self._opened[row]

    def _bind(self, head: Head) -> Answerer:
        plan = HeadPlan(head, self.access.locked)
        if self._codec.forwards:
            plan.json_length = 0  # because a header that becomes a parameter is not in the memo's key
        return partial(self._infer_bound if plan.infers else self._handle_bound, plan, head)

    def infer(self, model: str, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer an inference of ``model`` that arrived on a custom route of a host."""
        known = self._forwards.get(head)
        if known is None or known.model != model:
            v2 = head.to(f"/v2/models/{model}/infer", method="POST")
            known = self._forwards.put(head, _Forward(model, self.bind(v2)))
        return known.answer(body, exchange)

    def _handle_bound(self, plan: HeadPlan, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        try:
            return self._handle(plan, head, body, exchange, plan.timeout_ns)
        except LoadingError as loading:
            return self._wait(loading, plan, head, body, exchange)

    def _infer_bound(
        self, plan: HeadPlan, head: Head, body: Body, exchange: Exchange, timeout_ns: int = 0
    ) -> Cancellable | None:
        """Answer an inference, usually without a deadline.

        ``body`` may be decoded; the request is then submitted alone.
        """
        groups = self._groups
        if (
            groups is not None
            and plan.json_length
            and type(body) is bytes
            and len(body) <= SMALL_BYTES
            and not (timeout_ns or plan.encoding)
            and (known := self._codec.recall(body, plan.json_length)) is not None
        ):
            if groups.begun or groups.begin():
                inference = _Repeated(self, plan, head, body, exchange, known)
                groups.add(plan.model, plan.version, known, inference)
                return inference
            body = known.parts(body)
        try:
            return self._submit_to(self._front_end, plan.model, plan.version, head, exchange, plan, body, timeout_ns)
        except LoadingError as loading:
            return self._wait(loading, plan, head, body, exchange)  # type: ignore[arg-type]  # passed on to `_submit`
        except RemoraError as error:
            exchange.respond(encode_error(error, plain=True))
            return None

    def when_loaded(self, work: HostsWork, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Run a host's inference ``work``.

        After LoadingError, runs it again when the model is loaded.
        """
        try:
            return work(head, body, exchange)
        except LoadingError as loading:
            locked = self.access.locked("infer", head)
            if locked is not None:
                exchange.respond(locked)  # a refused request must not take a place among the waiting ones
                return None
            again = lambda _waited_ns: self.when_loaded(work, head, body, exchange)  # noqa: E731
            return self._waiting.take(loading, exchange, 0, again)

    def _wait(
        self, loading: LoadingError, plan: HeadPlan, head: Head, body: Buffer, exchange: Exchange
    ) -> Cancellable | None:
        """Handle a request again when its model is loaded; its deadline does not move."""
        timeout_ns = plan.timeout_ns

        def go_on(waited_ns: int) -> Cancellable | None:
            return self._handle(plan, head, body, exchange, max(timeout_ns - waited_ns, 1) if timeout_ns else 0)

        return self._waiting.take(loading, exchange, timeout_ns, go_on)

    def _handle(self, plan: HeadPlan, head: Head, body: Buffer, exchange: Exchange, timeout_ns: int) -> Ticket | None:
        """Handle a request. Raises LoadingError if it may wait for its model."""
        if plan.infers:
            return self._infer(plan, head, body, exchange)
        if timeout_ns:
            return self._in_time(plan, head, body, exchange, timeout_ns)
        if plan.generates is not None:
            return self._generate.handle(plan.generates, plan.encoding, head, body, exchange)
        if plan.route is not None:
            return self._call(plan, plan.route, head, body, exchange)
        if plan.locked and plan.refusal is not None:
            exchange.respond(plan.refusal)
        elif plan.refusal is not None:
            self._beyond_v2(plan.refusal, head, body, exchange)
        return None

    def _beyond_v2(self, refusal: HttpAnswer, head: Head, body: Buffer, exchange: Exchange) -> None:
        """Answer a request that V2 refuses.

        The answer is metrics, a probe or a page if the path names one, else the refusal.
        """
        if head.path in METRICS_PATHS and self._options.allow_metrics and head.method in ("GET", "HEAD"):
            exchange.respond(self.metrics())
        elif head.path in PROBES and head.method in ("GET", "HEAD"):
            exchange.respond(probe(head, self._engine))
        elif head.path in PAGES:
            self.page(head, exchange)
        else:
            exchange.respond(self._without_route(refusal, head.path))

    def _without_route(self, refusal: HttpAnswer, path: str) -> HttpAnswer:
        """Return V2's refusal of a request, with the nearest route for a path of another server."""
        if refusal.status != 404 or path.startswith("/v2"):
            return refusal
        from remora.protocols.rest.other_routes import with_hint  # imported here, because most servers never need it

        return with_hint(refusal, path, [model.name for model in self._engine.models()])

    def page(self, head: Head, exchange: Exchange) -> None:
        """Answer a request for one of `PAGES`."""
        refused = self.access.locked(action_of_page(head.path), head)
        if refused is not None:
            exchange.respond(refused)
            return

        def render() -> HttpAnswer:
            from remora.server.http.pages import render  # imported here, because startup does not need it

            return render(self._engine, head, metrics=self._options.allow_metrics)

        self._later(render, exchange)

    # -- inference --------------------------------------------------------------------------------------------------

    def _in_time(self, plan: HeadPlan, head: Head, body: Buffer, exchange: Exchange, timeout_ns: int) -> Ticket | None:
        """Submit an inference that has a deadline."""
        timed = deadlines.TimedExchange(exchange, plain=plan.generates is None)
        if plan.generates is None:
            ticket = self._infer(plan, head, body, timed, timeout_ns)
        else:
            ticket = self._generate.handle(plan.generates, plan.encoding, head, body, timed, timeout_ns)
        if ticket is not None:
            timed.watch(ticket, timeout_ns)
        return ticket

    def _infer(
        self, plan: HeadPlan, head: Head, body: Buffer, exchange: Exchange, timeout_ns: int = 0
    ) -> Ticket | None:
        try:
            return self._submit_to(self._front_end, plan.model, plan.version, head, exchange, plan, body, timeout_ns)
        except LoadingError:
            raise
        except RemoraError as error:
            exchange.respond(encode_error(error, plain=True))
            return None

    def _submit(
        self, model: ServedModel, head: Head, exchange: Exchange, plan: HeadPlan, body: Body, timeout_ns: int
    ) -> Ticket | None:
        """Decode an inference for ``model``, unless it is decoded, and submit it.

        Raises RetiredError.
        """
        try:
            if not isinstance(body, tuple):
                if self.large is not None and (self.large.takes(body) or plan.encoding):
                    read = LargeRequest(self._codec, body, plan.encoding, plan.header_length, head.headers, model)
                    if read.is_large:
                        return self._decode_in_thread(read, plan, head, exchange, timeout_ns)
                try:
                    parts = self._decode(plan, head, body, model.name)
                except SlowTextError:
                    read = LargeRequest(self._codec, body, plan.encoding, plan.header_length, head.headers, model)
                    return self._decode_in_thread(read, plan, head, exchange, timeout_ns)
                body = parts
            form, data, reply_format = body
            context = (exchange, model, reply_format, plan.accept)
            return model.submit(
                form, data, self._inferred, mailbox=self._mailbox, context=context, timeout_ns=timeout_ns
            )
        except RetiredError:
            raise
        except (Refusal, RemoraError) as error:
            exchange.respond(self._refusal(error))
        return None

    def _decode_in_thread(
        self, read: LargeRequest, plan: HeadPlan, head: Head, exchange: Exchange, timeout_ns: int
    ) -> Ticket:
        """Decode a body in a thread, then submit it to the model found for it or a successor."""
        assert self.large is not None  # because the codec reads all text without it

        def submit(parts: InferParts, counted: Exchange) -> Cancellable | None:
            try:
                return self._submit(read.model, head, counted, plan, parts, timeout_ns)
            except RetiredError:
                return self._infer_bound(plan, head, parts, counted, timeout_ns)

        return self.large.decode(exchange, read.parts, submit, self._refusal)

    def _decode(self, plan: HeadPlan, head: Head, body: Buffer, model: str) -> InferParts:
        codec = self._codec
        plain = inflate(body, plan.encoding, self._options.http_max_input_size) if plan.encoding else body
        if plan.json_length and type(plain) is bytes:
            known = codec.recall(plain, plan.json_length)
            if known is not None:
                return known.parts(plain)
        return codec.decode(plain, plan.header_length, codec.forwarded(head.headers), model)

    def _refusal(self, error: Refusal | RemoraError, *, plain: bool = False) -> HttpAnswer:
        """Return the answer to a request that cannot be decoded."""
        if isinstance(error, Refusal):
            return error.answer
        answer = encode_error(error, plain=plain)
        malformed = self._malformed if isinstance(error, MalformedError) else 0
        return answer._replace(status=malformed) if malformed else answer

    def _inferred(self, ticket: Ticket, outcome: Outcome) -> None:
        context: tuple[Exchange, ServedModel, ReplyFormat, str] = ticket.context  # type: ignore[assignment]
        exchange, model, reply_format, accept = context
        if isinstance(outcome, RemoraError):
            exchange.respond(encode_error(outcome, plain=True))
            return
        if not isinstance(outcome, Response):
            return  # unreachable: decoupled models are refused before submission
        name, form = self._known_as or model.name, ticket.request.form
        takes_long = accept or not reply_format.all_binary or model.signature.answers_texts
        large = self.large if takes_long else None
        if large is not None and prints_large(outcome, reply_format, compressed=bool(accept)):
            large.encode(
                exchange,
                self._codec.twin(),
                (name, model.version_text, form, outcome, reply_format),
                accept,
            )
            return
        try:
            answer = self._encode(name, model.version_text, form, outcome, reply_format)
        except RemoraError as error:
            exchange.respond(encode_error(error, plain=True))
            return
        exchange.respond(compress(answer, accept) if accept else answer)

    # -- everything else --------------------------------------------------------------------------------------------

    def _call(self, plan: HeadPlan, where: Route, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
        if where.action == "metrics":
            exchange.respond(self.metrics())
            return None
        if where.action == "ready" and self._engine.readiness().draining:
            exchange.respond(failure(503, "Server exiting", plain=True))
            return None
        if where.action in ("system_shm", "cuda_shm"):
            if len(body) > SLOW_BYTES:  # because JSON that orjson refuses takes long
                text = f"a request about shared memory may have {SLOW_BYTES} bytes, this one has {len(body)}"
                exchange.respond(failure(400, text, plain=True))
                return None
            from remora.protocols.shared_memory import answer_region  # imported here, because it is rare

            exchange.respond(answer_region(where, bytes(body), self._codec.regions))
            return None
        refusal = partial(self._refusal, plain=where.plain_errors)
        if self.large is not None and len(body) > SLOW_BYTES:

            def perform(call: Call, exchange: Exchange) -> Cancellable | None:
                try:
                    self._perform(where, call, head, exchange)
                except LoadingError as loading:
                    return self._wait(loading, plan, head, body, exchange)
                return None

            return self.large.decode(exchange, lambda: (decode_call(where, bytes(body)), 0), perform, refusal)
        try:
            call = decode_call(where, bytes(body))
        except (Refusal, RemoraError) as error:
            exchange.respond(refusal(error))
            return None
        self._perform(where, call, head, exchange)
        return None

    def _perform(self, where: Route, call: Call, head: Head, exchange: Exchange) -> None:
        denied = self.access.denied(LOAD_CONTENT, head) if isinstance(call, ModelLoad) and call.has_content else None
        if denied is not None:
            exchange.respond(denied)
            return
        asks = isinstance(call, ModelReady) and self._engine.decides_readiness(call.model, call.version)
        slow = asks or isinstance(call, _SLOW)

        def answer() -> HttpAnswer:
            try:
                return encode_result(where, self._engine.perform(call))
            except RemoraError as error:
                if isinstance(error, LoadingError) and not slow:
                    raise  # the request waits in the loop; in another thread the error would be lost
                return encode_error(error, plain=where.plain_errors)

        if slow:
            self._later(answer, exchange, lasts=asks or isinstance(call, _LASTING))
        else:
            exchange.respond(answer())

    def metrics(self) -> HttpAnswer:
        """Return the answer with the Prometheus metrics.

        All requests of a turn of the loop get the same text.
        """
        return HttpAnswer(200, (METRICS,), [self._metrics_text.get()])


class _Repeated:
    """Inference whose header the codec knows; see `remora.server.turn_groups.Inference`."""

    __slots__ = ("_head", "_service", "body", "cancelled", "exchange", "known", "plan", "ticket")

    def __init__(
        self, service: RestService, plan: HeadPlan, head: Head, body: bytes, exchange: Exchange, known: KnownHeader
    ) -> None:
        self._service = service
        self._head = head
        self.plan = plan
        self.body = body
        self.exchange = exchange
        self.known = known
        self.ticket: Cancellable | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()

    def start(self) -> None:
        """Submit it alone."""
        exchange = self.exchange
        try:
            decoded = self.known.parts(self.body)
            self.ticket = self._service._infer_bound(self.plan, self._head, decoded, exchange)
        except Exception:
            _log.exception("inference of model '%s'", self.plan.model)
            exchange.respond(failure(500, INTERNAL, plain=True))
        if self.cancelled:
            self.cancel()

    def refuse(self, error: RemoraError) -> None:
        self.exchange.respond(encode_error(error, plain=False))


def _contexts(model: ServedModel, inferences: list[_Repeated]) -> list[object]:
    return [(each.exchange, model, each.known.reply, each.plan.accept) for each in inferences]
