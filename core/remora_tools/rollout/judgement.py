"""Sequential tests on the answers of two versions, and the verdict on a release. Pure.

A test may look after every answer: its evidence is an e-process, a mixture likelihood ratio. The numerator averages the
likelihood of the counts over a Jeffreys prior (Beta(1/2, 1/2)) of each rate; the denominator is the largest likelihood
that the null hypothesis allows. Under any point of the null hypothesis the ratio is at most a nonnegative martingale of
mean 1, so by Ville's inequality it ever exceeds 1/alpha with probability at most alpha, however often one looks
(Robbins 1970; Wasserman, Ramdas and Balakrishnan, "Universal inference", 2020).

All three criteria are rates: failed answers, answers slower than a limit that is fixed before the test, and answers
that differ from the primary's. For a rollback each test gets an equal part of alpha, because one is enough; for a
promotion each gets alpha, because all must agree (an intersection-union test).

Without answers of the stable version the margin alone is the limit of the canary's rate. For a promotion this is the
same test, because a stable rate of 0 is then the likeliest one. For a rollback it is another null hypothesis, "the rate
is at most the margin", under which the evidence of both tests is bounded by one martingale, so that a change from the
one to the other while answers arrive needs no further part of alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from remora.traffic.releases import Rules

WAIT, PROMOTE, ROLLBACK = "wait", "promote", "rollback"
SLOW_QUANTILE = 0.95
SLOW_FACTOR = 1.25
CALIBRATION = 200
"""Number of the stable version's answers that set the latency limit; the test does not count them."""
MISSING = 20
"""Number of the canary's answers after which a stable version without answers is no longer waited for."""
_TESTS = 3
_STEPS = 40
_TINY = 1e-12


class Rate(NamedTuple):
    """Number of answers, and of those that count against the version."""

    hits: int = 0
    total: int = 0


class Observed(NamedTuple):
    """Rates of the two versions since the step began.

    Those of slow answers are empty until the latency limit is known. A canary that is not also the shadow has no
    ``differing``.
    """

    canary_errors: Rate = Rate()
    stable_errors: Rate = Rate()
    canary_slow: Rate = Rate()
    stable_slow: Rate = Rate()
    differing: Rate | None = None


class Verdict(NamedTuple):
    """The next action (WAIT, PROMOTE or ROLLBACK) and its reason."""

    action: str
    reason: str


def judge(rules: Rules, observed: Observed, elapsed_s: float) -> Verdict:
    """Return the verdict on a canary.

    Roll back as soon as one rate is worse than the stable version's by more than its margin, at level ``alpha`` over
    all tests; without answers of the stable version, as soon as it exceeds the margin. Promote when the bake time is
    over, the canary has answered often enough, and the tests have shown at the same level that no rate is worse by more
    than its margin. A rate that cannot be tested prevents the promotion.
    """
    worse, better = math.log(_TESTS / rules.alpha), math.log(1 / rules.alpha)
    rows: list[tuple[str, Rate, Rate | None, float]] = [
        ("failed answers", observed.canary_errors, observed.stable_errors, rules.error_margin),
        ("slow answers", observed.canary_slow, observed.stable_slow, rules.slow_margin),
    ]
    if observed.differing is not None:
        rows.append(("differing answers", observed.differing, None, rules.most_differing))
    for name, canary, stable, margin in rows:
        missing = stable is not None and not stable.total and canary.total >= MISSING
        evidence = log_evidence_worse(canary, None if missing else stable, margin)
        if evidence >= worse:
            return Verdict(ROLLBACK, f"{_shown(name, canary, stable, margin)} (evidence e^{evidence:.1f})")
    total = observed.canary_errors.total
    if total < rules.least:
        return Verdict(WAIT, f"the canary has {total} of the {rules.least} answers that a verdict needs")
    if elapsed_s < rules.bake_s:
        return Verdict(WAIT, f"{elapsed_s:.0f} s of the {rules.bake_s:g} s of bake time are over")
    if not (rules.slow_ms or observed.canary_slow.total or observed.stable_slow.total):
        good = observed.stable_errors.total - observed.stable_errors.hits
        reason = (
            f"the latency limit is not known: the stable version has given {good} of the {CALIBRATION} good answers"
        )
        return Verdict(WAIT, f"{reason} that set it, and the release has no limit in milliseconds")
    for name, canary, stable, margin in rows:
        if log_evidence_better(canary, stable, margin) < better:
            return Verdict(WAIT, f"not enough answers yet to compare {_shown(name, canary, stable, margin)}")
    return Verdict(PROMOTE, f"{total} answers in {elapsed_s:.0f} s, and no rate is worse than its margin allows")


