"""Sequential tests of a release, and their error rates."""

from __future__ import annotations

import random

import pytest

from remora.traffic.judgement import (
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


def _verdict_of_a_run(canary: float, stable: float, seed: int, rules: Rules = _NOW, answers: int = 1500) -> str:
    """Return the first verdict other than WAIT of a simulated release, looking after every 25th answer."""
    dice = random.Random(seed)
    counts = {True: [0, 0], False: [0, 0]}
    for number in range(answers):
        own = dice.random() < 0.3
        counts[own][1] += 1
        counts[own][0] += dice.random() < (canary if own else stable)
        if number % 25 == 0:
            action = judge(rules, Observed(Rate(*counts[True]), Rate(*counts[False])), 1.0).action
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
        (Observed(Rate(0, 5000), Rate(0, 50_000)), 600, PROMOTE, "5000 answers in 600 s"),
        (Observed(Rate(0, 120), Rate(0, 1000)), 600, WAIT, "not enough answers yet to compare failed answers"),
        (Observed(Rate(0, 5000), Rate(0, 50_000), Rate(900, 4000), Rate(2000, 40_000)), 9, ROLLBACK, "slow answers"),
        (Observed(Rate(0, 5000), Rate(0, 50_000), differing=Rate(90, 900)), 9, ROLLBACK, "differing answers: 90 of"),
        (Observed(Rate(0, 5000), Rate(0, 50_000), differing=Rate(0, 10)), 600, WAIT, "compare differing answers"),
        (Observed(Rate(0, 5000), Rate(0, 50_000), differing=Rate(1, 3000)), 600, PROMOTE, "no rate is worse"),
    ],
)
def test_the_verdict_follows_from_the_counts(observed: Observed, elapsed_s: float, action: str, reason: str) -> None:
    verdict = judge(Rules(), observed, elapsed_s)
    assert verdict.action == action
    assert reason in verdict.reason


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
