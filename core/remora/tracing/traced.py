"""Model wrapper that records one traced request, from the submission to its last response.

Most of a trace is read from the request's ticket when it is answered.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from remora.errors import RemoraError
from remora.messages import (
    NO_TIME,
    Data,
    InferForm,
    Outcome,
    Reply,
    Request,
    Response,
    Streamed,
    Ticket,
    datatype_of,
    split_outcome,
)
from remora.tracing.context import SpanContext, carried, context_of
from remora.tracing.records import BACKEND_OUTPUT, QUEUE_INPUT, Part, SeenTensor, Trace, legible
from remora.tracing.sampling import Sampling

if TYPE_CHECKING:
    from remora.tracing.arrival import Arrival, Carrier

_log = logging.getLogger("remora.traces")

_PART_BYTES = 2_048
_SEND_BYTES = 256
_SPANS = 3


class Recorder(Protocol):
    """Destination of traces; see `remora.tracing.tracer.Traces`."""

    @property
    def key_of(self) -> Callable[[Carrier], str]:
        """Returns the name of a request's API key from its headers, "" without one."""

    @property
    def now(self) -> Callable[[], int]:
        """Returns monotonic nanoseconds."""

    def number(self) -> int:
        """Return the id of the next part of a trace."""

    def note(self, request: TracedRequest) -> None:
        """Register a request whose sub-requests become parts of its trace."""

    def finished(self, sampling: Sampling, trace: Trace, size: int) -> None:
        """Accept a finished trace; ``size`` is its weight in the queue."""


def traced(traces: Recorder, sampling: Sampling, model: Any, arrival: Arrival | None) -> Any:
    """Return the model for the next request, wrapped if that request is traced.

    In mode opentelemetry the request's trace context decides [T08]; otherwise every Nth request is traced.
    """
    progress = _progress_of(traces, sampling, arrival)
    return model if progress is None else _TracedModel(model, progress, None)


def traced_task(traces: Recorder, sampling: Sampling, model: Any, arrival: Arrival | None) -> TracedTask | None:
    """Return the trace of the next request, which has no ticket, None if it is not traced."""
    progress = _progress_of(traces, sampling, arrival)
    if progress is None:
        return None
    part = _part(traces, model, "", progress.trace.context, None)
    return TracedTask(progress, part) if progress.begin(part) else None


def _progress_of(traces: Recorder, sampling: Sampling, arrival: Arrival | None) -> _Progress | None:
    """Return a new trace for the next request if it is traced; see `traced`."""
    origin = context_of(arrival.carrier) if sampling.exports and not sampling.off and arrival is not None else None
    if not (origin.sampled if origin is not None else sampling.hits()):
        return None
    now_ns = traces.now()
    trace_id = origin.trace_id if origin is not None else random.getrandbits(128) or 1
    context = SpanContext(trace_id, random.getrandbits(64) or 1, state=origin.state if origin is not None else "")
    protocol, since_ns = (arrival.protocol, arrival.since_ns) if arrival is not None else ("", 0)
    key = traces.key_of(arrival.carrier) if arrival is not None else ""
    trace = Trace(protocol, min(since_ns or now_ns, now_ns), now_ns, context, origin, key)
    return _Progress(traces, sampling, trace)


def rebound(retired: Any, model: Any) -> Any:
    """Return another version for the request of ``retired``, a result of `traced`, without counting it again."""
    return retired.rebind(model) if isinstance(retired, _TracedModel) else model


def _part(traces: Recorder, model: Any, request_id: str, context: SpanContext, caller: Part | None) -> Part:
    """Return a model's part of a trace, starting now."""
    own = SpanContext(context.trace_id, random.getrandbits(64) or 1, state=context.state)
    parent_id = 0 if caller is None else caller.id
    return Part(
        traces.number(), model.name, model.version, own, parent_id, context, legible(request_id), start_ns=traces.now()
    )


