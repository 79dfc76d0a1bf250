"""Execution of one ensemble request, from its first step to its last answer [E02-E06].

It has no thread: the thread that delivers a step's answer starts the next steps. Invariants:

1. The request is answered once, or its stream ended once, whatever its steps do. Later answers are dropped.
2. Outputs of a step are passed on without a copy, read-only if several readers share them. A device array is copied to
   the host at most once, and only if the next model or the client cannot use it on the device.
3. The models of the steps stay loaded until the request has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from remora.errors import CancelledError, InvalidArgumentError, RemoraError, UnavailableError, about, error_of
from remora.messages import (
    Array,
    Data,
    InferForm,
    InputSpec,
    Mailbox,
    Outcome,
    Parameter,
    Response,
    Streamed,
    Tensor,
    Ticket,
    split_outcome,
)
from remora.scheduling.delivery import failure_of
from remora.scheduling.ensembles.plan import EnsemblePlan, EnsembleRun, EnsembleStep, Progress, Start
from remora.signature import Signature, UnreadableError
from remora.tensors.device import DeviceArray, DeviceId, on_host

_log = logging.getLogger("remora.models")

_NO_STEPS: frozenset[int] = frozenset()
_SIGNED_LIMIT = 1 << 63
_ROOM_TIMEOUT_S = 1.0
"""Maximum time that a response waits for room behind it.

Ensembles whose steps wait for each other in a cycle would wait forever; with the limit they are only slow.
"""


class StepModel(Protocol):
    """A model version acquired by an ensemble."""

    @property
    def name(self) -> str: ...

    @property
    def decoupled(self) -> bool: ...

    @property
    def signature(self) -> Signature: ...

    @property
    def devices(self) -> frozenset[DeviceId]:
        """Devices on which it accepts and leaves tensors. See ``ServedModel.devices``."""

    def labels_of(self, output: str) -> Sequence[str]:
        """See ``ServedModel.labels_of``."""

    def unreadable(self, error: UnreadableError) -> RemoraError:
        """See ``ServedModel.unreadable``."""

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Callable[[Ticket, Outcome], None],
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        blocking_instances: frozenset[object] = frozenset(),
        keep_on_device: bool = False,
    ) -> Ticket:
        """Submit a step's request. See ``ServedModel.submit``."""

    def release(self) -> None:
        """Release the model."""


class StepModels(Protocol):
    """The source of an ensemble's composing models."""

    def acquire(self, name: str, version: int = -1) -> StepModel:
        """Acquire the serving version, or the highest ready one for -1.

        It stays loaded until it is released. Raises RemoraError if there is none.
        """


class Value(NamedTuple):
    """A tensor between two steps. ``batched`` is True if its first dimension is the batch."""

    data: Array
    datatype: str
    batched: bool


