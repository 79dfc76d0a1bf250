"""Table of the versions: what loads, unloads and the ends of earlier versions leave in it."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import DOUBLER, FakeBackend, FakeBackendModel, FakeClock, FakeInstance, config_of
from remora.models.served_model import ModelParts, ServedModel
from remora.models.table import ModelTable
from remora.models.version import State

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
