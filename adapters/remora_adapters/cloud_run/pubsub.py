"""Inference requests of Pub/Sub push subscriptions, whose answers are published to a topic.

A message's data is the body of a V2 request. The answer, also an error of the request, is a message of the topic; then
the push is acknowledged. A failure that passes with time (429 and 503) is not acknowledged, so Pub/Sub repeats it; 500
is published, because Triton's routes also give it to a malformed request, which would be repeated for days.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from remora.api.system import Answer, Limits, fetch
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.server.host import ServerContext
from remora.server.host_routes import HostRoute, RouteTable
from remora.server.http.exchange import Cancellable, Exchange, ForwardingExchange, Service
from remora.system.json_text import read_json

PREFIX = "/pubsub"
"""Path prefix of push endpoints; the rest is the path of a V2 inference."""
_TOPIC = re.compile(r"projects/[a-z0-9.:-]+/topics/[A-Za-z][\w.~+%-]{2,254}")
_ROUTES = tuple(HostRoute("POST", f"{PREFIX}/v2/models/{model}/infer", "infer") for model in ("*", "*/versions/*"))
_TABLE = RouteTable(_ROUTES)
_TOKEN_URL = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"
_PASSING = (429, 502, 503, 504)
_LIMITS = Limits(10.0)
_SPARE_S = 60.0
"""Time before a token's end at which a new one is read."""


class Push(NamedTuple):
    """Message of a push request."""

    id: str
    data: bytes
    attributes: Mapping[str, str]


def read_push(body: Buffer) -> Push:
    """Return the message in the body of a push request. Raises ValueError."""
    try:
        message = orjson.loads(body)["message"]
        data = base64.b64decode(message.get("data", ""), validate=True)
        attributes = message.get("attributes") or {}
        if not isinstance(attributes, dict) or not all(isinstance(each, str) for each in attributes.values()):
            raise TypeError("attributes must be an object of texts")
        return Push(str(message.get("messageId", "")), data, attributes)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f'expected {{"message": {{"data": BASE64, ...}}}} of a Pub/Sub push subscription: {error}'
        ) from error


def message_of(push: Push, answer: HttpAnswer) -> dict[str, Any]:
    """Return the message of an answer, with its request's attributes and id, and the status."""
    attributes = {**push.attributes, "remora-request-id": push.id, "remora-status": str(answer.status)}
    return {"data": base64.b64encode(b"".join(answer.body)).decode(), "attributes": attributes}


class Publisher:
    """Publishes messages to a topic. Call it in any thread.

    Args:
        topic: ``projects/PROJECT/topics/TOPIC``.
        root: URL of the API.
        token_url: URL of the metadata server's token; "" for an emulator, which needs none.
        clock: monotonic time, in seconds.
    """

    def __init__(
        self,
        topic: str,
        root: str = "https://pubsub.googleapis.com",
        token_url: str = _TOKEN_URL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not _TOPIC.fullmatch(topic):
            raise ValueError(f"REMORA_PUBSUB_TOPIC={topic}: expected projects/PROJECT/topics/TOPIC")
        self._url = f"{root}/v1/{topic}:publish"
        self._token_url = token_url
        self._clock = clock
        self._lock = threading.Lock()
        self._token, self._ends_s = "", 0.0

    def __call__(self, message: Mapping[str, Any]) -> None:
        """Publish a message. Raises OSError or ValueError."""
        headers = {"Content-Type": "application/json"}
        if self._token_url:
            headers["Authorization"] = f"Bearer {self._read_token()}"
        _checked(fetch(self._url, _LIMITS, body=json.dumps({"messages": [message]}).encode(), headers=headers))

    def _read_token(self) -> str:
        with self._lock:
            if self._clock() >= self._ends_s:
                found = read_json(_checked(fetch(self._token_url, _LIMITS, headers={"Metadata-Flavor": "Google"})))
                self._token = str(found["access_token"])
                self._ends_s = self._clock() + float(found["expires_in"]) - _SPARE_S
            return self._token


def _checked(answer: Answer) -> bytes:
    """Return the body of an answer. Raises OSError for a status that is not 2xx."""
    if not answer.is_success:
        raise OSError(f"the server answered {answer.status}")
    return answer.body


class PushService:
    """Service of push endpoints in front of another service.

    Args:
        context: the server.
        behind: the service of all other paths.
        publish: publishes a message; may block; raises OSError or ValueError.
    """

    routes = _ROUTES
    """See `remora.server.host_routes.RoutedService`."""

    def __init__(self, context: ServerContext, behind: Service, publish: Callable[[Mapping[str, Any]], None]) -> None:
        self._context, self._behind, self._publish = context, behind, publish

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later."""
        if not head.path.startswith(f"{PREFIX}/"):
            return self._behind.handle(head, body, exchange)
        path = head.path.removeprefix(PREFIX)
        if _TABLE.find(head.method, head.path) is None:
            exchange.respond(failure(404, f"{head.path}: expected POST {PREFIX}/v2/models/NAME/infer", plain=False))
            return None
        try:
            push = read_push(body)
        except ValueError as error:
            exchange.respond(failure(400, str(error), plain=False))
            return None
        plain = tuple(pair for pair in head.headers if pair[0].lower() != b"content-type")
        return self._behind.handle(head.to(path, headers=plain), push.data, PushExchange(self, push, exchange))

    def publish_later(self, push: Push, answer: HttpAnswer, exchange: Exchange) -> None:
        """Publish an answer in another thread, and acknowledge the push."""

        def work() -> HttpAnswer:
            try:
                self._publish(message_of(push, answer))
            except (OSError, ValueError, LookupError) as error:
                return failure(503, f"the answer could not be published: {error}", plain=False)
            return HttpAnswer(204, (), [])

        self._context.later(work, exchange)


class PushExchange(ForwardingExchange):
    """Exchange that publishes the answer, unless the request should be repeated."""

    __slots__ = ("_push", "_service")

    def __init__(self, service: PushService, push: Push, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._service, self._push = service, push

    def respond(self, answer: HttpAnswer) -> None:
        """Publish the answer, or send it to Pub/Sub if the failure passes with time."""
        if answer.status in _PASSING:
            self._exchange.respond(answer)
        else:
            self._service.publish_later(self._push, answer, self._exchange)
