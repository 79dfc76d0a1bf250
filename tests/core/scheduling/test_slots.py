"""Slots of a model's instances when the instances change."""

from __future__ import annotations

from fakes import FakeInstance
from remora.scheduling.slots import Slots


def test_a_removed_instance_may_run_no_further_batch_and_a_kept_one_stays_as_it_was() -> None:
    kept, removed, added = (FakeInstance(name) for name in ("m_0", "m_1", "m_2"))
    slots = Slots([kept, removed])
    running = next(slot for slot in slots if slot.instance is kept)
    running.busy = True
    (left_out,) = slots.set([kept, added])
    assert (left_out.instance, left_out.retired) == (removed, True)
    assert [(slot.instance, slot.retired, slot.busy) for slot in slots] == [(kept, False, True), (added, False, False)]