class Owner(Protocol):
    """The scheduler's interface to its requests."""

    @property
    def name(self) -> str: ...

    @property
    def plan(self) -> EnsemblePlan: ...

    @property
    def models(self) -> StepModels: ...

    @property
    def batches(self) -> bool: ...

    @property
    def inputs(self) -> Mapping[str, str]:
        """Datatype of each input."""

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """Dims of each output as returned by the steps.

        These are the dims of its reshape if it has one, without the batch dimension.
        """

    def to_wire(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs in the shapes that the ensemble declares."""

    def now(self) -> int:
        """Return the time of the engine's monotonic clock."""

    def mailbox_for(self, mailbox: Mailbox | None) -> Mailbox:
        """Return the mailbox of the steps' answers for a request with this mailbox."""

    def form(self, request: InferForm, step: EnsembleStep, inputs: tuple[InputSpec, ...]) -> InferForm:
        """Return the form of a step's request."""

    def emit(self, ticket: Ticket, outcome: Outcome) -> None:
        """Deliver an answer of the ensemble."""

    def ended(self, request: EnsembleRequest, error: RemoraError | None) -> None:
        """Record the end of a request. Called once for each, before its last answer is sent."""


class EnsembleRequest:
    """One request to an ensemble.

    `begin` is called once. `reply` receives the steps' answers, on any thread.
    """

    def __init__(self, owner: Owner, ticket: Ticket) -> None:
        self.ticket = ticket
        self.spent_ns = [0, 0, 0]
        self.first_ns = 0
        self._owner = owner
        self._run: EnsembleRun[Value] = EnsembleRun(owner.plan, ticket.request.requested)
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock) if owner.plan.max_inflight else None
        self._models: dict[tuple[str, int], StepModel] = {}
        self._kept_on_device: frozenset[int] = _NO_STEPS
        self._tickets: set[Ticket] = set()
        self._outbox: deque[Outcome] = deque()
        self._sending = False
        self._over = False
        self._unregister: Callable[[], None] = _nothing

    # -- events -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Acquire the models and start the steps that need only the request's inputs."""
        owner, request = self._owner, self.ticket.request
        self.ticket.start_ns = owner.now()
        try:
            self._acquire_models()
        except RemoraError as refusal:
            self.end(refusal)
            return
        given = {name: Value(data, owner.inputs[name], owner.batches) for name, data in request.inputs.items()}
        with self._lock:
            progress = self._run.begin(given)
            error = self._take_in(progress)
        self._unregister = request.when_cancelled(self.cancel)
        if self._over:
            self._unregister_cancel()
        self._go_on(progress, error)

    def reply(self, ticket: Ticket, outcome: Outcome) -> None:
        """Process the answer of a step."""
        start: Start[Value] | None = ticket.context  # type: ignore[assignment]  # what `_submit` put there
        final, content = split_outcome(outcome)
        if start is None or self._over:
            return
        if isinstance(content, RemoraError):
            self.end(content)
            return
        if self.ticket.request.cancelled:
            self.cancel()
            return
        outputs = None if content is None else self._values(start, content)
        with self._lock:
            if self._over:
                return
            if final:
                self._note_end(ticket, streamed=isinstance(outcome, Streamed))
            progress = self._run.answered(start, outputs, final=final)
            error = self._take_in(progress)
            if self._moved is not None:
                self._moved.notify_all()
        self._go_on(progress, error)
        if self._moved is not None and not final:
            self._wait_for_room(start.step)

    def cancel(self) -> None:
        """End with CancelledError unless already ended. Any thread may call."""
        self.end(CancelledError(about(self.ticket.request.form.id, "request was cancelled")))

    def end(self, error: RemoraError) -> None:
        """End with an error unless already ended. Any thread may call."""
        with self._lock:
            if self._over:
                return
            error = self._fail(error)
        self._finish(error)
        self._flush()

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _take_in(self, progress: Progress[Value]) -> RemoraError | None:
        """Queue the answers of a step and record the end. Returns the error if it ends with one."""
        if progress.stuck:
            return self._fail(
                InvalidArgumentError(
                    about(
                        self.ticket.request.form.id,
                        "unexpected deadlock, at least one output is not set while no more ensemble steps can be made",
                    )
                )
            )
        if progress.answers and not self.first_ns:
            self.first_ns = self._owner.now()
        try:
            answers = [self._response(answer) for answer in progress.answers]
        except Exception as error:  # an undeclared shape, or a device array that cannot be copied
            return self._fail(failure_of(error, self._owner.name))
        if not self._run.streamed:
            self._outbox.extend(answers)
        else:
            closing = progress.ended
            last = len(answers) - 1
            self._outbox.extend(Streamed(answer, closing and at == last) for at, answer in enumerate(answers))
            if closing and not answers:
                self._outbox.append(Streamed(None, True))
        self._over = progress.ended
        return None

    def _fail(self, error: RemoraError) -> RemoraError:
        """Record the end with an error and return it as the ensemble's."""
        self._over = True
        error = in_ensemble(self._owner.name, error)
        self._outbox.append(Streamed(error, True) if self._run.streamed else error)
        if self._moved is not None:
            self._moved.notify_all()
        return error

    def _note_end(self, ticket: Ticket, *, streamed: bool) -> None:
        """Record the end of a step's execution and add its phase durations.

        Of a streamed one only the total is known.
        """
        self._tickets.discard(ticket)
        ticket.context = None
        spent = (0, self._owner.now() - ticket.start_ns, 0) if streamed else ticket.spent_ns
        for phase, ns in enumerate(spent):
            self.spent_ns[phase] += ns

    # -- without the lock -------------------------------------------------------------------------------------------

    def _acquire_models(self) -> None:
        owner = self._owner
        for key in owner.plan.models:
            self._models[key] = owner.models.acquire(*key)
        for step in owner.plan.steps:
            if self._models[step.model, step.version].decoupled != step.decoupled:
                raise UnavailableError(
                    f"model '{step.model}' has just been replaced by one with another transaction policy: try again"
                )
        if any(model.devices for model in self._models.values()):
            self._kept_on_device = frozenset(step.number for step in owner.plan.steps if self._stays_on_device(step))

    def _stays_on_device(self, step: EnsembleStep) -> bool:
        """Return True if a reader of the step's outputs accepts them on the model's device."""
        devices = self._models[step.model, step.version].devices
        return bool(devices) and any(
            devices & self._models[reader.model, reader.version].devices for reader in self._run.readers(step)
        )

    def _go_on(self, progress: Progress[Value], error: RemoraError | None) -> None:
        """Carry out the progress: record the end, deliver the answers, start the steps."""
        if self._over and (progress.ended or error is not None):
            self._finish(error)
        self._flush()
        for start in progress.starts:
            if self._over:
                return
            self._submit(start)

    def _submit(self, start: Start[Value]) -> None:
        owner, step = self._owner, start.step
        model = self._models[step.model, step.version]
        try:
            form, data = self._step_request(model, start)
            trace = self.ticket.request.trace
            if trace is not None:
                model = trace.wrap_child(model)
            ticket = model.submit(
                form,
                data,
                self.reply,
                mailbox=owner.mailbox_for(self.ticket.mailbox),
                context=start,
                blocking_instances=self.ticket.request.blocking_instances,
                keep_on_device=step.number in self._kept_on_device,
            )
        except Exception as error:  # refused by the step's model, queue full, or unexpected
            self.end(failure_of(error, model.name))
            return
        with self._lock:
            if not self._over:
                if ticket.context is not None:  # otherwise it is already answered
                    self._tickets.add(ticket)
                return
        ticket.cancel()

    def _step_request(self, model: StepModel, start: Start[Value]) -> tuple[InferForm, list[Data]]:
        """Return the form and data for a step's model.

        Raises RemoraError for a tensor that cannot be copied from its device.
        """
        step, batches = start.step, model.signature.max_batch_size > 0
        specs: list[InputSpec] = []
        data: list[Data] = []
        for name, tensor in step.inputs:
            value = start.inputs.get(name)
            if value is None:
                continue
            array = value.data
            shape: tuple[int, ...] = array.shape
            if value.batched != batches:
                shape = fit_batch(shape, _dims(model.signature, name), batches=batches)
            specs.append(InputSpec(name, value.datatype, shape))
            data.append(_passed(array, model.devices, shared=self._run.is_shared(tensor)))
        return self._owner.form(self.ticket.request.form, step, tuple(specs)), data

    def _values(self, start: Start[Value], response: Response) -> dict[str, Value]:
        batched = self._models[start.step.model, start.step.version].signature.max_batch_size > 0
        return {tensor.name: Value(tensor.data, tensor.datatype, batched) for tensor in response.outputs}

    def _response(self, answer: dict[str, Value]) -> Response:
        owner = self._owner
        outputs: list[Tensor] = []
        if len(answer) < len(self._run.places):
            for name in self._run.places:
                if name not in answer:
                    _log.debug("Composing models did not output tensor %s", name)
        for name, (data, datatype, batched) in answer.items():
            data = on_host(data)
            if batched != owner.batches:
                data = data.reshape(fit_batch(data.shape, owner.outputs[name], batches=owner.batches))
            outputs.append(Tensor(name, datatype, data))
        return Response(owner.to_wire(outputs), sequence_parameters(self.ticket.request.form) if outputs else None)

    def _finish(self, error: RemoraError | None) -> None:
        """Record the end, cancel the steps that still run and release the models.

        Only the caller that ended the request may call this.
        """
        self._unregister_cancel()
        self._owner.ended(self, error)
        with self._lock:
            tickets, self._tickets = self._tickets, set()
        for ticket in tickets:
            ticket.cancel()
        for model in self._models.values():
            model.release()

    def _unregister_cancel(self) -> None:
        """Unregister from the request's cancellation.

        This breaks the reference cycle, so that all arrays are freed without the garbage collector.
        """
        unregister, self._unregister = self._unregister, _nothing
        unregister()

    def _flush(self) -> None:
        """Deliver the queued answers in order, by one thread at a time."""
        with self._lock:
            if self._sending or not self._outbox:
                return
            self._sending = True
            outcome = self._outbox.popleft()
        while True:
            self._owner.emit(self.ticket, outcome)
            with self._lock:
                if not self._outbox:
                    self._sending = False
                    return
                outcome = self._outbox.popleft()

    def _wait_for_room(self, step: EnsembleStep) -> None:
        """Block the sender of a response while a reader of the step is at the in-flight limit [E06]."""
        plan, moved = self._owner.plan, self._moved
        if moved is None or plan.returns_to(step):
            return
        readers = self._run.readers(step)
        with moved:
            moved.wait_for(
                lambda: self._over or all(self._run.open(reader) < plan.max_inflight for reader in readers),
                _ROOM_TIMEOUT_S,
            )


