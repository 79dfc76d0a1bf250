"""Vertex AI's routes health, predict and rawPredict.

The body of predict is ``{"instances": [...]}``; without instances it is V2, as in Triton's Vertex front end, with its
binary content type. The redirect header leads to other V2 routes.

Invariant: no route changes the server's state. Routes that load, unload, register or set something are refused with
403, by redirect and by path.
"""

from __future__ import annotations

import re
from functools import partial

import orjson

from remora.api.http import HOME, LONG_BYTES, Predictor, loads, method_of, release, route
from remora.calls import ServerReady
from remora.messages import Buffer
from remora.protocols.http1 import Head, HeadNote
from remora.protocols.rest.answer import Headers, HttpAnswer, Refusal, encode_json_error, failure
from remora.server.host import ServerContext
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Cancellable, Exchange
from remora_llm.openai.routes import PREFIXES
from remora_llm.routes.hosted_prompts import HostedGeneration

REDIRECT = b"x-vertex-ai-triton-redirect"
BINARY = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="
_LENGTH = b"inference-header-content-length"
_SIZE = re.compile(rb"[0-9]{1,18}")
_CHANGING = frozenset(("load", "unload", "trace", "logging", "system_shm", "cuda_shm"))


def _binary_headers(json_length: int) -> Headers:
    return ((b"Content-Type", b"%b%d" % (BINARY, json_length)),)


