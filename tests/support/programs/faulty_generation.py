"""A language model in miniature for faulty servers: right in everything but the one fault that FAULT names.

It is there if MODEL is `language`, and writes 40 tokens of 3 ms each.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

FAULT = os.environ.get("FAULT", "")
IS_THERE = os.environ.get("MODEL") == "language"
TOKENS, STEP_S = 40, 0.003
FAULTS: dict[str, set[str]] = {
    "language": set(),
    "no-usage": {"chat"},
    "no-done": {"chat-stream"},
    "one-event": {"chat-stream", "chat-cancel"},
    "holds-events": {"chat-stream", "chat-cancel"},
    "keeps-rows": {"chat-cancel"},
}
CHECKS = {"chat", "chat-stream", "chat-cancel"}
MODELS = {"object": "list", "data": [{"id": "lm", "object": "model", "max_model_len": 512}]}
ROUTES = ("/openai/v1/models", "/v1/models")

_counting = threading.Lock()
_counts = {"running": 0, "written": 0}


def metrics() -> bytes:
    rows = {"num_requests_running": _counts["running"], "num_requests_waiting": 0}
    rows["generation_tokens_total"] = _counts["written"]
    return b"".join(b'vllm:%b{model_name="lm"} %d\n' % (name.encode(), value) for name, value in rows.items())


def _count(name: str, step: int) -> None:
    with _counting:
        _counts[name] += step


def _tokens() -> Iterator[str]:
    pause = threading.Event()
    for number in range(TOKENS):
        pause.wait(STEP_S)
        _count("written", 1)
        yield f"{number} "


def whole() -> dict[str, Any]:
    """The answer to a chat."""
    text = "".join(_tokens())
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 5, "completion_tokens": TOKENS, "total_tokens": TOKENS + 5}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage}
    if FAULT == "no-usage":
        del answer["usage"]
    return answer


def answer_stream(request: BaseHTTPRequestHandler) -> None:
    """Answer a request with the events of a chat, in chunks."""
    request.close_connection = True
    request.send_response(200)
    request.send_header("Content-Type", "text/event-stream")
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    stream(lambda event: request.wfile.write(b"%x\r\n%b\r\n" % (len(event), event)))
    with suppress(OSError):  # the client may have left
        request.wfile.write(b"0\r\n\r\n")


def stream(send: Callable[[bytes], object]) -> None:
    """Send the events of a chat until the client has left."""
    _count("running", 1)
    try:
        _stream(send)
    except OSError:  # the client has left
        pass
    finally:
        _count("running", -1)


def _stream(send: Callable[[bytes], object]) -> None:
    left, held = False, []
    joined = ["".join(_tokens())] if FAULT == "one-event" else _tokens()
    for text in joined:
        event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"
        if FAULT == "holds-events":
            held.append(event)
            continue
        try:
            if not left:
                send(event)
        except OSError:
            if FAULT != "keeps-rows":
                raise
            left = True
    for event in held:
        send(event)
    if FAULT != "no-done":
        send(b"data: [DONE]\n\n")