def sequence_parameters(form: InferForm) -> dict[str, Parameter]:
    """Return the parameters that every response of an ensemble with an output has.

    They are present outside a sequence too.
    """
    number = form.sequence_id
    if not isinstance(number, str) and number >= _SIGNED_LIMIT:
        number -= 2 * _SIGNED_LIMIT  # as in Triton, because a gRPC parameter is a signed number
    return {"sequence_id": number, "sequence_start": form.sequence_start, "sequence_end": form.sequence_end}


def in_ensemble(name: str, error: RemoraError) -> RemoraError:
    """Return an error prefixed with the ensemble's name, as Triton does for all its errors."""
    return error_of(error.code, f"in ensemble '{name}', {error.message}", from_model=True)


def fit_batch(shape: tuple[int, ...], dims: tuple[int, ...], *, batches: bool) -> tuple[int, ...]:
    """Return the shape of a tensor between a model that batches and one that does not [E03].

    Args:
        shape: of the tensor.
        dims: declared by the reader, without the batch dimension; -1 for any size.
        batches: True if the reader batches; the producer does the opposite.

    A batch dimension of one row is added or removed if the rest then fits; otherwise the shape is unchanged, and the
    reader refuses it.
    """
    if batches:
        return (1, *shape) if _fits(shape, dims) else shape
    return shape[1:] if shape[:1] == (1,) and _fits(shape[1:], dims) and not _fits(shape, dims) else shape


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def _dims(signature: Signature, name: str) -> tuple[int, ...]:
    """Return the dims of a model's input without the batch dimension."""
    skip = 1 if signature.max_batch_size > 0 else 0
    return next((row.shape[skip:] for row in signature.inputs if row.name == name), ())


def _passed(array: Any, devices: frozenset[DeviceId], *, shared: bool) -> Array:
    """Return a step's array for a model that accepts tensors on ``devices``."""
    if type(array) is not DeviceArray:
        return _read_only(array) if shared else array
    if array.device not in devices:
        return array.host()
    return (array.as_shared() if shared else array).as_array()


def _read_only(array: Array) -> Array:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def _nothing() -> None:
    return None
