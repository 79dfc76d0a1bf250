"""What fits and what goes: least recently used first, nothing in vain, nothing that must stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.models.memory import FIRST_FACTOR, LoadCost, Resident, Space, refusal, room_for

MIB = 1 << 20
OLD, MID, NEW = Resident("old", 10, 1), Resident("mid", 20, 2), Resident("new", 30, 3)


@pytest.mark.parametrize(
    ("need", "space", "residents", "going"),
    [
        (5, Space(None, 10**9), (OLD,), ()),
        (40, Space(100, 60), (OLD, MID, NEW), ()),
        (41, Space(100, 60), (OLD, MID, NEW), ("old",)),
        (51, Space(100, 60), (NEW, OLD, MID), ("old", "mid")),
        (100, Space(100, 60), (OLD, MID, NEW), ("old", "mid", "new")),
        (101, Space(100, 60), (OLD, MID, NEW), None),
        (60, Space(100, 60), (OLD._replace(busy=True), MID, NEW), ("mid",)),
        (60, Space(100, 60), (OLD._replace(pinned=True), MID, NEW), ("mid",)),
        (41, Space(100, 60), (Resident("empty", 0, 0), OLD), ("old",)),
        (1, Space(100, 120), (OLD,), ("old",)),
        (1, Space(100, 100), (), None),
    ],
)
def test_the_least_recently_used_idle_models_go(
    need: int, space: Space, residents: tuple[Resident, ...], going: tuple[str, ...] | None
) -> None:
    assert room_for(need, space, residents) == going


RESIDENTS = st.lists(
    st.builds(Resident, st.text(), st.integers(0, 50), st.integers(0, 9), st.booleans(), st.booleans()),
    max_size=6,
    unique_by=lambda resident: resident.key,
)


@given(st.integers(0, 200), st.builds(Space, st.integers(0, 150), st.integers(0, 150)), RESIDENTS)
def test_what_goes_is_enough_and_never_more_than_that(need: int, space: Space, residents: list[Resident]) -> None:
    going = room_for(need, space, residents)
    by_key = {resident.key: resident for resident in residents}
    movable = [resident for resident in residents if not (resident.busy or resident.pinned)]
    free = space.free
    assert free is not None
    if going is None:
        assert need > free + sum(resident.size for resident in movable)
        return
    sizes = [by_key[key].size for key in going]
    assert need <= free + sum(sizes)
    assert not going or need > free + sum(sizes[:-1]), "the last one was needed"
    assert all(by_key[key] in movable for key in going)
    newest_gone = max((by_key[key].last_used_ms for key in going), default=-1)
    stayed = [resident for resident in movable if resident.key not in going and resident.size]
    assert all(resident.last_used_ms >= newest_gone for resident in stayed)


def test_the_factor_follows_what_large_loads_take_and_stays_sane() -> None:
    cost = LoadCost()
    assert cost.estimate(100) == 200
    assert cost.learn(MIB, 100 * MIB) == cost, "too small to tell"
    assert cost.learn(100 * MIB, 0) == cost
    assert cost.learn(100 * MIB, 300 * MIB).factor == (FIRST_FACTOR + 3) / 2
    assert cost.learn(100 * MIB, 10**12).factor == (FIRST_FACTOR + 4) / 2
    assert cost.learn(100 * MIB, 1).factor == (FIRST_FACTOR + 1.2) / 2


def test_a_refusal_has_the_numbers() -> None:
    text = refusal(512 * MIB, LoadCost(), Space(4096 * MIB, 3500 * MIB), "the memory")
    assert text.startswith("loading it takes about 1,024 MiB (2.0 times its 512 MiB of files), but 596 MiB of the ")
    assert "memory (4,096 MiB) are free" in text
