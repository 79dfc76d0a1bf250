"""Last finished traces, kept in memory for the page and for ``/v2/trace/recent``."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from threading import Lock
from typing import Any, Final

from remora.tracing.records import Part, Trace

_KEPT: Final = 64
_PHASES: Final = ("input", "compute", "output")
_MOST_EVENTS: Final = 1000

Document = dict[str, Any]


class RecentTraces:
    """The last traces of an engine, without tensors. Thread-safe."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock = Lock()
        self._traces: deque[Trace] = deque(maxlen=kept)

    def add(self, trace: Trace) -> None:
        """Keep a finished trace, and drop the oldest one if there is no room."""
        if any(part.tensors for part in trace.parts):  # tensors may be large
            trace = replace(trace, parts=[replace(part, tensors=[]) for part in trace.parts])
        with self._lock:
            self._traces.append(trace)

    def documents(self, now_ns: int) -> list[Document]:
        """Return the traces as JSON values, the newest first; see `document_of`."""
        with self._lock:
            traces = list(self._traces)
        return [document_of(trace, now_ns) for trace in reversed(traces)]


def document_of(trace: Trace, now_ns: int) -> Document:
    """Return a trace as JSON values.

    ``spans`` are in the order of a table of contents: each model that ran, with its phases below it (``depth``). Times
    are microseconds since the request began; ``ago_ms`` is the time since its end.
    """
    first = trace.parts[0]
    begin_ns = trace.receive_start_ns if trace.protocol else first.start_ns
    end_ns = max([end for _, end in trace.sends] + [part.end_ns for part in trace.parts])

    def span(name: str, depth: int, start_ns: int, stop_ns: int, error: str = "") -> Document:
        times = {"begin_us": (start_ns - begin_ns) / 1e3, "took_us": max(stop_ns - start_ns, 0) / 1e3}
        return {"name": name, "depth": depth, **times, "error": error}

    spans = [span("receive", 0, begin_ns, trace.receive_end_ns)] if trace.protocol else []
    depths: dict[int, int] = {0: -1}
    for part in trace.parts:
        depth = depths[part.id] = depths.get(part.parent_id, 0) + 1
        spans.append(span(f"{part.model}/{part.version}", depth, part.start_ns, part.end_ns, part.error))
        spans += [span(name, depth + 1, start, stop) for name, start, stop in _phases(part)]
    if trace.protocol and trace.sends:
        spans.append(span("send", 0, trace.sends[0][0], trace.sends[-1][1]))
    events = [
        {"name": name, "at_us": (ns - begin_ns) / 1e3}
        for part in trace.parts
        for name, ns in part.events[:_MOST_EVENTS]
    ]
    return {
        "id": first.id,
        "model": first.model,
        "version": str(first.version),
        "request_id": first.request_id,
        "protocol": trace.protocol,
        "api_key": trace.key,
        "error": first.error,
        "ago_ms": max(now_ns - end_ns, 0) / 1e6,
        "total_us": (end_ns - begin_ns) / 1e3,
        "spans": spans,
        "events": events,
    }


def _phases(part: Part) -> list[tuple[str, int, int]]:
    """Return the phases of a model that ran, with their start and end in nanoseconds."""
    if not part.compute:
        return []
    queue = [("queue", part.queue_ns, part.compute[0])] if part.queue_ns else []
    return queue + list(zip(_PHASES, part.compute, part.compute[1:], strict=False))
