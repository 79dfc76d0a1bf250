"""The arena: no two blocks share memory, and what is given back is whole again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends.worker.arena import ALIGNMENT, Arena, ArenaError

SIZE = 64 * ALIGNMENT


@given(st.lists(st.one_of(st.integers(0, SIZE // 4), st.integers(-8, -1)), max_size=80))
def test_blocks_never_overlap_and_room_is_never_lost(steps: list[int]) -> None:
    arena = Arena(SIZE)
    used: dict[int, int] = {}
    for step in steps:
        if step < 0:
            if used:
                offset = sorted(used)[step % len(used)]
                del used[offset]
                arena.free(offset)
            continue
        offset = arena.allocate(step)
        if offset is None:
            need = max(-(-step // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
            marks = [(0, 0), *sorted(used.items()), (SIZE, 0)]
            gaps = [after[0] - before[0] - before[1] for before, after in pairwise(marks)]
            assert max(gaps) < need, "a gap that is large enough was not found"
            continue
        length = max(-(-step // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        assert offset % ALIGNMENT == 0
        assert offset + length <= SIZE
        assert all(offset + length <= other or other + size <= offset for other, size in used.items())
        used[offset] = length
        assert arena.used_bytes == sum(used.values())
    for offset in used:
        arena.free(offset)
    assert arena.allocate(SIZE) == 0


def test_low_offsets_are_used_again() -> None:
    arena = Arena(SIZE)
    first = arena.allocate(100)
    arena.allocate(100)
    assert first is not None
    arena.free(first)
    assert arena.allocate(50) == first


@pytest.mark.parametrize("offset", [1, ALIGNMENT, -ALIGNMENT])
def test_what_is_not_in_use_cannot_be_given_back(offset: int) -> None:
    arena = Arena(SIZE)
    arena.allocate(1)
    with pytest.raises(ArenaError):
        arena.free(offset)


def test_memory_beyond_what_is_kept_is_surplus_once() -> None:
    arena = Arena(SIZE)
    low, high = arena.allocate(ALIGNMENT), arena.allocate(10 * ALIGNMENT)
    assert low == 0
    assert high is not None
    assert arena.surplus(2 * ALIGNMENT) is None
    arena.free(high)
    assert arena.surplus(2 * ALIGNMENT) == (2 * ALIGNMENT, 9 * ALIGNMENT)
    assert arena.surplus(2 * ALIGNMENT) is None
