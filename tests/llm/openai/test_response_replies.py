"""Tests of ``remora_llm.openai.response_replies``: whole answers and events from the same pieces."""

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
from remora_llm.openai.replies import Heading
from remora_llm.openai.response_replies import ResponseReply
from remora_llm.openai.responses import decode_response
from remora_llm.testing import ByteTokens

HEADING = Heading("1", 5, "m", "print")
TOOLS = [{"type": "function", "name": "f"}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def reply(task: Task, parser: str = "", **fields: Any) -> ResponseReply:
    query = decode_response(json.dumps({"model": "m", "input": "Hi", **fields}).encode())
    return ResponseReply(query, [task], HEADING, ByteTokens(), parser)


def task(logprobs: int | None = None) -> Task:
    return Task((72, 105), 9, logprobs=logprobs)


def piece(of: Task, text: str, end: EndReason | None = None, **more: Any) -> Piece:
    made = None if end is None else End(end, Usage(2, 3, 1), None, more.pop("error", None))
    return Piece(of, 0, tuple(text.encode()), text, end=made, **more)


def events(made: ResponseReply, *steps: Sequence[Piece]) -> list[Any]:
    octets = b"".join(made.events(step) for step in steps)
    found = []
    for event in octets.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def kinds(found: Sequence[Any]) -> list[str]:
    return [each["type"].removeprefix("response.") for each in found]


def test_a_text_is_answered_whole_with_its_usage() -> None:
    one = task()
    made = reply(one, metadata={"k": "v"})
    made.add([piece(one, "Hel"), piece(one, "lo", "stop")])
    assert made.done
    found = json.loads(made.body())
    assert (found["id"], found["object"], found["status"], found["model"]) == ("resp_1", "response", "completed", "m")
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert found["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert (found["metadata"], found["temperature"], found["error"]) == ({"k": "v"}, 1.0, None)


def test_a_stream_has_the_events_of_its_items_in_order_and_numbers_without_a_gap() -> None:
    one = task()
    found = events(reply(one), [piece(one, "Hel")], [piece(one, "lo")], [piece(one, "", "stop")])
    assert kinds(found) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert (found[0]["response"]["status"], found[0]["response"]["output"]) == ("in_progress", [])
    assert [each["delta"] for each in found[4:6]] == ["Hel", "lo"]
    assert found[6]["text"] == "Hello"
    assert {each["item_id"] for each in found[3:8]} == {found[2]["item"]["id"]}
    assert found[-1]["response"]["output"] == [found[-2]["item"]]


def test_an_answer_that_its_limit_cuts_is_incomplete() -> None:
    one = task()
    *_, last = events(reply(one), [piece(one, "a", "length")])
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_an_answer_without_text_is_an_empty_message() -> None:
    one = task()
    (item,) = events(reply(one), [piece(one, "", "stop")])[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_calls_are_items_beside_the_text() -> None:
    one = task()
    found = events(
        reply(one, "hermes", tools=TOOLS), *([piece(one, each)] for each in f"So {CALL}"), [piece(one, "", "stop")]
    )
    message, call = found[-1]["response"]["output"]
    assert message["content"][0]["text"].strip() == "So"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {"a": 1})
    names = kinds(found)
    assert names.index("output_text.done") < names.index("function_call_arguments.delta")
    parts = [each["delta"] for each in found if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(parts) == call["arguments"]
    done = next(each for each in found if each["type"] == "response.function_call_arguments.done")
    assert (done["arguments"], done["name"]) == (call["arguments"], "f")
    assert {each["output_index"] for each in found if "output_index" in each} == {0, 1}


def test_a_required_call_of_one_tool_is_one_item() -> None:
    one = task()
    made = reply(one, tools=TOOLS, tool_choice={"type": "function", "name": "f"})
    made.add([piece(one, '{"a"'), piece(one, ": 1}", "stop")])
    (call,) = json.loads(made.body())["output"]
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')


def test_log_probabilities_belong_to_their_texts() -> None:
    one = task(1)
    score = TokenLogprob(97, -0.5, 1, ((98, -1.0),))
    row = {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}],
    }
    found = events(
        reply(one, top_logprobs=1), [piece(one, "", logprobs=(score,))], [piece(one, "aa", "stop", logprobs=(score,))]
    )
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert [each["logprobs"] for each in deltas] == [[row, row]]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == [row, row]


def test_an_error_ends_the_stream_as_failed() -> None:
    one = task()
    made = reply(one)
    *_, last = events(made, [piece(one, "a")], [piece(one, "", "error", error=InternalError("the step failed"))])
    assert made.error is not None
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the step failed"}


def test_a_deadline_before_the_first_token_is_known() -> None:
    one = task()
    made = reply(one)
    made.add([piece(one, "", "deadline")])
    assert (made.done, made.timed_out) == (True, True)


@pytest.mark.parametrize("parser", ["", "hermes"])
@given(cuts=some.lists(some.integers(0, 90), max_size=6))
def test_streamed_and_whole_answers_have_the_same_items(parser: str, cuts: list[int]) -> None:
    text = f"Well é {CALL} and {CALL}"
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[begin:end] for begin, end in pairwise(places)]
    one = task()
    whole = reply(one, parser, tools=TOOLS)
    whole.add([piece(one, text), piece(one, "", "stop")])
    streamed = events(
        reply(one, parser, tools=TOOLS), *([piece(one, part)] for part in parts), [piece(one, "", "stop")]
    )
    expected = json.loads(whole.body())["output"]
    assert streamed[-1]["response"]["output"] == expected
    joined = "".join(each["delta"] for each in streamed if each["type"] == "response.output_text.delta")
    assert joined == "".join(item["content"][0]["text"] for item in expected if item["type"] == "message")
