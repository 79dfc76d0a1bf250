"""SageMaker's routes on the platform's port, served by V2.

V2 bodies are passed on unchanged, other bodies through `bodies`, those of an ``inference.py`` whole. The V2 service's
answers get SageMaker's headers. The multi-model API is here too, over `hosted`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import orjson

from remora.api.http import LOAD_CONTENT, RestService, json_length
from remora.api.models import LoadingError
from remora.calls import ServerLive, ServerReady
from remora.engine import Engine
from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import Buffer
from remora.protocols.http1 import Head, HeadNote
from remora.protocols.rest.answer import JSON, PLAIN, Headers, HttpAnswer, Refusal, encode_error, failure
from remora.server.host import ServerContext
from remora.server.http.exchange import Cancellable, Exchange
from remora_adapters.sagemaker import routes, sessions
from remora_adapters.sagemaker.bodies import is_translated
from remora_adapters.sagemaker.exchanges import AfterWork, FanIn, HeaderExchange, ScriptBack
from remora_adapters.sagemaker.hosted import Hosted, HostedModels
from remora_adapters.sagemaker.routes import HOST_ROUTES, OPEN_PATHS
from remora_adapters.sagemaker.scripted import script_request
from remora_adapters.sagemaker.settings import Rules
from remora_llm.openai.routes import PREFIXES
from remora_llm.routes.hosted_prompts import HostedGeneration

_log = logging.getLogger("remora.sagemaker")

_OK = HttpAnswer(200, (PLAIN,), [])
_NOT_READY = HttpAnswer(400, (PLAIN,), [])
_GONE = HttpAnswer(404, (PLAIN,), [])
_IDLE_S = 3600
_ASIDE_BYTES = 65_536
"""Limit of bodies converted in the event loop, because /ping must be answered meanwhile."""
_PAGE = 100
MALFORMED = 400
"""Status of an invalid body, which is the client's fault.

