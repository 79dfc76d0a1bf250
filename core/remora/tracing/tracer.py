"""Follows the requests that are traced from their arrival to their last answer; the law: a request that is not traced
costs nothing but the question, and one that is gets the answer that it would get.

A front end asks `Traces.over` for the model that it hands a request to. It gets the model itself, or a stand-in that
notes what happens to that one request. Most of a trace is read off the request's ticket when it is answered.
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
"""How many bytes, by estimate, may wait to be written to a file."""
_PART_BYTES = 2_048
_SEND_BYTES = 256
_SPANS = 3
_END_S = 3.0


class Arrival(NamedTuple):
    """How a request came: over which protocol, with which headers, and since when it was being received (0: now)."""

    protocol: str
    carrier: Carrier
    since_ns: int = 0


class Traces:
    """The traces of one engine. Thread-safe.

    Args:
        settings: what the command line says; where traces go stays as it says.
        clock: the engine's.
        environ: OpenTelemetry's variables are read from it, where the command line leaves something to them.
    """

    def __init__(self, settings: TraceSettings, clock: Clock, environ: Mapping[str, str]) -> None:
        self.on = False
        """Whether any request may be traced: what front ends ask first."""
        self._given = settings
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
        """Trace by these settings from now on, by model; "" has those of all others. ``renewed`` counts anew.

        Raises UnsupportedError when traces cannot leave as they should; then nothing has changed.
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
        """A model's settings as clients see them; "" for the server's."""
        return (self._samplings.get(name) or self._samplings[""]).now()

    def _make_writer(self) -> None:
        if self._writer is not None:
            return
        settings, export = self._given, self._given.export
        if not settings.exports:
            from remora.tracing.trace_file import TraceFile  # what is off is not imported

            folder = Path(settings.trace_file).absolute().parent
            if not os.access(folder, os.W_OK):
                raise UnsupportedError(
                    f"traces cannot be written to '{settings.trace_file}': '{folder}' takes no files"
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
        """Send what is finished, for as long as that: before the process is frozen."""
        if self._writer is not None:
            self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what is finished, and end."""
        self.on = False
        if self._writer is not None:
            self._writer.close(_END_S)

    @property
    def dropped(self) -> int:
        """How many traces were lost for want of room or of somebody to take them."""
        return self._writer.dropped if self._writer is not None else 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def over(self, model: Any, arrival: Arrival | None = None, retired: Any = None) -> Any:
        """The model for the next request: itself, or with a trace of that request.

        A context that comes with the request decides, in mode opentelemetry [T08]; else every Nth is traced.
        ``retired`` is what this gave for the same request before, when that has raised RetiredError: it is no next one.
        """
        if retired is not None:
            return retired.instead(model) if isinstance(retired, TracedModel) else model
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
        trace = Trace(protocol, min(since_ns or now_ns, now_ns), now_ns, context, origin)
        return TracedModel(model, _Progress(self, sampling, trace), None)

    def following(self, id: int, model: Any) -> Any:
        """The model for a request that is made for the traced one of that id; the model itself when that has ended."""
        caller = self._open.get(id)
        return model if caller is None else caller.over(model)

    def part(self, model: Any, form: InferForm, context: SpanContext, caller: Part | None) -> Part:
        """A model's part in a trace, which begins now."""
        own = SpanContext(context.trace_id, random.getrandbits(64) or 1, state=context.state)
        parent_id = 0 if caller is None else caller.id
        return Part(
            next(self._ids), model.name, model.version, own, parent_id, context, legible(form.id), start_ns=self.now()
        )

    def note(self, followed: _Followed) -> None:
        """Let calls for this request be found."""
        self._open[followed.id] = followed

    def finished(self, sampling: Sampling, trace: Trace) -> None:
        """Hand a trace on whose last part has ended."""
        writer = self._writer
        if writer is None:
            return
        size = len(trace.parts) * _SPANS if sampling.exports else _bytes_of(trace)
        writer.put(Finished(sampling, trace, size))


class _Progress:
    """A trace that is being made: it is finished when its last part and its last answer are."""

    __slots__ = ("_ended", "_left", "_lock", "_uncounted", "sampling", "trace", "traces")

    def __init__(self, traces: Traces, sampling: Sampling, trace: Trace) -> None:
        self.traces = traces
        self.sampling = sampling
        self.trace = trace
        self._left = 0
        self._ended = False
        self._uncounted = trace.origin is not None  # its caller has decided, whatever the count
        self._lock = threading.Lock()

    def begin(self, part: Part) -> bool:
        """Take the part in; False when there are traces enough, or this one has ended: what a model does for a request
        that it has answered is no part of it."""
        with self._lock:
            if self._ended or not (self.trace.parts or self._uncounted or self.sampling.take()):
                return False
            self._left += 1
            self.trace.parts.append(part)
            return True

    def end(self, part: Part, *, refused: bool = False) -> None:
        """The part has ended. One that was ``refused`` leaves no trace."""
        with self._lock:
            self._left -= 1
            if refused:
                self.trace.parts.remove(part)
                if not (self.trace.parts or self._uncounted):
                    self.sampling.give_back()
            done = self._ended = not self._left and bool(self.trace.parts)
        if done:
            self.traces.finished(self.sampling, self.trace)


class TracedModel:
    """A model version and the trace of the one request that is handed to it; else like the version itself."""

    __slots__ = ("_caller", "_model", "_progress")

    def __init__(self, model: Any, progress: _Progress, caller: Part | None) -> None:
        self._model = model
        self._progress = progress
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def instead(self, model: Any) -> TracedModel:
        """Another version for the same request."""
        return TracedModel(model, self._progress, self._caller)

    def submit(self, form: InferForm, data: Sequence[Data], reply: Reply, **how: Any) -> Ticket:
        """As ``ServedModel.submit``."""
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
    """One request to one model on its way. It is what ``Request.trace`` holds."""

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
        """What calls to other services carry."""
        return carried(self._part.context) if self._progress.sampling.exports else ""

    def over(self, model: Any) -> Any:
        """The model for a request that is made for this one."""
        return TracedModel(model, self._progress, self._part)

    def taken(self, request: Request) -> None:
        """The request was checked."""
        if self._progress.sampling.tensors:
            specs = {spec.name: spec.datatype for spec in request.form.inputs}
            for name, array in request.inputs.items():
                self._keep(QUEUE_INPUT, name, specs.get(name) or datatype_of(array), array)

    def reply(self, ticket: Ticket, outcome: Outcome) -> None:
        """An answer is there: note it, hand it on, and note that, too."""
        progress, part = self._progress, self._part
        now_ns = progress.traces.now()
        final = not isinstance(outcome, Streamed) or outcome.final
        try:
            self._answered(outcome)
        except Exception:  # whatever it is: the client waits for its answer
            _log.exception("an answer is left out of a trace")
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
        """A tensor as it is now: who has it may write into it later, or give its memory back."""
        try:
            copy = np.array(data.host() if hasattr(data, "host") else data)  # a DeviceArray, which few have imported
        except Exception as error:  # no memory, a device that is gone: the request is none the worse for it
            _log.warning("tensor '%s' is left out of a trace: %s", name, error)
            return
        self._part.tensors.append(SeenTensor(activity, name, datatype, copy))


def _bytes_of(trace: Trace) -> int:
    """About how much room a trace takes, as it is and as text."""
    size = _PART_BYTES * len(trace.parts) + _SEND_BYTES * len(trace.sends)
    for part in trace.parts:
        for _, _, datatype, data in part.tensors:
            size += 8 * data.nbytes
            if datatype == "BYTES":  # an array of these knows nothing of their lengths
                size += sum(len(each) for each in data.flat if isinstance(each, bytes | str))
    return size


def _compute(ticket: Ticket, now_ns: int, composed: bool, *, streamed: bool) -> tuple[int, ...]:
    """The times of COMPUTE by a ticket that was answered: none for ensembles, answers of the cache, and requests that
    never ran."""
    start = ticket.start_ns
    if composed or not start or (ticket.spent_ns is NO_TIME and not streamed):
        return ()
    if ticket.spent_ns is NO_TIME:  # it streams, and its execution goes on
        return (start, start, now_ns, now_ns)
    spent_input, spent_infer, spent_output = ticket.spent_ns
    middle = start + spent_input
    return (start, middle, middle + spent_infer, middle + spent_infer + spent_output)


def _number_of(text: str, default: int) -> int:
    """As OpenTelemetry reads its variables: what is no number counts as not given."""
    return int(text) if text.isascii() and text.isdigit() and int(text) else default
