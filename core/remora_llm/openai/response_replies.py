"""Encoder of answers of the Responses API, whole or as events. Pure.

An event that only carries text is put together from parts that are rendered once for a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from remora.errors import CancelledError, RemoraError
from remora_llm.generation import Tokens
from remora_llm.generation.tasks import End, Piece, Task, TokenLogprob
from remora_llm.generation.tool_calls import ArgumentsPart, CallBegin, TextPart, ToolEvent
from remora_llm.openai.replies import Heading, Usage
from remora_llm.openai.requests import Query
from remora_llm.openai.routes import message_of

_DELTA = "response.output_text.delta"


class ResponseReply:
    """Answer to the task of one request; see `remora_llm.openai.replies.Reply`.

    Args:
        query: the request.
        tasks: the task.
        heading: of the answer.
        tokens: the model's tokenizer; None if no log probabilities have to be shown.
        model_parser: the model's parser of tool calls.
    """

    def __init__(
        self, query: Query, tasks: Sequence[Task], heading: Heading, tokens: Tokens | None, model_parser: str = ""
    ) -> None:
        assert query.chat is not None
        tools = query.chat.tools
        (self._task,) = tasks
        self._query = query
        self._heading = heading
        self._tokens = tokens
        self._parser = tools.parser(model_parser) if tools is not None else None
        self.usage = Usage(tasks)
        self.error: RemoraError | None = None
        """The error of the answer."""
        self._end: End | None = None
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open = False
        """True if the last item is not complete."""
        self._scores: list[dict[str, Any]] = []
        self._delta = b""

    @property
    def done(self) -> bool:
        """True if the answer has ended."""
        return self._end is not None

    @property
    def timed_out(self) -> bool:
        """True if the answer ended by the deadline, before its first token."""
        return self.cut_off and not self.usage.generated

    @property
    def cut_off(self) -> bool:
        """True if the deadline ended the answer."""
        return self._end is not None and self._end.reason == "deadline"

    # -- Items ---------------------------------------------------------------------------------------------------------

    def _record(self, piece: Piece) -> Sequence[ToolEvent]:
        """Count a piece, and return its texts and calls."""
        self.usage.add(piece)
        parsed: Sequence[ToolEvent] = [TextPart(piece.text)] if piece.text else []
        if self._parser is not None:
            parsed = self._parser.feed(piece.text)
        if piece.end is not None:
            if self._parser is not None:
                parsed = [*parsed, *self._parser.finish()]
            self._end = piece.end
            if piece.end.reason in ("error", "cancelled"):
                self.error = piece.end.error or CancelledError("the request was cancelled")
            elif not self._items and not parsed:
                parsed = [TextPart("")]
        return parsed

    def _part(self) -> dict[str, Any]:
        """Return the text of the last item, which is a message."""
        part: dict[str, Any] = self._items[-1]["content"][0]
        return part

    def _begin_message(self) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        number = f"msg_{self._heading.number}_{len(self._items)}"
        message = {"id": number, "type": "message", "role": "assistant", "status": "in_progress", "content": [part]}
        self._items.append(message)
        self._open = True

    def _begin_call(self, name: str) -> None:
        number = f"{self._heading.number}_{len(self._items)}"
        item = {"id": f"fc_{number}", "call_id": f"call_{number}", "type": "function_call", "name": name}
        self._items.append({**item, "arguments": "", "status": "in_progress"})
        self._open = True

    @property
    def _is_message(self) -> bool:
        return self._open and self._items[-1]["type"] == "message"

    def _close(self) -> None:
        """Complete the last item."""
        self._open = False
        cut = self._end is not None and self._end.reason != "stop"
        self._items[-1]["status"] = "incomplete" if cut else "completed"

    def _keep_scores(self, scores: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return log probabilities as the API has them."""
        if self._task.logprobs is None:
            return []
        return [
            {
                **self._scored(score.token, score.logprob),
                "top_logprobs": [self._scored(token, logprob) for token, logprob in score.top],
            }
            for score in scores
        ]

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._tokens is not None
        octets = self._tokens.token_bytes(token)
        return {"token": octets.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(octets)}

    # -- Whole answers -------------------------------------------------------------------------------------------------

    def add(self, pieces: Sequence[Piece]) -> None:
        """Keep pieces for `body`."""
        self.events(pieces)

    def body(self) -> bytes:
        """Return the whole answer, after its end."""
        return orjson.dumps(self._document())

    def _document(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        status, error, incomplete = "in_progress", None, None
        if self.error is not None:
            status, error = "failed", {"code": "server_error", "message": message_of(self.error)}
        elif self._end is not None and self._end.reason != "stop":
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}  # the deadline limits an answer, too
        elif self._end is not None:
            status = "completed"
        sampling = self._task.sampling
        document = {
            "id": self._heading.answer_id(self._query),
            "object": "response",
            "created_at": self._heading.created,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "model": self._heading.model,
            "output": self._items if self._end is not None else [],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **self._query.response,
            "usage": self._usage() if self._end is not None else None,
        }
        if self._heading.fingerprint:
            document["system_fingerprint"] = self._heading.fingerprint
        return document

    def _usage(self) -> dict[str, Any]:
        counts = self.usage.document()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }

    # -- Events --------------------------------------------------------------------------------------------------------

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events for new pieces, with the end of the stream after the last one."""
        parts: list[bytes] = []
        if not self._sequence:
            for kind in ("response.created", "response.in_progress"):
                parts.append(self._event(kind, response=self._document()))
        for piece in pieces:
            scores = self._keep_scores(piece.logprobs)
            for event in self._record(piece):
                self._add(event, scores, parts)
                scores = []
            self._scores = scores  # of tokens whose text is held back
            if self._end is not None:
                self._finish(parts)
        return b"".join(parts)

    def _finish(self, parts: list[bytes]) -> None:
        if self._open:
            self._end_item(parts)
        ending = self._document()
        parts.append(self._event(f"response.{ending['status']}", response=ending))

    def _add(self, event: ToolEvent, scores: list[dict[str, Any]], parts: list[bytes]) -> None:
        """Add the events for a text, a call or a part of its arguments."""
        if isinstance(event, TextPart):
            self._add_text(event.text, scores, parts)
            return
        if isinstance(event, CallBegin):
            if self._open:
                self._end_item(parts)
            self._begin_call(event.name)
            parts.append(self._of_item("response.output_item.added", item=self._items[-1]))
        if isinstance(event, ArgumentsPart):
            self._items[-1]["arguments"] += event.text
            parts.append(self._of_item("response.function_call_arguments.delta", named=True, delta=event.text))

    def _add_text(self, text: str, scores: list[dict[str, Any]], parts: list[bytes]) -> None:
        if not self._is_message:
            if self._open:
                self._end_item(parts)
            self._begin_message()
            item = {**self._items[-1], "content": []}
            parts.append(self._of_item("response.output_item.added", item=item))
            parts.append(self._of_text("response.content_part.added", part=self._part()))
            place = {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}
            inner = orjson.dumps({"type": _DELTA, **place})[:-1]
            self._delta = b"event: %b\ndata: %b" % (_DELTA.encode(), inner)
        rows = [*self._scores, *scores]
        self._scores = []
        part = self._part()
        part["text"] += text
        part["logprobs"] += rows
        if text or rows:
            shown = orjson.dumps(rows) if rows else b"[]"
            parts.append(
                b'%b,"sequence_number":%d,"logprobs":%b,"delta":%b}\n\n'
                % (self._delta, self._sequence, shown, orjson.dumps(text))
            )
            self._sequence += 1

    def _end_item(self, parts: list[bytes]) -> None:
        is_message = self._is_message
        self._close()
        item = self._items[-1]
        if is_message:
            part = self._part()
            parts.append(self._of_text("response.output_text.done", text=part["text"], logprobs=part["logprobs"]))
            parts.append(self._of_text("response.content_part.done", part=part))
        else:
            ended = {"arguments": item["arguments"], "name": item["name"]}
            parts.append(self._of_item("response.function_call_arguments.done", named=True, **ended))
        parts.append(self._of_item("response.output_item.done", item=item))

    def _of_text(self, kind: str, **members: Any) -> bytes:
        return self._of_item(kind, named=True, content_index=0, **members)

    def _of_item(self, kind: str, *, named: bool = False, **members: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"]} if named else {}
        return self._event(kind, **place, output_index=len(self._items) - 1, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        document: Mapping[str, Any] = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))
