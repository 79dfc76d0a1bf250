"""Predictions from measured durations, and their correction."""

from __future__ import annotations

import pytest

from remora_tools.tuning import Load, LoadResult, ModelSpace, Runtime, Settings, System
from remora_tools.tuning.prediction import Costs, Predictor, distance, percentile
from support.engine.served_model_formula import goal_of

ONE, TWO = Runtime(1), Runtime(2)
PRESENT = Settings(8, True, (), 0, 1, ONE)
SYSTEM = System((ModelSpace("m", PRESENT, (1, 8), ((1, ONE), (1, TWO))),), ((0,),), cores=4, most_rows=8)


def predictor(points: dict[int, float], cores: float = 0.0) -> Predictor:
    costs = Costs(1)
    costs.add(0, ONE, points, cores)
    return Predictor(SYSTEM, goal_of(20), costs)


def test_a_runtime_with_few_sizes_takes_the_shape_of_another() -> None:
    costs = Costs(1)
    costs.add(0, ONE, {1: 1e6, 16: 4e6, 64: 10e6}, 1.0)
    costs.add(0, TWO, {1: 0.6e6, 16: 2e6}, 1.7)
    curve = costs.curve(0, TWO)
    assert curve(1) == pytest.approx(0.6e6)
    assert curve(16) == pytest.approx(2e6)
    assert curve(64) == pytest.approx(5e6)
    assert costs.known(0, TWO)
    assert not costs.known(0, Runtime(4))
    assert costs.cores(0, TWO) == 1.7


def test_a_closed_loop_fills_the_batches() -> None:
    found = predictor({1: 2e6, 8: 4e6})
    rate, latency = found.raw((PRESENT,), Load(16))
    assert rate == pytest.approx(8 / 4e6 * 1e9, rel=0.05)
    assert latency == pytest.approx(8e6, rel=0.05)
    assert found.bound((PRESENT,)) == pytest.approx(2000)


def test_processors_bound_the_throughput() -> None:
    many = (PRESENT._replace(instances=16),)
    assert predictor({1: 2e6, 8: 4e6}, cores=1.0).bound(many) == pytest.approx(4 * 2000)
    assert predictor({1: 2e6, 8: 4e6}, cores=0.0).bound(many) == pytest.approx(16 * 2000)


def test_measurements_correct_the_plans_near_them() -> None:
    found = predictor({1: 2e6, 8: 4e6})
    near, far = (PRESENT._replace(delay_us=100),), (PRESENT._replace(instances=4),)
    rate, latency = found.raw((PRESENT,), Load(16))
    found.learn((PRESENT,), Load(16), rate / 2, latency * 2)
    found.learn(far, Load(16), *found.raw(far, Load(16)))
    assert found.correction(near) == pytest.approx((0.5, 2.0))
    assert found.correction(far) == pytest.approx((1.0, 1.0))
    assert found.expect((PRESENT,), Load(16)) == pytest.approx((rate / 2, latency * 2))


def test_the_nearest_load_corrects_most() -> None:
    found = predictor({1: 2e6, 8: 4e6})
    for connections, factor in ((1, 1.0), (64, 0.5)):
        rate, latency = found.raw((PRESENT,), Load(connections))
        found.learn((PRESENT,), Load(connections), rate * factor, latency)
    assert found.correction((PRESENT,), Load(2))[0] == pytest.approx(1.0)
    assert found.correction((PRESENT,), Load(32))[0] == pytest.approx(0.5)


def test_instances_and_runtimes_are_further_apart_than_delays() -> None:
    delayed = distance((PRESENT,), (PRESENT._replace(delay_us=100),))
    assert 0 < delayed < distance((PRESENT,), (PRESENT._replace(instances=2),))
    assert delayed < distance((PRESENT,), (PRESENT._replace(runtime=TWO),))
    assert distance((PRESENT,), (PRESENT,)) == 0


def test_a_percentile_is_a_value_of_the_list() -> None:
    assert percentile([], 99) == 0.0
    assert percentile([3, 1, 2], 99) == 3
    assert percentile(list(range(200)), 99) == 198


def test_requests_in_turn_visit_a_model_as_often_as_their_routes_name_it() -> None:
    costs = Costs(2)
    for model in (0, 1):
        costs.add(model, ONE, {1: 2e6, 8: 4e6}, 0.0)
    for routes, bound in ((((0,), (1,)), 4000), (((0,), (0, 1)), 2000), (((0, 0), (1,)), 2000)):
        system = SYSTEM._replace(models=SYSTEM.models * 2, routes=routes)
        assert Predictor(system, goal_of(20), costs).bound((PRESENT, PRESENT)) == pytest.approx(bound)


def test_a_request_of_more_rows_than_a_batch_runs_alone() -> None:
    costs = Costs(1)
    costs.add(0, ONE, {1: 2e6, 16: 4e6}, 0.0)
    assert Predictor(SYSTEM._replace(rows=16), goal_of(20), costs).bound((PRESENT,)) == pytest.approx(250)


def loaded(front: float, rate: float = 1000.0) -> LoadResult:
    """Return a measurement with this use of the event loop."""
    return LoadResult(rate, 1e6, 0, 1.0, front=front)


def test_the_loop_under_load_limits_the_time_outside_of_the_models() -> None:
    found = predictor({1: 2e6, 8: 4e6})
    found.front_ns = 1e6
    found.limit_front(loaded(0.5))
    assert found.front_ns == pytest.approx(0.5e6)
    for result in (loaded(0.45), loaded(0.9), loaded(0.0), loaded(0.1, rate=0.0)):
        found.limit_front(result)
        assert found.front_ns == pytest.approx(0.5e6)


def test_a_lower_time_outside_of_the_models_changes_what_was_simulated() -> None:
    found = predictor({1: 1e4, 8: 1e4})
    found.front_ns = 1e6
    found.learn((PRESENT,), Load(16), 1000.0, 16e6)
    assert found.raw((PRESENT,), Load(16))[0] == pytest.approx(1000, rel=0.1)
    found.limit_front(loaded(0.1))
    rate = found.raw((PRESENT,), Load(16))[0]
    assert rate == pytest.approx(10_000, rel=0.1)
    assert found.bound((PRESENT,)) == pytest.approx(10_000)
    assert found.correction((PRESENT,))[0] == pytest.approx(1000 / rate)


def test_the_processors_of_a_batch_are_the_most_that_were_seen() -> None:
    costs = Costs(1)
    for cores in (1.7, 1.2):
        costs.add(0, ONE, {1: 2e6}, cores)
    assert costs.cores(0, ONE) == 1.7
