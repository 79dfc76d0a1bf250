"""Tests of ``remora_llm.generation.sampling``."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import InternalError
from remora_llm.generation.sampling import Sampler, draw, logprob_of, prompt_logprobs, random_number
from remora_llm.generation.tasks import Sampling, Task

Row = npt.NDArray[np.float32]
GREEDY = Sampling(temperature=0)


def row_of(seed: int, size: int = 1000) -> Row:
    # few different values, so that ties occur
    return (np.random.default_rng(seed).standard_normal(size) * 3).round(1).astype(np.float32)


def kept(row: Row, sampling: Sampling) -> list[int]:
    """The tokens that may be drawn, by sorting the whole row."""
    shares = np.exp((row.astype(np.float64) - row.max()) / sampling.temperature)
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = [token for token in order if shares[token] >= sampling.min_p * (1 - 1e-6)]
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, left, found = sum(shares[order]), 0.0, []
    for token in order:
        found.append(token)
        left += shares[token]
        if left >= sampling.top_p * total:
            break
    return found


@settings(max_examples=200)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 3, 50, 5000]),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([7, 300, 1000, 5000]),
)
def test_only_kept_tokens_are_drawn(seed: int, k: int, p: float, m: float, temperature: float, size: int) -> None:
    sampling = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=m)
    row = row_of(seed, size)
    allowed = kept(row, sampling)
    drawn = {draw(row, float(row.max()), sampling, number) for number in (0.0, 0.3, 0.6, 0.9, 1 - 2**-53)}
    # the last token of a nucleus depends on rounding of the sums
    assert len(drawn - set(allowed)) == 0 or p < 1
    assert all(row[token] >= row[allowed[-1]] - 0.11 for token in drawn)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(min_p=0.1, top_p=0.9)],
)
def test_tokens_are_drawn_in_proportion(sampling: Sampling) -> None:
    row = row_of(3, 40)
    allowed = kept(row, sampling)
    shares = {token: math.exp((float(row[token]) - float(row.max())) / sampling.temperature) for token in allowed}
    count = 4000
    drawn = Counter(draw(row, float(row.max()), sampling, (place + 0.5) / count) for place in range(count))
    assert set(drawn) <= set(allowed)
    for token in allowed:
        assert drawn[token] / count == pytest.approx(shares[token] / sum(shares.values()), abs=2 / count)


def test_equal_seeds_give_equal_tokens_and_choices_differ() -> None:
    def tokens(seed: int, choice: int) -> list[int]:
        sampler = Sampler(Task((1,), 20, Sampling(seed=seed)), choice)
        return [sampler.choose(row_of(place), place).token for place in range(20)]

    assert tokens(1, 0) == tokens(1, 0)
    assert tokens(1, 0) != tokens(2, 0)
    assert tokens(1, 0) != tokens(1, 1)


def test_a_position_gets_its_number_whatever_was_drawn_before() -> None:
    numbers = [random_number(9, 0, place) for place in range(1000)]
    assert random_number(9, 0, 500) == numbers[500]
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 1000 == pytest.approx(0.5, abs=0.05)
    assert len({*numbers, *(random_number((1 << 64) - 1, 7, place) for place in range(1000))}) == 2000


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert Sampler(Task((1,), 1, GREEDY), 0).choose(np.array([0, 5, 5, 1], np.float32), 0).token == 1


def test_the_bias_applies_to_choice_and_log_probability() -> None:
    sampling = replace(GREEDY, logit_bias=((3, 100.0), (0, -100.0)))
    row = row_of(1)
    before = row.copy()
    token, score = Sampler(Task((1,), 1, sampling, logprobs=1), 0).choose(row, 0)
    assert token == 3
    assert score is not None
    assert score.logprob == pytest.approx(0, abs=1e-6)
    assert np.array_equal(row, before)


def test_penalties_follow_their_definitions() -> None:
    def next_logits(sampling: Sampling, prompt: tuple[int, ...], written: list[int]) -> Row:
        sampler = Sampler(Task(prompt, 9, sampling), 0)
        for token in written:
            sampler.accept(token)
        return sampler._processed(np.array([2.0, -2.0, 1.0, 3.0], np.float32))

    assert next_logits(replace(GREEDY, repetition_penalty=2.0), (0, 1), [2, 2]).tolist() == [1.0, -4.0, 0.5, 3.0]
    assert next_logits(replace(GREEDY, presence_penalty=0.5), (0,), [2, 2]).tolist() == [2.0, -2.0, 0.5, 3.0]
    assert next_logits(replace(GREEDY, frequency_penalty=0.5), (0,), [2, 2]).tolist() == [2.0, -2.0, 0.0, 3.0]


def test_banned_and_forbidden_tokens_are_not_chosen() -> None:
    row = np.array([5, 4, 3, 2], np.float32)
    sampler = Sampler(Task((1,), 9, GREEDY, min_tokens=2), 0, {0})
    assert sampler.choose(row, 1).token == 1
    assert sampler.choose(row, 2).token == 0
    assert sampler.choose(row, 1, np.array([True, False, False, True])).token == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_logits_that_are_not_finite_are_an_error(value: float, sampling: Sampling) -> None:
    row = row_of(1)
    row[500] = value
    with pytest.raises(InternalError, match=f"{value}"):
        Sampler(Task((1,), 1, sampling), 0).choose(row, 0)


def test_a_grammar_without_any_token_is_an_error() -> None:
    with pytest.raises(InternalError):
        Sampler(Task((1,), 1, GREEDY), 0).choose(row_of(1), 0, np.zeros(1000, bool))


def test_log_probabilities_are_those_of_the_whole_distribution() -> None:
    row = row_of(4)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    score = logprob_of(row, 17, 5)
    assert score.logprob == pytest.approx(exact[17], abs=1e-5)
    assert score.rank == int((row > row[17]).sum()) + 1
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:5]
    assert [token for token, _ in score.top] == order
    assert [value for _, value in score.top] == pytest.approx(exact[order], abs=1e-5)
    (again,) = prompt_logprobs([row], [17], 5)
    assert again == score
