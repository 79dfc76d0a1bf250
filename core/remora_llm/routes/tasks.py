"""Running tasks of requests to language models, and delivery of their pieces."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remora.errors import RemoraError
from remora.models.served_model import ServedModel
from remora.server.http.exchange import Exchange
from remora_llm.generation import Generation
from remora_llm.generation.tasks import Piece, Task
from remora_llm.openai.replies import Heading
from remora_llm.openai.requests import Query, tasks_of
from remora_llm.routes.delivery import Delivery, FollowedTasks, reply_to

if TYPE_CHECKING:
    from remora.tracing.traced import TracedTask

_log = logging.getLogger("remora.http")


class PieceDelivery:
    """Sink that delivers the pieces of all requests in the event loop.

    A wake-up is posted only if none is pending.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Sequence[Piece]] = deque()
        self._posted = False
        self._requests: dict[Task, TaskRequest] = {}

    def add(self, task: Task, request: TaskRequest) -> None:
        """Deliver the pieces of a task to a request. Any thread may call this."""
        self._requests[task] = request

    def remove(self, task: Task) -> None:
        """Forget a task that did not begin."""
        self._requests.pop(task, None)

    def take(self, pieces: Sequence[Piece]) -> None:
        """Post the pieces of a step; see `Sink`."""
        self._waiting.append(pieces)
        if self._posted:
            return
        self._posted = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop and all its connections are closed
            self._deliver()

    def _deliver(self) -> None:
        self._posted = False  # before the pieces are taken, so that later ones post again
        touched: dict[TaskRequest, list[Piece]] = {}
        while self._waiting:
            for piece in self._waiting.popleft():
                request = self._requests.get(piece.task)
                if request is not None:
                    touched.setdefault(request, []).append(piece)
        for request, pieces in touched.items():
            try:
                request.take(pieces)
            except Exception:  # a fault of one request must not reach the others
                _log.exception("an answer of OpenAI's routes failed")
                request.give_up()


class TaskRequest:
    """A request whose tasks run."""

    __slots__ = (
        "_delivery",
        "_error",
        "_exchange",
        "_follow",
        "_generation",
        "_left",
        "_model",
        "_piece_delivery",
        "_query",
        "_tasks",
        "count",
    )

    def __init__(
        self,
        exchange: Exchange,
        query: Query,
        model: ServedModel,
        generation: Generation,
        piece_delivery: PieceDelivery,
    ) -> None:
        self._exchange = exchange
        self._query = query
        self._model = model
        self._generation = generation
        self._piece_delivery = piece_delivery
        self._tasks: list[Task] = []
        self._left = 0
        self._delivery: Delivery | None = None
        self._follow: FollowedTasks | None = None
        self._error: RemoraError | None = None
        self.count: Callable[[object], None] | None = None
        """Counts the end of the request for a release."""

    def follow(self, trace: TracedTask | None, now_ns: Callable[[], int]) -> None:
        """Record the tokens in a trace."""
        if trace is not None:
            self._follow = FollowedTasks(trace, self._query, self._model.name, now_ns)

    def begin(self, changes: Mapping[str, Any], heading: Callable[[str, str], Heading]) -> None:
        """Begin the tasks with changed attributes.

        May run in another thread. Raises RemoraError; then no task runs and the model is released.
        """
        query, generation = self._query, self._generation
        engine = generation.engine
        try:
            made = heading(query.model or self._model.name, engine.facts.fingerprint)
            answer_id = made.answer_id(query)
            tasks = [
                replace(task, id=answer_id, **changes) for task in tasks_of(query, generation, secrets.randbits(63))
            ]
            reply = reply_to(query, tasks, made, generation.tokens, generation.tool_parser)
            self._delivery = Delivery(self._exchange, query, reply, self.cancel)
            self._left = sum(task.choices for task in tasks)
            for task in tasks:
                self._piece_delivery.add(task, self)
                self._tasks.append(task)
                engine.begin(
                    task,
                    self._piece_delivery if self._follow is None else self._follow.sink(task, self._piece_delivery),
                )
        except BaseException as error:
            for task in self._tasks:
                self._piece_delivery.remove(task)
                engine.cancel(task)
            self._model.release()
            if self._follow is not None:
                self._follow.end(error)
            if self.count is not None:
                self.count(error)
            raise

    def cancel(self) -> None:
        """Cancel the tasks, because the client has disconnected or a task failed."""
        for task in self._tasks:
            self._generation.engine.cancel(task)
        if self._delivery is not None:
            self._delivery.leave()

    def give_up(self) -> None:
        """End the exchange after a fault."""
        if self._delivery is not None:
            self._delivery.give_up()

    def take(self, pieces: Sequence[Piece]) -> None:
        """Answer with new pieces, and release the model after the last end."""
        for piece in pieces:
            if piece.end is not None:
                self._left -= 1
                self._error = self._error or piece.end.error
                if not self._left:
                    for task in self._tasks:
                        self._piece_delivery.remove(task)
                    self._model.release()
                    if self._follow is not None:
                        self._follow.end(piece.end.error)
                    if self.count is not None and piece.end.reason != "cancelled":
                        self.count(self._error)
        if self._delivery is not None:
            self._delivery.take(pieces)
