"""Instances of a model and their state, guarded by the scheduler's lock.

An instance runs one batch at a time. Behind a batch begun by an event loop, the next may be begun already: it is queued
*ahead* and runs when the previous one has ended.

Invariant: an unhealthy instance gets work only if all instances are unhealthy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from remora.backends import Instance, capabilities_of
from remora.scheduling.batching import Plan


class Thread(Protocol):
    """Thread that runs the batches of one instance. The scheduler starts it."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Slot:
    """An instance and its state.

    Attributes:
        busy: it runs a batch, or is about to run ``handed``.
        handed: a plan for its own thread.
        begun: batches begun by an event loop that have not ended: two if one is queued ahead.
        barred: no batch may be queued ahead until the running one has ended.
        free_ns: end of its last batch that a loop had begun, if known.
        retired: it must not run any further batch.
        resting: its thread sleeps until there is work.
        answers_late: a capability of the instance.
    """

    __slots__ = (
        "answers_late",
        "barred",
        "begun",
        "busy",
        "free_ns",
        "handed",
        "instance",
        "resting",
        "retired",
        "thread",
    )

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.busy = False
        self.handed: Plan | None = None
        self.begun = 0
        self.barred = False
        self.free_ns = 0
        self.retired = False
        self.resting = False
        self.thread: Thread | None = None
        self.answers_late = capabilities_of(instance).answers_late

    @property
    def trouble(self) -> str:
        """Reason why the instance cannot run anything now, or ""."""
        return capabilities_of(self.instance).trouble


class Slots:
    """All instances of a model.

    Attributes:
        idle: number of instances that are not busy, healthy or not.
    """

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._slots: list[Slot] = []
        self.idle = 0
        self.set(instances)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def set(self, instances: Sequence[Instance]) -> list[Slot]:
        """Replace the instances, and return the slots of those removed."""
        known = {id(slot.instance): slot for slot in self._slots}
        self._slots = [known.pop(id(each)) if id(each) in known else Slot(each) for each in instances]
        self._may_fail = len(instances) > 1 and any(
            capabilities_of(instance).unhealthy_reason is not None for instance in instances
        )
        left_out = list(known.values())
        for slot in left_out:
            slot.retired = True
        self.idle = sum(not slot.busy for slot in self._slots)
        return left_out

    def occupy(self, slot: Slot) -> None:
        """Mark a slot as busy."""
        self.idle -= not (slot.busy or slot.retired)
        slot.busy = True

    def free(self, slot: Slot, *, begun: bool) -> None:
        """Record the end of a slot's batch, either of a loop (``begun``) or of a thread."""
        slot.begun -= begun
        slot.barred = False
        if not slot.begun:
            self.idle += slot.busy and not slot.retired
            slot.busy = False

    def next(self) -> Slot | None:
        """Return a slot that may run the next batch."""
        if self.idle:
            for slot in self._slots:
                if not slot.busy and (not self._may_fail or self.may_run(slot)):
                    return slot
        return None

    def may_run(self, slot: Slot) -> bool:
        """Return True if this slot may run the next batch."""
        return not slot.busy and not (self._may_fail and slot.trouble and not all(each.trouble for each in self._slots))

    def next_ahead(self) -> Slot | None:
        """Return a slot behind whose batch another may be begun."""
        return next((slot for slot in self._slots if slot.begun == 1 and not slot.barred), None)
