"""Tests of ``remora_llm.generation.tasks``."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from remora.errors import InvalidArgumentError
from remora_llm.generation.tasks import Grammar, ModelFacts, ParameterError, Sampling, Task, check_task

FACTS = ModelFacts(context=100, vocabulary=50, end_tokens=frozenset({2}), max_logprobs=5, grammars=frozenset({"regex"}))


def test_a_task_within_the_limits_is_accepted() -> None:
    check_task(Task((1, 2, 3), 97), FACTS)
    check_task(Task((1,), 0, prompt_logprobs=0), FACTS)
    check_task(Task((1,), 4, Sampling(seed=(1 << 64) - 1, logit_bias=((49, -100.0),)), min_tokens=4), FACTS)


BAD = [
    (Task((), 1), "prompt", "empty"),
    (Task((1, 50), 1), "prompt", "token id 50"),
    (Task((-1,), 1), "prompt", "token id -1"),
    (Task((1,) * 100, 1), "prompt", "100 tokens"),
    (Task((1,) * 10, 91), "max_tokens", "together 101"),
    (Task((1,), -1), "max_tokens", "negative"),
    (Task((1,), 0, choices=2), "n", "exactly one"),
    (Task((1,), 1, choices=10**9), "n", "between 1 and"),
    (Task((1,), 1, min_tokens=2), "min_tokens", "between 0 and"),
    (Task((1,), 1, stop=("",)), "stop", "1 to"),
    (Task((1,), 1, stop=("x",) * 1000), "stop", "1000 strings"),
    (Task((1,), 1, logprobs=6), "logprobs", "between 0 and 5"),
    (Task((1,), 1, prompt_logprobs=-1), "prompt_logprobs", "between 0 and 5"),
    (Task((1,), 1, grammar=Grammar("lark", "x")), "response_format", "lark"),
    (Task((1,), 1, adapter="other"), "model", "no adapter 'other'"),
    (Task((1,), 1, Sampling(temperature=-0.1)), "temperature", "between 0 and"),
    (Task((1,), 1, Sampling(temperature=float("nan"))), "temperature", "nan"),
    (Task((1,), 1, Sampling(top_p=0)), "top_p", "greater than 0"),
    (Task((1,), 1, Sampling(min_p=1.5)), "min_p", "between 0 and 1"),
    (Task((1,), 1, Sampling(repetition_penalty=0)), "repetition_penalty", "between 0.01 and 100"),
    (Task((1,), 1, Sampling(top_k=-1)), "top_k", "positive"),
    (Task((1,), 1, Sampling(seed=-1)), "seed", "2^64"),
    (Task((1,), 1, Sampling(logit_bias=((50, 1.0),))), "logit_bias", "token id 50"),
    (Task((1,), 1, Sampling(logit_bias=((4, 101.0),))), "logit_bias", "-100 to 100"),
]


@pytest.mark.parametrize(("task", "parameter", "text"), BAD, ids=[f"{row[1]}-{row[2]}" for row in BAD])
def test_a_task_that_the_model_cannot_honour_is_refused_with_the_parameter(
    task: Task, parameter: str, text: str
) -> None:
    with pytest.raises(ParameterError) as raised:
        check_task(task, FACTS)
    assert raised.value.parameter == parameter
    assert text in raised.value.message
    assert isinstance(raised.value, InvalidArgumentError)


@pytest.mark.parametrize("name", ["logprobs", "min_p"])
def test_a_parameter_that_an_engine_lacks_is_refused_unless_it_has_its_default(name: str) -> None:
    facts = replace(FACTS, unsupported=frozenset({name}))
    check_task(Task((1,), 1), facts)
    task = Task((1,), 1, Sampling(min_p=0.1), logprobs=1)
    with pytest.raises(ParameterError, match=name):
        check_task(task, facts)


def test_tasks_compare_by_identity_and_sampling_by_value() -> None:
    assert Task((1,), 1) != Task((1,), 1)
    assert Sampling(seed=3) == Sampling(seed=3)
    assert not Sampling().penalizes
    assert {each.name for each in fields(Sampling)} >= {"temperature", "seed"}
