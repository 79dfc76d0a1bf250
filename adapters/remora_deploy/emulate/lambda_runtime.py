"""AWS Lambda's Runtime API on loopback, for one function and one event at a time.

A violation of the API's rules is answered as Lambda answers it, and counted for the checks. Paths, headers and codes
are those of the Runtime API (2018-06-01).
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

PAYLOAD_BYTES = 6_291_456
"""Limit of the event of a synchronous invocation."""
ANSWER_BYTES = 6_291_556
"""Limit of a function's answer."""
STREAM_BYTES = 200 << 20
"""Limit of a streamed answer."""
READY = "/emulated/ready"
"""Additional route that answers 200 once the function has polled for its first event."""

_API = "/2018-06-01/runtime"
_FUNCTION = "arn:aws:lambda:eu-central-1:123456789012:function:emulated"
_REPLY = re.compile(rf"{_API}/invocation/([^/]+)/(response|error)")
_JSON = {"Content-Type": "application/json"}
_POLL_S = 0.02
"""Time after which the server notices that it shall stop."""


class RuntimeReply(NamedTuple):
    """Function's answer to an event.

    ``error`` is True if it was posted as an error, or if a stream ended with one; ``late_s`` is the time after the
    deadline. ``pieces`` are the parts of a stream with the times of their arrival, none for a whole answer.
    """

    body: bytes
    error: bool
    late_s: float
    pieces: tuple[tuple[float, bytes], ...] = ()
    content_type: str = ""

    @property
    def shown(self) -> str:
        """The reply in a few words."""
        return f"{'the error' if self.error else 'the answer'} {self.body[:160].decode('utf-8', 'replace')!r}"


class Invocation:
    """Event in flight, whose ``done`` is set once it has a ``reply``."""

    def __init__(self, event: bytes, timeout_s: float) -> None:
        self.id = str(uuid.uuid4())
        self.event = event
        self.deadline = time.time() + timeout_s
        self.taken = False
        self.done = threading.Event()
        self.reply: RuntimeReply | None = None


class Conduct:
    """Conduct of a function.

    Attributes:
        early: polls for an event while another was in flight.
        strays: ids of replies to events that the function did not have.
        longest: bytes of the longest answer.
    """

    def __init__(self) -> None:
        self.early = 0
        self.strays: list[str] = []
        self.longest = 0


