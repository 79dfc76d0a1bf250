"""Tests of ``remora_llm.generation.expectation``."""

from __future__ import annotations

import pytest

from remora.errors import QueueFullError
from remora_llm.generation.expectation import expected_first_token_ns, refuse_if_late
from remora_llm.generation.tasks import EngineStats

STEP_NS = 10_000_000
BUSY = EngineStats(running=4, steps=100, step_ns=100 * STEP_NS, generated_tokens=200, ended={"stop": 6, "length": 4})
"""Answers have 20 tokens."""


def stats(waiting: int, running: int = 4) -> EngineStats:
    return EngineStats(
        running=running,
        waiting=waiting,
        steps=BUSY.steps,
        step_ns=BUSY.step_ns,
        generated_tokens=BUSY.generated_tokens,
        ended=BUSY.ended,
    )


@pytest.mark.parametrize("known", [EngineStats(), EngineStats(waiting=50, running=16, steps=3, step_ns=3 * STEP_NS)])
def test_nothing_is_expected_before_an_answer_has_ended(known: EngineStats) -> None:
    assert expected_first_token_ns(known) == 0
    refuse_if_late(known, 1)


def test_without_others_that_wait_the_next_step_writes_the_token() -> None:
    assert expected_first_token_ns(stats(0)) == STEP_NS


def test_those_that_wait_take_the_rows_as_answers_end() -> None:
    assert expected_first_token_ns(stats(3)) == STEP_NS * (1 + 20)
    assert expected_first_token_ns(stats(7)) == STEP_NS * (1 + 2 * 20)
    assert expected_first_token_ns(stats(7, running=8)) == STEP_NS * (1 + 20)


def test_a_request_is_refused_if_even_its_first_token_would_be_late() -> None:
    refuse_if_late(stats(3), 210_000_000)
    with pytest.raises(QueueFullError, match="expected in 210 ms, after the deadline of 209 ms") as refused:
        refuse_if_late(stats(3), 209_000_000)
    assert refused.value.retry_after_s == 1
    with pytest.raises(QueueFullError) as refused:
        refuse_if_late(stats(99), 1_000_000_000)
    assert refused.value.retry_after_s == 4
