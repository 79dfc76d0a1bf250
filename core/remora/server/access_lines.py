"""Lines of the access log, as text or JSON. Pure.

What requests with the same head share is written once for the head (`RequestLine`), and lines are printed many at a
time, because each costs processor time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from remora.protocols.http1 import Head
from remora.protocols.http2.frames import Fields
from remora.server.http.request_ids import MOST_ID, valid_id
from remora.system.log_lines import Line, trace_members
from remora.tracing.arrival import Carrier
from remora.tracing.context import context_of

LOGGER = "remora.access"
_MOST_TEXT = 512
"""Characters of a path that are logged."""
_MOST_AGENT = 128
_GRPC_FAULTS = frozenset((2, 13, 14, 15))
"""gRPC statuses that are the server's fault: UNKNOWN, INTERNAL, UNAVAILABLE, DATA_LOSS."""


class RequestLine:
    """Fixed part of the lines of requests with one head.

    Args:
        method: HTTP method.
        path: path without the query, which may hold secrets.
        protocol: ``gRPC``, or "" for HTTP.
        header: returns a header by its lower-case name.
        key: name of the API key, "" without one.
    """

    __slots__ = ("_members", "_request", "_words", "client_of", "grpc", "id", "starts", "texts", "title")

    def __init__(self, method: str, path: str, protocol: str, header: Carrier, key: str = "") -> None:
        path = _legible(path, _MOST_TEXT)
        self.grpc = protocol == "gRPC"
        self.client_of: Callable[[str], str] | None = None
        """Returns the client's address from that of the connection; None if they are the same."""
        self.id = valid_id(header(b"x-request-id"))
        """The client's ``X-Request-Id``, "" without a valid one."""
        context = context_of(header)
        trace_id, span_id = (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context is not None else ("", "")
        self._words = f" trace={trace_id}" * bool(trace_id) + f" key={key}" * bool(key)
        agent = _legible((header(b"user-agent") or b"").decode("latin-1"), _MOST_AGENT)
        request = {"requestMethod": method, "requestUrl": path, "protocol": protocol, "userAgent": agent}
        self.title = f"{method} {path}"
        self._request = {name: value for name, value in request.items() if value}
        self._members = {**({"key": key} if key else {}), **trace_members(trace_id, span_id)}
        self.starts: dict[int, tuple[str, str]] = {}
        """Results of `json` so far by status."""
        self.texts: dict[int, tuple[str, str, str]] = {}
        """Results of `text` so far by status."""

    def text(self, status: int) -> tuple[str, str, str]:
        """Return the fixed parts of lines with this status.

        They stand before the peer, behind it, and at the end.
        """
        start = f" {_severity(self, status)[0]} {LOGGER}: "
        made = self.texts[status] = (start, f" {self.title} {status} bytes=", f"{self._words}\n")
        return made

    def json(self, status: int) -> tuple[str, str]:
        """Return the JSON of answers with this status.

        It is the first members, up to the value of ``responseSize`` in ``httpRequest``, and the last ones.
        """
        severity, request, last = self.members(status)
        first = {
            "severity": severity,
            "level": "WARN" if severity == "WARNING" else severity,
            "logger": LOGGER,
            "message": f"{self.title} {status}",
            "httpRequest": request,
        }
        start = f'{json.dumps(first, separators=(",", ":"))[1:-2]},"responseSize":"'
        made = self.starts[status] = (start, f",{json.dumps(last, separators=(',', ':'))[1:-1]}" if last else "")
        return made

    def members(self, status: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Return the severity and members of lines with this status.

        They are the first ones of ``httpRequest`` and the last ones of the line.
        """
        request = self._request | {"status": 200 if self.grpc else status}
        return _severity(self, status), request, ({"grpc_status": status} if self.grpc else {}) | self._members


def line_of_head(head: Head, key: str = "") -> RequestLine:
    """Return the fixed part of the lines of HTTP requests with this head."""
    return RequestLine(head.method, head.path, "", head.get, key)


def line_of_call(fields: Fields, key: str = "") -> RequestLine:
    """Return the fixed part of the lines of gRPC calls with these header fields."""
    found = dict(reversed(fields))  # the first of several fields of one name
    return RequestLine("POST", found.get(b":path", b"").decode("latin-1"), "gRPC", found.get, key)


Run = tuple[str, str, int, int, int, tuple[int, int, int], str]
"""Execution of an inference: model, version, batch sizes of the request and of the execution, queue time, times of the
phases input, infer and output, V2's id of the request. Times are nanoseconds.
"""
Entry = tuple[RequestLine, int, int, int, int, str, str, Run | None]
"""One answered request: line, status, monotonic time of the answer, duration, bytes of the answer's body, peer, request
id, and execution. Times are nanoseconds; the status is HTTP's, or gRPC's for a call.

Both are plain tuples, because making named ones would take a third of a request's budget.
"""


class TextLines:
    """Lines for people; ``iso8601`` prints times in UTC."""

    def __init__(self, *, iso8601: bool = False) -> None:
        self._iso8601 = iso8601

    def _print_second(self, second: int) -> str:
        if self._iso8601:
            return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))

    def lines(self, entries: Iterable[Entry], offset_ns: int) -> list[str]:
        """Return the lines of requests.

        ``offset_ns`` is the difference of nanoseconds since 1970 and the entries' monotonic time.
        """
        made, at_ms, at_second, second_text, stamp = [], -1, -1, "", ""
        at_spent, at_rows, at_batch, execution = (0, 0, 0), -1, 0, ""
        for line, status, end_ns, took_ns, size, peer, request_id, run in entries:
            wall_ms = (end_ns + offset_ns) // 1_000_000
            if wall_ms != at_ms:
                at_ms, second = wall_ms, wall_ms // 1000
                if second != at_second:
                    at_second, second_text = second, self._print_second(second)
                stamp = second_text if self._iso8601 else f"{second_text},{wall_ms % 1000:03d}"
            start, title, words = line.texts.get(status) or line.text(status)
            named = f" id={request_id}" if request_id else ""
            if run is None:
                made.append(f"{stamp}{start}{peer or '-'}{title}{size} took={took_ns // 1000}us{named}{words}")
                continue
            model, version, rows, batch, queue_ns, spent_ns, v2_id = run
            if v2_id and not request_id:
                named = f" id={_legible(v2_id, MOST_ID)}"
            if spent_ns is not at_spent or rows != at_rows or batch != at_batch:
                at_spent, at_rows, at_batch = spent_ns, rows, batch
                execution = f"us compute={sum(spent_ns) // 1000}us rows={rows} batch={batch}"
            made.append(
                f"{stamp}{start}{peer or '-'}{title}{size} took={took_ns // 1000}us{named} "
                f"model={model}/{version} queue={queue_ns // 1000}{execution}{words}"
            )
        return made


class JsonLines:
    """Lines for log services, with the members of `remora.system.log_lines` and ``httpRequest`` of Cloud Logging."""

    def lines(self, entries: Iterable[Entry], offset_ns: int) -> list[str]:
        """Return the lines of requests; see `TextLines.lines`."""
        made, at_ms, at_second, second_text, stamp = [], -1, -1, "", ""
        at_model: str | None = None
        at_version: str | None = None
        named_model = ""
        at_spent, at_rows, at_batch, execution = (0, 0, 0), -1, 0, ""
        for line, status, end_ns, took_ns, size, peer, request_id, run in entries:
            wall_ms = (end_ns + offset_ns) // 1_000_000
            if wall_ms != at_ms:
                at_ms, second = wall_ms, wall_ms // 1000
                if second != at_second:
                    at_second = second
                    second_text = time.strftime('{"timestamp":"%Y-%m-%dT%H:%M:%S', time.gmtime(second))
                stamp = f'{second_text}.{wall_ms % 1000:03d}Z",'
            start, more = line.starts.get(status) or line.json(status)
            us = (took_ns + 500) // 1000
            took = f"0.{str(1_000_000 + us)[1:]}" if us < 1_000_000 else f"{us // 1_000_000}.{us % 1_000_000:06d}"
            named = request_id or (run is not None and run[6])
            if named:
                more = f',"request_id":"{_escaped(named)}"{more}'
            if run is None:
                made.append(f'{stamp}{start}{size}","latency":"{took}s","remoteIp":"{peer}"}}{more}}}\n')
                continue
            model, version, rows, batch, queue_ns, spent_ns, _ = run
            if model is not at_model or version is not at_version:
                at_model, at_version = model, version
                named_model = f'"}},"model":"{_escaped(model)}","version":"{version}","queue_us":'
            if spent_ns is not at_spent or rows != at_rows or batch != at_batch:
                at_spent, at_rows, at_batch = spent_ns, rows, batch
                execution = f',"compute_us":{sum(spent_ns) // 1000},"rows":{rows},"batch_size":{batch}'
            made.append(
                f'{stamp}{start}{size}","latency":"{took}s","remoteIp":"{peer}{named_model}'
                f"{queue_ns // 1000}{execution}{more}}}\n"
            )
        return made


def _escaped(text: str) -> str:
    """Return a text as it stands in a JSON string."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text  # the usual case
    return text if plain else json.dumps(text)[1:-1]


def line_of_entry(entry: Entry, offset_ns: int) -> Line:
    """Return the line of a request as data, with the members that `JsonLines` prints."""
    line, status, end_ns, took_ns, size, peer, request_id, run = entry
    severity, request, last = line.members(status)
    us = (took_ns + 500) // 1000
    latency = f"{us // 1_000_000}.{us % 1_000_000:06d}s"
    first = {"httpRequest": request | {"responseSize": str(size), "latency": latency, "remoteIp": peer}}
    execution: dict[str, Any] = {}
    if run is not None:
        model, version, rows, batch, queue_ns, spent_ns, v2_id = run
        execution = {"model": model, "version": version, "queue_us": queue_ns // 1000}
        execution |= {"compute_us": sum(spent_ns) // 1000, "rows": rows, "batch_size": batch}
        request_id = request_id or v2_id
    named = {"request_id": request_id} if request_id else {}
    seconds = (end_ns + offset_ns) // 1_000_000 / 1000
    return Line(seconds, severity, LOGGER, f"{line.title} {status}", first | execution | named | last)


def is_failure(line: RequestLine, status: int) -> bool:
    """Return True if a status reports a failure of the request."""
    return bool(status) if line.grpc else status >= 400


def _severity(line: RequestLine, status: int) -> str:
    if not is_failure(line, status):
        return "INFO"
    return "ERROR" if (status in _GRPC_FAULTS if line.grpc else status >= 500) else "WARNING"


def _legible(text: str, most: int) -> str:
    """Return printable ASCII of at most ``most`` characters: a client must not forge lines or colours."""
    text = text[:most]
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
