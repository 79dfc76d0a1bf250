"""Delivery of an answer of OpenAI's routes through an exchange, whole or as events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import orjson

from remora.errors import CancelledError, InternalError, RemoraError, UnavailableError
from remora.models.served_model import ServedModel
from remora.protocols.rest.answer import INTERNAL, JSON, PLAIN, Headers, HttpAnswer, Refusal
from remora.server.http.exchange import Exchange, ForwardingExchange
from remora_llm.generation import Generation, Sink, Tokens
from remora_llm.generation.measurements import TracedSink
from remora_llm.generation.tasks import ParameterError, Piece, Task
from remora_llm.openai.replies import Heading, Reply
from remora_llm.openai.requests import Query, encode_prompts, most_tokens
from remora_llm.openai.response_replies import ResponseReply
from remora_llm.openai.routes import ApiError, Route, error_answer, refused

if TYPE_CHECKING:
    from remora.tracing.traced import TracedTask

_log = logging.getLogger("remora.http")

_EVENTS: Headers = ((b"Content-Type", b"text/event-stream; charset=utf-8"), (b"Cache-Control", b"no-cache"))
_CUT_OFF = (b"X-Request-Timed-Out", b"true")
"""Header of a whole answer that its deadline cut off, because OpenAI's ``finish_reason`` has no word for it."""

AnyReply = Reply | ResponseReply


def reply_to(
    query: Query, tasks: Sequence[Task], heading: Heading, tokens: Tokens | None, model_parser: str
) -> AnyReply:
    """Return what makes the answer to a query; see `Reply`."""
    kind = ResponseReply if query.action == "responses" else Reply
    return kind(query, tasks, heading, tokens, model_parser)


class FollowedTasks:
    """Trace of the tasks of one request.

    Args:
        trace: of the request.
        query: the request.
        model: name of the model.
        now_ns: clock of the trace.
    """

    def __init__(self, trace: TracedTask, query: Query, model: str, now_ns: Callable[[], int]) -> None:
        self._trace = trace
        self._model = query.model or model
        self._operation = "text_completion" if query.chat is None else "chat"
        self._now = now_ns
        self._id = ""

    def sink(self, task: Task, sink: Sink) -> Sink:
        """Return a sink that records the pieces of a task and passes them on."""
        self._id = task.id
        return TracedSink(sink, task, self._model, self._operation, self._trace, self._now)

    def end(self, error: BaseException | None) -> None:
        """Complete the trace."""
        known = error if error is None or isinstance(error, RemoraError) else InternalError(INTERNAL)
        self._trace.end(self._id, known)


class Delivery:
    """Answer of one request, sent as its pieces arrive.

    Args:
        exchange: receives the answer.
        query: the request.
        reply: makes the answer.
        cancel: called after an error, to end what still runs.
    """

    __slots__ = ("_begun", "_cancel", "_exchange", "_query", "_reply", "done")

    def __init__(self, exchange: Exchange, query: Query, reply: AnyReply, cancel: Callable[[], None]) -> None:
        self._exchange = exchange
        self._query = query
        self._reply = reply
        self._cancel = cancel
        self._begun = False
        self.done = False
        """True if the exchange has ended or its client has disconnected."""

    def take(self, pieces: Sequence[Piece]) -> None:
        """Answer with new pieces."""
        if self.done:
            return
        if self._query.stream:
            self._send(pieces)
        else:
            self._collect(pieces)

    def give_up(self) -> None:
        """End the exchange after a fault."""
        if not self.done:
            self.done = True
            self._cancel()
            self._end(RuntimeError())

    def leave(self) -> None:
        """End the exchange of a client that has disconnected, perhaps only for sending. Idempotent."""
        if not self.done:
            self.done = True
            self._end(cancelled())

    def _end(self, error: Exception) -> None:
        if self._begun:
            self._exchange.finish()
        else:
            self._exchange.respond(error_answer(error))

    def _send(self, pieces: Sequence[Piece]) -> None:
        reply = self._reply
        events = reply.events(pieces)
        if not self._begun:
            if reply.error is not None:
                self._refuse(reply.error)
                return
            self._begun = True
            self._exchange.begin(200, (*_EVENTS, *ignored_header(self._query.ignored)))
        self._exchange.send(events)
        if reply.error is not None or reply.done:
            self.done = True
            if reply.error is not None:
                self._cancel()
            self._exchange.finish()

    def _collect(self, pieces: Sequence[Piece]) -> None:
        reply = self._reply
        reply.add(pieces)
        if reply.error is not None:
            self._refuse(reply.error)
        elif reply.done:
            self.done = True
            if reply.timed_out:
                self._exchange.respond(error_answer(ApiError(504, "the deadline passed before the first token")))
            else:
                headers: Headers = (JSON, *ignored_header(self._query.ignored))
                if reply.cut_off:
                    headers = (*headers, _CUT_OFF)
                self._exchange.respond(HttpAnswer(200, headers, [reply.body()]))

    def _refuse(self, error: RemoraError) -> None:
        self.done = True
        self._cancel()
        self._exchange.respond(error_answer(error))