class RuntimeApi:
    """Server of the API within its context.

    Attributes:
        polled_once: set when the function has polled for its first event, which ends its init phase.
        idle: set while the function waits for an event, when Lambda may freeze it.
        init_error: report of a failed init.
        restored: set when the function is ready for SnapStart's snapshot and was allowed to continue.
        restore_error: report of a failed restore.
        observed: conduct of the function that the checks judge.
    """

    def __init__(self, port: int) -> None:
        self.polled_once = threading.Event()
        self.idle = threading.Event()
        self.init_error: bytes | None = None
        self.restored = threading.Event()
        self.restore_error: bytes | None = None
        self.observed = Conduct()
        self._current: Invocation | None = None
        self._dropped: set[str] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._server = _Server(("127.0.0.1", port), type("Api", (_Api,), {"api": self}))
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> RuntimeApi:
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def send_event(self, event: bytes, timeout_s: float) -> Invocation:
        """Give the function an event with ``timeout_s`` seconds to reply.

        The previous event must be done or dropped."""
        with self._changed:
            self._current = Invocation(event, timeout_s)
            self.idle.clear()
            self._changed.notify_all()
            return self._current

    def drop(self, invocation: Invocation) -> None:
        """Stop waiting for a reply, and refuse a later one."""
        with self._changed:
            if self._current is invocation:
                self._current = None
                self._dropped.add(invocation.id)

    # -- calls of the function --------------------------------------------------------------------------------------

    def next_event(self) -> Invocation | None:
        """Wait for the next event, or return None if one is in flight or the API has closed."""
        with self._changed:
            self.polled_once.set()
            if self._current is not None and self._current.taken:
                self.observed.early += 1
                return None
            while self._current is None or self._current.taken:
                if self._closed:
                    return None
                self.idle.set()
                self._changed.wait()
            self._current.taken = True
            return self._current

    def accept_reply(
        self,
        request_id: str,
        body: bytes,
        *,
        error: bool,
        pieces: Sequence[tuple[float, bytes]] = (),
        content_type: str = "",
    ) -> int:
        """Accept the reply to an event and return the status for the function, 202, 400 or 413."""
        with self._changed:
            invocation = self._current
            if invocation is None or invocation.id != request_id:
                if request_id not in self._dropped:  # a reply after its timeout is late, not wrong
                    self.observed.strays.append(request_id)
                return 400
            if not error and not pieces:
                self.observed.longest = max(self.observed.longest, len(body))
            too_long = len(body) > (STREAM_BYTES if pieces else ANSWER_BYTES)
            if too_long:
                text = f"Response payload size exceeded maximum allowed payload size ({ANSWER_BYTES} bytes)."
                body = json.dumps({"errorType": "Function.ResponseSizeTooLarge", "errorMessage": text}).encode()
            late_s = time.time() - invocation.deadline
            invocation.reply = RuntimeReply(body, error or too_long, late_s, tuple(pieces), content_type)
            self._current = None
            invocation.done.set()
            return 413 if too_long else 202


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a polling function blocks its thread forever

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the connection error of an exiting function."""


class _Api(BaseHTTPRequestHandler):
    """Connection of the function."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    api: RuntimeApi

    def log_message(self, *args: object) -> None:
        """Log nothing, because the report has the results."""

    def do_GET(self) -> None:
        """Answer `next` and the additional ready route."""
        if self.path == READY:
            self._answer(200 if self.api.polled_once.is_set() else 503, b"")
            return
        if self.path == f"{_API}/restore/next":
            self.api.restored.set()
            self._answer(200, b"")
            return
        if self.path != f"{_API}/invocation/next":
            self._fail(404, "InvalidPath", self.path)
            return
        invocation = self.api.next_event()
        if invocation is None:
            self._fail(403, "InvalidStateTransition", "an event is in flight: answer it before polling for the next")
            return
        headers = {
            "Lambda-Runtime-Aws-Request-Id": invocation.id,
            "Lambda-Runtime-Deadline-Ms": str(int(invocation.deadline * 1e3)),
            "Lambda-Runtime-Invoked-Function-Arn": _FUNCTION,
            "Lambda-Runtime-Trace-Id": f"Root=1-5759e988-{invocation.id.replace('-', '')[:24]};Sampled=0",
        }
        self._answer(200, invocation.event, {**_JSON, **headers})

    def do_POST(self) -> None:
        """Accept the answer to an event, its error, or a failed init or restore."""
        body, pieces, failed = self._body()
        if self.path in (f"{_API}/init/error", f"{_API}/restore/error"):
            setattr(self.api, f"{self.path.split('/')[-2]}_error", body)
            self._answer(202, b'{"status":"OK"}', _JSON)
            return
        match = _REPLY.fullmatch(self.path)
        if match is None:
            self._fail(404, "InvalidPath", self.path)
            return
        streamed = self.headers.get("Lambda-Runtime-Function-Response-Mode") == "streaming"
        status = self.api.accept_reply(
            match[1],
            body,
            error=match[2] == "error" or failed,
            pieces=pieces if streamed else (),
            content_type=self.headers.get("Content-Type", ""),
        )
        if status == 202:
            self._answer(202, b'{"status":"OK"}', _JSON)
        elif status == 413:
            self._fail(413, "RequestEntityTooLarge", f"an answer has at most {ANSWER_BYTES} bytes")
        else:
            self._fail(400, "InvalidRequestID", "no event with this id is in flight")

    def _body(self) -> tuple[bytes, list[tuple[float, bytes]], bool]:
        """Return the body, its pieces with their times, and True if its trailers are an error."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0)), [], False
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            piece = self.rfile.read(size)
            pieces.append((time.monotonic(), piece))
            self.rfile.readline()
        failed = False
        while trailer := self.rfile.readline().strip():
            failed = failed or trailer.lower().startswith(b"lambda-runtime-function-error-type:")
        return b"".join(piece for _, piece in pieces), pieces, failed

    def _fail(self, status: int, kind: str, text: str) -> None:
        self._answer(status, json.dumps({"errorType": kind, "errorMessage": text}).encode(), _JSON)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
