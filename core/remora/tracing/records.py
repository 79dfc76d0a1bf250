"""Trace records and their form in Triton's trace file and as spans.

A `Trace` is one client request. Its `Part`s are the model executions for it: first that of the requested model, then
those of ensemble steps and of calls by Python models. Times are nanoseconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from remora.messages import Array
from remora.tracing.context import SpanContext

COMPUTE: Final = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
RECEIVE: Final = {
    "HTTP": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}
QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"


class SeenTensor(NamedTuple):
    """A tensor at one point of a request. The trace owns ``data``."""

    activity: str
    name: str
    datatype: str
    data: Array


@dataclass(slots=True)
class Part:
    """A model's part in a trace.

    ``attributes`` and ``events`` are those of a language model's answer: attributes of the span, and times of tokens.
    ``compute`` holds the COMPUTE times, empty if the model itself computed nothing. ``parent_id`` is 0 for the model
    that the client requested; ``parent`` is the parent span, None at the root of the trace. ``request_id`` and
    ``error`` are `legible`.
    """

    id: int
    model: str
    version: int
    context: SpanContext
    parent_id: int = 0
    parent: SpanContext | None = None
    request_id: str = ""
    start_ns: int = 0
    queue_ns: int = 0
    compute: tuple[int, ...] = ()
    end_ns: int = 0
    error: str = ""
    tensors: list[SeenTensor] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """A traced client request.

    ``protocol`` is "HTTP", "GRPC", or "" for a request of the embedding program; ``origin`` is the context that the
    request carried, and ``key`` the name of its API key or "". ``sends`` holds the start and end of the sending of each
    response.
    """

    protocol: str
    receive_start_ns: int
    receive_end_ns: int
    context: SpanContext
    origin: SpanContext | None = None
    key: str = ""
    parts: list[Part] = field(default_factory=list)
    response_ns: int = 0
    sends: list[tuple[int, int]] = field(default_factory=list)


# -- Triton's file --------------------------------------------------------------------------------------------------


def text_of(trace: Trace, *, timestamps: bool) -> bytes:
    """Return the trace as members of the file's array, joined by commas [T06]."""
    return b",".join(orjson.dumps(member) for member in _members(trace, timestamps=timestamps))


def _members(trace: Trace, *, timestamps: bool) -> Iterator[dict[str, Any]]:
    for part in trace.parts:
        own = part.parent_id == 0
        yield from _stamped(part.id, _received(trace) if own and timestamps else [])
        head: dict[str, Any] = {"id": part.id, "model_name": part.model, "model_version": part.version}
        if part.request_id:
            head["request_id"] = part.request_id
        if own and trace.key:
            head["api_key"] = trace.key
        if part.parent_id:
            head["parent_id"] = part.parent_id
        yield head
        yield from _stamped(part.id, [("REQUEST_START", part.start_ns), *_queued(part)] if timestamps else [])
        for tensor in part.tensors:
            yield {"id": part.id, "activity": tensor.activity, "tensor": _tensor(tensor)}
        yield from _stamped(part.id, _rest(trace if own else None, part) if timestamps else [])


def _stamped(id: int, stamps: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for name, ns in stamps:
        yield {"id": id, "timestamps": [{"name": name, "ns": ns}]}


def _received(trace: Trace) -> list[tuple[str, int]]:
    times = (trace.receive_start_ns, trace.receive_end_ns)
    return list(zip(RECEIVE[trace.protocol], times, strict=True)) if trace.protocol else []


def _queued(part: Part) -> list[tuple[str, int]]:
    return [("QUEUE_START", part.queue_ns)] if part.queue_ns else []


def _rest(trace: Trace | None, part: Part) -> list[tuple[str, int]]:
    stamps: list[tuple[str, int]] = []
    if trace is not None and trace.response_ns:
        stamps.append(("INFER_RESPONSE_COMPLETE", trace.response_ns))
    stamps += zip(COMPUTE, part.compute, strict=False)
    stamps += part.events
    stamps.append(("REQUEST_END", part.end_ns))
    return stamps + (_sent(trace) if trace is not None else [])


def _sent(trace: Trace) -> list[tuple[str, int]]:
    if not trace.protocol:
        return []
    names = (f"{trace.protocol}_SEND_START", f"{trace.protocol}_SEND_END")
    return [stamp for times in trace.sends for stamp in zip(names, times, strict=True)]


def _tensor(tensor: SeenTensor) -> dict[str, str]:
    return {
        "name": tensor.name,
        "data": _values(tensor),
        "shape": ",".join(map(str, tensor.data.shape)),
        "dtype": tensor.datatype,
    }


def _values(tensor: SeenTensor) -> str:
    """Return a tensor's values as Triton prints them: numbers as C++ streams do, strings quoted."""
    flat = tensor.data.ravel()
    if tensor.datatype == "BYTES":
        return ",".join(f'"{legible(value)}"' for value in flat)
    if tensor.datatype == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    if flat.dtype.kind == "f":
        return ",".join(f"{value:g}" for value in flat.tolist())
    return ",".join(map(str, flat.astype(np.int64).tolist() if flat.dtype.kind == "b" else flat.tolist()))


def legible(text: object) -> str:
    """Return a text of a client or a model with invalid UTF-8 replaced.

    Files and spans require valid UTF-8.
    """
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text).encode("utf-8", "replace").decode()


# -- Spans ----------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """An OpenTelemetry span as data. ``error`` is "" for success."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    error: str


def spans_of(trace: Trace, new_id: Callable[[], int]) -> list[Span]:
    """Return the trace as spans named as in Triton [T08].

    ``new_id()`` returns the ids of the compute spans. A request of the embedding program has an InferRequest span, too.
    """
    first = trace.parts[0]
    events = _received(trace)
    if trace.response_ns:
        events.append(("INFER_RESPONSE_COMPLETE", trace.response_ns))
    events += _sent(trace)
    ends = [end for _, end in trace.sends] + [first.end_ns]
    start = trace.receive_start_ns if trace.protocol else first.start_ns
    named = {"remora.api_key": trace.key} if trace.key else {}
    spans = [Span("InferRequest", trace.context, trace.origin, start, max(ends), named, events, first.error)]
    for part in trace.parts:
        attributes: dict[str, Any] = {
            "triton.model_name": part.model,
            "triton.model_version": part.version,
            "triton.trace_id": part.id,
            "triton.trace_parent_id": part.parent_id,
        }
        if part.request_id:
            attributes["triton.request_id"] = part.request_id
        attributes |= part.attributes
        stamps = [("REQUEST_START", part.start_ns), *_queued(part), *part.events, ("REQUEST_END", part.end_ns)]
        spans.append(
            Span(part.model, part.context, part.parent, part.start_ns, part.end_ns, attributes, stamps, part.error)
        )
        if part.compute:
            own = SpanContext(part.context.trace_id, new_id(), part.context.sampled, part.context.state)
            times = part.compute
            stamps = list(zip(COMPUTE, times, strict=True))
            spans.append(Span("compute", own, part.context, times[0], times[-1], {}, stamps, ""))
    return spans