class _Progress:
    """An unfinished trace. It finishes with its last part and last response."""

    __slots__ = ("_ended", "_lock", "_uncounted", "_unfinished", "sampling", "trace", "traces")

    def __init__(self, traces: Recorder, sampling: Sampling, trace: Trace) -> None:
        self.traces = traces
        self.sampling = sampling
        self.trace = trace
        self._unfinished = 0
        self._ended = False
        self._uncounted = trace.origin is not None  # the caller's context decided, so the count does not apply
        self._lock = threading.Lock()

    def begin(self, part: Part) -> bool:
        """Add a part. Return False if the trace count is used up or the trace has ended.

        Sub-requests made after the response are not part of the trace.
        """
        with self._lock:
            if self._ended or not (self.trace.parts or self._uncounted or self.sampling.take()):
                return False
            self._unfinished += 1
            self.trace.parts.append(part)
            return True

    def end(self, part: Part, *, refused: bool = False) -> None:
        """End a part. A ``refused`` one is removed from the trace."""
        with self._lock:
            self._unfinished -= 1
            if refused:
                self.trace.parts.remove(part)
                if not (self.trace.parts or self._uncounted):
                    self.sampling.give_back()
            done = self._ended = not self._unfinished and bool(self.trace.parts)
        if done:
            trace = self.trace
            size = len(trace.parts) * _SPANS if self.sampling.exports else _bytes_of(trace)
            self.traces.finished(self.sampling, trace, size)


class _TracedModel:
    """Model version that traces the one request submitted to it.

    Otherwise it delegates to the version.
    """

    __slots__ = ("_caller", "_model", "_progress")

    def __init__(self, model: Any, progress: _Progress, caller: Part | None) -> None:
        self._model = model
        self._progress = progress
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def rebind(self, model: Any) -> _TracedModel:
        """Return a wrapper of another version for the same request."""
        return _TracedModel(model, self._progress, self._caller)

    def submit(self, form: InferForm, data: Sequence[Data], reply: Reply, **how: Any) -> Ticket:
        """Submit as ``ServedModel.submit`` does, with a trace."""
        progress, model = self._progress, self._model
        if model.is_routed:
            model.bind(form)  # so that the trace names the version that runs the request
        above = progress.trace.context if self._caller is None else self._caller.context
        part = _part(progress.traces, model, form.id, above, self._caller)
        if not progress.begin(part):
            untraced: Ticket = model.submit(form, data, reply, **how)
            return untraced
        followed = TracedRequest(progress, part, reply, composed=model.steps is not None)
        try:
            ticket: Ticket = model.submit(form, data, followed.reply, trace=followed, **how)
        except BaseException:
            progress.end(part, refused=True)
            raise
        return ticket


