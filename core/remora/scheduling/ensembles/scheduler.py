"""Scheduler of an ensemble: the interface of `Scheduler` over models instead of instances.

It has no threads. The thread that delivers a step's answer submits the next step; in an event loop, short steps run in
that loop as if the client had requested them. Invariants:

1. Each ticket is answered exactly once, or its stream ended once.
2. Answers that result from one delivery of a step are delivered together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from remora.calls import SequenceReport
from remora.errors import RemoraError
from remora.messages import InferForm, InputSpec, Mailbox, Outcome, Streamed, Ticket
from remora.proto.model_config_pb2 import ModelConfig, ModelEnsembling
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import deliver, run_replies, stopping
from remora.scheduling.ensembles.plan import EnsemblePlan, EnsembleStep
from remora.scheduling.ensembles.request import EnsembleRequest, StepModel, StepModels, in_ensemble
from remora.signature import Signature, UnreadableError
from remora.system.clock import Clock

_FORMS_KEPT = 256


class EnsembleRecorder(Protocol):
    """Counter of an ensemble's requests.

    Called without locks, from any thread; must not raise.
    """

    def ensemble_ended(
        self, ticket: Ticket, spent_ns: tuple[int, int, int], error: RemoraError | None, first_ns: int, now_ns: int
    ) -> None:
        """Record the end of a request.

        ``spent_ns`` are the sums of its steps' compute phases: input, infer, output. ``first_ns`` is the time of its
        first answer, 0 if there was no answer.
        """


class EnsembleScheduler:
    """The requests of one version of one ensemble.

    Args:
        config: complete and valid, its steps checked against their models.
        decoupled: the names of the decoupled composing models.
        models: source of the composing models.
        signature: the ensemble's.
        recorder: records every request that ends.
        clock: the engine's.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoupled: Collection[str],
        models: StepModels,
        signature: Signature,
        recorder: EnsembleRecorder,
        clock: Clock,
    ) -> None:
        self.name = config.name
        self.plan = EnsemblePlan.of(config, decoupled)
        self.models = models
        self.batches = signature.max_batch_size > 0
        self.inputs = {row.name: row.datatype for row in signature.inputs}
        self.outputs = {
            row.name: tuple(row.reshape.shape if row.HasField("reshape") else row.dims) for row in config.output
        }
        self.to_wire = signature.to_wire
        self.now: Callable[[], int] = clock.monotonic_ns
        self.costs = CostModel()
        self._recorder = recorder
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._requests: set[EnsembleRequest] = set()
        self._stopping = False
        self._forms: dict[tuple[object, ...], InferForm] = {}
        self._gathering = threading.local()
        self._mailbox = _StepMailbox(self, None)

    # -- taking requests --------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Start a request. Its reply delivers the answer, possibly before this returns.

        Any thread may call. Raises UnavailableError if the scheduler is stopping [D17]; the ticket is then not
        answered.
        """
        ticket.arrival_ns = ticket.arrival_ns or self.now()
        request = EnsembleRequest(self, ticket)
        with self._lock:
            if self._stopping:
                raise stopping()
            self._requests.add(request)
        request.begin()

    @property
    def pending(self) -> int:
        """Always 0, because only the steps' requests are queued [P04]."""
        return 0

    @property
    def oldest_ns(self) -> int:
        """Always 0, because only the steps' requests are queued."""
        return 0

    @property
    def running(self) -> int:
        return len(self._requests)

    open_sequences = 0

    def keeps_sequence(self, sequence_id: int | str) -> bool:
        """Return False, because the models of the steps keep the sequences."""
        return False

    def report(self) -> SequenceReport | None:
        """Return None, because the models of the steps have the reports."""
        return None

    # -- interface for requests -------------------------------------------------------------------------------------

    def mailbox_for(self, mailbox: Mailbox | None) -> Mailbox:
        """Return the mailbox for the steps. See ``Owner``.

        It is the same object while one loop calls, so that its answers can be delivered together.
        """
        current = self._mailbox
        if current.inner is not mailbox:
            current = self._mailbox = _StepMailbox(self, mailbox)
        return current

    def form(self, request: InferForm, step: EnsembleStep, inputs: tuple[InputSpec, ...]) -> InferForm:
        """Return the form for a step. See ``Owner``.

        It is the same object for equal contents, so that the step's model need not check it again.
        """
        if request.id or request.parameters:
            return _step_form(request, step, inputs)
        key = (
            step.number,
            inputs,
            request.priority,
            request.timeout_us,
            request.sequence_id,
            request.sequence_start,
            request.sequence_end,
        )
        known = self._forms.get(key)
        if known is None:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            known = self._forms[key] = _step_form(request, step, inputs)
        return known

    def emit(self, ticket: Ticket, outcome: Outcome) -> None:
        """Deliver an answer together with the others of the current delivery. See ``Owner``."""
        gathered: list[tuple[Ticket, Outcome]] | None = getattr(self._gathering, "deliveries", None)
        if gathered is None or isinstance(outcome, Streamed):  # because another thread may send the next one
            deliver([(ticket, outcome)])
        else:
            gathered.append((ticket, outcome))

    def take_in(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Process the answers of steps. Never raises."""
        outer = getattr(self._gathering, "deliveries", None)
        gathered: list[tuple[Ticket, Outcome]] = []
        self._gathering.deliveries = gathered
        try:
            run_replies(deliveries)
        finally:
            self._gathering.deliveries = outer
        deliver(gathered)

    def ended(self, request: EnsembleRequest, error: RemoraError | None) -> None:
        """See ``Owner``."""
        ticket = request.ticket
        spent = (request.spent_ns[0], request.spent_ns[1], request.spent_ns[2])
        ticket.spent_ns = spent
        self._recorder.ensemble_ended(ticket, spent, error, request.first_ns, self.now())
        with self._lock:
            self._requests.discard(request)
            if not self._requests:
                self._idle.notify_all()

    # -- shutdown ---------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for those in flight.

        Returns False on timeout. None waits without limit.
        """
        with self._lock:
            self._stopping = True
            return self._idle.wait_for(lambda: not self._requests, timeout_s)

    def fail_pending(self, error: RemoraError) -> None:
        """End all requests in flight with ``error``, after a stop timed out."""
        for request in tuple(self._requests):
            request.end(error)


class _StepMailbox:
    """Mailbox of the steps: receives their answers, and defers work to the loop of the request."""

    __slots__ = ("defer", "inner", "post", "watcher")

    def __init__(self, scheduler: EnsembleScheduler, inner: Mailbox | None) -> None:
        self.inner = inner
        self.post = scheduler.take_in
        self.defer: Callable[[Callable[[], None]], bool] = _never if inner is None else inner.defer
        self.watcher = None if inner is None else inner.watcher


def _never(work: Callable[[], None]) -> bool:
    return False


def _step_form(request: InferForm, step: EnsembleStep, inputs: tuple[InputSpec, ...]) -> InferForm:
    """Return a step's form, which has all properties of the ensemble's request [E02]."""
    return InferForm(
        inputs,
        step.requests,
        request.id,
        request.parameters,
        request.priority,
        request.timeout_us,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
    )


def labels_of(config: ModelConfig, models: StepModels, output: str) -> Sequence[str]:
    """Return the class labels of the model that produces an output [C09]."""
    source = _end(config, output, lambda step: step.output_map)
    if source is None:
        return ()
    step, inner = source
    with _acquired(models, step) as model:
        return model.labels_of(inner) if model is not None else ()


def unreadable(config: ModelConfig, models: StepModels, error: UnreadableError) -> RemoraError:
    """Return the error for an unreadable input, as worded by the first step that takes it."""
    reader = _end(config, error.input, lambda step: step.input_map)
    if reader is None:
        return error
    step, inner = reader
    worded = error.of(inner)
    with _acquired(models, step) as model:
        return in_ensemble(config.name, worded if model is None else model.unreadable(worded))


def _end(
    config: ModelConfig, tensor: str, mapping: Callable[[ModelEnsembling.Step], Mapping[str, str]]
) -> tuple[ModelEnsembling.Step, str] | None:
    """Return the first step that maps an ensemble's tensor, with the tensor's name there."""
    steps = config.ensemble_scheduling.step
    return next(((step, inner) for step in steps for inner, name in mapping(step).items() if name == tensor), None)


@contextmanager
def _acquired(models: StepModels, step: ModelEnsembling.Step) -> Iterator[StepModel | None]:
    try:
        model = models.acquire(step.model_name, step.model_version)
    except RemoraError:
        yield None
        return
    try:
        yield model
    finally:
        model.release()
