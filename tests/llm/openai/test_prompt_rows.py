"""Tests of ``remora_llm.openai.prompt_rows``; tests/adapters asks models through it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.prompt_rows import Texts, TextStream, answer_of_texts, error_of_texts, read_shape


def body(document: Any) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("document", "action"),
    [
        ({"messages": [], "prompt": "a"}, "chat"),
        ({"prompt": "a"}, "completions"),
        ({"input": ["a"]}, "embeddings"),
        ({"query": "a", "documents": ["b"]}, "rerank"),
        ({"inputs": "a"}, "completions"),
        ({"inputs": ["a", "b"]}, "completions"),
        ({"instances": [{"@requestFormat": "chatCompletions", "messages": []}]}, "chat"),
        ({"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}, None),
        ({"inputs": []}, None),
        ({"instances": [[1.0]]}, None),
        ({}, None),
        ([{"prompt": "a"}], None),
    ],
)
def test_the_shape_of_a_body_names_its_route(document: Any, action: str | None) -> None:
    shaped = read_shape(body(document))
    assert (shaped.route.action if shaped else None) == action


def test_the_body_of_openais_shapes_is_passed_on_as_it_is() -> None:
    given = body({"messages": [{"role": "user", "content": "a"}], "stream": True})
    shaped = read_shape(given)
    assert shaped is not None
    assert shaped.body is given
    assert shaped.stream


def test_parameters_get_openais_names_and_greedy_is_the_default() -> None:
    document = {
        "inputs": "a",
        "parameters": {"max_new_tokens": 5, "stop_sequences": ["x"], "top_p": 0.5, "watermark": False, "seed": None},
    }
    shaped = read_shape(body(document))
    assert shaped is not None
    made = json.loads(bytes(shaped.body))
    assert made == {"prompt": "a", "max_tokens": 5, "stream": False, "stop": ["x"], "top_p": 0.5, "temperature": 0}
    sampled = read_shape(body({"inputs": "a", "parameters": {"do_sample": True, "temperature": 2}}))
    assert sampled is not None
    assert json.loads(bytes(sampled.body))["temperature"] == 2
    assert json.loads(bytes(sampled.body))["max_tokens"] == 30


@given(st.binary(max_size=80))
def test_other_bytes_have_no_shape_or_a_parameter_is_named(content: bytes) -> None:
    with contextlib.suppress(ParameterError):
        shaped = read_shape(content)
        assert shaped is None or content.lstrip().startswith(b"{")


def chunk(text: str, ids: tuple[int, ...] = (), reason: str | None = None, stop: str | None = None) -> bytes:
    scores = {"token_logprobs": [-0.5] * len(ids)} if ids else None
    choice = {"text": text, "finish_reason": reason, "stop_reason": stop, "token_ids": list(ids), "logprobs": scores}
    return b"data: " + body({"choices": [choice]}) + b"\n\n"


@given(st.integers(1, 40), st.booleans())
def test_a_stream_is_converted_whatever_its_parts(size: int, events: bool) -> None:
    whole = chunk("a", (1,)) + chunk("bc", (2, 3)) + chunk("", (), "stop", "END") + b"data: [DONE]\n\n"
    stream = TextStream(Texts(("p",), details=True, full_text=True), events=events)
    made = b"".join(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    rows = [json.loads(row.removeprefix(b"data:")) for row in made.split(b"\n\n" if events else b"\n") if row]
    assert [row["token"]["id"] for row in rows] == [1, 2, 3, None]
    assert "".join(row["token"]["text"] for row in rows) == "abc"
    assert rows[-1]["generated_text"] == "pabc"
    assert rows[-1]["details"] == {"finish_reason": "stop_sequence", "generated_tokens": 3, "inputs": "p"}


def test_an_error_amid_a_stream_is_a_row() -> None:
    event = b"data: " + body({"error": {"message": "lost", "type": "server_error"}}) + b"\n\n"
    assert TextStream(Texts(("p",)), events=False).feed(event) == b'{"error":"lost","error_type":"server_error"}\n'
    assert error_of_texts(b"not JSON") == b"not JSON"


def test_reasons_have_the_names_of_text_generation_inference() -> None:
    for reason, stop, name in (("stop", None, "eos_token"), ("stop", "x", "stop_sequence"), ("length", None, "length")):
        choice = {"index": 0, "text": "t", "finish_reason": reason, "stop_reason": stop}
        answer = json.loads(answer_of_texts(body({"choices": [choice]}), Texts(("p",), details=True)))
        assert answer["details"]["finish_reason"] == name
