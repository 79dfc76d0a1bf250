"""Tests of ``remora_llm.generation.tool_calls``."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora_llm.generation.tool_calls import PARSERS, ArgumentsPart, CallBegin, TextPart, ToolEvent, detect_parser


def parse(name: str, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls (name, arguments) of an answer."""
    parser = PARSERS[name]()
    events: list[ToolEvent] = [event for part in parts for event in parser.feed(part)] + parser.finish()
    text = "".join(event.text for event in events if isinstance(event, TextPart))
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.call == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsPart):
            assert event.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return text, calls


def cut(text: str, sizes: list[int]) -> list[str]:
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    return [*parts, text[at:]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[],: é<', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"}', max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.text("abc_", min_size=1, max_size=6), st.dictionaries(st.text("abc", max_size=3), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def answer(name: str, calls: list[tuple[str, Any]], *, reverse: bool) -> str:
    key = "parameters" if name == "llama3" else "arguments"
    rows = [{"name": each, key: arguments} for each, arguments in calls]
    texts = [json.dumps(dict(reversed(row.items())) if reverse else row, ensure_ascii=False) for row in rows]
    if name == "hermes":
        return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)
    if name == "mistral":
        return f"[TOOL_CALLS][{', '.join(texts)}]"
    return "<|python_tag|>" + "; ".join(texts) if name == "llama3" else f" [{', '.join(texts)}]"


@settings(max_examples=60)
@given(CALLS, st.lists(st.integers(1, 9), max_size=40), st.booleans())
@pytest.mark.parametrize("name", list(PARSERS))
def test_calls_are_found_whatever_the_parts(name: str, calls: list[Any], sizes: list[int], reverse: bool) -> None:
    text = answer(name, calls, reverse=reverse)
    shown, found = parse(name, cut(text, sizes))
    assert [(each, json.loads(arguments)) for each, arguments in found] == calls
    assert shown.strip() == ""
    assert parse(name, [text]) == (shown, found)


@settings(max_examples=60)
@given(st.text("ab <tol_c>{[TO", max_size=30), st.lists(st.integers(1, 5), max_size=20))
@pytest.mark.parametrize("name", list(PARSERS))
def test_an_answer_without_calls_is_returned_whole(name: str, text: str, sizes: list[int]) -> None:
    shown, found = parse(name, cut("x" + text, sizes))
    assert (shown, found) == ("x" + text, [])


def test_text_before_a_call_is_shown_at_once() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed("Let me see <tool") == [TextPart("Let me see ")]
    assert parser.feed("box> ") == [TextPart("<toolbox> ")]
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"') == [CallBegin(0, "f"), ArgumentsPart(0, '{"a"')]
    assert parser.feed(": 1}}</tool_call>") == [ArgumentsPart(0, ": 1}")]
    assert parser.finish() == []


def test_an_object_that_is_no_call_is_text() -> None:
    assert parse("json", ['{"answer": ', "42}"]) == ('{"answer": 42}', [])
    assert parse("json", ['{"answer": 4']) == ('{"answer": 4', [])


@pytest.mark.parametrize(
    "text", ["a <tool_call> b </tool_call> c", "<tool_call> b", "<tool_call>b</tool_", "<tool_call>"]
)
def test_a_mark_that_no_object_follows_is_text(text: str) -> None:
    for size in (1, 3, 100):
        assert parse("hermes", cut(text, [size] * 40)) == (text, [])


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert parse("hermes", ['<tool_call>{"name": "now"}</tool_call>']) == ("", [("now", "{}")])


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    assert parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "b']) == ("", [("f", '{"a": "b')])


@pytest.mark.parametrize("name", list(PARSERS))
def test_twice_the_arguments_take_about_twice_the_time(name: str) -> None:
    def spent(size: int) -> float:
        text = answer(name, [("f", {"a": "x\\y" * (size // 4)})], reverse=False)
        parser, begin = PARSERS[name](), time.thread_time()
        for at in range(0, len(text), 8):
            parser.feed(text[at : at + 8])
        return time.thread_time() - begin

    spent(10_000)
    shorts, longs = zip(*[(spent(25_000), spent(200_000)) for _ in range(4)], strict=True)
    assert min(longs) < 8 * 3 * min(shorts)


def test_the_parser_is_seen_from_the_template() -> None:
    assert detect_parser("... <tool_call> ...") == "hermes"
    assert detect_parser("[TOOL_CALLS]") == "mistral"
    assert detect_parser("<|python_tag|>") == "llama3"
    assert detect_parser('{"name": ..., "parameters": ...}') == "json"
    assert detect_parser("{{ messages }}") == ""
