"""Loads on demand: one for all who ask, failures hold for a moment."""

from __future__ import annotations

import threading

import pytest

from remora.errors import InternalError, UnavailableError
from remora.models.on_demand import FAILURE_HOLDS_NS, OnDemand
from support.engine.fakes import FakeClock
from support.process.no_threads import refuse_threads

PATIENCE_S = 30.0


class Loads:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Event()
        self.failure: Exception | None = None

    def __call__(self, key: str) -> None:
        self.begun.append(key)
        assert self.may_end.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure


def test_all_who_ask_while_it_loads_wait_for_one_load() -> None:
    loads = Loads()
    demand = OnDemand(loads, FakeClock())
    wanted = [demand.request_load("m") for _ in range(5)]
    other = demand.request_load("other")
    loads.may_end.set()
    for future in (*wanted, other):
        future.result(PATIENCE_S)
    assert sorted(loads.begun) == ["m", "other"]


def test_after_a_load_that_went_well_the_next_one_is_new() -> None:
    loads = Loads()
    loads.may_end.set()
    demand = OnDemand(loads, FakeClock())
    for _ in range(2):
        demand.request_load("m").result(PATIENCE_S)
    assert loads.begun == ["m", "m"], "it was evicted in between"


@pytest.mark.parametrize("failure", [InternalError("no memory"), ValueError("no memory")])
def test_a_failure_holds_for_a_moment_and_is_then_tried_again(failure: Exception) -> None:
    loads, clock = Loads(), FakeClock()
    loads.may_end.set()
    loads.failure = failure
    demand = OnDemand(loads, clock)
    for _ in range(3):
        with pytest.raises(InternalError, match="no memory"):
            demand.request_load("m").result(PATIENCE_S)
    assert loads.begun == ["m"]
    clock.advance(FAILURE_HOLDS_NS)
    loads.failure = None
    demand.request_load("m").result(PATIENCE_S)
    assert loads.begun == ["m", "m"]


def test_a_stop_ends_the_wait_and_not_the_load() -> None:
    loads = Loads()
    demand = OnDemand(loads, FakeClock())
    wanted = demand.request_load("m")
    demand.stop(UnavailableError("stopping"))
    with pytest.raises(UnavailableError, match="stopping"):
        wanted.result(0)
    loads.may_end.set()
    for thread in threading.enumerate():
        if thread.name == "remora load m":
            thread.join(PATIENCE_S)
    with pytest.raises(UnavailableError, match="stopping"):
        demand.request_load("other").result(0)
    assert loads.begun == ["m"]


def test_a_load_whose_thread_cannot_start_fails_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, clock = Loads(), FakeClock()
    loads.may_end.set()
    demand = OnDemand(loads, clock)
    refuse_threads(monkeypatch)
    with pytest.raises(UnavailableError, match="can't start new thread"):
        demand.request_load("m").result(PATIENCE_S)
    monkeypatch.undo()
    clock.advance(FAILURE_HOLDS_NS)
    demand.request_load("m").result(PATIENCE_S)
    assert loads.begun == ["m"]
