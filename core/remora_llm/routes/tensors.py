"""Service of OpenAI's routes for ordinary models, which are called by tensors.

Texts of one request to embed, rerank or score form one batch, and more than the model's largest batch several.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from remora.api.http import LARGE_BYTES, HeldMailbox, LargeBodies
from remora.engine import Engine, FrontEnd
from remora.errors import InternalError, RemoraError
from remora.in_process import as_form, as_request
from remora.messages import Array, Mailbox, Outcome, Ticket, split_outcome
from remora.models.served_model import ServedModel
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer
from remora.server.http.exchange import Cancellable, Exchange, arrival_of
from remora.system.clock import SystemClock
from remora_llm.generation.tasks import ParameterError
from remora_llm.generation.templates import JinjaTemplate
from remora_llm.openai.mapping import COUNT, FILLED_INPUTS, TensorUse, tensors_of
from remora_llm.openai.replies import Heading
from remora_llm.openai.requests import Query
from remora_llm.openai.routes import ApiError, error_answer
from remora_llm.openai.tensors import TextAnswer, stops_of, task_for, text_inputs, token_inputs
from remora_llm.openai.vectors import VectorQuery, encode_embeddings, encode_scores, similarities
from remora_llm.routes.delivery import AnyReply, Delivery, cancelled, ignored_header, reply_to, unloaded

if TYPE_CHECKING:
    from remora.api.models import RoutedModel

_MAX_UNBATCHED = 256
"""Texts of one request to a model without batches, each of which is a request to it."""


class _NoTokens:
    """Tokenizer of a model that takes texts: no token is special."""

    special: Mapping[int, str] = {}
    longest = 1


class TicketGroup:
    """The tickets of one request, cancelled together."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self.cancelled = False
        self.leave: Callable[[], None] = lambda: None
        """Ends the exchange of a client that has disconnected."""

    def add(self, ticket: Ticket | None) -> None:
        """Add a ticket, and cancel it if the group is cancelled."""
        if ticket is not None:
            self._tickets.append(ticket)
            if self.cancelled:
                ticket.cancel()

    def cancel(self) -> None:
        """Cancel all tickets and end the exchange, because the client has disconnected."""
        self.stop()
        self.leave()

    def stop(self) -> None:
        """Cancel all tickets, because the request has failed."""
        self.cancelled = True
        for ticket in self._tickets:
            ticket.cancel()


class Origin(NamedTuple):
    """Where a request comes from.

    ``exchange`` receives the answer to ``head``; ``timeout_ns`` is the client's timeout, 0 for none. ``heading``
    returns the heading of a new answer for the name of a model and a fingerprint; ``large`` prints large answers.
    """

    exchange: Exchange
    head: Head
    timeout_ns: int
    heading: Callable[[str, str], Heading]
    large: LargeBodies | None = None


