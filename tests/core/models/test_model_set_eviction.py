"""Loads on demand within the memory limit, and the models evicted for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from remora.errors import (
    InvalidArgumentError,
    NotFoundError,
)
from remora.models.lifecycle import Lifecycle
from remora.models.loader import ModelLoader
from remora.models.table import LoadingError
from remora.options import EngineOptions
from support.engine.fakes import DOUBLER, FakeClock, write_model
from support.engine.lifecycle_bench import ALL, PATIENCE_S, Bench, answer_of, versions


def big_model(bench: Bench, name: str, config: str = DOUBLER, version: str = "1") -> None:
    """A model of 10 bytes."""
    folder = write_model(bench.repository, name, versions=(version,), config=config)
    (folder / version / "fake.bin").write_bytes(b"0123456789")


def test_on_demand_a_model_is_loaded_by_the_first_who_waits_for_it(bench: Bench) -> None:
    big_model(bench, "m")
    lifecycle = bench.started("ondemand", repository_poll_secs=0)
    assert lifecycle.ready_models() == []
    assert lifecycle.is_ready()
    assert lifecycle.is_model_ready("m", -1), "its first request would be served"
    with pytest.raises(LoadingError) as loading:
        lifecycle.resolve("m")
    loading.value.ready.result(PATIENCE_S)
    assert lifecycle.resolve("m").version == 1
    assert lifecycle.wait_for("m", -1) is lifecycle.resolve("m")
    with pytest.raises(NotFoundError, match="'nope' is not found"):
        lifecycle.resolve("nope")


def test_on_demand_the_least_recently_used_goes_and_comes_back(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        big_model(bench, name)
    clock = FakeClock()
    options = EngineOptions(
        model_repository=(bench.repository,), model_control_mode="ondemand", model_memory_budget=40, load_model=("c",)
    )
    lifecycle = Lifecycle(options, ModelLoader(options, clock), clock)
    assert lifecycle.start() == {}
    for name in ("a", "b", "a"):
        clock.advance(10**9)
        lifecycle.wait_for(name, -1, PATIENCE_S)
        served = {model.name for model in lifecycle.ready_models()}
        assert served == {"c", name}, "c stays, and there is room for one more"
    lifecycle.stop(PATIENCE_S)


def test_on_demand_a_busy_model_stays_and_the_other_load_is_refused(bench: Bench) -> None:
    running, may_end = threading.Event(), threading.Event()

    def during() -> None:
        running.set()
        assert may_end.wait(PATIENCE_S)

    for name in ("a", "b"):
        big_model(bench, name)
    lifecycle = bench.started("ondemand", repository_poll_secs=0, model_memory_budget=30)
    bench.backend.during = during
    model = lifecycle.wait_for("a", -1)
    asking = threading.Thread(target=answer_of, args=(model,))
    asking.start()
    assert running.wait(PATIENCE_S)
    with pytest.raises(InvalidArgumentError, match="of the budget for models"):
        lifecycle.wait_for("b", -1)
    may_end.set()
    asking.join(PATIENCE_S)
    assert lifecycle.resolve("a") is model


def test_a_load_of_one_more_version_does_not_evict_the_versions_beside_it(bench: Bench) -> None:
    big_model(bench, "m", ALL)
    lifecycle = bench.started("ondemand", repository_poll_secs=0, model_memory_budget=30)
    lifecycle.wait_for("m", -1)
    big_model(bench, "m", ALL, version="2")
    with pytest.raises(InvalidArgumentError, match="of the budget for models"):
        lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1]


def test_a_model_counts_at_every_moment_between_its_load_and_its_service(bench: Bench) -> None:
    for name in ("a", "b"):
        big_model(bench, name)
    lifecycle = bench.started(model_memory_budget=30)
    gate, table = lifecycle.models.loads.gate, lifecycle.table
    replace, refused, looked = table.replace, list[str](), threading.Event()

    class Lock:
        """Records when a thread has to wait for it."""

        lock = gate._lock

        def __enter__(self) -> None:
            if not self.lock.acquire(blocking=False):
                looked.set()
                self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def load_other() -> None:
        try:
            lifecycle.load("b", {})
        except InvalidArgumentError as error:
            refused.append(str(error))
        looked.set()

    other = threading.Thread(target=load_other)

    def publish(*what: Any) -> Any:
        other.start()
        assert looked.wait(PATIENCE_S)
        return replace(*what)

    gate._lock = Lock()  # type: ignore[assignment]
    table.replace = publish  # type: ignore[method-assign]
    lifecycle.load("a", {})
    other.join(PATIENCE_S)
    assert len(refused) == 1
    assert [model.name for model in lifecycle.ready_models()] == ["a"]


def test_a_load_that_does_not_fit_into_memory_is_refused_with_the_numbers(bench: Bench) -> None:
    big_model(bench, "m")
    lifecycle = bench.started(model_memory_budget=15)
    with pytest.raises(InvalidArgumentError, match=r"Unavailable: loading it takes about 0 MiB \(2.0 times"):
        lifecycle.load("m", {})
    assert bench.backend.opened == []


def test_a_poll_on_demand_reloads_what_is_loaded_and_loads_nothing_else(bench: Bench) -> None:
    for name in ("a", "b"):
        big_model(bench, name)
    lifecycle = bench.started("ondemand", repository_poll_secs=0)
    first = lifecycle.wait_for("a", -1)
    (bench.repository / "a" / "1" / "fake.bin").write_bytes(b"other")
    big_model(bench, "new")
    lifecycle.poll()
    assert [model.name for model in lifecycle.ready_models()] == ["a"]
    assert lifecycle.resolve("a") is not first
    assert lifecycle.wait_for("new", -1).name == "new"
