"""Releases as values: assignment, transitions, texts and the stored form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.traffic import releases
from remora.traffic.releases import HISTORY, HUNDRED, Arm, Release, Rules, arm_of, bucket_of

_BASE = Release(2)


def _running(weight: int = 1000, **changes: object) -> Release:
    return releases.start(_BASE, 3, weight, 5)._replace(**changes)  # type: ignore[arg-type]


# -- assignment -------------------------------------------------------------------------------------------------------


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_client_keeps_its_place(salt: str, key: str) -> None:
    salt = salt.encode("utf-8", "ignore").decode()
    assert bucket_of(salt, key) == bucket_of(salt, key)
    assert 0 <= bucket_of(salt, key) < HUNDRED


def test_clients_are_spread_evenly_and_differently_by_salt() -> None:
    keys = [f"client {number}" for number in range(4000)]
    first = {key for key in keys if bucket_of("a", key) < 1000}
    second = {key for key in keys if bucket_of("b", key) < 1000}
    assert 320 < len(first) < 480  # 400 plus or minus four standard deviations
    assert len(first & second) < 90


@given(st.integers(0, HUNDRED - 1), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_a_larger_weight_of_the_canary_takes_clients_only_into_it(bucket: int, low: int, more: int, other: int) -> None:
    before = arm_of((Arm("canary", 3, low),), bucket)
    after = arm_of((Arm("canary", 3, low + more),), bucket)
    assert before is None or (after is not None and after.version == before.version)
    split = arm_of((Arm("canary", 3, low), Arm("b", 4, other)), bucket)
    assert (split.alias if split else "") == ("canary" if bucket < low else "b" if bucket < low + other else "")


def test_no_weight_gets_no_request_and_all_of_it_gets_each() -> None:
    assert arm_of((Arm("canary", 3, 0),), 0) is None
    assert arm_of((Arm("canary", 3, HUNDRED),), HUNDRED - 1) is not None


# -- transitions ------------------------------------------------------------------------------------------------------


def test_a_release_starts_and_is_promoted() -> None:
    started = releases.start(_BASE, 3, 1000, 7, reason="the new model")
    assert (started.stage, started.canary) == ("running", Arm("canary", 3, 1000))
    assert started.events[-1] == (7, "start canary version 3 with 10 %", "the new model")
    done = releases.promote(started, 9)
    assert (done.stage, done.stable, done.arms, done.versions()) == ("settled", 3, (), {3})


def test_a_rolled_back_version_is_not_loaded_by_the_policy() -> None:
    back = releases.rollback(_running(), 9, reason="bad answers")
    assert (back.stage, back.stable, back.rejected) == ("settled", 2, (3,))
    assert back.select([3], [1, 2, 3]) == [2]
    assert back.select([3, 4], [1, 2, 3, 4]) == [2, 4]
    assert releases.start(back, 3, 100, 10).rejected == ()


def test_versions_of_a_release_are_loaded_beside_those_of_the_policy() -> None:
    assert _running().select([4], [1, 2, 3, 4]) == [2, 3, 4]
    assert _running().select([], [1, 2]) == [2]


def test_several_arms_share_the_requests() -> None:
    both = releases.start(_running(), 4, 2000, 6, alias="b")
    assert [arm.alias for arm in both.arms] == ["canary", "b"]
    assert both.shares() == [Arm("stable", 2, 7000), Arm("canary", 3, 1000), Arm("b", 4, 2000)]
    back = releases.rollback(both, 7, alias="b")
    assert (back.arms, back.rejected) == ((Arm("canary", 3, 1000),), (4,))
    assert releases.rollback(both, 7).arms == ()
    assert releases.promote(both, 7, alias="b").stable == 4


def test_the_canary_takes_its_steps_and_is_then_promoted() -> None:
    step = releases.start(_BASE, 3, 100, 1, steps=(1000, 5000), automatic=True)
    step = releases.advance(step, 2, "good")
    assert (step.canary, step.steps, step.since_ms) == (Arm("canary", 3, 1000), (5000,), 2)
    step = releases.advance(step, 3, "good")
    assert step.canary == Arm("canary", 3, 5000)
    step = releases.advance(step, 4, "good")
    assert (step.stable, step.stage, step.automatic) == (3, "settled", False)


def test_the_rules_are_those_of_the_canary() -> None:
    rules = Rules(slow_ms=50)
    step = releases.start(_BASE, 3, 100, 1, automatic=True, rules=rules)
    step = releases.start(step, 4, 100, 2, alias="b", rules=Rules())
    assert (step.automatic, step.rules) == (True, rules)
    step = releases.rollback(step, 3)
    assert releases.start(step, 4, 100, 4).rules == Rules()


def test_a_weight_set_by_hand_skips_the_steps_below_it() -> None:
    step = releases.start(_BASE, 3, 100, 1, steps=(1000, 5000))
    assert releases.set_weight(step, 2000, 2).steps == (5000,)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: releases.start(_BASE, 2, 100, 1), "version 2 is stable already"),
        (lambda: releases.start(_running(), 4, 100, 1), "a release is running: canary is version 3 with 10 %"),
        (lambda: releases.start(_running(), 3, 100, 1, alias="b"), "version 3 is the version of canary already"),
        (lambda: releases.start(_running(), 4, 9001, 1, alias="b"), "exceed 100 percent: canary 10 % + b 90.01 %"),
        (lambda: releases.start(_BASE, 3, 10_001, 1), "expected 0 to 100 percent"),
        (lambda: releases.start(_BASE, 3, 100, 1, alias="stable"), "'stable' cannot have a weight"),
        (lambda: releases.start(_BASE, 3, 100, 1, alias="7"), "'7' is not an alias"),
        (lambda: releases.start(_BASE, 3, 100, 1, alias="b", automatic=True), "only 'canary' is judged"),
        (lambda: releases.start(_BASE, 3, 100, 1, steps=(100,)), "a larger weight"),
        (lambda: releases.start(_BASE, 3, 100, 1, sticky="cookie"), "expected request, header:NAME"),
        (lambda: releases.start(_BASE, 3, 100, 1, sticky="header:a b"), "expected request, header:NAME"),
        (lambda: releases.promote(_BASE, 1), "there is no arm 'canary': no release runs"),
        (lambda: releases.promote(_running(), 1, alias="b"), "there is no arm 'b': there is canary"),
        (lambda: releases.rollback(_BASE, 1), "no release is running"),
        (lambda: releases.set_weight(_running(), 10_100, 1), "expected 0 to 100 percent, got 101 %"),
        (lambda: releases.set_alias(_running(), "canary", 1, 1), "'canary' follows the release"),
        (lambda: releases.set_alias(_BASE, "latest", 1, 1), "'latest' follows the release"),
    ],
)
def test_an_invalid_transition_is_refused_with_the_reason(change: object, text: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        change()  # type: ignore[operator]
    assert text in str(refusal.value)


def test_aliases_name_versions() -> None:
    named = releases.set_alias(_running(), "champion", 1, 3)
    found = {name: named.version_of(name) for name in ("stable", "canary", "champion", "other")}
    assert found == {"stable": 2, "canary": 3, "champion": 1, "other": None}
    assert named.versions() == {1, 2, 3}
    assert releases.set_alias(named, "champion", None, 4).aliases == {}


def test_only_the_latest_events_are_kept() -> None:
    release = _running()
    for weight in range(HISTORY + 5):
        release = releases.set_weight(release, weight, weight)
    assert len(release.events) == HISTORY
    assert release.events[-1].at_ms == HISTORY + 4


# -- texts and documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "weight"), [("10%", 1000), ("12.5 %", 1250), (7, 700), ("100", HUNDRED), (0, 0)])
def test_a_weight_is_read_as_percent(value: object, weight: int) -> None:
    assert releases.parse_weight(value) == weight


@pytest.mark.parametrize("value", ["", "ten", "101%", -1, "nan", True, None, "1e9", "inf"])
def test_a_weight_outside_the_range_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected 0 to 100 percent"):
        releases.parse_weight(value)


def test_the_stored_form_gives_the_same_release() -> None:
    release = releases.start(
        releases.set_alias(releases.rollback(_running(), 6), "old", 1, 7),
        4,
        250,
        8,
        steps=(500, 5000),
        sticky="header:x-user",
        automatic=True,
        rules=Rules(alpha=0.01, slow_ms=20),
        declared="abc",
    )._replace(slow_limit_ns=1_250_000)
    text = json.dumps(releases.as_document(release))
    assert releases.from_document(json.loads(text)) == release


def test_a_stored_form_without_a_latency_limit_is_read_but_not_one_without_another_field() -> None:
    document = releases.as_document(_running(slow_limit_ns=1_250_000))
    del document["slow_limit_ns"]
    assert releases.from_document(document) == _running()
    del document["steps"]
    with pytest.raises(ValueError, match="not a stored release: KeyError 'steps'"):
        releases.from_document(document)


@pytest.mark.parametrize(
    "change",
    [
        {"arms": 5},
        {"arms": [{"alias": "canary"}]},
        {"rules": {}, "events": [3]},
        {"sticky": "x"},
        {"steps": 1},
        {"slow_limit_ns": -1},
        {"slow_limit_ns": "5"},
        {"slow_limit_ns": True},
    ],
)
def test_a_damaged_stored_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not a stored release|sticky"):
        releases.from_document(releases.as_document(_running()) | change)
    with pytest.raises(ValueError, match="not a stored release"):
        releases.from_document([])
