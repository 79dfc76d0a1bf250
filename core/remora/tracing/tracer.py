"""Tracing of requests from arrival to last response.

A front end calls `Traces.wrap_model` with the model for a request. It returns the model, or a wrapper of `traced` that
records that one request. Requests that are not traced cost one check; traced ones get the same response.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora import plugins
from remora.errors import UnsupportedError
from remora.system.clock import Clock
from remora.system.install_advice import install_command
from remora.tracing.sampling import Sampling
from remora.tracing.settings import TraceSettings

if TYPE_CHECKING:
    from remora.tracing.arrival import Arrival, Carrier
    from remora.tracing.recent import RecentTraces
    from remora.tracing.records import Trace
    from remora.tracing.traced import TracedRequest, TracedTask
    from remora.tracing.writer import Finished, TraceWriter


_FILE_ROOM = 64 << 20
"""Maximum estimated bytes of traces that wait for the file."""
_END_S = 3.0


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
        self._open: weakref.WeakValueDictionary[int, TracedRequest] = weakref.WeakValueDictionary()
        self._writer: TraceWriter[Finished] | None = None
        self._recent: RecentTraces | None = None
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
                self._writer.finish(gone, None, 0)

    def shown(self, name: str) -> TraceSettings:
        """Return a model's settings as clients see them, or "" for the server's."""
        return (self._samplings.get(name) or self._samplings[""]).now()

    def _make_writer(self) -> None:
        if self._writer is not None:
            return
        from remora.tracing.recent import RecentTraces  # imported here because tracing is usually off
        from remora.tracing.writer import TraceWriter

        self._recent = RecentTraces()
        settings, export = self._initial, self._initial.export
        if not settings.exports:
            from remora.tracing.trace_file import TraceFile

            folder = Path(settings.trace_file).absolute().parent
            if not os.access(folder, os.W_OK):
                raise UnsupportedError(
                    f"traces cannot be written to '{settings.trace_file}': '{folder}' is not writable"
                )
            self._writer = TraceWriter(TraceFile(settings.trace_file), room=_FILE_ROOM)
            return
        try:
            open_sink = plugins.load_for("mode opentelemetry", plugins.SPAN_SINK)
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
        sink = open_sink(export.url, resource, batch, lambda: self._wall_ms() * 1_000_000 - self.now())
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

    def recent(self) -> list[dict[str, Any]]:
        """Return the last finished traces as JSON values, the newest first (`RecentTraces`)."""
        return [] if self._recent is None else self._recent.documents(self.now())

    # -- requests ---------------------------------------------------------------------------------------------------

    def wrap_model(self, model: Any, arrival: Arrival | None = None, retired: Any = None) -> Any:
        """Return the model for the next request, wrapped if that request is traced.

        In mode opentelemetry the request's trace context decides [T08]; otherwise every Nth request is traced.
        ``retired`` is the result of the first call for a request whose submit raised RetiredError; the
        request is not counted again.
        """
        if retired is None and not self.on:
            return model
        from remora.tracing.traced import rebound, traced  # imported here because tracing is usually off

        if retired is not None:
            return rebound(retired, model)
        return traced(self, self._samplings.get(model.name) or self._samplings[""], model, arrival)

    def begin_task(self, model: Any, arrival: Arrival) -> TracedTask | None:
        """Return the trace of the next request to a language model, None if it is not traced."""
        if not self.on:
            return None
        from remora.tracing.traced import traced_task  # imported here because tracing is usually off

        return traced_task(self, self._samplings.get(model.name) or self._samplings[""], model, arrival)

    def wrap_child(self, id: int, model: Any) -> Any:
        """Return the model for a sub-request of the traced request ``id``.

        Returns it unwrapped if that has ended.
        """
        caller = self._open.get(id)
        return model if caller is None else caller.wrap_child(model)

    def number(self) -> int:
        """Return the id of the next part of a trace."""
        return next(self._ids)

    def note(self, request: TracedRequest) -> None:
        """Register a request so that `wrap_child` finds it by id."""
        self._open[request.id] = request

    def finished(self, sampling: Sampling, trace: Trace, size: int) -> None:
        """Queue a finished trace for delivery; ``size`` is its weight in the queue."""
        if self._writer is not None:
            self._writer.finish(sampling, trace, size)
        if self._recent is not None:
            self._recent.add(trace)


def _number_of(text: str, default: int) -> int:
    """Parse a number as OpenTelemetry does: an invalid one counts as unset."""
    return int(text) if text.isascii() and text.isdigit() and int(text) else default