class TracedRequest:
    """One request to one model in flight, as stored in ``Request.trace``."""

    __slots__ = ("__weakref__", "_composed", "_part", "_progress", "_reply", "id")

    def __init__(self, progress: _Progress, part: Part, reply: Reply, *, composed: bool) -> None:
        self.id = part.id
        self._progress = progress
        self._part = part
        self._reply = reply
        self._composed = composed
        progress.traces.note(self)

    @property
    def context(self) -> str:
        """The headers that calls to other services carry, as JSON."""
        return carried(self._part.context) if self._progress.sampling.exports else ""

    def wrap_child(self, model: Any) -> Any:
        """Return the model for a sub-request of this one."""
        return _TracedModel(model, self._progress, self._part)

    def record_inputs(self, request: Request) -> None:
        """Record the inputs of a validated request."""
        if self._progress.sampling.tensors:
            specs = {spec.name: spec.datatype for spec in request.form.inputs}
            for name, array in request.inputs.items():
                self._keep(QUEUE_INPUT, name, specs.get(name) or datatype_of(array), array)

    def record_answer(self, attributes: Mapping[str, Any], events: Sequence[tuple[str, int]]) -> None:
        """Record a language model's answer."""
        self._part.attributes.update(attributes)
        self._part.events.extend(events)

    def reply(self, ticket: Ticket, outcome: Outcome) -> None:
        """Record a response, pass it on, and record when it was sent."""
        progress, part = self._progress, self._part
        now_ns = progress.traces.now()
        final, content = split_outcome(outcome)
        try:
            self._answered(content)
        except Exception:  # a failed trace must not cost the client its response
            _log.exception("a response is missing from a trace")
        try:
            self._reply(ticket, outcome)
        finally:
            if not part.parent_id:
                progress.trace.response_ns = progress.trace.response_ns or now_ns
                progress.trace.sends.append((now_ns, progress.traces.now()))
            if final:
                part.queue_ns = ticket.arrival_ns
                part.compute = _compute(ticket, now_ns, self._composed, streamed=isinstance(outcome, Streamed))
                part.end_ns = max(now_ns, *part.compute) if part.compute else now_ns
                progress.end(part)

    def _answered(self, content: Response | RemoraError | None) -> None:
        if isinstance(content, RemoraError):
            self._part.error = legible(content.message)
        elif isinstance(content, Response) and self._progress.sampling.tensors:
            for tensor in content.outputs:
                self._keep(BACKEND_OUTPUT, tensor.name, tensor.datatype, tensor.data)

    def _keep(self, activity: str, name: str, datatype: str, data: Any) -> None:
        """Copy a tensor, because its owner may overwrite or free it later."""
        try:
            copy = np.array(data.host() if hasattr(data, "host") else data)  # DeviceArray, not imported here
        except Exception as error:  # such as out of memory or a lost device; the request must not fail for it
            _log.warning("tensor '%s' is missing from a trace: %s", name, error)
            return
        self._part.tensors.append(SeenTensor(activity, name, datatype, copy))


class TracedTask:
    """One request to a language model in flight, which has no ticket.

    `end` completes its trace once.
    """

    __slots__ = ("_part", "_progress", "id")

    def __init__(self, progress: _Progress, part: Part) -> None:
        self.id = part.id
        self._progress = progress
        self._part = part

    def record_answer(self, attributes: Mapping[str, Any], events: Sequence[tuple[str, int]]) -> None:
        """Record the answer to one prompt of the request."""
        self._part.attributes.update(attributes)
        self._part.events.extend(events)

    def end(self, request_id: str, error: RemoraError | None = None) -> None:
        """Complete the trace with the last token or with an error."""
        part, trace, now_ns = self._part, self._progress.trace, self._progress.traces.now()
        part.request_id = legible(request_id)
        part.error = legible(error.message) if error is not None else ""
        part.queue_ns, part.end_ns = part.start_ns, now_ns
        trace.response_ns = part.events[0][1] if part.events else now_ns
        trace.sends.append((now_ns, now_ns))
        self._progress.end(part)


def _bytes_of(trace: Trace) -> int:
    """Estimate the memory of a trace, as data and as text."""
    events = sum(len(part.events) for part in trace.parts)
    size = _PART_BYTES * len(trace.parts) + _SEND_BYTES * (len(trace.sends) + events)
    for part in trace.parts:
        for _, _, datatype, data in part.tensors:
            size += 8 * data.nbytes
            if datatype == "BYTES":  # an object array's nbytes excludes its elements
                size += sum(len(each) for each in data.flat if isinstance(each, bytes | str))
    return size


def _compute(ticket: Ticket, now_ns: int, composed: bool, *, streamed: bool) -> tuple[int, ...]:
    """Return the COMPUTE times of an answered ticket.

    Empty for ensembles, cached responses and requests that never ran.
    """
    start = ticket.start_ns
    if composed or not start or (ticket.spent_ns is NO_TIME and not streamed):
        return ()
    if ticket.spent_ns is NO_TIME:  # streamed: the execution has not ended
        return (start, start, now_ns, now_ns)
    spent_input, spent_infer, spent_output = ticket.spent_ns
    middle = start + spent_input
    return (start, middle, middle + spent_infer, middle + spent_infer + spent_output)