def _shown(name: str, canary: Rate, stable: Rate | None, margin: float) -> str:
    if stable is None:
        other = ""
    else:
        count = f"{stable.hits} of {stable.total}" if stable.total else "no answers"
        other = f", the stable version has {count}"
    return f"{name}: {canary.hits} of {canary.total}{other}; margin {margin:.1%}"


def log_evidence_worse(canary: Rate, stable: Rate | None, margin: float) -> float:
    """Return the log evidence for a canary that is worse than the stable version.

    Its rate exceeds the stable rate by more than the margin. Without a stable rate, the margin itself is the limit.
    """
    if stable is None:
        return _log_mixture(canary) - _log_likelihood(canary, min(_mean(canary), margin))
    return _log_mixture(canary) + _log_mixture(stable) - _most_likely(canary, stable, margin, worse=False)


def log_evidence_better(canary: Rate, stable: Rate | None, margin: float) -> float:
    """Return the log evidence for a canary within the margin (see `log_evidence_worse`)."""
    if stable is None:
        return _log_mixture(canary) - _log_likelihood(canary, max(_mean(canary), margin))
    return _log_mixture(canary) + _log_mixture(stable) - _most_likely(canary, stable, margin, worse=True)


def _most_likely(canary: Rate, stable: Rate, margin: float, *, worse: bool) -> float:
    """Return the largest log likelihood of two rates.

    The canary's is at least the stable rate and the margin if ``worse``, else at most.
    """
    free_canary, free_stable = _mean(canary), _mean(stable)
    if (free_canary >= free_stable + margin) if worse else (free_canary <= free_stable + margin):
        return _log_likelihood(canary, free_canary) + _log_likelihood(stable, free_stable)
    low, high = 0.0, 1.0 - margin  # the likelihood is concave, so that its maximum is on the border

    def at(rate: float) -> float:
        return _log_likelihood(stable, rate) + _log_likelihood(canary, rate + margin)

    for _ in range(_STEPS):
        third = (high - low) / 3
        if at(low + third) < at(high - third):
            low += third
        else:
            high -= third
    return at((low + high) / 2)


def _mean(rate: Rate) -> float:
    return rate.hits / rate.total if rate.total else 0.0


def _log_likelihood(rate: Rate, probability: float) -> float:
    inside = min(max(probability, _TINY), 1 - _TINY)
    value = 0.0
    if rate.hits:
        value += rate.hits * math.log(inside)
    if rate.total > rate.hits:
        value += (rate.total - rate.hits) * math.log1p(-inside)
    return value


def _log_mixture(rate: Rate) -> float:
    hits, misses = rate.hits + 0.5, rate.total - rate.hits + 0.5
    return math.lgamma(hits) + math.lgamma(misses) - math.lgamma(rate.total + 1) - 2 * math.lgamma(0.5)


def latency_limit_ns(samples: Sequence[int]) -> int:
    """Return the limit of a slow answer, from the stable version's first latencies."""
    ordered = sorted(samples)
    quantile = ordered[min(int(len(ordered) * SLOW_QUANTILE), len(ordered) - 1)]
    return max(int(quantile * SLOW_FACTOR), 1)  # 0 would mean that the limit is unknown
