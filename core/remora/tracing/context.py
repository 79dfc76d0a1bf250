"""Trace contexts from the request headers of W3C and AWS X-Ray.

Pure functions. A context that cannot be parsed is treated as absent.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from remora.tracing.arrival import Carrier

_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_XRAY_ROOT: Final = re.compile(rb"1-([0-9a-f]{8})-([0-9a-f]{24})")
_XRAY_PARENT: Final = re.compile(rb"[0-9a-f]{16}")
_KEY: Final = rb"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER: Final = re.compile(rb"%b=[ -+\--<>-~]{0,255}[!-+\--<>-~]" % _KEY)
_STATE_LIMIT = 512
_MOST_MEMBERS = 32


class SpanContext(NamedTuple):
    """A span's position in a trace (W3C Trace Context).

    ``state`` is the ``tracestate`` of vendors.
    """

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""


def context_of(carrier: Carrier) -> SpanContext | None:
    """Return the context in W3C's ``traceparent``.

    Without it, returns that in AWS's ``X-Amzn-Trace-Id`` if that names a parent.
    """
    parent = carrier(b"traceparent")
    if parent is not None:
        return _of_w3c(parent.strip(), carrier(b"tracestate"))
    tracing = carrier(b"x-amzn-trace-id")
    return None if tracing is None else _of_xray(tracing)


def _of_w3c(parent: bytes, state: bytes | None) -> SpanContext | None:
    match = _PARENT.fullmatch(parent)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(int(match[4], 16) & 1), _state_of(state or b""))


def _state_of(value: bytes) -> str:
    """Return a valid ``tracestate``, or "" for an invalid one.

    OpenTelemetry's SDK would warn about an invalid one.
    """
    members = [member for part in value.split(b",") if (member := part.strip(b" \t"))]
    keys = {member.partition(b"=")[0] for member in members}
    if len(value) > _STATE_LIMIT or not len(keys) == len(members) <= _MOST_MEMBERS:
        return ""
    return value.decode().strip() if members and all(map(_MEMBER.fullmatch, members)) else ""


def _of_xray(value: bytes) -> SpanContext | None:
    fields = dict(part.strip().partition(b"=")[::2] for part in value.split(b";"))
    root, parent = _XRAY_ROOT.fullmatch(fields.get(b"Root", b"")), fields.get(b"Parent", b"")
    if root is None or not _XRAY_PARENT.fullmatch(parent) or not int(parent, 16):
        return None
    return SpanContext(int(root[1] + root[2], 16), int(parent, 16), fields.get(b"Sampled") == b"1")


def traceparent(context: SpanContext) -> str:
    """Return the ``traceparent`` header that names this span as the parent."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.sampled:02x}"


def carried(context: SpanContext) -> str:
    """Return the context for Python models: JSON of the headers to send on, as in Triton."""
    headers = {"traceparent": traceparent(context)}
    if context.state:
        headers["tracestate"] = context.state
    return json.dumps(headers, separators=(",", ":"))
