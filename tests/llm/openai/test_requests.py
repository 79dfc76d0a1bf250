"""Tests of ``remora_llm.openai.requests``: bodies to queries and tasks."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from remora.errors import InvalidArgumentError
from remora_llm.generation import Generation
from remora_llm.generation.step_loop import LoopSettings, StepLoop
from remora_llm.generation.tasks import ParameterError, Task
from remora_llm.openai.fields import CHAT, COMPLETION
from remora_llm.openai.requests import Query, decode, tasks_of
from remora_llm.testing import ByteTokens, ScriptedStepper

TOOL = {"type": "function", "function": {"name": "f"}}


class PlainTemplate:
    """Template that joins roles and contents."""

    source = ""

    def render(self, messages: Any, **options: Any) -> tuple[int, ...]:
        return tuple("".join(f"{each['role']}:{each['content']};" for each in messages).encode())


def model(**options: Any) -> Generation:
    tokens = ByteTokens()
    engine = StepLoop(ScriptedStepper(length=200), tokens, LoopSettings("m"), lambda: 0, threaded=False)
    return Generation(engine, tokens, PlainTemplate(), **options)


def chat(**fields: Any) -> Query:
    return decode(
        "chat", json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    )


def completion(**fields: Any) -> Query:
    return decode("completions", json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def task_of(query: Query, generation: Generation | None = None) -> Task:
    (task,) = tasks_of(query, generation or model(), 5)
    return task


def test_every_sampling_parameter_reaches_the_task() -> None:
    parameters = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 11, "logit_bias": {"5": 2},
    }  # fmt: skip
    sampling = task_of(completion(**parameters)).sampling
    assert sampling.logit_bias == ((5, 2.0),)
    assert {name: getattr(sampling, name) for name in parameters if name != "logit_bias"} == {
        name: value for name, value in parameters.items() if name != "logit_bias"
    }


def test_every_limit_reaches_the_task() -> None:
    task = task_of(
        completion(
            n=2, stop=["a", "b"], stop_token_ids=[4], ignore_eos=True, min_tokens=2, max_tokens=9, logprobs=3,
            skip_special_tokens=False, priority=4, user="u", structured_outputs={"regex": "a+"}, echo=True,
        )
    )  # fmt: skip
    assert (task.choices, task.stop, task.stop_tokens, task.ignore_end) == (2, ("a", "b"), frozenset({4}), True)
    assert (task.min_tokens, task.max_tokens, task.logprobs, task.prompt_logprobs) == (2, 9, 3, 3)
    assert (task.skip_special, task.priority, task.user) == (False, 4, "u")
    assert task.grammar is not None
    assert task.grammar.kind == "regex"


def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_the_rest_of_the_context() -> None:
    assert task_of(completion()).max_tokens == 16
    assert task_of(chat()).max_tokens == 200 - len("user:Hi;")
    assert task_of(chat(), model(default_max_tokens=30)).max_tokens == 30
    assert task_of(chat(max_tokens=9, max_completion_tokens=4)).max_tokens == 4


def test_the_seed_of_the_server_is_used_without_one_and_the_models_defaults_too() -> None:
    task = task_of(completion(top_p=0.5), model(defaults={"temperature": 0.25, "top_p": 0.75}))
    assert task.sampling.seed == 5
    assert (task.sampling.temperature, task.sampling.top_p) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("Hi", ("Hi",)), ([1, 2], ((1, 2),)), (["a", "b"], ("a", "b")), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_a_list_of_prompts_is_a_task_each() -> None:
    assert [task.prompt for task in tasks_of(completion(prompt=["a", "b"]), model(), 0)] == [(97,), (98,)]


def test_messages_reach_the_template_with_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    query = chat(messages=messages)
    assert query.chat is not None
    assert query.chat.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert bytes(task_of(query).prompt).startswith(b"system:Be brief;")


def test_a_form_of_the_answer_becomes_its_grammar() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert chat(response_format=form).parameters["structured_outputs"] == {"json": schema}
    assert chat(response_format={"type": "json_object"}).is_constrained
    assert not chat(response_format={"type": "text"}).is_constrained
    assert chat(tools=[TOOL], tool_choice="required").is_constrained
    calls = chat(tools=[TOOL], tool_choice="required").parameters
    assert chat(tools=[TOOL], tool_choice="required", response_format=form).parameters == calls
    one_of = chat(tools=[TOOL], response_format=form).parameters["structured_outputs"]["json"]["anyOf"]
    assert one_of == [calls["structured_outputs"]["json"], schema]
    assert not chat(tools=[TOOL]).is_constrained


def test_a_stream_may_have_usage_in_its_chunks() -> None:
    query = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (query.stream, query.usage, query.continuous_usage) == (True, True, True)
    assert not chat(stream=True).usage


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"n": 129}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TOOL]}, "structured_outputs"),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}},
                "tools": [TOOL],
            },
            "response_format",
        ),
    ],
)
def test_a_wrong_chat_is_refused_by_the_name_of_its_parameter(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a"] * 513, "n": 2}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_wrong_completion_is_refused_by_the_name_of_its_parameter(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        completion(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("body", [b"", b"{bad", b"[" * 5000, b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff"])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="the body is not JSON"):
        decode("chat", body)


JSON = some.recursive(
    some.none() | some.booleans() | some.integers(-5, 10**18) | some.floats(allow_nan=False) | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(fields=some.dictionaries(some.sampled_from(sorted(CHAT)), JSON, max_size=5))
def test_any_values_of_a_chat_are_understood_or_refused(fields: dict[str, Any]) -> None:
    _understood_or_refused("chat", {"messages": [{"role": "user", "content": "Hi"}], **fields})


@given(fields=some.dictionaries(some.sampled_from(sorted(COMPLETION)), JSON, max_size=5))
def test_any_values_of_a_completion_are_understood_or_refused(fields: dict[str, Any]) -> None:
    _understood_or_refused("completions", {"prompt": "Hi", **fields})


MODEL = model()


def _understood_or_refused(action: str, fields: dict[str, Any]) -> None:
    with suppress(InvalidArgumentError):
        assert all(isinstance(task, Task) for task in tasks_of(decode(action, json.dumps(fields).encode()), MODEL, 0))