class TensorRequests:
    """One request of a client, as requests to an ordinary model.

    Args:
        engine: has the model.
        mailbox: receives the responses.
        model: the version that answers.
        use: of its tensors.
        origin: of the request.
    """

    def __init__(
        self, engine: Engine, mailbox: Mailbox | None, model: ServedModel, use: TensorUse, origin: Origin
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._model = model
        self._use = use
        self._origin = origin
        self._group = TicketGroup()
        self._prompt: str | None = None
        self._inputs, self._outputs = tensors_of(model.config)
        self._batch = model.config.max_batch_size

    def prepare(self, query: Query | VectorQuery) -> None:
        """Render the prompt of a chat before `begin`, in any thread. Raises ParameterError."""
        if isinstance(query, Query) and query.chat is not None and self._use.task == "text":
            self._prompt = self._chat_prompt(query)

    def begin(self, query: Query | VectorQuery, *, keeps_version: bool) -> Cancellable:
        """Submit the requests to the model.

        Args:
            query: the client's request.
            keeps_version: the version stays open until all requests are submitted, because a release chose it.

        Raises:
            ApiError: the model does something else.
            ParameterError: a parameter cannot be honoured.
            RemoraError: the model refuses a request.
        """
        if not keeps_version:
            return self._begin(query)
        if not self._model.acquire():
            raise unloaded(self._model)
        try:
            return self._begin(query)
        finally:
            self._model.release()

    def _begin(self, query: Query | VectorQuery) -> Cancellable:
        if isinstance(query, VectorQuery):
            self._begin_vectors(query)
        elif self._use.task != "text":
            raise ApiError(400, f"the model '{self._model.name}' does not write text", param="model")
        elif query.action not in ("chat", "completions", "responses"):
            raise ApiError(400, f"the model '{self._model.name}' has no tokenizer here", param="model")
        else:
            self._begin_texts(query)
        return self._group

    def _submit(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], reply: Callable[[Ticket, Outcome], None],
        held: HeldMailbox | None = None,
    ) -> None:  # fmt: skip
        """Submit one request. Raises RemoraError, and then cancels the others."""
        mailbox = held or self._mailbox

        def submit(model: ServedModel, *_: object) -> Ticket:
            specs, data = as_request(model, inputs)
            form = as_form(specs, outputs, "", {})
            return model.submit(form, data, reply, mailbox=mailbox, timeout_ns=self._origin.timeout_ns)

        try:
            front_end = FrontEnd(submit, arrival_of, routed=self._keep_version)
            ticket = self._engine.submit_to(front_end, self._model.name, -1, self._origin.head, self._origin.exchange)
        except BaseException:
            self._group.stop()
            raise
        if held is not None and ticket is not None:
            held.release_with(ticket.request)
        self._group.add(ticket)

    def _keep_version(self, routed: ServedModel, *arguments: object) -> tuple[object, ...]:
        """Send a request that a release routes to the version of all the others."""
        cast("RoutedModel", routed).bind_version(self._model)
        return arguments

    # -- Texts ---------------------------------------------------------------------------------------------------------

    def _begin_texts(self, query: Query) -> None:
        prompts = [str(each) for each in query.prompts]
        if query.chat is not None:
            prompts = [self._chat_prompt(query) if self._prompt is None else self._prompt]
        tasks = [task_for(query) for _ in prompts]
        made = self._origin.heading(query.model or self._model.name, "")
        reply = reply_to(query, tasks, made, None, self._use.tool_parser)
        reply.usage.prompt = 0
        delivery = Delivery(self._origin.exchange, query, reply, self._group.stop)
        self._group.leave = delivery.leave
        stops = stops_of(query, self._use, self._inputs)
        known = (self._use.answer, "finish_reason", COUNT, "num_output_tokens")
        outputs = [name for name in known if name in self._outputs]
        inputs = [text_inputs(query, each, self._use, self._inputs, batched=self._batch > 0) for each in prompts]
        for task, one in zip(tasks, inputs, strict=True):
            answer = TextAnswer(task, self._use, stops)
            flow, mailbox = self._origin.exchange.flow, self._mailbox
            held = HeldMailbox(mailbox, flow) if mailbox is not None and flow is not None and query.stream else None
            self._submit(one, outputs, partial(self._take_text, answer, reply, delivery, held), held)

    def _take_text(
        self, answer: TextAnswer, reply: AnyReply, delivery: Delivery, held: HeldMailbox | None, ticket: Ticket,
        outcome: Outcome,
    ) -> None:  # fmt: skip
        """Process the next response of the model."""
        final, found = split_outcome(outcome)
        if not answer.ended and not self._group.cancelled:
            piece = answer.piece(found, final=final)
            if piece.end is not None:
                reply.usage.prompt += answer.prompt_tokens
                if not final:
                    ticket.cancel()  # a stop string was found
            delivery.take([piece])
        if held is not None:
            if final:
                held.end()
            else:
                held.sent()

    def _chat_prompt(self, query: Query) -> str:
        """Return the prompt of a chat, or its messages as JSON for a model that takes them."""
        chat, use = query.chat, self._use
        assert chat is not None
        if use.messages:
            if chat.tools is not None:
                raise ParameterError("tools", "the model takes messages, and has no input for tools")
            return json.dumps(chat.messages, ensure_ascii=False)
        if not use.chat_template:
            raise ParameterError(
                "messages",
                f"the model '{self._model.name}' takes a prompt and has no chat template: use /v1/completions, declare "
                "a chat_template in the parameter openai of its configuration, or give it an input 'messages'",
            )
        clock = SystemClock().monotonic_ns
        tokens = _NoTokens()
        template = JinjaTemplate(use.chat_template, tokens, {}, self._model.name, clock, time.strftime)  # type: ignore[arg-type]
        return template.render_text(
            chat.messages,
            tools=chat.tools.tools if chat.tools is not None else (),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            arguments=chat.arguments,
        )

    # -- Vectors and scores --------------------------------------------------------------------------------------------

    def _begin_vectors(self, query: VectorQuery) -> None:
        inputs_of, count = self._rows_of(query)
        rows = TextValues(partial(self._answer_vectors, query), self._origin.exchange, self._group, self._origin.large)
        size = self._row_limit(query, count)
        if not size:
            raise ParameterError(
                "input" if query.action == "embeddings" else "documents",
                f"the model has no batches, so that at most {_MAX_UNBATCHED} texts are possible",
            )
        batches = [inputs_of(slice(first, first + size)) for first in range(0, count, size)]
        rows.missing = len(batches)
        self._group.leave = rows.leave
        outputs = [self._use.answer, *([COUNT] if COUNT in self._outputs else [])]
        for place, inputs in enumerate(batches):
            self._submit(inputs, outputs, partial(rows.take, place))

    def _rows_of(self, query: VectorQuery) -> tuple[Callable[[slice], dict[str, Array]], int]:
        """Return what makes the inputs of some rows, and the number of rows. Raises RemoraError."""
        use, name = self._use, self._model.name
        if use.task == "embeddings" and query.ids:
            if not use.tokens:
                raise ParameterError(
                    "input",
                    f"the model '{name}' takes texts, no token ids: send the texts themselves (LangChain does with "
                    "check_embedding_ctx_length=False)",
                )
            batched = self._batch > 0
            return (lambda part: token_inputs(query.ids[part], use, self._inputs, batched=batched)), len(query.ids)
        columns: dict[str, tuple[str, ...]] = {}
        if use.task == "embeddings":
            if not use.prompt:
                asked = "input" if query.action == "embeddings" else "documents"
                raise ParameterError(asked, f"the model '{name}' takes token ids, no texts: send lists of numbers")
            columns = {use.prompt: (*query.queries, *query.texts)}
        elif use.task == "score" and query.queries:
            queries, documents = query.pairs
            columns = {use.prompt: queries, use.document: documents}
        if not columns:
            raise ApiError(400, f"the model '{name}' cannot answer {query.action}: it is for {use.task}", param="model")
        count = len(next(iter(columns.values())))
        return (lambda part: {each: self._column(each, texts[part]) for each, texts in columns.items()}), count

    def _row_limit(self, query: VectorQuery, count: int) -> int:
        """Return the number of texts for each request to the model, 0 if there are too many texts."""
        if query.ids and len({*map(len, query.ids)}) > 1 and not any(name in self._inputs for name in FILLED_INPUTS):
            return 1 if count <= _MAX_UNBATCHED else 0  # without a mask, padding would change the vectors
        if self._batch:
            return self._batch
        inputs, use = self._inputs, self._use
        has_rows = len(inputs[use.tokens].dims) > 1 if query.ids else inputs[use.prompt].dims == (-1,)
        if has_rows and len(self._outputs[use.answer].dims) > 1:
            return count  # the model's own first dimension
        return 1 if count <= _MAX_UNBATCHED else 0

    def _column(self, name: str, texts: Sequence[str]) -> Array:
        """Return texts in the shape of an input."""
        flat = np.empty(len(texts), object)
        flat[:] = [text.encode("utf-8", "replace") for text in texts]
        dims = len(self._inputs[name].dims)
        return flat.reshape([len(texts), *[1] * dims]) if self._batch else flat.reshape([len(texts), *[1] * (dims - 1)])

    def _answer_vectors(self, query: VectorQuery, values: npt.NDArray[np.float64], tokens: int) -> HttpAnswer:
        """Return the answer for the values of all texts, of which the model has counted the tokens."""
        tokens = tokens or sum(map(len, query.ids))
        heading = self._origin.heading(query.model or self._model.name, "")
        if query.action == "embeddings":
            body = encode_embeddings(query, values, heading, tokens)
        elif self._use.task == "embeddings":
            body = encode_scores(query, similarities(values, query), heading, tokens)
        else:
            body = encode_scores(query, values.reshape(len(values), -1)[:, -1].tolist(), heading, tokens)
        return HttpAnswer(200, (JSON, *ignored_header(query.ignored)), [body])


