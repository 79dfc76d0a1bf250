"""Runtime client of a Lambda function that sends HTTP answers as streams.

AWS's client for Python sends only whole answers. This one answers an HTTP event in the Runtime API's streaming mode:
status and headers first, then each piece of the body as the model produces it. Other events are answered whole.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from remora.api.http import Send
from remora.system.json_text import read_json

_log = logging.getLogger("remora.lambda")

_API = "/2018-06-01/runtime"
_HTTP_STREAM = "application/vnd.awslambda.http-integration-response"
_DELIMITER = bytes(8)
"""Separates the head of an HTTP answer from its body."""
_ERROR_TYPE, _ERROR_BODY = "Lambda-Runtime-Function-Error-Type", "Lambda-Runtime-Function-Error-Body"
_SEGMENT = "_X_AMZN_TRACE_ID"

Event = dict[str, Any]
Answer = Callable[[object, "Invocation"], object]
"""Returns the answer to an event other than an HTTP request."""
Stream = Callable[[Event, "Invocation", Send], None]
"""Answers an HTTP request by messages of ASGI."""


class Invocation(NamedTuple):
    """One event and its context; ``deadline_s`` is the time of the clock when it ends."""

    id: str
    body: bytes
    deadline_s: float
    segment: str

    def get_remaining_time_in_millis(self) -> int:
        """Return the milliseconds until the deadline."""
        return max(int((self.deadline_s - time.time()) * 1e3), 0)


class RuntimeClient:
    """Connection to Lambda's Runtime API. Raises OSError if the environment ends."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address)  # no timeout: the environment waits for its next event

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def next(self) -> Invocation:
        """Wait for the next event."""
        self._connection.request("GET", f"{_API}/invocation/next")
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise ConnectionError(f"the Runtime API answers {response.status} to a request for an event")
        headers = response.headers
        return Invocation(
            headers["Lambda-Runtime-Aws-Request-Id"],
            body,
            int(headers.get("Lambda-Runtime-Deadline-Ms", "0")) / 1e3,
            headers.get("Lambda-Runtime-Trace-Id", ""),
        )

    def answer(self, invocation: Invocation, body: bytes) -> None:
        """Send a whole answer."""
        self._post(f"invocation/{invocation.id}/response", body)

    def fail(self, invocation: Invocation, error: BaseException) -> None:
        """Send an error instead of an answer."""
        self._post(f"invocation/{invocation.id}/error", _described(error), {_ERROR_TYPE: type(error).__name__})

    def fail_init(self, error: BaseException) -> None:
        """Report that the function cannot start."""
        self._post("init/error", _described(error), {_ERROR_TYPE: type(error).__name__})

    def _post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._connection.request(
            "POST", f"{_API}/{path}", body, {"Content-Type": "application/json", **(headers or {})}
        )
        self._connection.getresponse().read()

    def begin(self, invocation: Invocation, content_type: str) -> None:
        """Begin an answer of pieces."""
        self._connection.putrequest("POST", f"{_API}/invocation/{invocation.id}/response")
        for name, value in (
            ("Content-Type", content_type),
            ("Lambda-Runtime-Function-Response-Mode", "streaming"),
            ("Transfer-Encoding", "chunked"),
            ("Trailer", f"{_ERROR_TYPE}, {_ERROR_BODY}"),
        ):
            self._connection.putheader(name, value)
        self._connection.endheaders()

    def piece(self, data: bytes) -> None:
        """Send a piece of the answer that was begun."""
        if data:
            self._connection.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, error: BaseException | None = None) -> None:
        """End the answer that was begun, with an error as its trailers."""
        trailers = ""
        if error is not None:
            body = base64.b64encode(_described(error)).decode()
            trailers = f"{_ERROR_TYPE}: {type(error).__name__}\r\n{_ERROR_BODY}: {body}\r\n"
        self._connection.send(f"0\r\n{trailers}\r\n".encode("latin-1"))
        self._connection.getresponse().read()


class _HttpAnswer:
    """ASGI's send for one HTTP event; ``begun`` is about its head, ``ended`` about its body."""

    def __init__(self, client: RuntimeClient, invocation: Invocation) -> None:
        self._client, self._invocation = client, invocation
        self.begun = self.ended = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send a message: blocks while Lambda does not read, because the loop has no other request."""
        if message["type"] == "http.response.start":
            self._client.begin(self._invocation, _HTTP_STREAM)
            self.begun = True
            self._client.piece(head_of(message["status"], message.get("headers", ())))
        elif message["type"] == "http.response.body":
            self._client.piece(bytes(message.get("body", b"")))
            if not message.get("more_body", False):
                self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End the body once."""
        if not self.ended:
            self.ended = True
            self._client.end(error)


def head_of(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of an HTTP answer as Lambda reads it before the body."""
    found: dict[str, str] = {}
    cookies = []
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if name == "set-cookie":
            cookies.append(value)
        elif name not in ("content-length", "transfer-encoding", "connection"):  # of this hop
            found[name] = f"{found[name]}, {value}" if name in found else value
    head: dict[str, Any] = {"statusCode": status, "headers": found}
    if cookies:
        head["cookies"] = cookies
    return json.dumps(head).encode() + _DELIMITER


def _described(error: BaseException) -> bytes:
    return json.dumps({"errorType": type(error).__name__, "errorMessage": str(error), "stackTrace": []}).encode()


def run(client: RuntimeClient, answer: Answer, stream: Stream) -> None:
    """Answer events until the connection ends. Raises OSError."""
    while True:
        invocation = client.next()
        os.environ[_SEGMENT] = invocation.segment
        try:
            event = read_json(invocation.body)
            if not isinstance(event, dict) or "requestContext" not in event:
                body = json.dumps(answer(event, invocation)).encode()
                client.answer(invocation, body)
                continue
        except OSError:
            raise
        except Exception as error:
            client.fail(invocation, error)
            continue
        _stream(client, invocation, event, stream)


def _stream(client: RuntimeClient, invocation: Invocation, event: Event, stream: Stream) -> None:
    sending = _HttpAnswer(client, invocation)
    try:
        stream(event, invocation, sending)
        failure: BaseException | None = None
    except OSError:
        raise
    except Exception as error:
        failure = error
    if not sending.begun:
        client.fail(invocation, failure or RuntimeError("the application sent no answer"))
    elif not sending.ended:
        _log.error("a stream ended early: %s", failure)
        sending.end(failure or RuntimeError("the stream ended early"))
