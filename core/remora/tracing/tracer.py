"""Tracing of requests from arrival to last response.

A front end calls `Traces.wrap_model` with the model for a request. It returns the model, or a wrapper that records that
one request. Most of a trace is read from the request's ticket when it is answered. Requests that are not traced cost
one check; traced ones get the same response.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.errors import RemoraError, UnsupportedError
from remora.messages import NO_TIME, Data, InferForm, Outcome, Request, Response, Streamed, Ticket, datatype_of
from remora.system.clock import Clock
from remora.system.install_advice import install_command
from remora.tracing.context import Carrier, SpanContext, carried, context_of
from remora.tracing.records import BACKEND_OUTPUT, QUEUE_INPUT, Part, SeenTensor, Trace, legible
from remora.tracing.sampling import Sampling
from remora.tracing.settings import TraceSettings
from remora.tracing.writer import Finished, TraceWriter

_log = logging.getLogger("remora.traces")

Reply = Callable[[Ticket, Outcome], None]

_FILE_ROOM = 64 << 20
"""Maximum estimated bytes of traces that wait for the file."""
_PART_BYTES = 2_048
_SEND_BYTES = 256
_SPANS = 3
_END_S = 3.0


class Arrival(NamedTuple):
    """The protocol and headers of a request, and when its receipt began (0: now)."""

    protocol: str
    carrier: Carrier
    since_ns: int = 0


def _no_key(_carrier: Carrier) -> str:
    return ""


class Traces:
    """The traces of one engine. Thread-safe.

    Args:
        settings: the command line's; the destination of traces never changes.
        clock: the engine's.
        environ: source of OpenTelemetry's variables, for values that the command line leaves open.
    """

    def __init__(self, settings: TraceSettings, clock: Clock, environ: Mapping[str, str]) -> None:
        self.on = False
        """True if any request may be traced; front ends check this first."""
        self.key_of: Callable[[Carrier], str] = _no_key
        """Returns the name of a request's API key from its headers, "" without one."""
        self._initial = settings
        self.now = clock.monotonic_ns
        self._wall_ms = clock.wall_ms
        self._environ = environ
        self._samplings: dict[str, Sampling] = {}
        self._ids = count(1)
        self._open: weakref.WeakValueDictionary[int, _Followed] = weakref.WeakValueDictionary()
        self._writer: TraceWriter | None = None
        self.apply({"": settings})

    # -- settings ---------------------------------------------------------------------------------------------------

    def apply(self, settings: Mapping[str, TraceSettings], renewed: str = "") -> None:
        """Trace by these settings from now on.

        Args:
            settings: the settings by model; "" has those of all other models.
            renewed: name of the model whose counters restart.

        Raises:
            UnsupportedError: the destination cannot be opened; nothing has changed.
        """
        if any(not each.off for each in settings.values()):
            self._make_writer()
        before = self._samplings
        after = {
            name: before[name]
            if name in before and name != renewed and before[name].settings == each
            else Sampling(each)
            for name, each in settings.items()
        }
        self._samplings = after
        self.on = any(not sampling.off for sampling in after.values())
        if self._writer is not None:
            for gone in set(before.values()) - set(after.values()):
                self._writer.put(Finished(gone, None, 0))

    def shown(self, name: str) -> TraceSettings:
        """Return a model's settings as clients see them, or "" for the server's."""
        return (self._samplings.get(name) or self._samplings[""]).now()

    def _make_writer(self) -> None:
        if self._writer is not None:
            return
        settings, export = self._initial, self._initial.export
        if not settings.exports:
            from remora.tracing.trace_file import TraceFile  # imported here because tracing is usually off

            folder = Path(settings.trace_file).absolute().parent
            if not os.access(folder, os.W_OK):
                raise UnsupportedError(
                    f"traces cannot be written to '{settings.trace_file}': '{folder}' is not writable"
                )
            self._writer = TraceWriter(TraceFile(settings.trace_file), room=_FILE_ROOM)
            return
        try:
            from remora.tracing.otlp import SpanSink
        except ImportError as error:
            raise UnsupportedError(f"mode opentelemetry needs: {install_command('otel')} ({error})") from error
        room, batch, delay_ms = (
            _number_of(own or self._environ.get(f"OTEL_{name.upper()}", ""), default)
            for own, name, default in (
                (export.bsp_max_queue_size, "bsp_max_queue_size", 2_048),
                (export.bsp_max_export_batch_size, "bsp_max_export_batch_size", 512),
                (export.bsp_schedule_delay, "bsp_schedule_delay", 5_000),
            )
        )
        resource = dict(pair.partition("=")[::2] for pair in export.resource)
        sink = SpanSink(export.url, resource, batch, lambda: self._wall_ms() * 1_000_000 - self.now())
        self._writer = TraceWriter(sink, room=room, batch=batch, delay_s=delay_ms / 1e3)

    def flush(self, timeout_s: float = 2.0) -> None:
        """Deliver finished traces within the timeout, for example before the process is frozen."""
        if self._writer is not None:
            self._writer.flush(timeout_s)

    def close(self) -> None:
        """Deliver finished traces and stop tracing."""
        self.on = False
        if self._writer is not None:
            self._writer.close(_END_S)

    @property
    def dropped(self) -> int:
        """The number of traces lost because the queue was full or delivery failed."""
        return self._writer.dropped if self._writer is not None else 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def wrap_model(self, model: Any, arrival: Arrival | None = None, retired: Any = None) -> Any:
        """Return the model for the next request, wrapped if that request is traced.

        In mode opentelemetry the request's trace context decides [T08]; otherwise every Nth request is traced.
        ``retired`` is the result of the first call for a request whose submit raised RetiredError; the
        request is not counted again.
        """
        if retired is not None:
            return retired.rebind(model) if isinstance(retired, TracedModel) else model
        if not self.on:
            return model
        sampling = self._samplings.get(model.name) or self._samplings[""]
        origin = context_of(arrival.carrier) if sampling.exports and not sampling.off and arrival is not None else None
        if not (origin.sampled if origin is not None else sampling.hits()):
            return model
        now_ns = self.now()
        trace_id = origin.trace_id if origin is not None else random.getrandbits(128) or 1
        context = SpanContext(trace_id, random.getrandbits(64) or 1, state=origin.state if origin is not None else "")
        protocol, since_ns = (arrival.protocol, arrival.since_ns) if arrival is not None else ("", 0)
        key = self.key_of(arrival.carrier) if arrival is not None else ""
        trace = Trace(protocol, min(since_ns or now_ns, now_ns), now_ns, context, origin, key)
        return TracedModel(model, _Progress(self, sampling, trace), None)

    def wrap_child(self, id: int, model: Any) -> Any:
        """Return the model for a sub-request of the traced request ``id``.

        Returns it unwrapped if that has ended.
        """
        caller = self._open.get(id)
        return model if caller is None else caller.wrap_child(model)

    def part(self, model: Any, form: InferForm, context: SpanContext, caller: Part | None) -> Part:
        """Create a model's part of a trace, starting now."""
        own = SpanContext(context.trace_id, random.getrandbits(64) or 1, state=context.state)
        parent_id = 0 if caller is None else caller.id
        return Part(
            next(self._ids), model.name, model.version, own, parent_id, context, legible(form.id), start_ns=self.now()
        )

    def note(self, followed: _Followed) -> None:
        """Register a request so that `wrap_child` finds it by id."""
        self._open[followed.id] = followed

    def finished(self, sampling: Sampling, trace: Trace) -> None:
        """Queue a finished trace for delivery."""
        writer = self._writer
        if writer is None:
            return
        size = len(trace.parts) * _SPANS if sampling.exports else _bytes_of(trace)
        writer.put(Finished(sampling, trace, size))