class ErrorExchange(ForwardingExchange):
    """Exchange whose errors take OpenAI's form."""

    __slots__ = ()

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""
        self._exchange.respond(refused(answer))


def not_managed() -> HttpAnswer:
    """Return the refusal of a load where requests load nothing; V2's 503 would be repeated."""
    text = "this server loads and unloads no models on request: start it with --model-control-mode=explicit"
    return error_answer(ApiError(400, text))


class ManagedExchange(ForwardingExchange):
    """Exchange whose answers of V2's repository API take OpenAI's form.

    Args:
        exchange: receives the answer.
        where: the route, which names the model.
    """

    __slots__ = ("_where",)

    def __init__(self, exchange: Exchange, where: Route) -> None:
        super().__init__(exchange)
        self._where = where

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""
        if answer.status == 200:
            document = {"id": self._where.model, "object": "model", "status": f"{self._where.action}ed"}
            answer = HttpAnswer(200, (JSON,), [orjson.dumps(document)])
        self._exchange.respond(refused(answer))


def tokens_answer(query: Query, generation: Generation) -> HttpAnswer:
    """Return the answer to tokenize, detokenize and input_tokens. Raises ParameterError."""
    tokens, most = generation.tokens, most_tokens(query, generation)
    if query.action == "detokenize":
        (given,) = query.prompts
        assert not isinstance(given, str)
        if len(given) > most:
            raise ParameterError("tokens", f"there are {len(given)} tokens; at most {most} are possible here")
        return HttpAnswer(200, (JSON,), [orjson.dumps({"prompt": tokens.decode(given, skip_special=False)})])
    (encoded,) = encode_prompts(query, generation)
    if len(encoded) > most:
        raise ParameterError("prompt", f"the text has {len(encoded)} tokens; at most {most} are possible here")
    if query.action == "input_tokens":
        return HttpAnswer(
            200, (JSON,), [orjson.dumps({"object": "response.input_tokens", "input_tokens": len(encoded)})]
        )
    context = generation.engine.facts.context
    document: dict[str, object] = {"count": len(encoded), "max_model_len": context, "tokens": list(encoded)}
    if query.token_ids:
        document["token_strs"] = [tokens.token_name(token) for token in encoded]
    return HttpAnswer(200, (JSON,), [orjson.dumps(document)])


def answer_to(error: Exception) -> HttpAnswer:
    """Return the answer for an error, and log one without a known cause."""
    if isinstance(error, Refusal):
        return refused(error.answer._replace(headers=(PLAIN, *error.headers)))
    if isinstance(error, RecursionError):
        error = ApiError(400, "the body is nested too deep")
    if not isinstance(error, RemoraError):
        _log.error("a request to OpenAI's routes failed", exc_info=error)
    return error_answer(error)


def unloaded(model: ServedModel) -> RemoraError:
    """Return the error of a request whose model was unloaded meanwhile."""
    return UnavailableError(f"the model '{model.name}' is being unloaded")


def cancelled() -> RemoraError:
    """Return the error of a request whose client has disconnected."""
    return CancelledError("the request was cancelled")


def ignored_header(names: Sequence[str]) -> Headers:
    """Return the header that names ignored fields."""
    if not names:
        return ()
    shown = ", ".join(name for name in names if name.replace(".", "_").isidentifier() and name.isascii())
    return ((b"X-Ignored-Parameters", shown[:1000].encode()),)