class VertexService:
    """Service of Vertex AI's two routes and the read-only routes of V2.

    Args:
        context: the server.
        health: the path of the health route.
        predict: the path of the predict route.
        default: the target of predict; the only model if empty.
    """

    def __init__(self, context: ServerContext, health: str, predict: str, default: str) -> None:
        self._engine = context.engine
        self._rest = context.rest
        self._health = health
        self._predict = predict
        self._default = default
        self._binaries = context.rest.over(context.engine, binary_headers=_binary_headers)
        self._predictor = Predictor(context.rest, context.engine, context.mailbox, context.options.http_max_input_size)
        self._generation = HostedGeneration(context.rest, context.engine)
        self._plans = HeadNote[_Plan]()
        self.open_paths = frozenset((health, HOME))
        """See `remora.server.key_check.OpenService`."""
        self.routes = (HostRoute("POST", predict, "infer", REDIRECT.decode()),)
        """See `remora.server.host_routes.RoutedService`."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later."""
        if head.path == self._predict:
            return self._post(head, body, exchange)
        if head.path == self._health:
            if head.method in ("GET", "HEAD"):
                exchange.respond(HttpAnswer(200 if self._engine.perform(ServerReady()) else 503, (), []))
            else:
                exchange.respond(failure(405, "Method Not Allowed", plain=False))
            return None
        if head.path.startswith(PREFIXES):  # with the prefix "/*" an endpoint passes on any path
            name = self._default or self._engine.only_model() or ""
            found, pending = self._generation.handle_path(head, body, exchange, name)
            if found:
                return pending
        return self._handle_read_only(head, body, exchange)

    def _post(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        plan = self._plans.get(head) or self._plans.put(head, _Plan(head, self.routes[0].target_of(head) or ""))
        if plan.refusal is not None:
            exchange.respond(plan.refusal)
            return None
        if plan.target:
            return self._follow_redirect(plan, body, exchange)
        return self._rest.when_loaded(self._predict_loaded, head, body, exchange)

    def _predict_loaded(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        name = self._default or self._engine.only_model()
        if not name:
            count = len({model.name for model in self._engine.models()})
            text = f"which of {count} models? Set REMORA_DEFAULT_MODEL, or send X-Vertex-Ai-Triton-Redirect"
            exchange.respond(failure(400, text, plain=False))
            return None
        plan = self._plans.get(head)
        assert plan is not None  # from `_post`
        if plan.may_have_instances:
            found: list[bool] = []
            otherwise = partial(self._tensors, plan, name, body, found)
            return self._generation.dispatch(
                name, head, body, exchange, otherwise, look=lambda octets: found.append(_has_instances(octets))
            )
        return self._infer(plan, plan.to(f"/v2/models/{name}/infer"), body, exchange)

    def _tensors(
        self, plan: _Plan, name: str, body: Buffer, found: list[bool], exchange: Exchange
    ) -> Cancellable | None:
        """Answer a body of the predict protocol or of V2; a thread distinguishes large ones.

        ``found`` has the result if that was done already.
        """
        if found:
            return self._answer_tensors(plan, name, body, found[0], exchange)
        large = self._rest.large
        if large is None or not large.takes(body):
            return self._answer_tensors(plan, name, body, _has_instances(body), exchange)
        answer = partial(self._answer_tensors, plan, name, body)
        return large.decode(exchange, lambda: (_has_instances(body), 0), answer, encode_json_error)

    def _answer_tensors(
        self, plan: _Plan, name: str, body: Buffer, has_instances: bool, exchange: Exchange
    ) -> Cancellable | None:
        if not has_instances:
            return self._infer(plan, plan.to(f"/v2/models/{name}/infer"), body, exchange)
        locked = self._rest.access.locked("infer", plan.head)
        if locked is None:
            return self._predictor.handle(name, plan.head, body, exchange)
        exchange.respond(locked)
        return None

    def _infer(self, plan: _Plan, v2: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Run a V2 inference and answer in Vertex's binary form if the request had it."""
        if plan.size is None:
            return self._rest.handle(v2, body, exchange)
        if plan.json_length <= len(body):
            return self._binaries.handle(v2, body, exchange)
        exchange.respond(_bad_size(plan.size))
        return None

    def _follow_redirect(self, plan: _Plan, body: Buffer, exchange: Exchange) -> Cancellable | None:
        if plan.target == "/metrics":
            exchange.respond(self._rest.access.locked("metrics", plan.head) or self._rest.metrics())
            return None
        method = method_of(plan.target)  # because predict is always POST and read-only routes are GET
        v2 = plan.to(plan.target, method)
        if plan.infers:
            return self._infer(plan, v2, body, exchange)
        return self._handle_read_only(v2, body if method == "POST" else b"", exchange)

    def _handle_read_only(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer a V2 route unless it changes state."""
        try:
            where = route(head.method, head.path)
        except Refusal as refusal:
            if refusal.action not in _CHANGING:
                return self._rest.handle(head, body, exchange)
            where = None
        reads = where is not None and (where.action not in _CHANGING or where.verb in ("GET", "status"))
        if reads:
            return self._rest.handle(head, body, exchange)
        exchange.respond(failure(403, f"{head.path} changes what is served, which is not allowed here", plain=False))
        return None


class _Plan:
    """Parsed head of a predict request, cached with the head.

    ``target`` is the path in the redirect header, or "", and ``infers`` is True if it is that of an inference.
    ``size`` is the JSON length in Vertex's binary content type as text and ``json_length`` as a number; None and 0 for
    another content type.
    """

    __slots__ = ("_v2", "head", "infers", "json_length", "may_have_instances", "refusal", "size", "target")

    def __init__(self, head: Head, target: str) -> None:
        self.head = head
        self._v2: Head | None = None
        kind = head.get(b"content-type") or b""
        self.size = kind.removeprefix(BINARY) if kind.startswith(BINARY) else None
        self.json_length = int(self.size) if self.size and _SIZE.fullmatch(self.size) else 0
        self.may_have_instances = self.size is None and head.get(_LENGTH) is None
        self.target = target
        self.infers = bool(target) and _infers(target)
        self.refusal: HttpAnswer | None = None
        if head.method != "POST":
            self.refusal = failure(405, "Method Not Allowed", plain=False)
        elif self.size is not None and not _SIZE.fullmatch(self.size):
            self.refusal = _bad_size(self.size)

    def to(self, path: str, method: str = "POST") -> Head:
        """Return the equivalent V2 head, cached for the same path."""
        if self._v2 is None or self._v2.path != path:
            dropped = (REDIRECT,) if self.size is None else (REDIRECT, _LENGTH)
            kept = tuple(pair for pair in self.head.headers if pair[0].lower() not in dropped)
            length_header = () if self.size is None else ((_LENGTH, self.size),)
            self._v2 = self.head.to(path, method=method, headers=(*kept, *length_header))
        return self._v2


def _infers(path: str) -> bool:
    try:
        return route("POST", path).action == "infer"
    except Refusal:
        return False


def _bad_size(size: bytes) -> HttpAnswer:
    text = f"Unable to parse inference header size, got: {size[:40].decode('latin-1')}"
    return failure(400, text, plain=False)


def _has_instances(body: Buffer) -> bool:
    """Return True if the body is predict's, a JSON object with instances."""
    octets = bytes(body)
    if b'"instances"' not in octets:
        return False
    if b'"inputs"' not in octets:
        return True  # not a V2 request; predict parses it again
    try:
        message = loads(octets)
    except orjson.JSONDecodeError:
        return True  # because predict's error is more specific than V2's
    found = isinstance(message, dict) and "instances" in message
    if len(octets) > LONG_BYTES:
        release(message)
    return found
