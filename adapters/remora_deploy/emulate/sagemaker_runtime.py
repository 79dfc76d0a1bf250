"""SageMaker Runtime API in front of a container, for clients such as boto3 and the AWS CLI.

    boto3.client("sagemaker-runtime", endpoint_url="http://127.0.0.1:PORT", region_name="us-east-1")

Names, limits and shapes are those of the service model in botocore. Requests are not authenticated, because the API
listens on loopback for tests. Objects of S3 are files: ``s3://BUCKET/KEY`` is ``<objects>/BUCKET/KEY``.

Clients of OpenAI take ``http://127.0.0.1:PORT/endpoints/NAME/openai/v1`` as base URL, and any bearer token.
"""

from __future__ import annotations

import json
import re
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from remora.api.system import Connection, Incoming, NoAnswerError, NoAnswerInTimeError
from remora.system.json_text import read_json
from remora_deploy.emulate.asking import Address, HttpReply, ask

ANSWER_S = 60.0
PAYLOAD_BYTES = 6_291_456

_PATH = re.compile(
    r"/endpoints/([a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62})/(invocations(?:-response-stream)?|async-invocations)"
)
_CHAT_PATH = re.compile(
    r"/endpoints/[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62}"
    r"(?:/inference-components/[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62})?/openai(/v1/chat/completions)"
)
_X = "X-Amzn-SageMaker-"
_FORWARDED = (
    # The client's headers that the platform forwards to a container.
    "Content-Type",
    "Accept",
    f"{_X}Custom-Attributes",
    f"{_X}Target-Model",
    f"{_X}Target-Variant",
    f"{_X}Target-Container-Hostname",
    f"{_X}Inference-Id",
    f"{_X}Enable-Explanations",
    f"{_X}Inference-Component",
    f"{_X}Session-Id",
    f"{_X}Prefix-Aware-Id",
)
_RETURNED = ("Content-Type", f"{_X}Custom-Attributes", f"{_X}New-Session-Id", f"{_X}Closed-Session-Id")
_VARIANT = "AllTraffic"
_STRING = 7
_ASYNC_BYTES = 1 << 30
_LOCATION = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([A-Za-z0-9!_.*'()/-]{1,1024})")


class Endpoint(NamedTuple):
    """Container behind the API, and the folder of S3 objects.

    ``unpack`` converts a client's target model to the name and folder that a multi-model container gets.
    """

    address: Address
    objects: Path
    unpack: Callable[[str], tuple[str, str]] | None = None


@contextmanager
def runtime_api(endpoint: Endpoint, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve the API on a loopback port within the context, at the server's ``server_address``.

    The exit waits for asynchronous invocations in flight.
    """
    with ThreadPoolExecutor(16, thread_name_prefix="runtime api") as pool:
        handler = type("_Handler", (_Requests,), {"endpoint": endpoint, "pool": pool, "protocol_version": "HTTP/1.1"})
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        server.daemon_threads = True
        running = pool.submit(server.serve_forever, 0.05)
        try:
            yield server
        finally:
            server.shutdown()
            running.result()
            server.server_close()


def event(kind: str, payload: bytes, *, message: str = "event") -> bytes:
    """Encode one message of AWS's event stream."""
    texts = {f":{message}-type": kind, ":message-type": message, ":content-type": "application/octet-stream"}
    headers = b"".join(
        struct.pack("!B", len(name)) + name.encode() + struct.pack("!BH", _STRING, len(text)) + text.encode()
        for name, text in texts.items()
    )
    prelude = struct.pack("!II", len(headers) + len(payload) + 16, len(headers))
    whole = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
    return whole + struct.pack("!I", zlib.crc32(whole))


class _Requests(BaseHTTPRequestHandler):
    endpoint: Endpoint
    pool: ThreadPoolExecutor

    def log_message(self, *args: object) -> None:
        """Log nothing, because the client sees the result."""

    def do_POST(self) -> None:
        """Answer one call of the API."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > PAYLOAD_BYTES:
            self.close_connection = True
            self._fail(413, "ValidationError", f"the body has {length} bytes; the limit is {PAYLOAD_BYTES}")
            return
        body = self.rfile.read(length)
        match, chat = _PATH.fullmatch(self.path), _CHAT_PATH.fullmatch(self.path)
        if chat is not None:
            self._chat(chat[1], body)
        elif match is None:
            self._fail(404, "ValidationError", f"no operation has the path {self.path[:200]}")
        elif match[2] == "invocations":
            self._invoke(body)
        elif match[2] == "async-invocations":
            self._invoke_later(body)
        else:
            self._invoke_streaming(body)

    def _forwarded_headers(self, **replaced: str | None) -> dict[str, str]:
        """Return the client's headers for the container."""
        found = {name: self.headers[name] for name in _FORWARDED if self.headers[name] is not None}
        return found | {name.replace("_", "-"): value for name, value in replaced.items() if value is not None}

    # -- operations -------------------------------------------------------------------------------------------------

    def _invoke(self, body: bytes) -> None:
        try:
            answer = self._call_container(body, self._forwarded_headers())
        except _RefusedError as refused:
            self._fail(refused.status, refused.kind, str(refused))
            return
        if not 200 <= answer.status < 300:
            self._model_error(answer)
            return
        headers = {name: answer.headers.get(name.lower(), "") for name in _RETURNED}
        self._answer(200, answer.body, {name: value for name, value in headers.items() if value})

    def _call_container(self, body: bytes, headers: Mapping[str, str], timeout_s: float = ANSWER_S) -> HttpReply:
        """Return the container's answer to an invocation. Raises _RefusedError."""
        path, target = "/invocations", headers.get(f"{_X}Target-Model")
        if target is not None:
            path = f"/models/{self._ensure_loaded(target)}/invoke"
        return ask(self.endpoint.address, "POST", path, body=body, headers=headers, timeout_s=timeout_s)

    def _ensure_loaded(self, target: str) -> str:
        """Return the opaque name of a target model, loading it if necessary.

        On a 507 another model is unloaded and the load is retried.
        """
        if self.endpoint.unpack is None:
            raise _RefusedError(400, "ValidationError", "this endpoint has one model and takes no TargetModel")
        try:
            name, url = self.endpoint.unpack(target)
        except (OSError, ValueError) as error:
            raise _RefusedError(400, "ValidationError", f"cannot unpack model {target[:200]}: {error}") from error
        body = json.dumps({"model_name": name, "url": url}).encode()
        headers = {f"{_X}Target-Model": target, "Content-Type": "application/json"}
        unloaded: set[str] = set()
        while True:
            answer = self._platform("POST", "/models", body, headers)
            if answer.status in (200, 409):
                return name
            rows = read_json(self._platform("GET", "/models").body)["models"] if answer.status == 507 else []
            candidates = [row["modelName"] for row in rows if row["modelName"] not in unloaded]
            if not candidates:
                text = answer.body.decode("utf-8", "replace")
                raise _RefusedError(500, "InternalFailure", f"the model cannot be loaded: {answer.status} {text}")
            self._platform("DELETE", f"/models/{candidates[0]}")
            unloaded.add(candidates[0])

    def _platform(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> HttpReply:
        return ask(self.endpoint.address, method, path, body=body or None, headers=headers, timeout_s=360.0)

    def _invoke_streaming(self, body: bytes) -> None:
        headers = self._forwarded_headers(Accept=self.headers[f"{_X}Accept"])
        with self._response("/invocations", body, headers) as response:
            if response is None:
                return
            if not 200 <= response.status < 300:
                self._model_error(HttpReply(response.status, {}, response.read()))
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.amazon.eventstream")
            self.send_header(f"{_X}Content-Type", response.headers.get("content-type", ""))
            self.send_header("x-Amzn-Invoked-Production-Variant", _VARIANT)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for message in _messages(response):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(message), message))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    @contextmanager
    def _response(self, path: str, body: bytes, headers: Mapping[str, str]) -> Iterator[Incoming | None]:
        """Yield the container's response, whose body is not read.

        Without a response, answer the client and yield None. An error within the context ends the client's connection.
        """
        with closing(Connection(*self.endpoint.address, ANSWER_S)) as connection:
            try:
                connection.send("POST", path, body, headers)
                response = connection.receive()
            except NoAnswerError as error:
                self._model_error(HttpReply(0, {}, b"", trouble=str(error)))
                yield None
                return
            try:
                yield response
            except OSError:
                self.close_connection = True  # ends a response that has begun

    def _chat(self, path: str, body: bytes) -> None:
        """Pass a chat on to the container, and its answer back as it comes.

        The platform checks the bearer token, and the container does not get it.
        """
        if not (self.headers["Authorization"] or "").startswith("Bearer "):
            self._fail(403, "AccessDeniedException", "the request has no bearer token")
            return
        headers = {name: self.headers[name] for name in ("Content-Type", "Accept") if self.headers[name] is not None}
        with self._response(path, body, headers) as response:
            if response is None:
                return
            self.send_response(response.status)
            self.send_header("Content-Type", response.headers.get("content-type", ""))
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in response.pieces():
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    def _invoke_later(self, body: bytes) -> None:
        source = self.headers[f"{_X}InputLocation"]
        try:
            whole = body if source is None else self._object(source).read_bytes()
        except (OSError, ValueError) as error:
            self._fail(400, "ValidationError", f"the input {source} cannot be read: {error}")
            return
        if len(whole) > _ASYNC_BYTES:
            self._fail(400, "ValidationError", f"the input has {len(whole)} bytes; the limit is {_ASYNC_BYTES}")
            return
        headers = self._forwarded_headers(
            Accept=self.headers[f"{_X}Accept"], Content_Type=self.headers[f"{_X}Content-Type"]
        )
        timeout_s = float(self.headers[f"{_X}InvocationTimeoutSeconds"] or 900)
        name = f"{uuid.uuid4()}{self.headers[f'{_X}S3OutputPathExtension'] or '.out'}"
        done, failed = f"s3://emulated-output/{name}", f"s3://emulated-failures/{name}"
        try:
            good, bad = self._object(done), self._object(failed)
        except ValueError as error:
            self._fail(400, "ValidationError", f"the answer cannot be written to {done[:200]}: {error}")
            return

        def run() -> None:
            try:
                answer = self._call_container(whole, headers, timeout_s)
            except _RefusedError as refused:  # the client has its response already
                answer = HttpReply(0, {}, b"", trouble=str(refused))
            place = good if 200 <= answer.status < 300 else bad
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f".{place.name}")
            part.write_bytes(answer.body if answer.status else answer.trouble.encode())
            part.rename(place)  # rename, so that a waiting client never sees a partial object

        self.pool.submit(run)
        where = {f"{_X}OutputLocation": done, f"{_X}FailureLocation": failed, "Content-Type": "application/json"}
        self._answer(202, json.dumps({"InferenceId": self.headers[f"{_X}Inference-Id"] or name}).encode(), where)

    def _object(self, location: str) -> Path:
        """Return the file for an object. Raises ValueError for a location outside the folder."""
        match = _LOCATION.fullmatch(location)
        place = self.endpoint.objects / match[1] / match[2] if match else self.endpoint.objects
        if match is None or not place.resolve().is_relative_to(self.endpoint.objects.resolve() / match[1]):
            raise ValueError("expected s3://BUCKET/KEY")
        return place

    # -- answers ----------------------------------------------------------------------------------------------------

    def _model_error(self, answer: HttpReply) -> None:
        """Answer with a ModelError for a container's error or timeout."""
        if not answer.status:
            self._fail(
                424, "ModelError", "the container did not answer", OriginalStatusCode=0, OriginalMessage=answer.trouble
            )
            return
        text = answer.body.decode("utf-8", "replace")
        message = f"Received server error ({answer.status}) from primary with message {text!r}"
        self._fail(424, "ModelError", message, OriginalStatusCode=answer.status, OriginalMessage=text)

    def _fail(self, status: int, kind: str, message: str, **more: str | int) -> None:
        body = json.dumps({"Message": message, **more}).encode()
        self._answer(status, body, {"Content-Type": "application/json", "x-amzn-ErrorType": kind})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "x-Amzn-Invoked-Production-Variant": _VARIANT}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _RefusedError(Exception):
    """Call that the API itself refuses."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind


def _messages(response: Incoming) -> Iterable[bytes]:
    """Yield the container's chunks as events, and an error event if the stream breaks."""
    try:
        for piece in response.pieces():
            yield event("PayloadPart", piece)
        return
    except NoAnswerInTimeError:
        code, text = "ModelInvocationTimeExceeded", f"the container took longer than {ANSWER_S:g} s"
    except NoAnswerError as error:
        code, text = "StreamBroken", str(error)
    yield event("ModelStreamError", json.dumps({"Message": text, "ErrorCode": code}).encode(), message="exception")