Triton answers 500 [H13] except on multi-model endpoints, but on a 500 the platform blames the container and the client
retries.
"""
_NOT_EXPLICIT = "repository registration is not allowed if model control mode is not EXPLICIT"
_NO_MODEL = "there is no single model: set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"


class Model(NamedTuple):
    """Model of an invocation, with its service, engine and name, and True for a script.

    ``generation`` answers bodies for language models.
    """

    rest: RestService
    engine: Engine
    name: str
    generation: HostedGeneration
    script: bool = False


class _Plan:
    """Parsed head of a request, cached with the head."""

    __slots__ = ("extra", "media", "model", "refusal", "route", "session", "v2")

    def __init__(self, head: Head, *, as_triton: bool) -> None:
        self.refusal: HttpAnswer | None = None
        self.route = routes.Route("")
        self.model: Model | None = None  # the model of `v2`
        self.v2: Head | None = None
        self.media = ""
        self.session: bytes | None = None
        echoed = routes.attributes(head)
        self.extra: Headers = ((routes.ATTRIBUTES, echoed),) if echoed else ()
        try:
            self.route = routes.route(head.method, head.path)
        except (Refusal, routes.NotAskedError) as error:
            self.refusal = routes.refusal_of(error)
        if not as_triton:
            media = routes.media_type(head).decode("latin-1")
            self.media = media if is_translated(media) else ""
            self.session = head.get(routes.SESSION)


class SageMakerService:
    """Service of the platform's port.

    Args:
        context: the engine and the V2 service.
        rules: how requests are answered.
        hosted: the models of a multi-model endpoint.
        script: True if the single model is an ``inference.py``.
    """

    open_paths = OPEN_PATHS
    """See `remora.server.key_check.OpenService`."""
    routes = HOST_ROUTES
    """See `remora.server.host_routes.RoutedService`."""

    def __init__(self, context: ServerContext, rules: Rules, hosted: HostedModels, *, script: bool = False) -> None:
        self._engine = context.engine
        malformed = 0 if rules.as_triton else MALFORMED
        self._rest = context.rest.over(context.engine, malformed=malformed, binary_headers=routes.binary_headers)
        self._later = context.later
        self._rules = rules
        self._hosted = hosted
        self._script = script
        self._generation = HostedGeneration(self._rest, self._engine)
        self._only: Model | None = None  # model of the last invocation
        self._hosts: dict[str, Model] = {}
        self._plans = HeadNote[_Plan]()
        self._act: dict[str, Callable[[_Plan, Head, Buffer, Exchange], Cancellable | None]] = {
            "invoke": self._invoke,
            "invoke-model": self._invoke_model,
            "ping": self._ping,
            "execution-parameters": self._execution_parameters,
            "list": self._list,
            "get": self._get,
            "load": self._load,
            "unload": self._unload,
        }

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request through ``exchange``, now or later.

        The returned ticket, if any, can be cancelled.
        """
        plan = self._plans.get(head) or self._plans.put(head, _Plan(head, as_triton=self._rules.as_triton))
        if plan.refusal is not None:
            if not self._rules.as_triton and head.path.startswith(PREFIXES):
                back = HeaderExchange(exchange, plan.extra) if plan.extra else exchange
                name = self._rules.model or self._engine.only_model() or ""
                found, pending = self._generation.handle_path(head, body, back, name)
                if found:
                    return pending
            exchange.respond(plan.refusal)
            return None
        return self._act[plan.route.action](plan, head, body, exchange)

    # -- invocations ------------------------------------------------------------------------------------------------

    def _invoke(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        back = HeaderExchange(exchange, plan.extra) if plan.extra else exchange
        return self._rest.when_loaded(self._invoke_only, head, body, back)

    def _invoke_only(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Run an invocation of the default model. Raises LoadingError if it may wait for the model."""
        name = self._rules.model or self._engine.only_model()
        plan = self._plans.get(head)
        assert plan is not None  # from `handle`
        model = self._only
        if model is None or model.name != name:
            if not name:
                exchange.respond(failure(400, _NO_MODEL, plain=True))
                return None
            model = self._only = Model(self._rest, self._engine, name, self._generation, self._script)
        return self._run(plan, model, head, body, exchange)

    def _invoke_model(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        row = self._hosted.get(plan.route.model)
        if row is None or row.rest is None or row.engine is None:
            exchange.respond(_GONE)
            return None
        if self._rules.as_triton:  # which identifies a model by the target's name only [N07]
            target = _target(head) or row.name
            if target != row.target:
                exchange.respond(failure(400, f"Request for unknown model: '{target}' is not found", plain=False))
                return None
        model = self._hosts.get(row.name)
        if model is None or model.rest is not row.rest:
            generation = HostedGeneration(row.rest, row.engine)
            model = self._hosts[row.name] = Model(row.rest, row.engine, row.inner, generation, row.script)
        return self._run(plan, model, head, body, HeaderExchange(exchange, plan.extra, memory=True))

    def _run(self, plan: _Plan, model: Model, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Pass a body of any form on to V2."""
        if model.script:
            return self._run_script(plan, model, head, body, exchange)
        if plan.media:
            return self._run_translated(plan, model, head, body, exchange)
        if not self._rules.as_triton and routes.BINARY not in (head.get(b"content-type") or b""):
            run = partial(self._run_tensors, plan, model, head, body)
            return model.generation.dispatch(model.name, head, body, exchange, run, self._as_json)
        return self._run_tensors(plan, model, head, body, exchange)

    def _run_tensors(
        self, plan: _Plan, model: Model, head: Head, body: Buffer, exchange: Exchange
    ) -> Cancellable | None:
        """Pass a V2 body on."""
        if plan.session is not None:
            return self._run_in_session(plan, model, head, body, exchange)
        v2 = plan.v2
        if v2 is None or plan.model is not model:
            try:
                v2 = plan.v2 = self._v2_head(head, model, routes.header_length(head))
            except Refusal as refusal:
                exchange.respond(refusal.answer)
                return None
            plan.model = model
        return model.rest.handle(v2, body, exchange)

    def _as_json(self, head: Head) -> Head:
        """Return the head for OpenAI's routes, with the endpoint's timeout and the trace."""
        return routes.v2_head(head, head.path, None, self._rules.timeout_ms)

    def _v2_head(self, head: Head, model: Model, json_length: bytes | None, *, infers: bool = False) -> Head:
        kind = "infer" if infers else self._rules.kind
        if not infers and not self._rules.as_triton and routes.wants_events(head):
            kind = "generate_stream"
        return routes.v2_head(head, f"/v2/models/{model.name}/{kind}", json_length, self._rules.timeout_ms)

    def _run_in_session(
        self, plan: _Plan, model: Model, head: Head, body: Buffer, exchange: Exchange
    ) -> Cancellable | None:
        try:
            session = sessions.session_of(plan.session, uuid.uuid4().hex)
            length = routes.header_length(head)
            json_part = len(body) if length is None else json_length(length, len(body))
        except ValueError as error:
            exchange.respond(failure(400, str(error), plain=True))
            return None
        except Refusal as refusal:
            exchange.respond(refusal.answer)
            return None
        assert session is not None
        text, json_part, ends = sessions.as_sequence(body, json_part, session)
        extra = sessions.headers_of(session, ends=ends, now_s=time.time(), idle_s=self._idle_s(model))
        v2 = self._v2_head(head, model, b"%d" % json_part if length is not None else None)
        return model.rest.handle(v2, text, HeaderExchange(exchange, extra, only_good=True))

    def _idle_s(self, model: Model) -> int:
        """Return the idle timeout of a session, which is that of the model's sequences."""
        try:
            config = model.engine.resolve(model.name).config
        except RemoraError:
            return _IDLE_S
        return config.sequence_batching.max_sequence_idle_microseconds // 1_000_000 or _IDLE_S

    def _run_translated(
        self, plan: _Plan, model: Model, head: Head, body: Buffer, exchange: Exchange
    ) -> Cancellable | None:
        accept = (head.get(b"accept") or b"").decode("latin-1")
        if accept in ("", "*/*") and self._rules.accept:
            accept = self._rules.accept

        def v2_head(json_part: int | None) -> Head:
            length = None if json_part is None else b"%d" % json_part
            return self._v2_head(head, model, length, infers=True)

        try:
            signature = model.engine.resolve(model.name).signature
        except LoadingError:
            raise
        except RemoraError as error:
            exchange.respond(encode_error(error, plain=True))
            return None
        gathering = FanIn(model.rest, v2_head, accept, self._later, exchange)

        def read() -> HttpAnswer | None:
            return gathering.read(plan.media, body, signature.inputs, signature.max_batch_size)

        if len(body) > _ASIDE_BYTES:
            AfterWork.run(self._later, read, gathering.submit, exchange)
            return gathering  # cancellable before its first request
        refusal = read()
        if refusal is not None:
            exchange.respond(refusal)
            return None
        return gathering.submit()

    def _run_script(
        self, plan: _Plan, model: Model, head: Head, body: Buffer, exchange: Exchange
    ) -> Cancellable | None:
        media = routes.media_type(head) or b"application/json"
        accept = (head.get(b"accept") or b"").partition(b",")[0].partition(b";")[0].strip().lower()
        if accept in (b"", b"*/*"):
            accept = self._rules.accept.encode() or b"application/json"
        text, length = script_request(body, media, accept)
        v2 = self._v2_head(head, model, b"%d" % length, infers=True)
        return model.rest.handle(v2, text, ScriptBack(exchange))

    # -- management -------------------------------------------------------------------------------------------------

    def _ping(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> None:
        good = bool(self._engine.perform(ServerLive() if self._rules.ping_live else ServerReady()))
        if self._rules.as_triton and not self._rules.ping_live:
            good = good and not self._hosted.failed
        exchange.respond(self._rest.access.locked("ready", head) or (_OK if good else _NOT_READY))

    def _execution_parameters(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> None:
        if self._rules.as_triton:
            exchange.respond(HttpAnswer(400, (PLAIN,), []))
            return
        at_once = self._rules.transforms or max(
            (
                max(model.config.max_batch_size, 1) * sum(group.count for group in model.config.instance_group)
                for model in self._engine.models()
            ),
            default=1,
        )
        parameters: dict[str, int | str] = {
            "MaxConcurrentTransforms": max(min(at_once, 100), 1),
            "MaxPayloadInMB": self._rules.payload_mb,
        }
        if self._rules.strategy:  # the SDKs' local mode has no default for it
            parameters["BatchStrategy"] = self._rules.strategy
        exchange.respond(HttpAnswer(200, (JSON,), [orjson.dumps(parameters)]))

    # -- the multi-model API ----------------------------------------------------------------------------------------

    def _list(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> None:
        locked = self._rest.access.locked("index", head)
        if locked is not None:
            exchange.respond(locked)
            return
        rows = self._hosted.loaded()
        if self._rules.as_triton:  # which looks up its models by another name [N06]
            exchange.respond(_models([_entry(row) if row.target == row.name else {} for row in rows]))
            return
        start = _page_of(head.query)
        more = {"nextPageToken": str(start + _PAGE)} if len(rows) > start + _PAGE else {}
        exchange.respond(_models([_entry(row) for row in rows[start : start + _PAGE]], **more))

    def _get(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> None:
        row = self._hosted.get(plan.route.model)
        locked = self._rest.access.locked("index", head)
        exchange.respond(locked or (_GONE if row is None else HttpAnswer(200, (PLAIN,), [orjson.dumps(_entry(row))])))

    def _load(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> None:
        refusal = self._rest.access.locked("load", head) or self._rest.access.denied(
            LOAD_CONTENT, head
        )  # the URL is any folder
        if refusal is None and self._rules.as_triton and self._engine.options.model_control_mode != "explicit":
            refusal = routes.refused(400, _NOT_EXPLICIT)
        if refusal is not None:
            exchange.respond(refusal)
            return
        try:
            name, url = _parse_load(body)
            target = _target(head) or name
            work = self._hosted.add(name, url, target)
        except InvalidArgumentError as error:
            exchange.respond(routes.refused(400, error.message))
            return
        if work is None:
            exchange.respond(routes.refused(409, f"model repository '{url}' has already been registered"))
            return

        def load() -> HttpAnswer:
            try:
                work()
            except (RemoraError, OSError, MemoryError, ValueError) as error:
                self._hosted.forget(name)
                text = str(error) or type(error).__name__
                _log.error("cannot load %r from %r: %s", name, url, text.rstrip())
                out = isinstance(error, MemoryError) or routes.is_out_of_memory(text.encode())
                return routes.refused(507 if out else 400, text)
            except BaseException:
                self._hosted.forget(name)
                raise
            return _OK

        self._later(load, exchange, lasts=True)

    def _unload(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> None:
        locked = self._rest.access.locked("unload", head)
        work = None if locked is not None else self._hosted.remove(plan.route.model)
        if work is None:
            exchange.respond(locked or _GONE)
            return
        self._hosts.pop(plan.route.model, None)

        def unload() -> HttpAnswer:
            try:
                work()
            finally:
                self._hosted.forget(plan.route.model)
            return _OK

        self._later(unload, exchange, lasts=True)


def _parse_load(body: Buffer) -> tuple[str, str]:
    """Return the name and the URL of a load request. Raises InvalidArgumentError."""
    try:
        document: Any = orjson.loads(memoryview(body))
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"failed to parse the request JSON buffer: {error}") from error
    found = []
    for key in ("model_name", "url"):
        value = document.get(key) if isinstance(document, dict) else None
        if not isinstance(value, str) or not value or len(value) > 1024 or "\0" in value:
            raise InvalidArgumentError(f"the load request needs '{key}': a string of at most 1024 characters")
        found.append(value)
    if "/" in found[0]:
        raise InvalidArgumentError("a model_name must not contain a slash")
    return found[0], found[1]


def _target(head: Head) -> str:
    return (head.get(routes.TARGET_MODEL) or b"").decode("latin-1")


def _entry(row: Hosted) -> dict[str, str]:
    return {"modelName": row.name, "modelUrl": row.url}


def _models(entries: list[dict[str, str]], **more: str) -> HttpAnswer:
    return HttpAnswer(200, (PLAIN,), [orjson.dumps({"models": entries, **more})])


def _page_of(query: str) -> int:
    token = query.removeprefix("next_page_token=")
    return int(token) if token != query and token.isascii() and token.isdigit() and len(token) < 8 else 0
