"""A Lambda runtime client in miniature, right in everything but the one fault that the variable FAULT names.

    FAULT=late python faulty_lambda.py [MODULE.handler]

Without a handler it doubles the numbers of {"numbers": [...]}, and has a model to load: the file `models/weights`.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
from support.programs import faulty_generation as language

FAULT = os.environ.get("FAULT", "")
API = "/2018-06-01/runtime"
state: dict[str, Any] = {"broken": False, "deadline": 0.0, "frozen": False}


class Context:
    def get_remaining_time_in_millis(self) -> int:
        return max(int((state["deadline"] - time.time()) * 1e3), 0)


def doubled(event: Any, context: Context) -> object:
    if FAULT == "refuses" or (FAULT == "frozen" and state["frozen"]) or state["broken"]:
        raise ValueError("it does not feel like it")
    if isinstance(event, str) and len(event) > 1_000_000:
        state["broken"] = FAULT == "large-event"
    if isinstance(event, dict) and "requestContext" in event:
        return "done" if FAULT == "http" else {"statusCode": 200, "body": json.dumps(doubled_numbers(event["body"]))}
    if not isinstance(event, dict):
        raise TypeError("an event is an object")
    if FAULT == "writes":
        (Path(os.environ["LAMBDA_TASK_ROOT"]) / "models" / "scratch").write_text("mine")
    if "slow" in event:
        if FAULT == "late":
            time.sleep(context.get_remaining_time_in_millis() / 1e3 + 0.3)
        raise TimeoutError("the invocation ends soon")
    if "long" in event:
        if FAULT == "long-answer":
            return "x" * 6_300_000
        raise ValueError("the answer would be too long")
    return {"numbers": [number * 2 for number in event["numbers"]]}


def doubled_numbers(body: str) -> list[int]:
    return [number * 2 for number in json.loads(body)["numbers"]]


class Client:
    """The connection to the Runtime API."""

    def __init__(self) -> None:
        self.connection = http.client.HTTPConnection(os.environ["AWS_LAMBDA_RUNTIME_API"])

    def next(self) -> tuple[str, bytes]:
        self.connection.request("GET", f"{API}/invocation/next")
        response = self.connection.getresponse()
        body = response.read()
        state["deadline"] = int(response.headers["Lambda-Runtime-Deadline-Ms"]) / 1e3
        return response.headers["Lambda-Runtime-Aws-Request-Id"], body

    def post(self, path: str, body: bytes) -> None:
        self.connection.request("POST", f"{API}/{path}", body)
        self.connection.getresponse().read()

    def begin(self, request_id: str) -> None:
        """Begin an answer in pieces."""
        self.connection.putrequest("POST", f"{API}/invocation/{request_id}/response")
        self.connection.putheader("Content-Type", "application/vnd.awslambda.http-integration-response")
        self.connection.putheader("Lambda-Runtime-Function-Response-Mode", "streaming")
        self.connection.putheader("Transfer-Encoding", "chunked")
        self.connection.endheaders()

    def piece(self, part: bytes) -> None:
        self.connection.send(b"%x\r\n%b\r\n" % (len(part), part))

    def end(self) -> None:
        self.piece(b"")
        self.connection.getresponse().read()

    def ask_early(self) -> None:
        self.connection.request("GET", f"{API}/invocation/next")
        self.connection.getresponse().read()


def told(error: Exception) -> bytes:
    return json.dumps({"errorType": type(error).__name__, "errorMessage": str(error), "stackTrace": []}).encode()


def handler_of(words: list[str]) -> Callable[[Any, Context], object]:
    if words:
        module, _, name = words[0].rpartition(".")
        found: Callable[[Any, Context], object] = getattr(import_module(module), name)
        return found
    if not language.IS_THERE:
        (Path(os.environ["LAMBDA_TASK_ROOT"]) / "models" / "weights").read_bytes()
    return doubled


def take_a_snapshot(client: Client) -> None:
    client.connection.request("GET", f"{API}/restore/next")
    client.connection.getresponse().read()
    if FAULT == "restore":
        client.post("restore/error", told(ValueError("the connection is gone")))
        sys.exit(65)


def speak(client: Client, request_id: str, event: Any) -> None:
    """Answer a function URL's request to a language model."""
    head: dict[str, Any] = {"statusCode": 200, "headers": {"Content-Type": "application/json"}}
    lists = event["rawPath"].endswith("/models")
    if lists or not json.loads(event["body"]).get("stream"):
        answer = {**head, "body": json.dumps(language.MODELS if lists else language.whole())}
        client.post(f"invocation/{request_id}/response", json.dumps(answer).encode())
    else:
        head["headers"]["Content-Type"] = "text/event-stream"
        client.begin(request_id)
        client.piece(json.dumps(head).encode() + bytes(8))
        language.stream(client.piece)
        client.end()


def serve(client: Client, handler: Callable[[Any, Context], object]) -> None:
    while True:
        request_id, event = client.next()
        if FAULT == "early":
            client.ask_early()
        if FAULT == "stray":
            client.post("invocation/another/response", b"{}")
        if language.IS_THERE:
            speak(client, request_id, json.loads(event))
            continue
        if b'"/stream"' in event:
            delimiter = b"" if FAULT == "stream" else bytes(8)
            client.begin(request_id)
            for part in (b'{"statusCode": 200}' + delimiter, b"one", b"two"):
                client.piece(part)
            client.end()
            continue
        try:
            answer = json.dumps(handler(json.loads(event), Context())).encode()
            client.post(f"invocation/{request_id}/response", answer)
        except Exception as error:
            body = b"it failed" if FAULT == "plain-error" and len(event) < 1_000 else told(error)
            client.post(f"invocation/{request_id}/error", body)
        if FAULT == "once":
            sys.exit(0)


def main() -> None:
    if FAULT == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if FAULT == "ends":
        sys.exit(1)
    if FAULT == "never-ready":
        signal.pause()
    signal.signal(signal.SIGCONT, lambda *_: state.update(frozen=True))
    client = Client()
    try:
        handler = handler_of(sys.argv[1:])
    except Exception as error:
        if FAULT != "silent-init":
            client.post("init/error", told(error))
        raise
    if os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"] == "snap-start":
        take_a_snapshot(client)
    serve(client, handler)


if __name__ == "__main__":
    main()
