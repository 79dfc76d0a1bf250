"""Candidates for batch sizes, delays, instances and threads."""

from __future__ import annotations

import pytest

from remora_tools.tuning import ModelSpace, Runtime, Settings
from remora_tools.tuning.candidates import (
    batch_sizes,
    changed,
    complexity,
    is_neighbour,
    ladder,
    reverted,
    rounded_us,
    settings_of,
    slots_of,
    with_batch,
)

PRESENT = Settings(8, True, (), 0, 2, Runtime(2))


def test_batch_sizes_are_powers_of_two_and_the_limit() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(8) == (1, 2, 4, 8)
    assert batch_sizes(12) == (1, 2, 4, 8, 12)


def test_instances_and_threads_use_at_most_twice_the_processors() -> None:
    found = slots_of(PRESENT, 4, True, ())
    assert found[0] == (2, Runtime(2))
    assert {count for count, _ in found} == {1, 2, 4}
    assert all(count * runtime.threads <= 8 for count, runtime in found)
    assert (4, Runtime(1)) in found


def test_a_model_without_a_setting_for_threads_has_none() -> None:
    present = PRESENT._replace(runtime=Runtime())
    assert slots_of(present, 2, False, ()) == ((2, Runtime()), (1, Runtime()))


def test_accelerators_are_tried_with_each_number_of_instances() -> None:
    found = slots_of(PRESENT._replace(runtime=Runtime()), 2, False, ["openvino"])
    assert {(count, runtime.provider) for count, runtime in found} == {
        (1, ""), (1, "openvino"), (2, ""), (2, "openvino"),
    }  # fmt: skip


def test_candidates_begin_with_the_present_and_leave_out_what_takes_too_long() -> None:
    space = ModelSpace("m", PRESENT, batch_sizes(64), ((2, Runtime(2)),))
    found = settings_of(space, lambda runtime, rows: rows * 1e6, 20_000_000)
    assert found[0] == PRESENT
    assert max(each.batch for each in found) == 16
    assert all(each.delay_us * 1000 < 20_000_000 for each in found)
    assert len(found) == len(set(found))


def test_max_batch_size_never_falls_below_the_present_one() -> None:
    assert with_batch(PRESENT, 4) == PRESENT._replace(preferred=(4,))
    assert with_batch(PRESENT, 8, 100) == PRESENT._replace(delay_us=100)
    assert with_batch(PRESENT, 32) == PRESENT._replace(limit=32)
    alone = with_batch(PRESENT, 1, 100)
    assert (alone.limit, alone.dynamic, alone.delay_us) == (8, False, 0)


@pytest.mark.parametrize(("ns", "us"), [(100, 0), (1_400, 1), (1_700, 2), (480_000, 500), (8_000_000, 10_000)])
def test_delays_are_round(ns: float, us: int) -> None:
    assert rounded_us(ns) == us


def test_connections_are_powers_of_two() -> None:
    assert ladder(0.0) == [1]
    assert ladder(9) == [1, 2, 4, 8]
    assert ladder(float("inf"))[-1] == 1024


def test_each_changed_field_can_be_reverted() -> None:
    new = Settings(32, True, (), 500, 4, Runtime(1))
    assert changed((new,), (PRESENT,)) == [(0, "batch"), (0, "delay_us"), (0, "instances"), (0, "runtime")]
    plan = (new,)
    for _, field in changed(plan, (PRESENT,)):
        plan = reverted(plan, (PRESENT,), 0, field)
    assert plan == (PRESENT,)


def test_fewer_changes_and_instances_are_simpler() -> None:
    plans = [(PRESENT,), (PRESENT._replace(instances=1),), (PRESENT._replace(instances=4),),
             (PRESENT._replace(instances=1, delay_us=100),)]  # fmt: skip
    assert sorted(plans, key=lambda plan: complexity(plan, (PRESENT,))) == plans


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (PRESENT._replace(limit=16), True),
        (PRESENT._replace(preferred=(4,)), True),
        (PRESENT._replace(limit=32), False),
        (PRESENT._replace(delay_us=100), True),
        (PRESENT._replace(instances=4), True),
        (PRESENT._replace(instances=4, runtime=Runtime(1)), True),
        (PRESENT._replace(instances=8), False),
        (PRESENT._replace(instances=4, limit=16), False),
        (PRESENT._replace(instances=4, delay_us=100), False),
        (PRESENT._replace(runtime=Runtime(2, "openvino")), True),
        (PRESENT, False),
    ],
)
def test_a_neighbour_is_one_step_away(new: Settings, expected: bool) -> None:
    assert is_neighbour((new,), (PRESENT,)) is expected


def test_neighbours_differ_in_one_model() -> None:
    other = PRESENT._replace(instances=4)
    assert is_neighbour((PRESENT, other), (PRESENT, PRESENT))
    assert not is_neighbour((other, other), (PRESENT, PRESENT))
