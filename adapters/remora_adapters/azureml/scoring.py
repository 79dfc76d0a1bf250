"""Azure's routes on the server's port, beside V2 and metrics.

With a scoring script ``/score`` is the script's, otherwise a V2 request to the single model. Headers and errors are
those of azureml-inference-server-http.

Invariant: probes are answered while the script and the models load.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote

from remora.api.http import PATHS as PROBES
from remora.calls import ServerReady
from remora.messages import Buffer
from remora.protocols.http1 import Head, HeadNote
from remora.protocols.rest.answer import Headers, HttpAnswer, Wire, fixed_part
from remora.server.host import ServerContext
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Cancellable, Exchange, ForwardingExchange
from remora_adapters.azureml.answers import FAILED, AzureAnswer, empty_answer, message_answer
from remora_adapters.azureml.cors import Origins
from remora_adapters.azureml.swagger import ANYTHING, Named, NoDocumentError, find_document
from remora_llm.openai.routes import PREFIXES
from remora_llm.routes.hosted_prompts import HostedGeneration

if TYPE_CHECKING:
    from remora_adapters.azureml.entry_script import EntryScript

_HEADER_LIMIT = 100
_PLACE = b"\0" * 36
"""Placeholder of an id's length in cached bytes, which no header can contain."""
_STARTS = 64
_HTML = (b"Content-Type", b"text/html; charset=utf-8")
_NOT_FOUND = (
    "The requested URL was not found on the server. If you entered the URL manually please check your spelling and try "
    "again."
)
_NOT_ALLOWED = "The method is not allowed for the requested URL."
_NO_MODEL = (
    "/score needs a scoring script or a single model: this deployment has {count} models. Set "
    "REMORA_DEFAULT_MODEL, or call /v2/models/NAME/infer"
)
_WANT_SCRIPT = ("/startupz", "/readyz", "/v2/health/ready")
_READS = ("GET", "HEAD", "OPTIONS")
_METHODS = {
    "/": (*_READS, "POST"),
    "/score": (*_READS, "POST"),
    "/swagger.json": _READS,
    "/metrics": _READS,
}
_SCORED = ("/score", "/")
"""Paths of scoring by POST: that of Azure's server, and the scoring route of the deployments that remora makes."""
_ACTIONS = {"/swagger.json": "pages", "/metrics": "metrics"}
_DOCUMENTS = tuple(HostRoute(method, path, action) for path, action in _ACTIONS.items() for method in ("GET", "HEAD"))
_NO_ORIGINS, _UNNAMED = Origins(""), Named()


class ScoringSettings(NamedTuple):
    """Settings of ``/score`` from the environment.

    Attributes:
        script: the scoring script, or None.
        timeout_ms: ``SCORING_TIMEOUT_MS``, after which the client gets an error. The script continues, because a thread
            cannot be stopped.
        model: ``REMORA_DEFAULT_MODEL``, the target of ``/score`` without a script; the only model if empty.
        root: ``AML_APP_ROOT``, which may contain a swagger.json.
        server_version: ``HTTP_X_MS_SERVER_VERSION``, or that of remora, for a header of the answers.
        origins: ``AML_CORS_ORIGINS``, whose pages may read the answers.
        named: name of the deployment in its documents.
    """

    script: EntryScript | None = None
    timeout_ms: int = 3_600_000
    model: str = ""
    root: Path = Path("/var/azureml-app")
    server_version: str = ""
    origins: Origins = _NO_ORIGINS
    named: Named = _UNNAMED


