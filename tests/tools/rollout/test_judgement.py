"""Sequential tests of a release, and their error rates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_tools.rollout.judgement import (
    MISSING,
    PROMOTE,
    ROLLBACK,
    WAIT,
    Observed,
    Rate,
    Rules,
    judge,
    latency_limit_ns,
    log_evidence_better,
    log_evidence_worse,
)

_NOW = Rules(bake_s=0, least=50)
_GOOD = Rate(0, 5000), Rate(0, 50_000), Rate(0, 5000), Rate(0, 50_000)
"""Rates of a canary without a fault and of the stable version."""


def _verdict_of_a_run(canary: float, stable: float, seed: int, rules: Rules = _NOW, answers: int = 1500) -> str:
    """Return the first verdict other than WAIT of a simulated release, looking after every 25th answer."""
    dice = random.Random(seed)
    counts = {True: [0, 0], False: [0, 0]}
    for number in range(answers):
        own = dice.random() < 0.3
        counts[own][1] += 1
        counts[own][0] += dice.random() < (canary if own else stable)
        if number % 25 == 0:
            errors = Rate(*counts[True]), Rate(*counts[False])
            slow = Rate(0, errors[0].total), Rate(0, errors[1].total)
            action = judge(rules, Observed(*errors, *slow), 1.0).action
            if action != WAIT:
                return action
    return WAIT


@pytest.mark.parametrize(("canary", "stable"), [(0.01, 0.0), (0.06, 0.05), (0.31, 0.30), (0.0, 0.0)])
def test_a_version_within_the_margin_is_rolled_back_more_rarely_than_alpha(canary: float, stable: float) -> None:
    rules = _NOW._replace(alpha=0.2)
    verdicts = [_verdict_of_a_run(canary, stable, seed, rules) for seed in range(100)]
    assert verdicts.count(ROLLBACK) <= 100 * rules.alpha


@pytest.mark.parametrize(("canary", "stable"), [(0.011, 0.0), (0.07, 0.05)])
def test_a_version_worse_than_the_margin_is_promoted_more_rarely_than_alpha(canary: float, stable: float) -> None:
    rules = _NOW._replace(alpha=0.2)
    verdicts = [_verdict_of_a_run(canary, stable, seed, rules) for seed in range(100)]
    assert verdicts.count(PROMOTE) <= 100 * rules.alpha


def test_the_evidence_is_a_supermartingale_where_the_rates_differ_by_the_margin() -> None:
    dice = random.Random(5)
    runs = 400
    exceeded = 0
    for _ in range(runs):
        hits = [0, 0]
        for total in range(1, 61):
            hits[0] += dice.random() < 0.25
            hits[1] += dice.random() < 0.20
            if log_evidence_worse(Rate(hits[0], total), Rate(hits[1], total), 0.05) > 2.3026:  # e^2.3 = 10
                exceeded += 1
                break
    assert exceeded / runs <= 0.1


def test_a_canary_that_fails_at_once_is_rolled_back_after_a_few_answers() -> None:
    verdict = judge(Rules(), Observed(Rate(8, 8), Rate(0, 72)), 1.0)
    assert verdict.action == ROLLBACK
    assert "failed answers: 8 of 8, the stable version has 0 of 72" in verdict.reason


def test_a_version_that_fails_is_found_by_every_run() -> None:
    assert {_verdict_of_a_run(0.5, 0.01, seed) for seed in range(20)} == {ROLLBACK}


def test_an_equal_version_is_promoted_by_every_run() -> None:
    assert {_verdict_of_a_run(0.0, 0.0, seed, answers=5000) for seed in range(5)} == {PROMOTE}


@pytest.mark.parametrize(
    ("observed", "elapsed_s", "action", "reason"),
    [
        (Observed(), 1e9, WAIT, "the canary has 0 of the 100 answers"),
        (Observed(Rate(0, 5000), Rate(0, 50_000)), 599, WAIT, "599 s of the 600 s of bake time"),
        (Observed(*_GOOD), 600, PROMOTE, "5000 answers in 600 s"),
        (Observed(Rate(0, 5000), Rate(0, 190)), 600, WAIT, "the latency limit is not known: the stable version has"),
        (Observed(Rate(0, 5000), Rate(9, 199)), 600, WAIT, "has given 190 of the 200 good answers that set it"),
        (Observed(*_GOOD[:3]), 600, PROMOTE, "no rate is worse"),
        (Observed(*_GOOD[:2], Rate(0, 30), Rate(0, 9000)), 600, WAIT, "not enough answers yet to compare slow answers"),
        (
            Observed(Rate(0, 120), Rate(0, 1000), Rate(0, 120), Rate(0, 800)),
            600,
            WAIT,
            "not enough answers yet to compare failed answers",
        ),
        (Observed(Rate(0, 5000), Rate(0, 50_000), Rate(900, 4000), Rate(2000, 40_000)), 9, ROLLBACK, "slow answers"),
        (Observed(Rate(0, 5000), Rate(0, 50_000), differing=Rate(90, 900)), 9, ROLLBACK, "differing answers: 90 of"),
        (Observed(*_GOOD, differing=Rate()), 600, WAIT, "compare differing answers: 0 of 0"),
        (Observed(*_GOOD, differing=Rate(0, 10)), 600, WAIT, "compare differing answers"),
        (Observed(*_GOOD, differing=Rate(1, 3000)), 600, PROMOTE, "no rate is worse"),
    ],
)
def test_the_verdict_follows_from_the_counts(observed: Observed, elapsed_s: float, action: str, reason: str) -> None:
    verdict = judge(Rules(), observed, elapsed_s)
    assert verdict.action == action
    assert reason in verdict.reason


# -- a step without answers of the stable version ---------------------------------------------------------------------


def _verdict_alone(failing: float, slow: float, seed: int, rules: Rules, answers: int = 2000) -> str:
    """Return the first verdict other than WAIT of a simulated step of 100 %, looking after every fifth answer."""
    dice = random.Random(seed)
    errors = slows = timed = 0
    for total in range(1, answers + 1):
        if dice.random() < failing:
            errors += 1
        else:
            timed += 1
            slows += dice.random() < slow
        if total % 5 == 0:
            action = judge(rules, Observed(Rate(errors, total), Rate(), Rate(slows, timed)), 1.0).action
            if action != WAIT:
                return action
    return WAIT


_ALONE = Rules(alpha=0.2, bake_s=0, least=50, slow_ms=100)


@pytest.mark.parametrize(("failing", "slow"), [(0.01, 0.0), (0.0, 0.05), (0.01, 0.05)])
def test_a_version_at_the_margin_is_rolled_back_alone_more_rarely_than_alpha(failing: float, slow: float) -> None:
    verdicts = [_verdict_alone(failing, slow, seed, _ALONE, answers=500) for seed in range(60)]
    assert verdicts.count(ROLLBACK) <= 60 * _ALONE.alpha


@pytest.mark.parametrize(("failing", "slow"), [(0.0101, 0.0), (0.0, 0.0501)])
def test_a_version_above_a_margin_is_promoted_alone_more_rarely_than_alpha(failing: float, slow: float) -> None:
    verdicts = [_verdict_alone(failing, slow, seed, _ALONE, answers=1000) for seed in range(60)]
    assert verdicts.count(PROMOTE) <= 60 * _ALONE.alpha


def test_a_good_version_is_promoted_alone_and_a_bad_one_is_rolled_back_by_every_run() -> None:
    assert {_verdict_alone(0.0, 0.0, seed, _ALONE) for seed in range(5)} == {PROMOTE}
    assert {_verdict_alone(0.3, 0.0, seed, _ALONE) for seed in range(20)} == {ROLLBACK}
    assert {_verdict_alone(0.0, 0.5, seed, _ALONE) for seed in range(20)} == {ROLLBACK}


@given(
    hits=st.integers(0, 3000),
    more=st.integers(0, 3000),
    slow=st.integers(0, 3000),
    slow_ms=st.sampled_from([0.0, 50.0]),
)
def test_without_stable_answers_no_version_is_promoted_whose_rates_exceed_the_margins(
    hits: int, more: int, slow: int, slow_ms: float
) -> None:
    rules, total = Rules(bake_s=0, least=1, slow_ms=slow_ms), hits + more
    timed = more if slow_ms else 0
    observed = Observed(Rate(hits, total), Rate(), Rate(min(slow, timed), timed))
    action = judge(rules, observed, 1e9).action
    if not slow_ms or hits >= total * rules.error_margin or min(slow, timed) >= timed * rules.slow_margin:
        assert action != PROMOTE
    if total >= MISSING and hits == total:
        assert action == ROLLBACK


@pytest.mark.parametrize(
    ("rules", "observed", "action", "reason"),
    [
        (Rules(), Observed(Rate(20, 20)), ROLLBACK, "failed answers: 20 of 20, the stable version has no answers"),
        (Rules(), Observed(Rate(MISSING - 1, MISSING - 1)), WAIT, "the canary has 19 of the 100 answers"),
        (Rules(), Observed(Rate(0, 1000), Rate(0, 110)), WAIT, "has given 110 of the 200 good answers that set it"),
        (Rules(), Observed(Rate(0, 1000)), WAIT, "has given 0 of the 200 good answers that set it"),
        (Rules(slow_ms=5), Observed(Rate(0, 1000), Rate(), Rate(1000, 1000)), ROLLBACK, "slow answers: 1000 of 1000"),
        (Rules(slow_ms=5), Observed(Rate(0, 1000), Rate(), Rate(0, 1000)), PROMOTE, "1000 answers in 600 s"),
        (Rules(slow_ms=5), Observed(Rate(0, 120), Rate(), Rate(0, 120)), WAIT, "compare failed answers: 0 of 120"),
        (Rules(slow_ms=5), Observed(Rate(9, 1000), Rate(), Rate(0, 991)), WAIT, "compare failed answers: 9 of 1000"),
    ],
)
def test_without_stable_answers_the_margin_is_the_limit(
    rules: Rules, observed: Observed, action: str, reason: str
) -> None:
    verdict = judge(rules, observed, 600)
    assert verdict.action == action
    assert reason in verdict.reason


@given(hits=st.integers(0, 500), more=st.integers(0, 500), margin=st.floats(0, 0.5))
def test_evidence_for_a_version_within_the_margin_is_the_same_without_stable_answers(
    hits: int, more: int, margin: float
) -> None:
    canary = Rate(hits, hits + more)
    compared, alone = (log_evidence_better(canary, stable, margin) for stable in (Rate(), None))
    assert compared == pytest.approx(alone, abs=1e-3)


# -- evidence and limits ----------------------------------------------------------------------------------------------


def test_evidence_points_in_one_direction_only() -> None:
    worse = Rate(50, 200), Rate(10, 200)
    assert log_evidence_worse(*worse, 0.01) > 9
    assert log_evidence_better(*worse, 0.01) < 0
    assert log_evidence_better(Rate(0, 3000), Rate(0, 3000), 0.01) > 10
    assert log_evidence_worse(Rate(0, 3000), Rate(0, 3000), 0.01) < 0


def test_no_answers_are_no_evidence() -> None:
    assert abs(log_evidence_worse(Rate(), Rate(), 0.01)) < 1e-9
    assert abs(log_evidence_better(Rate(), None, 0.01)) < 1e-9


def test_the_latency_limit_lies_above_the_95th_percentile() -> None:
    assert latency_limit_ns(list(range(1, 201))) == int(191 * 1.25)
    assert latency_limit_ns([8]) == 10
    assert latency_limit_ns([0]) == 1
