"""Tests of ``remora_llm.openai.tensors``: parameters to inputs, responses to pieces."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from remora.errors import InternalError
from remora.messages import Response
from remora.messages import Tensor as Output
from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.mapping import Tensor, TensorUse
from remora_llm.openai.requests import Query, decode
from remora_llm.openai.tensors import TextAnswer, stops_of, task_for, text_inputs, token_inputs

USE = TensorUse("text", "P", "A", inputs={"max_tokens": "limit", "stop": "stops", "top_k": "k"})
INPUTS = {
    "P": Tensor("P", "BYTES", (-1,)),
    "limit": Tensor("limit", "INT32", (1,)),
    "stops": Tensor("stops", "BYTES", (-1,), True),
    "k": Tensor("k", "INT32", (1,), True),
    "stream": Tensor("stream", "BOOL", (1,), True),
}


def query(**fields: Any) -> Query:
    return decode("completions", json.dumps({"prompt": "Hi", **fields}).encode())


def values(given: Query, inputs: Any = INPUTS, use: TensorUse = USE, *, batched: bool = True) -> dict[str, Any]:
    return {name: array.tolist() for name, array in text_inputs(given, "Hi", use, inputs, batched=batched).items()}


def test_each_parameter_has_its_input_and_a_needed_limit_a_default() -> None:
    assert values(query(top_k=3, stop="x")) == {
        "P": [[b"Hi"]], "stops": [[b"x"]], "k": [[3]], "limit": [[16]], "stream": [[False]]
    }  # fmt: skip
    assert values(query(max_tokens=4, stop=["a", "b"]), batched=False)["stops"] == [b"a", b"b"]
    chat = decode("chat", b'{"messages": [{"role": "user", "content": "Hi"}]}')
    assert values(chat)["limit"] == [[USE.default_max_tokens]]


def test_all_parameters_go_into_one_input_as_json_where_there_is_one() -> None:
    inputs = {**INPUTS, "sampling_parameters": Tensor("sampling_parameters", "BYTES", (1,))}
    found = values(query(seed=4, top_k=2, priority=1, user="me"), inputs)
    assert json.loads(found["sampling_parameters"][0][0]) == {"seed": 4, "top_k": 2}
    assert "k" not in found


def test_what_a_model_cannot_honour_is_refused() -> None:
    with pytest.raises(ParameterError, match="no input for seed"):
        values(query(seed=1))
    for fields in ({"n": 2}, {"logprobs": 1}, {"prompt": [1]}, {"return_token_ids": True}):
        with pytest.raises(ParameterError):
            task_for(query(**fields))


def test_stop_strings_are_searched_here_if_the_model_takes_none() -> None:
    assert stops_of(query(stop="x"), USE, INPUTS) == ()
    assert stops_of(query(stop="x"), TensorUse("text", "P", "A"), INPUTS) == ("x",)
    assert stops_of(query(), TensorUse("text", "P", "A"), INPUTS) == ()


def response(text: str, **more: Any) -> Response:
    rows = [Output("A", "BYTES", np.array([text.encode()], object))]
    return Response([*rows, *(Output(name, "BYTES", np.array([value], object)) for name, value in more.items())])


def test_responses_are_pieces_of_an_answer_with_its_end() -> None:
    answer = TextAnswer(task_for(query()), USE, ())
    first = answer.piece(response("He", num_output_tokens=2, num_input_tokens=7), final=False)
    assert (first.text, len(first.tokens), first.end) == ("He", 2, None)
    last = answer.piece(response("llo", finish_reason=b"length"), final=True)
    assert last.text == "llo"
    assert last.end is not None
    assert last.end.reason == "length"
    assert answer.prompt_tokens == 7


def test_a_stop_string_ends_an_answer_wherever_responses_are_cut() -> None:
    answer = TextAnswer(task_for(query()), USE, ("END",))
    texts = [answer.piece(response(part), final=False) for part in ("aE", "N", "Dx", "more")]
    assert "".join(piece.text for piece in texts) == "a"
    assert texts[2].end is not None
    assert (texts[2].end.reason, texts[2].end.stop) == ("stop", "END")
    held = TextAnswer(task_for(query()), USE, ("END",))
    assert held.piece(response("aEN"), final=False).text == "a"
    assert held.piece(None, final=True).text == "EN"


def test_an_error_of_the_model_ends_its_answer() -> None:
    answer = TextAnswer(task_for(query()), USE, ())
    piece = answer.piece(InternalError("broken"), final=True)
    assert piece.end is not None
    assert (piece.end.reason, str(piece.end.error)) == ("error", "broken")


ENCODER = TensorUse("embeddings", "", "E", tokens="input_ids")
ENCODER_INPUTS = {
    "input_ids": Tensor("input_ids", "INT32", (-1,)),
    "attention_mask": Tensor("attention_mask", "INT64", (-1,)),
}


def test_token_ids_of_a_batch_are_padded_outside_of_the_mask() -> None:
    made = token_inputs([[5, 6, 7], [8]], ENCODER, ENCODER_INPUTS, batched=True)
    assert made["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (made["input_ids"].dtype, made["attention_mask"].dtype) == (np.int32, np.int64)


def test_token_ids_take_the_shape_of_the_model() -> None:
    assert token_inputs([[5, 6]], ENCODER, ENCODER_INPUTS, batched=False)["input_ids"].shape == (2,)
    own_rows = {"input_ids": Tensor("input_ids", "INT64", (-1, -1))}
    assert token_inputs([[5, 6]], ENCODER, own_rows, batched=False)["input_ids"].shape == (1, 2)
    fixed = {"input_ids": Tensor("input_ids", "INT64", (4,))}
    assert token_inputs([[5, 6]], ENCODER, fixed, batched=True)["input_ids"].tolist() == [[5, 6, 0, 0]]
    with pytest.raises(ParameterError, match="at most 4"):
        token_inputs([[1] * 5], ENCODER, fixed, batched=True)


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 70])
def test_a_token_id_beyond_the_type_is_refused(token: int) -> None:
    with pytest.raises(ParameterError, match="between 0 and 2147483647"):
        token_inputs([[1, token]], ENCODER, ENCODER_INPUTS, batched=True)
