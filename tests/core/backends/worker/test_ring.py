"""The ring: records come out as they went in, in order, and nonsense in the memory is noticed."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends.worker.ring import AWAY, HEADER_BYTES, WAITING, Ring, RingError

CAPACITY = 256


def no_fence() -> None:
    """One process and one thread see their own writes in order."""


def pair(capacity: int = CAPACITY) -> tuple[Ring, Ring, memoryview]:
    memory = memoryview(bytearray(HEADER_BYTES + capacity))
    return Ring(memory, no_fence), Ring(memory, no_fence), memory


@given(st.lists(st.one_of(st.none(), st.binary(max_size=CAPACITY // 4))))
def test_records_come_out_as_they_went_in(steps: list[bytes | None]) -> None:
    writer, reader, _ = pair()
    inside: deque[bytes] = deque()
    for record in steps:
        if record is None:
            assert reader.take() == (inside.popleft() if inside else None)
        elif writer.put(record):
            inside.append(record)
        else:  # full: what is inside and this one do not fit together
            assert sum(16 + len(each) for each in inside) + 16 + len(record) > CAPACITY
        assert reader.empty == (not inside)
    assert [reader.take() for _ in inside] == list(inside)


@given(st.integers(0, CAPACITY // 4))
def test_a_ring_that_is_empty_takes_any_record_that_it_may_hold(size: int) -> None:
    writer, reader, _ = pair()
    for _ in range(3 * CAPACITY):
        assert writer.put(bytes(size))
        assert reader.take() == bytes(size)


def test_a_record_that_is_too_long_is_refused() -> None:
    writer, _, _ = pair()
    with pytest.raises(ValueError, match="longer than the 64"):
        writer.put(bytes(65))


def test_a_full_ring_takes_a_record_once_there_is_room() -> None:
    writer, reader, _ = pair()
    while writer.put(bytes(40)):
        pass
    assert not writer.put(bytes(40))
    reader.take()
    assert writer.put(bytes(40))


@given(st.binary(min_size=HEADER_BYTES + CAPACITY, max_size=HEADER_BYTES + CAPACITY))
def test_any_memory_is_read_or_refused(content: bytes) -> None:
    ring = Ring(memoryview(bytearray(content)), no_fence)
    try:
        ring.take()
    except RingError:
        return


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_marks_and_lengths_that_lie_are_noticed(tail: int, head: int, length: int) -> None:
    writer, reader, memory = pair()
    words = memory.cast("Q")
    words[0], words[8] = tail, head
    words[32:] = memoryview(length.to_bytes(8, "little") * (CAPACITY // 8)).cast("Q")
    try:
        record = reader.take()
    except RingError:
        record = None
    assert record is None or len(record) <= CAPACITY
    try:
        writer.put(b"x")
    except (RingError, ValueError):
        return


def test_the_reader_says_who_sleeps() -> None:
    writer, reader, _ = pair()
    for state in (AWAY, WAITING):
        reader.state = state
        assert writer.state == state


def test_a_ring_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring(memoryview(bytearray(HEADER_BYTES + 24)), no_fence)
