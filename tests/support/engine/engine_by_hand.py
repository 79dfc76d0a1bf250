"""An engine of two models whose answers are given by a test, for streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np

from remora.engine import Engine
from remora.errors import InvalidArgumentError, NotFoundError, RetiredError
from remora.messages import Data, InferForm, Mailbox, Outcome, Request, Response, Tensor, Ticket
from remora.models.table import LoadingError
from remora.scheduling.delivery import run_replies
from remora.tracing.tracer import Traces
from support.engine.fakes import UNTRACED

PATIENCE_S = 60.0


@dataclass
class Served:
    """A model as a front end sees it."""

    name: str = "m"
    version: int = 3
    decoupled: bool = False
    submit: Any = None
    version_text: str = "3"
    is_routed: bool = False
    split: Any = None
    generation: Any = None
    signature = SimpleNamespace(has_texts=False, answers_texts=False)  # of numbers alone

    @property
    def is_plain(self) -> bool:
        return not self.decoupled


class Asked:
    """A request in a test's hands."""

    def __init__(self, form: InferForm, ticket: Ticket) -> None:
        self.form = form
        self.ticket = ticket

    def answer(self, outcome: Outcome) -> None:
        assert self.ticket.mailbox is not None
        self.ticket.mailbox.post([(self.ticket, outcome)])


@dataclass
class ByHand:
    """An engine of two models, ``plain`` and ``many``, whose answers are the test's."""

    traces: Traces = UNTRACED
    asked: SimpleQueue[Asked] = field(default_factory=SimpleQueue)
    cancelled: SimpleQueue[str] = field(default_factory=SimpleQueue)
    swaps: int = 0
    """How many more requests come just when their model is replaced."""

    def perform(self, call: Any, /) -> Any:
        return True

    loading: bool = False
    """True if the models are being loaded."""

    def resolve(self, model: str, version: int = -1) -> Any:
        if self.loading:
            raise LoadingError("being loaded", Future())
        return self.wait_for(model, version)

    def wait_for(self, model: str, version: int, timeout_s: float | None = None, /) -> Any:
        if model not in ("plain", "many"):
            raise NotFoundError(f"Request for unknown model: '{model}' is not found")
        return Served(model, decoupled=model == "many", submit=self.submit)

    submit_to = Engine.submit_to
    capture = None

    def submit(
        self,
        form: InferForm,
        data: list[Data],
        reply: Callable[[Ticket, Outcome], None],
        /,
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        timeout_ns: int = 0,
    ) -> Ticket:
        if form.id == "bad":
            raise InvalidArgumentError("it does not fit")
        if self.swaps:
            self.swaps -= 1
            raise RetiredError("replaced")
        request = Request(form, {}, ("Y",), 1, None)
        asked = Asked(form, Watched(self.cancelled, Ticket(request, reply, mailbox or ByCaller(), context)))
        self.asked.put(asked)
        return asked.ticket

    def next(self) -> Asked:
        return self.asked.get(timeout=PATIENCE_S)


@dataclass
class TextsByHand(ByHand):
    """The same with models of texts."""

    looked_up: int = 0
    meanwhile: Callable[[], None] = lambda: None
    """What happens while texts are split."""

    def resolve(self, model: str, version: int = -1) -> Any:
        self.looked_up += 1
        return super().resolve(model, version)

    def wait_for(self, model: str, version: int, timeout_s: float | None = None, /) -> Any:
        served = super().wait_for(model, version, timeout_s)
        served.signature = SimpleNamespace(has_texts=True, answers_texts=True)
        served.split = self.split
        return served

    def split(self, form: InferForm, data: list[Data]) -> list[Data]:
        self.meanwhile()
        return [np.array([b"abc"], object) for _ in data]


class ByCaller:
    """A mailbox that delivers in the thread of the model."""

    watcher = None

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        run_replies(deliveries)

    def defer(self, _work: Callable[[], None]) -> bool:
        return False


class Watched(Ticket):
    """A ticket that tells a queue when it is cancelled."""

    __slots__ = ("_told",)

    def __init__(self, told: SimpleQueue[str], ticket: Ticket) -> None:
        super().__init__(ticket.request, ticket.reply, ticket.mailbox, ticket.context)
        self._told = told

    def cancel(self) -> None:
        super().cancel()
        self._told.put(self.request.form.id)


def response(value: int = 1) -> Response:
    return Response([Tensor("Y", "INT32", np.array([value], "<i4"))])
