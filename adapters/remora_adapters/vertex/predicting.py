"""Vertex AI's routes: health, predict and rawPredict; the law: nothing here changes what is served.

Predict's body is ``{"instances": [...]}``; what has none is V2, as Triton's Vertex front end takes it, with its binary
content type. The redirect header leads to other V2 routes, but to none that loads, unloads, registers or sets anything:
those are refused with 403, and so are they when asked for by path (spec clouds 6).
"""

from __future__ import annotations

import re
from functools import lru_cache

import orjson

from remora.messages import Buffer, ServerReady
from remora.protocols.http1 import Head
from remora.protocols.http_answer import Headers, HttpAnswer, Refusal, failure
from remora.protocols.v2_routes import route
from remora.server.doors import Inside
from remora.server.exchange import Cancellable, Exchange
from remora.server.predict import Predictor

REDIRECT = b"x-vertex-ai-triton-redirect"
BINARY = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="
_SIZE = re.compile(rb"[0-9]{1,18}")
_CHANGING = frozenset(("load", "unload", "trace", "logging", "system_shm", "cuda_shm"))


class VertexService:
    """Answers Vertex AI's two routes, and what of V2 only looks.

    Args:
        inside: the server.
        health: the path of the health route.
        predict: the path of the predict route.
        default: the model that predict asks; the only one when empty.
    """

    def __init__(self, inside: Inside, health: str, predict: str, default: str) -> None:
        self._inside = inside
        self._health = health
        self._predict = predict
        self._default = default
        self._binaries = inside.rest.over(inside.engine)  # the answers' fixed parts are not V2's
        self._predictor = Predictor(inside)

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later."""
        if head.path == self._predict:
            return self._post(head, body, exchange)
        if head.path == self._health:
            ready = head.method in ("GET", "HEAD") and self._inside.engine.perform(ServerReady())
            exchange.respond(HttpAnswer(200 if ready else 503, (), []))
            return None
        return self._looking(head, body, exchange)

    def _post(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        redirect = head.get(REDIRECT)
        if head.method != "POST":
            exchange.respond(failure(405, "Method Not Allowed", plain=False))
        elif redirect is not None:
            return self._redirected(head, redirect.decode("latin-1"), body, exchange)
        else:
            return self._predicted(head, body, exchange)
        return None

    def _predicted(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        name = self._default or self._inside.engine.only_model()
        if not name:
            count = len({model.name for model in self._inside.engine.models()})
            text = f"which of {count} models? Set REMORA_DEFAULT_MODEL, or send X-Vertex-Ai-Triton-Redirect"
            exchange.respond(failure(400, text, plain=False))
            return None
        kind = head.get(b"content-type") or b""
        if kind.startswith(BINARY):
            return self._binary(head, kind, name, body, exchange)
        if head.get(b"inference-header-content-length") is None and _has_instances(body):
            locked = self._inside.rest.locked("infer", head)
            if locked is None:
                return self._predictor.handle(name, head, body, exchange)
            exchange.respond(locked)
            return None
        return self._inside.rest.infer(name, head, body, exchange)

    def _binary(self, head: Head, kind: bytes, name: str, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """V2 with raw tensors, whose length of JSON is in the content type, and so is the answer's."""
        known = head.note
        if not isinstance(known, _Binary) or known.model != name:
            size = kind.removeprefix(BINARY)
            kept = tuple(pair for pair in head.headers if pair[0].lower() != b"inference-header-content-length")
            told = (*kept, (b"Inference-Header-Content-Length", size))
            length = int(size) if _SIZE.fullmatch(size) else -1
            known = head.note = _Binary(name, length, Head("POST", f"/v2/models/{name}/infer", told))
        if not 0 <= known.length <= len(body):
            shown = kind.removeprefix(BINARY)[:40].decode("latin-1")
            exchange.respond(failure(400, f"Unable to parse inference header size, got: {shown}", plain=False))
            return None
        return self._binaries.handle(known.head, body, _BinaryExchange(exchange))

    def _redirected(self, head: Head, target: str, body: Buffer, exchange: Exchange) -> Cancellable | None:
        path = f"/{target.lstrip('/')}".partition("?")[0]
        kept = tuple(pair for pair in head.headers if pair[0].lower() != REDIRECT)
        method = "POST"
        try:
            route(method, path)
        except Refusal as refusal:
            if refusal.status == 405:  # predict is always posted, and what is looked at is got
                method = "GET"
        return self._looking(Head(method, path, kept), body if method == "POST" else b"", exchange)

    def _looking(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """V2, but for what changes something."""
        try:
            where = route(head.method, head.path)
        except Refusal as refusal:
            if refusal.action not in _CHANGING:
                return self._inside.rest.handle(head, body, exchange)
            where = None
        reads = where is not None and (where.action not in _CHANGING or where.verb in ("GET", "status"))
        if reads:
            return self._inside.rest.handle(head, body, exchange)
        exchange.respond(failure(403, f"{head.path} changes what is served, which is not allowed here", plain=False))
        return None


def _has_instances(body: Buffer) -> bool:
    """Whether a body is predict's: a JSON object with instances."""
    octets = bytes(body)
    if b'"instances"' not in octets:
        return False
    if b'"inputs"' not in octets:
        return True  # without them it is no V2 request, and predict reads it once more
    try:
        message = orjson.loads(octets)
    except orjson.JSONDecodeError:
        return True  # whose refusal says more than V2's
    return isinstance(message, dict) and "instances" in message


class _Binary:
    """What is the same in all binary requests of one head: how long their JSON is, and the V2 head they stand for."""

    __slots__ = ("head", "length", "model")

    def __init__(self, model: str, length: int, head: Head) -> None:
        self.model = model
        self.length = length
        self.head = head


@lru_cache(64)
def _told(headers: Headers) -> Headers:
    """V2's headers of an answer, with the length of its JSON in the content type."""
    named = {name.lower(): value for name, value in headers}
    length = named.pop(b"inference-header-content-length", None)
    if length is None:
        return headers
    named[b"content-type"] = BINARY + length
    return tuple(named.items())


class _BinaryExchange:
    """An exchange that says in the content type how long an answer's JSON is."""

    __slots__ = ("_exchange", "begin", "finish", "send")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.begin, self.send, self.finish = exchange.begin, exchange.send, exchange.finish

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(HttpAnswer(answer.status, _told(answer.headers), answer.body, answer.wire))
