"""Checks of language models: whole answers, streams, and clients that disconnect.

They run with the user's chat, or if OpenAI's routes list a model with ``max_model_len``, as vLLM and remora do. Each
check allows several attempts, because the machine may be busy, and fails only if all of them show a violation.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from remora.system.json_text import read_json
from remora_deploy.emulate import Check, Failed, Inapplicable, Skipped
from remora_deploy.emulate.asking import Address, HttpReply, Line, ask
from remora_deploy.emulate.container import json_object, must_answer
from remora_deploy.emulate.examples import Send, find_when_ready, send_to_container
from remora_deploy.emulate.stage import Stage

Wrap = Callable[[dict[str, Any]], dict[str, Any]]

_MODELS = ("/openai/v1/models", "/v1/models")
_ATTEMPTS, _ATTEMPTS_S = 3, 4.0
"""Least number of attempts, and the time for more, because a small model may write its answer while it is not read."""
_CLIENTS = 4
_LEAST_EVENTS = 4
_TOKENS = 256
_REASONS = ("stop", "length", "tool_calls")
_RUNNING, _WAITING, _WRITTEN = "num_requests_running", "num_requests_waiting", "generation_tokens_total"
_FREE_S = 10.0
"""Time until all rows must be free, which a server that notices a disconnected client needs in no case."""
_LOOK_S = 0.02


def metrics_of_any_port(stage: Stage) -> HttpReply:
    """Return the metrics at ``/metrics`` of the first of the container's ports that has them."""
    addresses = [stage.address]
    if stage.settings.command:
        addresses += [Address(stage.address.host, row.port) for row in stage.process.listening()]
    replies = (ask(address, "GET", "/metrics") for address in addresses)
    return next((reply for reply in replies if reply.status == 200), HttpReply(404, {}, b""))


def generation_checks(
    path: Callable[[Stage], str],
    send: Send = send_to_container,
    *,
    metrics: Callable[[Stage], HttpReply] | None = metrics_of_any_port,
    wrap: Wrap | None = None,
) -> tuple[Check, ...]:
    """Return the checks of a platform.

    Args:
        path: returns the path of chats.
        send: sends a request.
        metrics: returns the container's metrics; None on a platform whose functions do not learn of disconnected
            clients.
        wrap: makes the body of a whole chat, whose answer is then the value of ``predictions``.
    """

    def answers_whole(stage: Stage) -> None:
        chat = _chat_of(stage, send)
        answer = must_answer(send(stage, "POST", path(stage), _body(wrap(chat) if wrap else chat)), "a chat")
        document = json_object(answer)
        if not _is_chat_answer(document.get("predictions") if wrap else document):
            raise Failed(f"a chat has no message, finish reason or token counts that add up: {answer.shown}")

    def streams(stage: Stage) -> None:
        body, seen = _body({**_chat_of(stage, send), "stream": True}), ""
        for _ in _attempts():
            answer = must_answer(send(stage, "POST", path(stage), body), "a streamed chat")
            if not answer.pieces:
                raise Inapplicable("the function sends whole answers: its runtime client has no response streams")
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise Failed(f"a streamed chat has the type {answer.headers.get('content-type')}: {answer.shown}")
            if not answer.body.rstrip().endswith(b"data: [DONE]"):
                raise Failed(f"the stream does not end with [DONE], but with {answer.body[-80:]!r}")
            times = _times_of_texts(answer.pieces)
            if len(times) < _LEAST_EVENTS:
                raise Failed(f"the text came in {len(times)} events: expected one for each step of the model")
            if times[0] <= times[-1] / 2:
                return
            seen = f"{times[0]:.3f} s after the request, and the last one after {times[-1]:.3f} s"
        raise Failed(f"the first of {len(times)} events with text came {seen}: the server holds them back")

    def frees_rows(stage: Stage) -> None:
        assert metrics is not None
        chat = _chat_of(stage, send)
        if _RUNNING not in _gauges(metrics(stage)):
            raise Skipped(f"needs vllm:{_RUNNING} among the metrics of the container")
        whole = json_object(must_answer(send_to_container(stage, "POST", path(stage), _body(chat)), "a chat"))
        if not _is_chat_answer(whole):
            raise Skipped("needs the token counts of an answer: see chat")
        expected = _CLIENTS * int(whole["usage"]["completion_tokens"])
        for _ in _attempts():
            before = _gauges(metrics(stage))
            _begin_and_leave(stage, path(stage), _body({**chat, "stream": True}))
            after = _await_free_rows(stage, metrics)
            if after[_WRITTEN] - before[_WRITTEN] < expected:
                return
        raise Failed(f"{_CLIENTS} clients disconnected after their first event, and all {expected} tokens were written")

    found = (
        Check(
            "chat",
            "a chat is answered with its text, finish reason and token counts",
            "OpenAI's clients read these members",
            answers_whole,
        ),
        Check(
            "chat-stream",
            "the first event of a streamed chat arrives before the last token is written",
            "users wait for the first token, and a stream that is held back has no advantage over a whole answer",
            streams,
        ),
        Check(
            "chat-cancel",
            "the answers of clients that disconnect end, and their rows are free",
            "a server that continues them computes text without a reader, while other requests wait",
            frees_rows,
        ),
    )
    return found if metrics is not None else found[:2]


