"""Inferences with the same header that arrive in one turn of the event loop, queued in one step.

Look-up, validation, lock and clock then cost once for all of them. An inference that cannot be queued with others is
submitted alone, which also gives its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from remora.engine import Engine
from remora.errors import RemoraError
from remora.messages import InferForm, Mailbox, Reply, Watcher
from remora.models.served_model import ServedModel
from remora.server.http.exchange import Cancellable

SMALL_BYTES = 16_384
"""Longest request that is queued with others, because its tensors are copied."""


class Header(Protocol):
    """Meaning of a request's bytes beside its tensors: the same object for the same bytes."""

    @property
    def form(self) -> InferForm:
        """The form, without a sequence."""

    @property
    def slices(self) -> Sequence[slice]:
        """Places of the tensors in the request."""


class Inference(Protocol):
    """Inference that has arrived.

    Attributes:
        body: the request.
        ticket: what a client's departure cancels; None before it is queued.
        cancelled: True if the client is gone.
    """

    body: bytes
    ticket: Cancellable | None
    cancelled: bool

    def start(self) -> None:
        """Submit it alone. Must not raise."""

    def refuse(self, error: RemoraError) -> None:
        """Answer it with the error of a full queue. Must not raise."""


I = TypeVar("I", bound=Inference)  # noqa: E741


class _Group(Generic[I]):
    """Inferences for one model with one header."""

    __slots__ = ("inferences", "model", "version")

    def __init__(self, model: str, version: int, inference: I) -> None:
        self.model = model
        self.version = version
        self.inferences = [inference]


class TurnGroups(Generic[I]):
    """Inferences of one front end in this turn of the loop, by header.

    Use it in the loop's thread.

    Args:
        engine: runs them.
        mailbox: delivers their answers.
        watcher: the mailbox's loop.
        reply: as for ``ServedModel.submit``.
        contexts: returns the context of each inference's ticket.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        watcher: Watcher,
        reply: Reply,
        contexts: Callable[[ServedModel, list[I]], Sequence[object]],
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._watcher = watcher
        self._reply = reply
        self._contexts = contexts
        self.begun = False
        """True if inferences of this turn may be added."""
        self._groups: dict[Header, _Group[I]] = {}

    @classmethod
    def of(
        cls,
        engine: Engine,
        mailbox: Mailbox | None,
        reply: Reply,
        contexts: Callable[[ServedModel, list[I]], Sequence[object]],
    ) -> TurnGroups[I] | None:
        """Return the groups of a mailbox's loop, None if there is no loop."""
        if mailbox is None or mailbox.watcher is None:
            return None
        return cls(engine, mailbox, mailbox.watcher, reply, contexts)

    def begin(self) -> bool:
        """Begin a turn, or return False if a request is to be submitted at once."""
        self.begun = self._watcher.collect(self._submit)
        return self.begun

    def add(self, model: str, version: int, header: Header, inference: I) -> None:
        """Submit an inference at the end of the turn that has begun.

        It has no deadline and at most SMALL_BYTES.
        """
        group = self._groups.get(header)
        if group is None:
            self._groups[header] = _Group(model, version, inference)
        elif group.model == model and group.version == version:
            group.inferences.append(inference)
        else:
            inference.start()

    def _submit(self) -> None:
        groups, self._groups, self.begun = self._groups, {}, False
        for header, group in groups.items():
            if len(group.inferences) == 1 or not self._submit_together(header, group):
                for inference in group.inferences:
                    inference.start()

    def _submit_together(self, header: Header, group: _Group[I]) -> bool:
        """Queue a group in one step, or return False if each inference is to be submitted alone."""
        engine, inferences = self._engine, group.inferences
        if engine.traces.on or engine.capture is not None:
            return False
        try:
            model = engine.resolve(group.model, group.version)
            if not (model.is_plain and model.queues_together):
                return False
            bodies = [inference.body for inference in inferences]
            columns = [memoryview(b"".join([body[place] for body in bodies])) for place in header.slices]
            contexts = self._contexts(model, inferences)
            tickets, refused = model.submit_all(header.form, columns, self._reply, self._mailbox, contexts)
        except RemoraError:
            return False
        for inference, ticket in zip(inferences, tickets, strict=True):
            inference.ticket = ticket
            if inference.cancelled:
                ticket.cancel()
        for index, error in refused:
            inferences[index].refuse(error)
        return True