class ScoringService:
    """Service of Azure's routes, and of V2 below ``/v2``.

    Args:
        context: the server.
        settings: settings of the environment.
        new_id: returns new request ids.
    """

    open_paths = frozenset(("/",))
    """See `remora.server.key_check.OpenService`."""

    def __init__(
        self, context: ServerContext, settings: ScoringSettings, new_id: Callable[[], bytes] | None = None
    ) -> None:
        self._context = context
        self._settings = settings
        methods = ("POST",) if settings.script is None else _METHODS["/score"]
        scoring = (HostRoute(method, "/score", "infer") for method in methods)
        self.routes = (*_DOCUMENTS, *scoring, HostRoute("POST", "/", "infer"))
        """See `remora.server.host_routes.RoutedService`."""
        self._when_loaded = context.rest.when_loaded
        self._v2 = context.rest.handle
        self._only_model = context.engine.only_model
        self._generation = HostedGeneration(context.rest, context.engine)
        self._new_id = new_id or _ids()
        self._known = HeadNote[_Known]()
        if settings.script is not None:
            asyncio.get_running_loop().run_in_executor(None, settings.script.open)

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later."""
        known = self._known.get(head)
        if known is not None:  # a repeated head
            if known.infers:  # the usual case
                return self._when_loaded(self._infer, head, body, _WithRequestIds(exchange, known))
            return self._answer(head, known, body, exchange)
        if head.path.startswith(PREFIXES):
            name = self._settings.model or self._only_model() or ""
            found, pending = self._generation.handle_path(head, body, exchange, name)
            if found:
                return pending
        if head.path.startswith("/v2") or head.path in PROBES:
            trouble = self._trouble() if head.path in _WANT_SCRIPT else ""
            if not trouble:
                return self._context.rest.handle(head, body, exchange)
            exchange.respond(HttpAnswer(503, ((b"Content-Type", b"text/plain"),), [trouble.encode()]))
            return None
        methods = _METHODS.get(head.path)
        if methods is None:
            exchange.respond(_http(message_answer(404, _NOT_FOUND)))
        elif head.method not in methods:
            exchange.respond(_http(message_answer(405, _NOT_ALLOWED), (_allow(methods),)))
        else:
            known = self._known.put(head, self._headers_of(head))
            return self._answer(head, known, body, exchange)
        return None

    def _answer(self, head: Head, known: _Known, body: Buffer, exchange: Exchange) -> Cancellable | None:
        labelled = _WithRequestIds(exchange, known)
        if known.infers:
            return self._when_loaded(self._infer, head, body, labelled)
        if known.refusal:
            labelled.respond(_http(message_answer(431, known.refusal)))
        elif head.method == "OPTIONS" and (head.path != "/score" or self._settings.script is None):
            labelled.respond(HttpAnswer(200, (_HTML, _allow(_METHODS[head.path])), []))
        elif head.path == "/" and head.method != "POST":
            labelled.respond(self._health())
        elif head.path == "/swagger.json":
            labelled.respond(
                self._context.rest.access.locked(_ACTIONS[head.path], head) or _http(self._swagger(head.query))
            )
        elif head.path == "/metrics":
            labelled.respond(
                self._context.rest.access.locked(_ACTIONS[head.path], head) or self._context.rest.metrics()
            )
        elif self._settings.script is not None:
            locked = self._context.rest.access.locked("infer", head)
            if locked is None:
                return self._run(self._settings.script, head, body, labelled)
            labelled.respond(locked)
        else:
            labelled.respond(_http(message_answer(405, "Method not allowed")))
        return None

    def _trouble(self) -> str:
        script = self._settings.script
        return script.trouble if script is not None else ""

    def _health(self) -> HttpAnswer:
        """Answer Azure's single probe, healthy once all is loaded, else with the reason."""
        trouble = self._trouble()
        if not trouble and not self._context.engine.perform(ServerReady()):
            trouble = "the models are being loaded, or one of them failed to: see /v2/repository/index"
        if trouble:
            return _http(message_answer(503, trouble))
        return HttpAnswer(200, (_HTML,), [b"Healthy"])

    # -- scoring ----------------------------------------------------------------------------------------------------

    def _run(self, script: EntryScript, head: Head, body: Buffer, exchange: Exchange) -> Cancellable:
        from remora_adapters.azureml.raw_http import AMLRequest  # imported with the script

        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
        path = unquote(head.path) if head.path != "/" else "/score"
        request = AMLRequest(head.method, path, head.query, headers, bytes(body))
        once = _FirstAnswerWins(exchange)
        timer = asyncio.get_running_loop().call_later(self._settings.timeout_ms / 1e3, self._give_up, once)
        once.ended = timer.cancel

        def score() -> HttpAnswer:
            answer = script.score(request, lambda: once.wanted)
            if answer.status == 405 and request.method == "OPTIONS":
                answer = empty_answer()
            return _http(answer)

        self._context.later(score, once, lasts=True)
        return once

    def _give_up(self, exchange: _FirstAnswerWins) -> None:
        text = f"Scoring timeout after {self._settings.timeout_ms} ms"
        exchange.respond(_http(message_answer(500, text, failed=True)))

    def _infer(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Run a V2 request sent to a route of scoring."""
        name = self._settings.model or self._only_model()
        known = self._known.get(head)
        assert known is not None  # from `handle`
        if known.v2 is None or known.model != name:
            if not name:
                count = len({model.name for model in self._context.engine.models()})
                exchange.respond(_http(message_answer(404, _NO_MODEL.format(count=count))))
                return None
            known.model, known.v2 = name, head.to(f"/v2/models/{name}/infer", method="POST")
        return self._generation.dispatch(name, head, body, exchange, partial(self._v2, known.v2, body))

    # -- headers of an answer ---------------------------------------------------------------------------------------

    def _headers_of(self, head: Head) -> _Known:
        """Return the answers' request ids and a refusal, empty for valid ids in the request."""
        given = _text(head, b"x-request-id")
        legacy, client = _text(head, b"x-ms-request-id"), _text(head, b"x-ms-client-request-id")
        refusal = ""
        if len(given) > _HEADER_LIMIT:
            refusal = f"x-request-id must not exceed {_HEADER_LIMIT} characters"
            return self._combine(head, None, "", "", refusal)
        if max(len(legacy), len(client)) > _HEADER_LIMIT:
            refusal = f"x-ms-request-id and x-ms-client-request-id must not exceed {_HEADER_LIMIT} characters"
            legacy = client = ""
        elif legacy:
            client = client or legacy
        else:
            legacy = client
        return self._combine(head, given, legacy, client, refusal)

    def _combine(self, head: Head, given: str | None, legacy: str, client: str, refusal: str) -> _Known:
        """Combine the headers of the answers.

        ``given`` is the request's id, "" for a new one in each answer, and None for no id.
        """
        # x-ms-request-id repeats the id if the client sent no other, and omits a refused one.
        repeats = given is not None and not legacy and not refusal
        own = _no_id if given or given is None else _id_twice if repeats else _id_once
        fixed = [
            ("x-ms-server-version", self._settings.server_version),
            ("x-request-id", given or ""),
            ("x-ms-request-id", (given or "") if repeats else legacy),
            ("x-ms-client-request-id", client),
            ("TraceId", _text(head, b"traceid")),
        ]
        scores = head.method == "POST" and head.path in _SCORED
        infers = not refusal and scores and self._settings.script is None
        same = (*_pairs(fixed), *self._settings.origins.headers(head))
        return _Known(same, own, bytes if own is _no_id else self._new_id, refusal, infers=infers)

    def _swagger(self, query: str) -> AzureAnswer:
        script, named = self._settings.script, self._settings.named
        version = dict(parse_qsl(query)).get("version", "2")
        try:
            document = find_document(version, self._settings.root, named, script.schemas if script else ANYTHING)
        except NoDocumentError as error:
            return message_answer(404, str(error))
        return AzureAnswer(200, [("Content-Type", "application/json"), (FAILED, "False")], document)


class _Known:
    """Cached values of all requests with one head, such as the answers' ids and the V2 head.

    ``same`` are headers of all answers, and ``own`` returns the headers with an answer's id from ``new_id``. ``infers``
    is True if V2 answers and the request's ids are valid.
    """

    __slots__ = ("_made", "_new_id", "_own", "_same", "infers", "model", "refusal", "v2")

    def __init__(
        self,
        same: Headers,
        own: Callable[[bytes], Headers],
        new_id: Callable[[], bytes],
        refusal: str,
        *,
        infers: bool = False,
    ) -> None:
        self._same, self._own, self._new_id = same, own, new_id
        self._made: dict[Wire | None, tuple[Headers, list[bytes]]] = {}
        self.refusal = refusal
        self.infers = infers
        self.model = ""
        self.v2: Head | None = None

    def label(self, answer: HttpAnswer) -> HttpAnswer:
        """Add the ids to an answer.

        For answers with a shared fixed part its bytes are cached, and only the id is inserted.
        """
        status, headers, body, wire = answer
        own = self._new_id()
        made = self._made.get(wire)
        if made is not None:
            return HttpAnswer(status, made[0] + self._own(own), body, Wire(own.join(made[1])))
        same = (*headers, *self._same)
        if wire is not None and own:
            if len(self._made) >= _STARTS:
                self._made.clear()
            start = fixed_part(HttpAnswer(status, same + self._own(_PLACE), body))
            self._made[wire] = same, start.split(_PLACE)
        return HttpAnswer(status, same + self._own(own), body)


def _no_id(own: bytes) -> Headers:
    return ()


def _id_once(own: bytes) -> Headers:
    return ((b"x-request-id", own),)


def _id_twice(own: bytes) -> Headers:
    return ((b"x-request-id", own), (b"x-ms-request-id", own))


def _pairs(rows: Iterable[tuple[str, str]]) -> Headers:
    return tuple((name.encode(), value.encode("latin-1")) for name, value in rows if value)


def _allow(methods: tuple[str, ...]) -> tuple[bytes, bytes]:
    return b"Allow", ", ".join(methods).encode()


def _ids() -> Callable[[], bytes]:
    """Return a source of UUID-like ids, a random prefix and a counter, at a tenth of the cost."""
    begin = str(uuid.uuid4())[:24].encode()
    return map((begin + b"%012x").__mod__, count()).__next__


def _text(head: Head, name: bytes) -> str:
    return (head.get(name) or b"").decode("latin-1")


def _http(answer: AzureAnswer, more: Headers = ()) -> HttpAnswer:
    """Convert an answer to the server's type, without length headers and line breaks."""
    headers = tuple(
        (name.encode("latin-1"), value.replace("\r", " ").replace("\n", " ").encode("latin-1", "replace"))
        for name, value in answer.headers
        if name.lower() not in ("content-length", "transfer-encoding", "connection")
    )
    return HttpAnswer(answer.status, headers + more, [answer.body])


class _WithRequestIds(ForwardingExchange):
    """Exchange that adds the request's ids to the answer."""

    __slots__ = ("_known",)

    def __init__(self, exchange: Exchange, known: _Known) -> None:
        super().__init__(exchange)
        self._known = known

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(self._known.label(answer))

    def begin(self, status: int, headers: Headers) -> None:
        self._exchange.begin(status, self._known.label(HttpAnswer(status, headers, [])).headers)


class _FirstAnswerWins(ForwardingExchange):
    """Exchange that sends the first of two answers, the script's or the timeout's.

    ``wanted`` is True while the script's answer is needed; other threads may read it.
    """

    __slots__ = ("_open", "ended", "wanted")

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._open = self.wanted = True
        self.ended: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        self.wanted = False

    def respond(self, answer: HttpAnswer) -> None:
        if self._open:
            self._open = self.wanted = False
            self.ended()
            self._exchange.respond(answer)