def _attempts() -> Iterator[int]:
    """Yield the numbers of attempts while more are allowed."""
    end = time.monotonic() + _ATTEMPTS_S
    for number in count():
        if number >= _ATTEMPTS and time.monotonic() > end:
            return
        yield number


def _body(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def _chat_of(stage: Stage, send: Send) -> dict[str, Any]:
    """Return the user's chat, or one for the first language model.

    Raises Inapplicable without a model.
    """
    known = stage.facts.get("chat")
    if known is None:
        given = stage.settings.given.get("chat")
        known = read_json(Path(given).read_bytes()) if given else find_when_ready(stage, send, _derived_chat)
        stage.facts["chat"] = known
    if not isinstance(known, dict):
        raise Inapplicable('needs a language model, or a chat: --with chat=FILE with {"messages": [...]}')
    return known


def _derived_chat(stage: Stage, send: Send) -> dict[str, Any] | str:
    """Return a chat for the first model of OpenAI's routes with a context, "" without one."""
    for path in _MODELS:
        try:
            rows = read_json(send(stage, "GET", path, b"").body)["data"]
            name, context = next((row["id"], row["max_model_len"]) for row in rows if row.get("max_model_len"))
        except (Failed, ValueError, KeyError, TypeError, AttributeError, StopIteration):
            continue
        messages = [{"role": "user", "content": "Count from one to one thousand."}]
        limit = min(_TOKENS, int(context) // 2)
        return {"model": name, "messages": messages, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
    return ""


def _is_chat_answer(document: Any) -> bool:
    """Return True if an answer has the members that OpenAI's clients read."""
    try:
        choice, usage = document["choices"][0], document["usage"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        counts = [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
        return isinstance(text, str) and reason in _REASONS and counts[0] + counts[1] == counts[2] > counts[0] > 0
    except (KeyError, IndexError, TypeError):
        return False


def _times_of_texts(pieces: Sequence[tuple[float, bytes]]) -> list[float]:
    """Return the times at which the events with text were complete."""
    times, rest = [], b""
    for at_s, piece in pieces:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        times += [at_s for event in whole if _has_text(event)]
    return times


def _has_text(event: bytes) -> bool:
    try:
        choices = read_json(event.partition(b"data:")[2])["choices"]
        return any(choice["delta"].get("content") for choice in choices)
    except (ValueError, KeyError, TypeError):
        return False


def _begin_and_leave(stage: Stage, path: str, body: bytes) -> None:
    """Begin streams, read until each has its first text, and disconnect."""
    lines = [Line(stage.address, 60.0) for _ in range(_CLIENTS)]
    for line in lines:
        line.send("POST", path, body, {"Content-Type": "application/json"})
    for line in lines:
        must_answer(line.answer(lambda seen: any(map(_has_text, seen.split(b"\n\n")))), "a streamed chat")
    for line in lines:
        line.close()


def _await_free_rows(stage: Stage, metrics: Callable[[Stage], HttpReply]) -> dict[str, float]:
    """Return the metrics once no answer is being written. Raises Failed after the time limit."""
    end = time.monotonic() + stage.limit_s(_FREE_S)
    while (found := _gauges(metrics(stage)))[_RUNNING] or found[_WAITING]:
        if time.monotonic() > end:
            raise Failed(f"{found[_RUNNING]:g} answers still run {_FREE_S:g} s after their clients disconnected")
        time.sleep(_LOOK_S)
    return found


def _gauges(page: HttpReply) -> dict[str, float]:
    """Return the sums of vLLM's metrics over all models."""
    text = page.body.decode("utf-8", "replace")
    found = {}
    for name in (_RUNNING, _WAITING, _WRITTEN):
        values = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)
        if values:
            found[name] = sum(map(float, values))
    return found
