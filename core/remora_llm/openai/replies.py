"""Encoder of answers to chats and completions, whole or as events. Pure.

A chunk that only carries text is put together from parts that are rendered once for a request, because a stream has one
for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from remora.errors import CancelledError, RemoraError
from remora_llm.generation import Tokens
from remora_llm.generation.tasks import End, Piece, Task, TokenLogprob
from remora_llm.generation.tool_calls import ArgumentsPart, CallBegin, TextPart, ToolEvent, ToolParser
from remora_llm.openai.requests import Query
from remora_llm.openai.routes import error_object

DONE = b"data: [DONE]\n\n"


class Heading(NamedTuple):
    """What all chunks of an answer share.

    ``number`` is a unique text; ``created`` is in seconds of Unix time.
    """

    number: str
    created: int
    model: str
    fingerprint: str = ""

    def answer_id(self, query: Query) -> str:
        """Return the id of the answer to a query."""
        if query.action == "responses":
            return f"resp_{self.number}"
        return f"{'cmpl' if query.chat is None else 'chatcmpl'}-{self.number}"


class Usage:
    """Token counts of a request. The prompt counts once for all of its choices."""

    __slots__ = ("_cached", "generated", "prompt")

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.prompt = sum(len(task.prompt) for task in tasks)
        self.generated = 0
        self._cached: dict[Task, int] = {}

    def add(self, piece: Piece) -> None:
        """Count the tokens of a piece."""
        self.generated += len(piece.tokens)
        if piece.end is not None and piece.choice == 0:
            self._cached[piece.task] = piece.end.usage.cached_tokens

    def document(self) -> dict[str, Any]:
        """Return OpenAI's ``usage``."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.generated,
            "completion_tokens": self.generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class _Choice:
    """State of one choice."""

    __slots__ = ("begun", "calls", "end", "index", "offset", "parser", "prompt", "scores", "texts", "tokens")

    def __init__(self, index: int, prompt: str, parser: ToolParser | None) -> None:
        self.index = index
        self.prompt = prompt
        """Text of the prompt or of a chat's last message, to be echoed before the answer."""
        self.parser = parser
        self.begun = False
        self.end: End | None = None
        self.calls: list[dict[str, Any]] = []
        self.offset = 0
        """Characters of the texts of the tokens so far."""
        self.texts: list[str] = []
        self.scores: list[TokenLogprob | None] = []
        self.tokens: list[int] = []


def _is_cut_off(choice: _Choice) -> bool:
    return choice.end is not None and choice.end.reason == "deadline"


