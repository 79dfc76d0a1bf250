"""Tests of ``remora_llm.generation.parameters``."""

from __future__ import annotations

from typing import Any

import pytest

from remora_llm.generation.parameters import parse_grammar, parse_parameters
from remora_llm.generation.tasks import Grammar, ParameterError, Sampling, Task


def parse(**parameters: Any) -> Task:
    return parse_parameters(parameters, (1, 2, 3), seed=99, room=1000)


def test_the_defaults_are_those_of_vllm() -> None:
    task = parse()
    assert task.sampling == Sampling(temperature=1.0, seed=99)
    assert (task.prompt, task.max_tokens, task.choices, task.stop) == ((1, 2, 3), 16, 1, ())
    assert parse_parameters({}, (1,), seed=0, room=5).max_tokens == 5


def test_every_parameter_reaches_the_task() -> None:
    task = parse(
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "seed": -2},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"7": -5}, "n": 2, "stop": "x"},
        **{"stop_token_ids": [4], "ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "logprobs": 1},
        **{"prompt_logprobs": 0, "skip_special_tokens": False, "user": "u", "priority": 3},
        **{"structured_outputs": {"regex": "a+"}, "lora_name": "french"},
    )
    assert task.sampling == Sampling(0.5, 40, 0.9, 0.1, 1.1, 0.2, 0.3, ((7, -5.0),), (1 << 64) - 2)
    assert (task.choices, task.stop, task.stop_tokens, task.ignore_end) == (2, ("x",), frozenset({4}), True)
    assert (task.max_tokens, task.min_tokens, task.logprobs, task.prompt_logprobs) == (9, 2, 1, 0)
    assert (task.skip_special, task.user, task.priority, task.adapter) == (False, "u", 3, "french")
    assert task.grammar == Grammar("regex", "a+")


def test_numbers_may_be_texts() -> None:
    task = parse(temperature="0.1", max_tokens="100", top_k="-1", ignore_eos="true")
    assert (task.sampling.temperature, task.max_tokens, task.sampling.top_k, task.ignore_end) == (0.1, 100, 0, True)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"max_token": 5}, "max_token"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "9" * 5000}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"best_of": 2}, "best_of"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(parameters: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError) as raised:
        parse(**parameters)
    assert raised.value.parameter == name
    assert name in raised.value.message or name == "structured_outputs"


def test_grammars_of_all_kinds_are_read() -> None:
    assert parse_grammar(None) is None
    assert parse_grammar({"json": {"type": "object"}}) == Grammar("json_schema", '{"type": "object"}')
    assert parse_grammar({"json": "{}"}) == Grammar("json_schema", "{}")
    assert parse_grammar({"choice": ["a", "b"]}) == Grammar("choice", '["a", "b"]')
    assert parse_grammar({"grammar": "start: x"}) == Grammar("lark", "start: x")
    assert parse_grammar({"json_object": True}) == Grammar("json_object")
