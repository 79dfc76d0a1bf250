"""KServe's routes on the server's port, for V1 and KServe's dialect of V2.

Bodies, codes and texts are those of KServe's ModelServer. V2 inference is the server's; only the routes around it
differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

import orjson

from remora.api.http import PATHS as PROBES
from remora.api.http import Predictor
from remora.calls import ModelReady, ServerReady
from remora.errors import NotFoundError, RemoraError
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer, encode_json_error, failure
from remora.server.host import ServerContext
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Cancellable, Exchange, ForwardingExchange
from remora_adapters.kserve.cloud_events import Event, answer_event, read_event
from remora_llm.routes.hosted_prompts import HostedGeneration

_V1 = "/v1/models"
_V2 = "/v2/models"
_REPOSITORY = "/v2/repository/models/"
_NOT_FOUND = b'{"detail":"Not Found"}'
_NOT_ALLOWED = b'{"detail":"Method Not Allowed"}'


class KServeService:
    """Service of V1, and of V2 as in KServe's server.

    Args:
        context: the server.
        as_kserve: False leaves V2 as Triton answers it.
        openai: first part of the paths of OpenAI's routes; "" for /v1, where V1's GET routes go first.
        now: returns the time as RFC 3339, for events.
    """

    open_paths = frozenset(("/",))
    """See `remora.server.key_check.OpenService`."""
    routes = (
        HostRoute("POST", f"{_V1}/*", "infer"),
        *(HostRoute(method, _V1, "model_metadata") for method in ("GET", "HEAD")),
        *(HostRoute(method, f"{_V1}/*", "model_ready") for method in ("GET", "HEAD")),
    )
    """See `remora.server.host_routes.RoutedService`."""

    def __init__(
        self,
        context: ServerContext,
        *,
        as_kserve: bool = True,
        openai: str = "openai",
        now: Callable[[], str] | None = None,
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._as_kserve = as_kserve
        self._now = now or (lambda: datetime.now(UTC).isoformat())
        self._predictor = Predictor(context.rest, context.engine, context.mailbox, context.options.http_max_input_size)
        self._openai = f"/{openai}/v1/" if openai else "/v1/"
        self._generation = HostedGeneration(context.rest, context.engine)

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later."""
        if "%" in head.path and (self._as_kserve or not head.path.startswith("/v2")):
            head = head.to(unquote(head.path))  # KServe decodes paths, and Triton does not
        path = head.path
        if path in (_V1, _V2):  # V1's list of models, which KServe, unlike Triton, also has in V2
            exchange.respond(self._get(head, "model_metadata", self._models))
            return None
        if path.startswith("/v2"):
            return self._v2(head, body, exchange)
        if path.startswith(self._openai) and (not path.startswith("/v1/") or head.method == "POST"):
            rest = quote(path.removeprefix(self._openai))  # because these routes decode a name themselves
            whole = head.to(f"/openai/v1/{rest}")
            found, pending = self._generation.handle_path(whole, body, exchange, self._engine.only_model() or "")
            if found:
                return pending
        if path in PROBES:
            return self._context.rest.handle(head, body, exchange)
        if path == "/":
            exchange.respond(self._get(head, "", lambda: _json({"status": "alive"})))
        elif path == "/metrics":
            exchange.respond(self._get(head, "metrics", self._context.rest.metrics))
        elif path.startswith(f"{_V1}/"):
            return self._v1(head, path.removeprefix(f"{_V1}/"), body, exchange)
        else:
            exchange.respond(HttpAnswer(404, (JSON,), [_NOT_FOUND]))
        return None

    # -- V1 ---------------------------------------------------------------------------------------------------------

    def _v1(self, head: Head, rest: str, body: Buffer, exchange: Exchange) -> Cancellable | None:
        name, colon, verb = rest.rpartition(":")
        if not rest or (colon and not name) or "/" in rest:
            exchange.respond(HttpAnswer(404, (JSON,), [_NOT_FOUND]))
        elif not colon or head.method == "GET":
            exchange.respond(self._model_ready(head, rest))
        elif verb not in ("predict", "explain"):
            exchange.respond(HttpAnswer(404, (JSON,), [_NOT_FOUND]))
        elif head.method != "POST":
            exchange.respond(HttpAnswer(405, (JSON,), [_NOT_ALLOWED]))
        elif verb == "explain":
            exchange.respond(failure(501, f"model '{name}' has no explainer", plain=False))
        else:
            return self._predict(head, name, body, exchange)
        return None

    def _predict(self, head: Head, name: str, body: Buffer, exchange: Exchange) -> Cancellable | None:
        locked = self._context.rest.access.locked("infer", head)
        if locked is not None:
            exchange.respond(locked)
            return None
        try:
            event = read_event(head, body)
        except RemoraError as error:
            exchange.respond(encode_json_error(error))
            return None
        if event is None:
            return self._predictor.handle(name, head, body, exchange)
        return self._predictor.handle(name, head, event.data, _EventExchange(exchange, event, name, self._now))

    def _models(self) -> HttpAnswer:
        return _json({"models": sorted({model.name for model in self._engine.models()})})

    def _model_ready(self, head: Head, name: str) -> HttpAnswer:
        return self._get(head, "model_ready", lambda: self._ready(name))

    def _ready(self, name: str) -> HttpAnswer:
        try:
            if self._engine.perform(ModelReady(name)):
                return _json({"name": name, "ready": True})
        except NotFoundError:
            return failure(404, f"Model with name {name} does not exist.", plain=False)
        except RemoraError:
            pass  # a known model that is not serving
        return failure(503, f"Model with name {name} is not ready.", plain=False)

    def _get(self, head: Head, action: str, answer: Callable[[], HttpAnswer]) -> HttpAnswer:
        """Return the answer to a request that reads, or its refusal.

        ``action`` is that of V2 whose permission the request needs, "" for none.
        """
        if head.method not in ("GET", "HEAD"):
            return HttpAnswer(405, (JSON,), [_NOT_ALLOWED])
        return self._context.rest.access.locked(action, head) or answer()

    # -- V2 ---------------------------------------------------------------------------------------------------------

    def _v2(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer a V2 request, with KServe's bodies where they differ."""
        rest = self._context.rest
        if not self._as_kserve:
            return rest.handle(head, body, exchange)
        empty_body: dict[str, Any] | None = None
        if head.path == "/v2/health/live":
            empty_body = {"live": True}
        elif head.path == "/v2/health/ready":
            if not rest.access.locked("ready", head) and not self._engine.perform(ServerReady()):
                exchange.respond(failure(503, "Server is not ready.", plain=False))
                return None
            empty_body = {"ready": True}
        elif head.path.startswith(f"{_V2}/") and head.path.endswith("/ready"):
            name = head.path.removeprefix(f"{_V2}/").partition("/")[0]
            if head.path == f"{_V2}/{name}/ready":
                exchange.respond(self._model_ready(head, name))
                return None
            empty_body = {"name": name, "ready": True}
        elif head.path.startswith(_REPOSITORY):
            name, _, verb = head.path.removeprefix(_REPOSITORY).partition("/")
            empty_body = {"name": name, verb: True}
        return rest.handle(head, body, _JsonExchange(exchange, empty_body))


def _json(value: object) -> HttpAnswer:
    return HttpAnswer(200, (JSON,), [orjson.dumps(value)])


class _JsonExchange(ForwardingExchange):
    """Exchange that sends errors as JSON and ``empty_body`` in place of an empty answer."""

    __slots__ = ("_empty_body",)

    def __init__(self, exchange: Exchange, empty_body: dict[str, Any] | None) -> None:
        super().__init__(exchange)
        self._empty_body = empty_body

    def respond(self, answer: HttpAnswer) -> None:
        if answer.status == 200 and self._empty_body is not None and not any(len(piece) for piece in answer.body):
            answer = _json(self._empty_body)
        elif answer.status >= 400:
            kept = tuple(pair for pair in answer.headers if pair[0].lower() != b"content-type")
            answer = HttpAnswer(answer.status, (JSON, *kept), answer.body)
        self._exchange.respond(answer)


class _EventExchange(ForwardingExchange):
    """Exchange that answers an event with an event."""

    __slots__ = ("_event", "_model", "_now")

    def __init__(self, exchange: Exchange, event: Event, model: str, now: Callable[[], str]) -> None:
        super().__init__(exchange)
        self._event = event
        self._model = model
        self._now = now

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(answer_event(self._event, self._model, answer, str(uuid.uuid4()), self._now()))
