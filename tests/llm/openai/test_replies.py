"""Tests of ``remora_llm.openai.replies``: whole answers and events from the same pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from remora.errors import InternalError
from remora_llm.generation.tasks import End, EndReason, Piece, Task, TokenLogprob, Usage
from remora_llm.openai.replies import DONE, Heading, Reply
from remora_llm.openai.requests import Query, decode
from remora_llm.testing import ByteTokens

HEADING = Heading("1", 5, "m", "print")
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat(**fields: Any) -> Query:
    return decode(
        "chat", json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    )


def completion(**fields: Any) -> Query:
    return decode("completions", json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def task(choices: int = 1, logprobs: int | None = None) -> Task:
    return Task((72, 105), 9, choices=choices, logprobs=logprobs)


def reply(query: Query, *tasks: Task, parser: str = "") -> Reply:
    return Reply(query, tasks, HEADING, ByteTokens(), parser)


def piece(of: Task, text: str, end: EndReason | None = None, *, choice: int = 0, **more: Any) -> Piece:
    made = None if end is None else End(end, Usage(2, 3, 1), more.pop("stop", None), more.pop("error", None))
    return Piece(of, choice, tuple(text.encode()), text, end=made, **more)


def rows(events: bytes) -> list[Any]:
    assert events.endswith(b"\n\n")
    lines = events.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def whole(made: Reply, pieces: Sequence[Piece]) -> Any:
    made.add(pieces)
    assert made.done
    return json.loads(made.body())


def test_a_chat_is_answered_whole_with_its_usage() -> None:
    of = task()
    answer = whole(reply(chat(), of), [piece(of, "Hel"), piece(of, "lo", "stop")])
    assert answer == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": "print",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_the_events_of_a_chat_are_role_text_reason_usage_and_done() -> None:
    of = task()
    made = reply(chat(stream=True, stream_options={"include_usage": True}), of)
    found = [
        *rows(made.events([piece(of, "Hé")])),
        *rows(made.events([piece(of, '"\n')])),
        *rows(made.events([piece(of, "", "length")])),
    ]
    assert found[-1] == "[DONE]"
    deltas = [row["choices"][0]["delta"] for row in found[:-2]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hé"}, {"content": '"\n'}, {}]
    assert [row["choices"][0]["finish_reason"] for row in found[:-2]] == [None, None, None, "length"]
    assert all(row["usage"] is None for row in found[:-2])
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["total_tokens"] == 2 + 3 + 2
    assert {row["id"] for row in found[:-1]} == {"chatcmpl-1"}


def test_a_piece_without_text_makes_no_event() -> None:
    of = task()
    made = reply(chat(stream=True), of)
    made.events([piece(of, "a")])
    assert made.events([piece(of, "")]) == b""


def test_the_usage_may_come_with_each_chunk() -> None:
    of = task()
    options = {"include_usage": True, "continuous_usage_stats": True}
    made = reply(completion(stream=True, stream_options=options), of)
    found = rows(made.events([piece(of, "ab")])) + rows(made.events([piece(of, "c", "length")]))
    assert [row["usage"]["completion_tokens"] for row in found[:-1]] == [2, 3, 3, 3]


def test_choices_are_numbered_over_all_prompts() -> None:
    first, second = task(2), task(2)
    made = reply(completion(prompt=["a", "b"], n=2), first, second)
    pieces = [piece(of, text, "stop", choice=choice) for of, choice, text in
              ((second, 1, "d"), (first, 0, "a"), (second, 0, "c"), (first, 1, "b"))]  # fmt: skip
    assert [(row["index"], row["text"]) for row in whole(made, pieces)["choices"]] == [*enumerate("abcd")]


SAID = [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]


@pytest.mark.parametrize(
    ("messages", "fields", "role", "content"),
    [
        ([{"role": "assistant", "content": "Once"}], {}, "assistant", "Once!"),
        ([{"role": "assistant", "content": SAID}], {}, "assistant", "Once\nupon!"),
        ([{"role": "user", "content": "Hi"}], {}, "assistant", "!"),
        ([{"role": "user", "content": "Hi"}], {"add_generation_prompt": False}, "user", "Hi!"),
        (
            [{"role": "assistant", "content": "Once"}],
            {"add_generation_prompt": False, "continue_final_message": True, "tools": TOOLS},
            "assistant",
            "Once!",
        ),
    ],
)
def test_the_echo_of_a_chat_is_the_last_message_if_it_has_the_role_of_the_answer(
    messages: Any, fields: Any, role: str, content: str
) -> None:
    of = task(2)
    news = [piece(of, "!", "stop", choice=choice) for choice in (0, 1)]
    for echo in (True, False):
        shown = content if echo else "!"
        answer = whole(reply(chat(messages=messages, echo=echo, n=2, **fields), of), news)
        assert [row["message"]["content"] for row in answer["choices"]] == [shown] * 2
        assert [row["message"]["role"] for row in answer["choices"]] == [role] * 2
        made = reply(chat(messages=messages, echo=echo, n=2, stream=True, **fields), of)
        chunks = [row["choices"][0] for row in rows(made.events(news))[:-1]]
        for index in (0, 1):
            deltas = [row["delta"] for row in chunks if row["index"] == index]
            assert deltas[0] == {"role": role, "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == shown


def test_the_echo_of_a_chat_has_no_scores_and_stands_beside_tool_calls() -> None:
    of = task(logprobs=0)
    score = TokenLogprob(33, -0.5, 1, ())
    messages = [{"role": "assistant", "content": "<tool_call>"}]
    query = chat(messages=messages, echo=True, logprobs=True, tools=TOOLS)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = whole(reply(query, of, parser="hermes"), [piece(of, text, "stop", logprobs=(score,))])
    (row,) = answer["choices"]
    assert row["message"]["content"] == "<tool_call>"
    assert [call["function"]["name"] for call in row["message"]["tool_calls"]] == ["f"]
    assert len(row["logprobs"]["content"]) == 1


def test_an_echo_precedes_the_answer_with_the_scores_of_the_prompt() -> None:
    of = task(logprobs=1)
    scores: tuple[TokenLogprob | None, ...] = (None, TokenLogprob(105, -2.0, 2, ((97, -1.0),)))
    news = piece(of, "!", "length", logprobs=(TokenLogprob(33, -0.5, 1, ((33, -0.5),)),), prompt_logprobs=scores)
    for stream in (False, True):
        made = reply(completion(echo=True, logprobs=1, stream=stream), of)
        row = rows(made.events([news]))[0]["choices"][0] if stream else whole(made, [news])["choices"][0]
        assert row["text"] == "Hi!"
        assert row["logprobs"] == {
            "tokens": ["H", "i", "!"],
            "token_logprobs": [None, -2.0, -0.5],
            "top_logprobs": [None, {"i": -2.0, "a": -1.0}, {"!": -0.5}],
            "text_offset": [0, 1, 2],
        }


def test_offsets_continue_from_chunk_to_chunk() -> None:
    of = task(logprobs=0)
    made = reply(completion(stream=True, logprobs=0), of)
    found = []
    for letter in "abc":
        found += rows(made.events([piece(of, letter, logprobs=(TokenLogprob(ord(letter), -1.0, 1),))]))
    assert [row["choices"][0]["logprobs"]["text_offset"] for row in found] == [[0], [1], [2]]


def test_the_scores_of_a_chat_have_bytes_and_alternatives() -> None:
    of = task(logprobs=1)
    score = TokenLogprob(65, -0.25, 1, ((65, -0.25),))
    answer = whole(reply(chat(logprobs=True, top_logprobs=1), of), [piece(of, "A", "stop", logprobs=(score,))])
    row = {"token": "A", "logprob": -0.25, "bytes": [65]}
    assert answer["choices"][0]["logprobs"] == {"content": [{**row, "top_logprobs": [row]}], "refusal": None}


def test_token_ids_come_where_they_are_wanted() -> None:
    of = task()
    answer = whole(reply(chat(return_token_ids=True), of), [piece(of, "A", "stop")])
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([72, 105], [65])
    of = task()
    made = reply(completion(return_token_ids=True, stream=True), of)
    rows_of = [*rows(made.events([piece(of, "A")])), *rows(made.events([piece(of, "B", "stop")]))]
    assert [row["choices"][0].get("token_ids") for row in rows_of[:-1]] == [[65], [66], None]
    assert rows_of[0]["choices"][0]["prompt_token_ids"] == [72, 105]


def test_the_matched_stop_is_named() -> None:
    of = task()
    answer = whole(reply(completion(stop="x"), of), [piece(of, "a", "stop", stop="x")])
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", "x")


def test_an_answer_at_its_deadline_counts_as_cut_off() -> None:
    of = task()
    made = reply(completion(), of)
    answer = whole(made, [piece(of, "a", "deadline")])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert not made.timed_out
    late = reply(completion(), of)
    late.add([piece(of, "", "deadline")])
    assert late.timed_out


def test_an_error_amid_a_stream_is_an_event_without_done() -> None:
    of = task()
    made = reply(chat(stream=True), of)
    made.events([piece(of, "a")])
    events = made.events([piece(of, "", "error", error=InternalError("it broke"))])
    assert rows(events)[-1]["error"]["message"] == "it broke"
    assert DONE not in events
    assert isinstance(made.error, InternalError)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_calls_are_members_of_the_message() -> None:
    of = task()
    answer = whole(reply(chat(tools=TOOLS), of, parser="hermes"), [piece(of, CALL, "stop")])
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1_0_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]


@pytest.mark.parametrize(("end", "reason"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_is_cut_off_within_a_call_says_so(end: EndReason, reason: str) -> None:
    of = task()
    answer = whole(reply(chat(tools=TOOLS), of, parser="hermes"), [piece(of, CALL, end)])
    assert answer["choices"][0]["finish_reason"] == reason


def test_a_named_call_ends_with_stop() -> None:
    of = task()
    named = {"type": "function", "function": {"name": "f"}}
    answer = whole(reply(chat(tools=TOOLS, tool_choice=named), of), [piece(of, '{"a": 1}', "stop")])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def joined(found: list[Any]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Text, calls and reasons of a streamed chat."""
    text, calls, reasons = "", [], []
    for row in found[:-1]:
        choice = row["choices"][0]
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append(["", ""])
            function = call["function"]
            calls[call["index"]][0] += function.get("name", "")
            calls[call["index"]][1] += function["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, [(name, arguments) for name, arguments in calls], reasons


@given(
    text=some.sampled_from([CALL, f"First {CALL} then {CALL}", "no call <tool", 'é\u2028"\\']),
    cuts=some.sets(some.integers(1, 90)),
)
def test_a_stream_says_the_same_as_the_whole_answer(text: str, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(places)]
    of = task()
    message = whole(
        reply(chat(tools=TOOLS), of, parser="hermes"), [*(piece(of, part) for part in parts), piece(of, "", "stop")]
    )
    made = reply(chat(tools=TOOLS, stream=True), of, parser="hermes")
    events = b"".join(made.events([piece(of, part)]) for part in parts) + made.events([piece(of, "", "stop")])
    choice = message["choices"][0]
    calls = [tuple(call["function"].values()) for call in choice["message"].get("tool_calls", ())]
    assert joined(rows(events)) == (choice["message"]["content"] or "", calls, [choice["finish_reason"]])
