"""What refusing requests on arrival is good for at twice the load that can be served."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.scheduling.admission import AdmittingQueue
from remora.scheduling.batching import BatchQueue
from remora.scheduling.costs import CostModel
from remora_tools.deciders.simulation import Simulated, arrivals, simulate
from support.engine.fakes import MS, dynamic


def cost_ms(rows: int) -> float:
    return 2 + rows


def admitting(instances: int) -> AdmittingQueue:
    costs = CostModel()
    for rows in (1, 2, 4, 8):
        costs.learn(rows, int(cost_ms(rows) * MS))
    return AdmittingQueue(BatchQueue(dynamic(8)), dynamic(8), costs, instances)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(1, 3))
def test_what_is_admitted_at_any_load_is_answered_in_time(seed: int, instances: int) -> None:
    # One size of requests and known costs: the prediction is then exact but for batches that fill up after it.
    found = overload(admitting(instances), instances, seed)
    assert found.late + found.dropped <= 0.03 * len(found.waits_ns)


def overload(queue: AdmittingQueue | BatchQueue, instances: int, seed: int) -> Simulated:
    """Twice the requests that ``instances`` can serve, each of which must be answered within 40 ms."""
    capacity_per_s = instances * 8 / cost_ms(8) * 1000
    stream = arrivals(2 * capacity_per_s, 3000, seed=seed, timeout_ns=40 * MS)
    return simulate(queue, stream, lambda rows: cost_ms(rows) * MS, instances)


@pytest.mark.parametrize("instances", [1, 2])
def test_at_twice_the_load_goodput_stays_near_the_capacity_and_falls_without_admission(instances: int) -> None:
    goodput = {}
    for name, queue in (("on", admitting(instances)), ("off", BatchQueue(dynamic(8)))):
        found = overload(queue, instances, seed=1)
        good = len(found.waits_ns) - found.late
        goodput[name] = good / (found.end_ns / MS) / (instances * 8 / cost_ms(8))
    assert goodput["on"] > 0.9
    assert goodput["off"] < 0.5 * goodput["on"]
