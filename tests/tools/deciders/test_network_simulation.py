"""The simulation of several models against closed forms."""

from __future__ import annotations

import pytest

from remora.config import BatchPolicy
from remora_tools.deciders.network_simulation import Offered, Station, simulate_network
from support.engine.fakes import MS, dynamic

ALONE = BatchPolicy(max_batch_size=8)


def fixed(ms: float, instances: int = 1, policy: BatchPolicy = ALONE, cores: float = 0.0) -> Station:
    """A model whose batches take the same time whatever their rows."""
    return Station(policy, lambda rows: ms * MS, instances, cores)


@pytest.mark.parametrize("instances", [1, 3])
def test_a_closed_loop_uses_each_instance_all_the_time(instances: int) -> None:
    found = simulate_network([fixed(2.0, instances)], [(0,)], Offered(connections=6), cores=8)
    assert found.rate_per_s == pytest.approx(500 * instances, rel=0.02)
    assert max(found.latencies_ns[0]) == pytest.approx(6 / instances * 2 * MS, rel=0.02)  # Little's law


def test_full_batches_multiply_the_throughput() -> None:
    found = simulate_network([fixed(2.0, policy=dynamic(4))], [(0,)], Offered(connections=8), cores=8)
    assert found.rate_per_s == pytest.approx(2000, rel=0.02)


def test_a_delay_ends_when_it_is_over() -> None:
    found = simulate_network([fixed(1.0, policy=dynamic(8, delay_ms=3))], [(0,)], Offered(connections=2), cores=8)
    assert set(found.latencies_ns[0]) == {4 * MS}


def test_the_slowest_step_of_a_route_limits_it() -> None:
    stations = [fixed(1.0), fixed(4.0), fixed(2.0)]
    found = simulate_network(stations, [(0, 1, 2)], Offered(connections=16), cores=8)
    assert found.rate_per_s == pytest.approx(250, rel=0.02)
    alone = simulate_network(stations, [(0, 1, 2)], Offered(connections=1), cores=8)
    assert set(alone.latencies_ns[0]) == {7 * MS}


def test_routes_take_turns_and_keep_their_latencies_apart() -> None:
    found = simulate_network([fixed(1.0), fixed(5.0)], [(0,), (1,)], Offered(connections=1), cores=8)
    assert [min(each) for each in found.latencies_ns] == [1 * MS, 5 * MS]


def test_batches_that_need_more_processors_than_there_are_take_longer() -> None:
    few = simulate_network([fixed(2.0, 4, cores=1.0)], [(0,)], Offered(connections=4), cores=2)
    assert few.rate_per_s == pytest.approx(1000, rel=0.1)
    sleeping = simulate_network([fixed(2.0, 4)], [(0,)], Offered(connections=4), cores=2)
    assert sleeping.rate_per_s == pytest.approx(2000, rel=0.02)


def test_the_front_limits_the_throughput() -> None:
    found = simulate_network([fixed(0.1, 8)], [(0,)], Offered(connections=32, front_ns=1e6), cores=8)
    assert found.rate_per_s == pytest.approx(1000, rel=0.02)


def test_an_open_loop_is_answered_at_its_rate_while_there_is_capacity() -> None:
    found = simulate_network([fixed(1.0)], [(0,)], Offered(per_s=300, requests=2000), cores=8)
    assert found.rate_per_s == pytest.approx(300, rel=0.1)
    assert min(found.latencies_ns[0]) == 1 * MS
    over = simulate_network([fixed(1.0)], [(0,)], Offered(per_s=3000, requests=2000), cores=8)
    assert over.rate_per_s == pytest.approx(1000, rel=0.02)


def test_the_same_load_gives_the_same_result() -> None:
    once, again = (simulate_network([fixed(1.0, 2, dynamic(4))], [(0,)], Offered(per_s=900), cores=2) for _ in range(2))
    assert once == again