class Reply:
    """Answer to the tasks of one request.

    Args:
        query: the request.
        tasks: a task for each prompt.
        heading: of the answer.
        tokens: the model's tokenizer; None if neither log probabilities nor token ids have to be shown.
        model_parser: the model's parser of tool calls.
    """

    def __init__(
        self, query: Query, tasks: Sequence[Task], heading: Heading, tokens: Tokens | None, model_parser: str = ""
    ) -> None:
        self._query = query
        self._tasks = tasks
        self._heading = heading
        self._tokens = tokens
        self._is_chat = query.chat is not None
        self._role = "assistant" if query.chat is None else query.chat.role
        self._tools = query.chat.tools if query.chat is not None else None
        self.usage = Usage(tasks)
        self.error: RemoraError | None = None
        """The first error of a choice."""
        self._first: dict[Task, int] = {}
        first = 0
        self._choices: list[_Choice] = []
        for place, task in enumerate(tasks):
            self._first[task] = first
            first += task.choices
            prompt = self._text_of_prompt(place) if query.echo else ""
            for _ in range(task.choices):
                parser = self._tools.parser(model_parser) if self._tools is not None else None
                self._choices.append(_Choice(len(self._choices), prompt, parser))
        self._left = len(self._choices)
        self._scored = any(task.logprobs is not None for task in tasks)
        self._simple = not (self._scored or query.token_ids or query.continuous_usage or self._tools is not None)
        self._prompt_scores: dict[Task, Sequence[TokenLogprob | None]] = {}
        self._prepare_chunks()

    @property
    def done(self) -> bool:
        """True if all choices have ended."""
        return not self._left

    @property
    def timed_out(self) -> bool:
        """True if all choices ended by the deadline, before their first token."""
        return not self.usage.generated and all(map(_is_cut_off, self._choices))

    @property
    def cut_off(self) -> bool:
        """True if the deadline ended a choice."""
        return any(map(_is_cut_off, self._choices))

    def _text_of_prompt(self, place: int) -> str:
        if self._query.chat is not None:
            return self._query.chat.echoed
        prompt = self._query.prompts[place]
        if isinstance(prompt, str):
            return prompt
        assert self._tokens is not None
        return self._tokens.decode(prompt, skip_special=False)

    def _record(self, piece: Piece) -> _Choice:
        """Count a piece and return its choice."""
        choice = self._choices[self._first[piece.task] + piece.choice]
        self.usage.add(piece)
        if piece.prompt_logprobs:
            self._prompt_scores[piece.task] = piece.prompt_logprobs
        if piece.end is not None:
            choice.end = piece.end
            self._left -= 1
            if self.error is None and piece.end.reason in ("error", "cancelled"):
                self.error = piece.end.error or CancelledError("the request was cancelled")
        return choice

    # -- Events --------------------------------------------------------------------------------------------------------

    def _prepare_chunks(self) -> None:
        heading = self._heading
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        answer_id = heading.answer_id(self._query)
        head = {"id": answer_id, "object": name, "created": heading.created, "model": heading.model}
        if heading.fingerprint:
            head["system_fingerprint"] = heading.fingerprint
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._tail = b',"usage":null}\n\n' if self._query.usage and not self._query.continuous_usage else b"}\n\n"
        inner = b'"delta":{"content":' if self._is_chat else b'"text":'
        self._text_heads = [b'%b,"choices":[{"index":%d,%b' % (self._head, i, inner) for i in range(len(self._choices))]
        closing = b"}" if self._is_chat else b""
        self._text_tail = closing + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events for new pieces, with the end of the stream after the last one."""
        parts: list[bytes] = []
        for piece in pieces:
            choice = self._record(piece)
            if choice.begun and self._simple and piece.end is None:
                if piece.text:
                    parts += (self._text_heads[choice.index], orjson.dumps(piece.text), self._text_tail)
            else:
                self._events_of(choice, piece, parts)
        if self.error is not None:
            parts.append(b"data: %b\n\n" % error_object(self.error))
        elif not self._left:
            if self._query.usage:
                parts.append(b'%b,"choices":[],"usage":%b}\n\n' % (self._head, orjson.dumps(self.usage.document())))
            parts.append(DONE)
        return b"".join(parts)

    def _events_of(self, choice: _Choice, piece: Piece, parts: list[bytes]) -> None:
        text = piece.text
        scores: list[TokenLogprob | None] = list(piece.logprobs)
        extra: dict[str, Any] = {"token_ids": list(piece.tokens)} if self._query.token_ids else {}
        if not choice.begun:
            choice.begun = True
            if self._is_chat:
                parts.append(self._chunk(choice, {"delta": {"role": self._role, "content": ""}}, None))
                if choice.prompt:
                    parts.append(self._chunk(choice, {"delta": {"content": choice.prompt}}, None))
            if self._query.token_ids:
                extra["prompt_token_ids"] = list(piece.task.prompt)
            if self._query.echo and not self._is_chat:
                text = choice.prompt + text
                scores = [*self._prompt_scores.get(piece.task, ()), *scores]
        parsed: Sequence[ToolEvent] = [TextPart(text)] if text else []
        if choice.parser is not None:
            parsed = choice.parser.feed(text)
            if piece.end is not None:
                parsed = [*parsed, *choice.parser.finish()]
        logprobs = self._logprobs(choice, scores)
        if not parsed and (logprobs is not None or extra.get("token_ids") or "prompt_token_ids" in extra):
            parsed = [TextPart("")]
        for event in parsed:
            parts.append(self._chunk(choice, self._content(choice, event), None, logprobs, extra))
            logprobs, extra = None, {}
        if piece.end is not None and self.error is None:
            end: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            stop = {"stop_reason": piece.end.stop} if piece.end.stop is not None else {}
            parts.append(self._chunk(choice, end, self._reason(choice), None, stop))

    def _content(self, choice: _Choice, event: ToolEvent) -> dict[str, Any]:
        if isinstance(event, TextPart):
            return {"delta": {"content": event.text}} if self._is_chat else {"text": event.text}
        if isinstance(event, CallBegin):
            choice.calls.append({})
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.call, "id": self._call_id(choice, event.call), "type": "function"}
            return {"delta": {"tool_calls": [{**call, "function": function}]}}
        return {"delta": {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}}

    def _chunk(
        self,
        choice: _Choice,
        content: Mapping[str, Any],
        reason: str | None,
        logprobs: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        row = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason, **(extra or {})}
        tail = self._tail
        if self._query.continuous_usage:
            tail = b',"usage":%b}\n\n' % orjson.dumps(self.usage.document())
        return b'%b,"choices":[%b]%b' % (self._head, orjson.dumps(row), tail)

    # -- Whole answers -------------------------------------------------------------------------------------------------

    def add(self, pieces: Sequence[Piece]) -> None:
        """Keep pieces for `body`."""
        for piece in pieces:
            choice = self._record(piece)
            choice.texts.append(piece.text)
            choice.scores += piece.logprobs
            if self._query.token_ids:
                choice.tokens += piece.tokens

    def body(self) -> bytes:
        """Return the whole answer, after the end of all choices."""
        heading = self._heading
        document: dict[str, Any] = {
            "id": heading.answer_id(self._query),
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": heading.created,
            "model": heading.model,
            "choices": [self._row(choice, task) for choice, task in self._pairs()],
            "usage": self.usage.document(),
        }
        if heading.fingerprint:
            document["system_fingerprint"] = heading.fingerprint
        if self._query.token_ids and self._is_chat:
            document["prompt_token_ids"] = list(self._tasks[0].prompt)
        if self._query.prompt_scores and self._is_chat:
            document["prompt_logprobs"] = self._prompt_rows(self._tasks[0])
        return orjson.dumps(document)

    def _pairs(self) -> list[tuple[_Choice, Task]]:
        tasks = [task for task in self._tasks for _ in range(task.choices)]
        return list(zip(self._choices, tasks, strict=True))

    def _row(self, choice: _Choice, task: Task) -> dict[str, Any]:
        text = "".join(choice.texts)
        row: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            row["message"] = self._message(choice, text)
            row["logprobs"] = self._logprobs(choice, choice.scores)
        else:
            echoed = self._prompt_scores.get(task, ()) if self._query.echo else ()
            row["text"] = choice.prompt + text
            row["logprobs"] = self._logprobs(choice, [*echoed, *choice.scores], task)
        row["finish_reason"] = self._reason(choice)
        if choice.end is not None and choice.end.stop is not None:
            row["stop_reason"] = choice.end.stop
        if self._query.prompt_scores and not self._is_chat:
            row["prompt_logprobs"] = self._prompt_rows(task)
        if self._query.token_ids:
            row["token_ids"] = choice.tokens
            if not self._is_chat:
                row["prompt_token_ids"] = list(task.prompt)
        return row

    def _message(self, choice: _Choice, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self._role, "content": choice.prompt + text, "refusal": None}
        if choice.parser is None:
            return message
        events = [*choice.parser.feed(text), *choice.parser.finish()]
        content = choice.prompt + "".join(event.text for event in events if isinstance(event, TextPart))
        for event in events:
            if isinstance(event, CallBegin):
                function = {"name": event.name, "arguments": ""}
                number = self._call_id(choice, event.call)
                choice.calls.append({"id": number, "type": "function", "function": function})
            elif isinstance(event, ArgumentsPart):
                choice.calls[-1]["function"]["arguments"] += event.text
        must_call = self._tools is not None and self._tools.must_call
        message["content"] = content if content or not (choice.calls or must_call) else None
        if choice.calls:
            message["tool_calls"] = choice.calls
        return message

    # -- Both ----------------------------------------------------------------------------------------------------------

    def _call_id(self, choice: _Choice, call: int) -> str:
        return f"call_{self._heading.number}_{choice.index}_{call}"

    def _reason(self, choice: _Choice) -> str:
        """Return OpenAI's ``finish_reason`` of a choice that has ended."""
        assert choice.end is not None
        if choice.end.reason != "stop":
            return "length"  # the deadline limits an answer, too
        named = self._tools is not None and self._tools.choice == "named"
        return "tool_calls" if choice.calls and not named else "stop"

    def _logprobs(
        self, choice: _Choice, scores: Sequence[TokenLogprob | None], task: Task | None = None
    ) -> dict[str, Any] | None:
        if not self._scored:
            return None
        if self._is_chat:
            rows = [self._scored_row(score) for score in scores if score is not None]
            return {"content": rows, "refusal": None}
        first = (task or self._tasks[0]).prompt[0]
        tokens = [self._show(first if score is None else score.token) for score in scores]
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "tokens": tokens,
            "top_logprobs": [None if score is None else self._likeliest(score) for score in scores],
        }

    def _prompt_rows(self, task: Task) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs``: rows of each token and the likeliest ones."""
        rows: list[dict[str, Any] | None] = []
        for score in self._prompt_scores.get(task, ()):
            if score is None:
                rows.append(None)
                continue
            ranked = [(place, token, logprob) for place, (token, logprob) in enumerate(score.top, 1)]
            rows.append(
                {
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._show(token)}
                    for rank, token, logprob in [(score.rank, score.token, score.logprob), *ranked]
                }
            )
        return rows

    def _likeliest(self, score: TokenLogprob) -> dict[str, float]:
        """Return the log probability of the token and of the likeliest ones, by their texts."""
        rows = {self._show(score.token): score.logprob}
        for token, logprob in score.top:
            rows.setdefault(self._show(token), logprob)
        return rows

    def _scored_row(self, score: TokenLogprob) -> dict[str, Any]:
        top = [self._token_row(token, logprob) for token, logprob in score.top]
        return {**self._token_row(score.token, score.logprob), "top_logprobs": top}

    def _token_row(self, token: int, logprob: float) -> dict[str, Any]:
        octets = self._bytes_of(token)
        return {"token": octets.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(octets)}

    def _show(self, token: int) -> str:
        return self._bytes_of(token).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        assert self._tokens is not None
        return self._tokens.token_bytes(token)