class _Progress:
    """An unfinished trace. It finishes with its last part and last response."""

    __slots__ = ("_ended", "_lock", "_uncounted", "_unfinished", "sampling", "trace", "traces")

    def __init__(self, traces: Traces, sampling: Sampling, trace: Trace) -> None:
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
            self.traces.finished(self.sampling, self.trace)


class TracedModel:
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

    def rebind(self, model: Any) -> TracedModel:
        """Return a wrapper of another version for the same request."""
        return TracedModel(model, self._progress, self._caller)

    def submit(self, form: InferForm, data: Sequence[Data], reply: Reply, **how: Any) -> Ticket:
        """Submit as ``ServedModel.submit`` does, with a trace."""
        progress, model = self._progress, self._model
        above = progress.trace.context if self._caller is None else self._caller.context
        part = progress.traces.part(model, form, above, self._caller)
        if not progress.begin(part):
            untraced: Ticket = model.submit(form, data, reply, **how)
            return untraced
        followed = _Followed(progress, part, reply, composed=model.steps is not None)
        try:
            ticket: Ticket = model.submit(form, data, followed.reply, trace=followed, **how)
        except BaseException:
            progress.end(part, refused=True)
            raise
        return ticket


class _Followed:
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
        return TracedModel(model, self._progress, self._part)

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
        final = not isinstance(outcome, Streamed) or outcome.final
        try:
            self._answered(outcome)
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

    def _answered(self, outcome: Outcome) -> None:
        content = outcome.outcome if isinstance(outcome, Streamed) else outcome
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


def _number_of(text: str, default: int) -> int:
    """Parse a number as OpenTelemetry does: an invalid one counts as unset."""
    return int(text) if text.isascii() and text.isdigit() and int(text) else default
