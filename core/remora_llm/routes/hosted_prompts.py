"""Requests to language models on a platform's single path, answered by OpenAI's routes.

Invariant: each exchange ends once; a client that disconnects frees its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from remora.api.http import RestService
from remora.api.models import LoadingError
from remora.engine import Engine
from remora.errors import InvalidArgumentError, NotFoundError, RemoraError
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, Headers, HttpAnswer
from remora.server.http.exchange import Cancellable, Exchange, ForwardingExchange
from remora_llm.openai.prompt_rows import (
    Shaped,
    Texts,
    TextStream,
    answer_of_texts,
    error_of_texts,
    predictions_of,
    read_shape,
)
from remora_llm.openai.routes import MANAGES, PREFIXES, error_answer, find_route
from remora_llm.routes.group import OpenAiGroup

if TYPE_CHECKING:
    from remora_llm.routes.openai import OpenAiRoutes

_EVENTS: Headers = ((b"Content-Type", b"text/event-stream; charset=utf-8"), (b"Cache-Control", b"no-cache"))
_LINES: Headers = ((b"Content-Type", b"application/jsonlines"), (b"Cache-Control", b"no-cache"))
_EXPECTED = (
    "the body must be a JSON object with messages (a chat), prompt (a completion), or inputs as text with parameters"
)


class HostedGeneration:
    """Language models of one engine behind a platform's routes.

    Use it in the event loop's thread.

    Args:
        rest: the V2 service, which has OpenAI's routes.
        engine: has the models.
    """

    def __init__(self, rest: RestService, engine: Engine) -> None:
        self._rest = rest
        self._engine = engine

    @property
    def _routes(self) -> OpenAiRoutes:
        """OpenAI's routes of the service, imported by their first use."""
        return cast(OpenAiGroup, self._rest.opened(PREFIXES[0])).routes

    def dispatch(
        self,
        model: str,
        head: Head,
        body: Buffer,
        exchange: Exchange,
        otherwise: Callable[[Exchange], Cancellable | None],
        openai_head: Callable[[Head], Head] | None = None,
        look: Callable[[bytes], object] | None = None,
    ) -> Cancellable | None:
        """Answer a body whose shape names one of OpenAI's routes.

        Any other is passed on to ``otherwise``. A large body is read in a thread, which calls ``look`` before a large
        body is passed on. ``openai_head`` returns the head for OpenAI's routes if it differs.

        Raises:
            LoadingError: the model is being loaded.
        """
        try:
            generates = self._engine.resolve(model).generation is not None
        except LoadingError:
            raise  # the host's route waits for the model
        except NotFoundError:
            return otherwise(exchange)
        except RemoraError as error:
            exchange.respond(error_answer(error))
            return None

        large = self._rest.large
        is_large = large is not None and large.takes(body)
        if not generates and not is_large and not _may_be_vectors(body):
            return otherwise(exchange)

        def answer(shaped: Shaped | None, exchange: Exchange) -> Cancellable | None:
            if shaped is None:
                return otherwise(exchange)
            return self.handle(shaped, model, head if openai_head is None else openai_head(head), exchange)

        if large is not None and is_large:
            return large.decode(exchange, lambda: (_shape_of(body, look, generates=generates), 0), answer, error_answer)
        try:
            shaped = _shape_of(body, generates=generates)
        except RemoraError as error:
            exchange.respond(error_answer(error))
            return None
        return answer(shaped, exchange)

    def handle(self, shaped: Shaped, model: str, head: Head, exchange: Exchange) -> Cancellable | None:
        """Answer a request of this shape for a model."""
        back: Exchange = exchange
        if shaped.texts is not None:
            accepts_events = b"text/event-stream" in (head.get(b"accept") or b"").lower()
            back = _TextExchange(exchange, shaped.texts, events=accepts_events)
        elif shaped.predictions:
            back = _PredictionExchange(exchange)
        return self._routes.handle_hosted(shaped.route, head, shaped.body, back, model)

    def handle_path(self, head: Head, body: Buffer, exchange: Exchange, model: str) -> tuple[bool, Cancellable | None]:
        """Answer a request to one of OpenAI's paths, for ``model`` if it names none.

        Returns True and the pending request, or False for another path.
        """
        where = find_route(head.path) if head.path.startswith(PREFIXES) else None
        if where is None or where.action in MANAGES:  # the platform loads models
            return False, None
        return True, self._routes.handle_hosted(where, head, body, exchange, model)


def _shape_of(body: Buffer, look: Callable[[bytes], object] | None = None, *, generates: bool) -> Shaped | None:
    """Return what a body means, None for the V2 routes after ``look`` was called.

    Raises RemoraError for a wrong parameter, and if a language model cannot answer the body.
    """
    octets = bytes(body)
    shaped = read_shape(octets) if generates or _may_be_vectors(octets) else None
    if shaped is None and generates and not (b'"inputs"' in octets or b'"instances"' in octets):
        raise InvalidArgumentError(_EXPECTED)
    if shaped is None and look is not None:
        look(octets)
    return shaped


def _may_be_vectors(body: Buffer) -> bool:
    """Return True if a body is not V2's and may ask for embeddings or a reranking."""
    octets = bytes(body)
    return b'"inputs"' not in octets and (b'"input"' in octets or b'"documents"' in octets)


class _PredictionExchange(ForwardingExchange):
    """Exchange whose good answers become the value of ``predictions``."""

    __slots__ = ()

    def respond(self, answer: HttpAnswer) -> None:
        """Forward the whole answer."""
        if answer.status == 200:
            answer = answer._replace(body=[predictions_of(b"".join(answer.body))], wire=None)
        self._exchange.respond(answer)


class _TextExchange(ForwardingExchange):
    """Exchange that converts a completion to the LMI schema."""

    __slots__ = ("_events", "_stream", "_texts")

    def __init__(self, exchange: Exchange, texts: Texts, *, events: bool) -> None:
        super().__init__(exchange)
        self._texts = texts
        self._events = events
        self._stream = TextStream(texts, events=events)

    def respond(self, answer: HttpAnswer) -> None:
        """Forward the whole answer."""
        body = b"".join(answer.body)
        made = answer_of_texts(body, self._texts) if answer.status == 200 else error_of_texts(body)
        headers = tuple(pair for pair in answer.headers if pair[0].lower() != b"content-type")
        self._exchange.respond(HttpAnswer(answer.status, (JSON, *headers), [made]))

    def begin(self, status: int, headers: Headers) -> None:
        """Begin a stream of lines or events."""
        self._exchange.begin(status, _EVENTS if self._events else _LINES)

    def send(self, piece: Buffer) -> None:
        """Send what the next part of the completion becomes."""
        self._exchange.send(self._stream.feed(piece))
