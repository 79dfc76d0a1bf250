"""Table of the versions: what loads, unloads and the ends of earlier versions leave in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.models.served_model import ModelParts, ServedModel
from remora.models.table import ModelTable
from remora.models.version import State
from support.engine.fakes import DOUBLER, FakeBackend, FakeBackendModel, FakeClock, FakeInstance, config_of

FIRST, SECOND = 1, 2


def opened(number: int) -> ServedModel:
    backend_model: Any = FakeBackendModel(FakeBackend(), None)  # type: ignore[arg-type]  # never looks at its source
    return ServedModel(
        ModelParts(
            name="m",
            version=number,
            config=config_of(DOUBLER),
            backend_model=backend_model,
            instances=[FakeInstance()],
            clock=FakeClock(),
        )
    )


class Loads:
    """A table, and the loads and unloads of one model in it."""

    def __init__(self) -> None:
        self.table = ModelTable()

    def load(self, *numbers: int, kept: tuple[int, ...] = ()) -> list[ServedModel]:
        """Load versions, and return those that were opened."""
        self.table.begin("m", numbers)
        models = {number: opened(number) for number in numbers}
        assert self.table.replace("m", models, kept) is not None
        return list(models.values())

    def unload(self) -> list[ServedModel]:
        return self.table.retire("m")

    def close(self, model: ServedModel) -> None:
        assert model.close()
        self.table.closed("m", model)

    def shown(self) -> dict[int, tuple[str, str]]:
        state = self.table.state("m")
        return {} if state is None else {number: row.shown for number, row in sorted(state.versions.items())}


UNLOADED = ("UNAVAILABLE", "unloaded")


def test_a_version_that_still_finishes_requests_is_not_unloaded_because_an_earlier_load_of_it_is_closed() -> None:
    loads = Loads()
    (earlier,) = loads.load(FIRST)
    (later,) = loads.load(FIRST)
    assert loads.unload() == [later]
    loads.close(earlier)
    assert loads.shown() == {FIRST: ("UNLOADING", "")}
    loads.close(later)
    assert loads.shown() == {FIRST: UNLOADED}


def test_a_version_that_is_loaded_again_while_it_is_closed_keeps_its_new_state() -> None:
    loads = Loads()
    (earlier,) = loads.load(FIRST)
    loads.unload()
    loads.table.begin("m", [FIRST])
    loads.close(earlier)
    assert loads.shown() == {FIRST: ("LOADING", "")}


def test_a_failure_is_shown_until_a_load_succeeds_and_a_retry_counts_as_unhealthy() -> None:
    loads = Loads()
    loads.table.begin("m", [FIRST])
    assert loads.table.is_fine()
    loads.table.fail("m", {FIRST: "Internal: no memory"})
    assert loads.shown() == {FIRST: ("UNAVAILABLE", "Internal: no memory")}
    loads.table.begin("m", [FIRST])
    assert not loads.table.is_fine()
    assert loads.shown() == {FIRST: ("LOADING", "")}
    assert loads.table.troubles() == ["model 'm' version 1 is LOADING: Internal: no memory"]
    loads.load(SECOND)
    assert loads.shown() == {SECOND: ("READY", "")}


@pytest.mark.parametrize("reason", ["unloaded", ""])
def test_a_failure_is_a_failure_whatever_its_text_is(reason: str) -> None:
    loads = Loads()
    loads.table.begin("m", [FIRST])
    loads.table.fail("m", {FIRST: reason})
    state = loads.table.state("m")
    assert state is not None
    assert not state.is_unloaded
    assert not loads.table.is_fine()
    assert loads.table.failure("m") == f"version 1 is at UNAVAILABLE state: {reason};\n"


def test_a_load_that_ends_after_the_table_was_cleared_leaves_nothing_in_service() -> None:
    loads = Loads()
    (serving,) = loads.load(FIRST)
    loads.table.begin("m", [SECOND])
    late = opened(SECOND)
    assert loads.table.clear() == [serving]
    assert loads.table.replace("m", {SECOND: late}, [FIRST]) is None
    assert (serving.state, late.state) == (State.DRAINING, State.OPENED)
    for model in (serving, late):
        assert model.close()
        assert model.state is State.CLOSED
    assert loads.shown() == {}


def test_a_model_that_is_closed_twice_closes_its_backend_once() -> None:
    model = opened(FIRST)
    assert model.close()
    assert model.close()
    assert [instance.closed for instance in model.instances] == [1]  # type: ignore[attr-defined]


LOADING, READY, UNLOADING = ("LOADING", ""), ("READY", ""), ("UNLOADING", "")
BROKEN = ("UNAVAILABLE", "Internal: broken")
RACES: list[tuple[str, dict[int, tuple[str, str]]]] = [
    ("load 1, unload, unload", {1: UNLOADING}),
    ("load 1, unload, close 1, unload", {1: UNLOADED}),
    ("begin 1, unload", {1: LOADING}),
    ("begin 1, unload, publish 1", {1: READY}),
    ("load 1, begin 2, unload, publish 2", {1: UNLOADING, 2: READY}),
    ("load 1, begin 1, unload, publish 1", {1: READY}),
    ("load 1, begin 1, unload, publish 1, close 1", {1: READY}),
    ("load 1, begin 1, unload, fail 1, close 1", {1: BROKEN}),
    ("load 1, begin 1, fail 1", {1: READY}),
    ("load 1, begin 2, fail 2", {1: READY, 2: BROKEN}),
    ("load 1, begin 2, fail 2, unload", {1: UNLOADING, 2: BROKEN}),
    ("load 1, load 2, close 1", {1: UNLOADED, 2: READY}),
    ("load 1, load 2, close 1, begin 3, fail 3", {2: READY, 3: BROKEN}),
    ("begin 1, fail 1, load 2", {2: READY}),
    ("begin 1, fail 1, begin 2, fail 2", {2: BROKEN}),
    ("load 1, unload, begin 1, close 1", {1: LOADING}),
    ("load 1, unload, close 1, load 1", {1: READY}),
    ("load 1, clear, publish 1, fail 1, begin 2", {}),
]


@pytest.mark.parametrize(("events", "shown"), RACES, ids=[events for events, _ in RACES])
def test_the_index_shows_after_these_events(events: str, shown: dict[int, tuple[str, str]]) -> None:
    loads, retired = Loads(), list[ServedModel]()
    for event in events.split(", "):
        happens, _, text = event.partition(" ")
        number = int(text or 0)
        if happens in ("load", "begin"):
            loads.table.begin("m", [number])
        if happens in ("load", "publish"):
            replaced = loads.table.replace("m", {number: opened(number)}, ())
            retired += replaced.retired if replaced is not None else ()
        if happens == "fail":
            loads.table.fail("m", {number: "Internal: broken"})
        if happens == "unload":
            retired += loads.unload()
        if happens == "clear":
            retired += loads.table.clear()
        if happens == "close" and retired:
            loads.close(retired.pop(0))
    assert loads.shown() == shown


def test_a_load_learns_which_of_the_versions_that_it_keeps_were_unloaded_meanwhile() -> None:
    loads = Loads()
    loads.load(FIRST)
    loads.table.begin("m", [SECOND])
    loads.unload()
    replaced = loads.table.replace("m", {SECOND: opened(SECOND)}, [FIRST])
    assert replaced is not None
    assert replaced.unloaded == {FIRST}


NUMBERS = st.sets(st.integers(1, 3), max_size=3)
STEPS = st.tuples(st.sampled_from(["begin", "publish", "fail", "unload", "close"]), NUMBERS, NUMBERS)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_every_version_that_was_opened_serves_or_ends_closed(steps: list[tuple[str, set[int], set[int]]]) -> None:
    loads, everything, retired = Loads(), list[ServedModel](), list[ServedModel]()
    table = loads.table
    for happens, numbers, others in steps:
        if happens == "begin":
            table.begin("m", numbers)
        elif happens == "publish":
            models = {number: opened(number) for number in numbers}
            replaced = table.replace("m", models, others - numbers)
            assert replaced is not None
            everything += models.values()
            retired += replaced.retired
        elif happens == "fail":
            table.fail("m", dict.fromkeys(numbers, "Internal: broken"))
        elif happens == "unload":
            retired += loads.unload()
        elif retired:
            loads.close(retired.pop())
        serving = [model for model in everything if model.state is State.READY]
        assert sorted(table.ready_models(), key=id) == sorted(serving, key=id)
        assert set(retired) == {model for model in everything if model.state is State.DRAINING}
    for model in (*retired, *table.clear()):
        assert model.close()
    assert [model.state for model in everything] == [State.CLOSED] * len(everything)
    closed = [instance.closed for model in everything for instance in model.instances]  # type: ignore[attr-defined]
    assert closed == [1] * len(everything)
