"""The gate: loads under way count, what is evicted is evicted before the load, the cost is learned."""

from __future__ import annotations

import pytest

from remora.errors import UnavailableError
from remora.models.memory import MemoryGate, Resident, Space

MIB = 1 << 20


class Machine:
    """Memory with models in it; evicting one frees it."""

    def __init__(self, limit: int, **models: int) -> None:
        self.limit, self.models, self.used = limit, models, sum(models.values())
        self.gone: list[str] = []

    def space(self) -> Space:
        return Space(self.limit, self.used)

    def residents(self) -> list[Resident]:
        return [Resident(key, size, index) for index, (key, size) in enumerate(self.models.items())]

    def evict(self, key: str) -> None:
        self.gone.append(key)
        self.used -= self.models.pop(key)

    def gate(self, budget: int | None = None, *, evicts: bool = True) -> MemoryGate:
        return MemoryGate(self.space, budget, self.residents, self.evict if evicts else None)


def test_what_fits_is_let_in_and_what_does_not_is_refused_with_the_numbers() -> None:
    gate = Machine(100 * MIB, a=50 * MIB).gate(evicts=False)
    with gate.load(20 * MIB):
        pass
    with pytest.raises(UnavailableError, match=r"takes about 60 MiB .* 50 MiB of the memory \(100 MiB\) are free"):
        gate.load(30 * MIB).__enter__()


def test_loads_under_way_count_as_if_they_were_done() -> None:
    gate = Machine(100 * MIB).gate()
    with gate.load(30 * MIB), pytest.raises(UnavailableError):
        gate.load(30 * MIB).__enter__()
    with gate.load(30 * MIB):
        pass


def test_what_was_loaded_counts_once_when_it_has_settled() -> None:
    machine = Machine(10**12, a=20 * MIB)
    gate = machine.gate(budget=100 * MIB, evicts=False)
    with gate.load(30 * MIB) as settling:
        with settling():
            machine.models["b"] = 60 * MIB
        with gate.load(10 * MIB):
            pass
        with pytest.raises(UnavailableError, match="20 MiB of the budget"):
            gate.load(11 * MIB).__enter__()
    with pytest.raises(UnavailableError, match="20 MiB of the budget"):
        gate.load(11 * MIB).__enter__()


def test_a_load_that_fails_while_it_settles_takes_no_room() -> None:
    gate = Machine(100 * MIB).gate()
    with pytest.raises(KeyError), gate.load(50 * MIB) as settling, settling():
        raise KeyError
    with gate.load(50 * MIB):
        pass


def test_idle_models_go_to_make_room() -> None:
    machine = Machine(100 * MIB, a=30 * MIB, b=30 * MIB, c=30 * MIB)
    with machine.gate().load(25 * MIB):
        assert machine.gone == ["a", "b"]


def test_the_budget_holds_on_any_machine() -> None:
    machine = Machine(10**12, a=30 * MIB, b=30 * MIB)
    with machine.gate(budget=80 * MIB).load(20 * MIB):
        assert machine.gone == ["a"]
    with pytest.raises(UnavailableError, match=r"the budget for models \(80 MiB\)"):
        machine.gate(budget=80 * MIB, evicts=False).load(41 * MIB).__enter__()


def test_the_cost_is_learned_from_a_load_that_was_alone() -> None:
    machine = Machine(10**12)
    gate = machine.gate()
    with gate.load(100 * MIB):
        machine.used += 300 * MIB
    assert gate.cost.factor == 2.5


def test_nothing_is_learned_from_loads_that_overlap() -> None:
    machine = Machine(10**12)
    gate = machine.gate()
    before = gate.cost
    first, second = gate.load(100 * MIB), gate.load(100 * MIB)
    first.__enter__()
    second.__enter__()
    machine.used += 600 * MIB
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gate.cost == before