class TextValues:
    """Values of the texts of one request, which may come in several batches.

    Args:
        encode: returns the answer for the values of all texts and the number of their tokens.
        exchange: receives it.
        group: stopped after an error.
        large: encodes large answers; None to encode all in the loop.
    """

    def __init__(
        self,
        encode: Callable[[npt.NDArray[np.float64], int], HttpAnswer],
        exchange: Exchange,
        group: TicketGroup,
        large: LargeBodies | None = None,
    ) -> None:
        self._large = large
        self._encode = encode
        self._exchange = exchange
        self._group = group
        self._found: dict[int, npt.NDArray[np.float64]] = {}
        self._done = False
        self._tokens = 0
        self.missing = 0
        """Number of batches whose last response has not arrived."""

    def take(self, place: int, _ticket: Ticket, outcome: Outcome) -> None:
        """Process a response of the model, of which each batch has one."""
        if self._done or self._group.cancelled:
            return
        final, found = split_outcome(outcome)
        if isinstance(found, RemoraError):
            self._fail(found)
            return
        if found is not None:
            if place in self._found:
                self._fail(InternalError("the model gave more than one response"))
                return
            outputs = {tensor.name: tensor.data for tensor in found.outputs}
            counts = outputs.pop(COUNT, None)
            if counts is not None:
                self._tokens += max(int(counts.sum()), 0)
            values = next(iter(outputs.values()))
            self._found[place] = values if values.ndim > 1 else values.reshape(-1, values.size)
        if not final:
            return
        if place not in self._found:
            self._fail(InternalError("the model gave no response"))
            return
        self.missing -= 1
        if not self.missing:
            self._finish()

    def _finish(self) -> None:
        self._done = True
        parts = [self._found[each] for each in sorted(self._found)]
        if self._large is not None and sum(each.nbytes for each in parts) > LARGE_BYTES:
            self._large.print(self._exchange, lambda: self._answer(parts))
        else:
            self._exchange.respond(self._answer(parts))

    def _answer(self, parts: list[npt.NDArray[np.float64]]) -> HttpAnswer:
        """Encode the answer, in any thread."""
        try:
            return self._encode(np.concatenate(parts), self._tokens)
        except Exception as error:  # such as a length that the client does not want
            return error_answer(error)

    def leave(self) -> None:
        """End the exchange of a client that has disconnected."""
        if not self._done:
            self._done = True
            self._exchange.respond(error_answer(cancelled()))

    def _fail(self, error: RemoraError) -> None:
        self._done = True
        self._group.stop()
        self._exchange.respond(error_answer(error))
