"""Slots of a model's instances when the instances change."""

from __future__ import annotations

from remora.scheduling.slots import Slots
from support.engine.fakes import FakeInstance


def test_a_removed_instance_may_run_no_further_batch_and_a_kept_one_stays_as_it_was() -> None:
    kept, removed, added = (FakeInstance(name) for name in ("m_0", "m_1", "m_2"))
    slots = Slots([kept, removed])
    running = next(slot for slot in slots if slot.instance is kept)
    slots.occupy(running)
    (left_out,) = slots.set([kept, added])
    assert (left_out.instance, left_out.retired) == (removed, True)
    assert [(slot.instance, slot.retired, slot.busy) for slot in slots] == [(kept, False, True), (added, False, False)]


def test_idle_slots_are_counted_as_batches_begin_and_end() -> None:
    slots = Slots([FakeInstance(name) for name in ("m_0", "m_1", "m_2")])
    first, second, third = slots
    slots.occupy(first)
    slots.occupy(first)
    slots.occupy(second)
    assert slots.idle == 1
    assert slots.next() is third
    slots.occupy(third)
    assert slots.next() is None
    slots.free(first, begun=False)
    slots.free(first, begun=False)
    assert slots.idle == 1
    assert slots.next() is first


def test_a_slot_with_a_batch_queued_ahead_becomes_idle_after_the_second() -> None:
    slots = Slots([FakeInstance()])
    (slot,) = slots
    slots.occupy(slot)
    slot.begun = 2
    slots.free(slot, begun=True)
    assert (slots.idle, slot.busy) == (0, True)
    slots.free(slot, begun=True)
    assert (slots.idle, slot.busy) == (1, False)


def test_a_removed_slot_is_not_counted_as_idle() -> None:
    kept, removed = FakeInstance("m_0"), FakeInstance("m_1")
    slots = Slots([kept, removed])
    running, busy = slots
    slots.occupy(running)
    slots.occupy(busy)
    slots.set([kept])
    assert slots.idle == 0
    slots.free(busy, begun=False)
    assert slots.idle == 0
    slots.occupy(busy)
    slots.free(running, begun=False)
    assert slots.idle == 1


def test_an_unhealthy_slot_runs_the_next_batch_only_if_all_are_unhealthy() -> None:
    ill, well = FakeInstance("m_0"), FakeInstance("m_1")
    ill.trouble, well.trouble = "its process has ended", ""  # type: ignore[attr-defined]
    slots = Slots([ill, well])
    found = slots.next()
    assert found is not None
    assert found.instance is well
    well.trouble = "its process has ended"  # type: ignore[attr-defined]
    found = slots.next()
    assert found is not None
    assert found.instance is ill
