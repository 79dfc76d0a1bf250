"""The instances of a model and who uses them; the law: an instance in trouble is given work only when all are.

Nothing here takes a lock: the scheduler's guards it. An instance runs one batch at a time. Behind one that an event
loop has begun, the next may be begun already: it goes *ahead*, and runs when the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from remora.backends import Instance
from remora.scheduling.batching import Plan


class Thread(Protocol):
    """Runs the batches of one instance; the scheduler starts it."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Slot:
    """An instance and who uses it.

    Attributes:
        busy: it runs a batch, or is to run ``handed``.
        handed: a plan that its own thread is to run.
        begun: how many batches an event loop has begun that have not ended: two when one has gone ahead.
        barred: nothing more goes ahead until the batch that runs has ended.
        free_ns: when it has ended its last batch that a loop had begun, if it can tell.
        retired: it is to run nothing more.
        resting: its thread sleeps until there is work.
    """

    __slots__ = ("barred", "begun", "busy", "free_ns", "handed", "instance", "resting", "retired", "thread")

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

    @property
    def trouble(self) -> str:
        """Why the instance cannot run anything now; empty when it can."""
        return str(getattr(self.instance, "trouble", ""))

    def free(self, *, begun: bool) -> None:
        """A batch has ended: one that a loop had ``begun``, or one of a thread."""
        self.begun -= begun
        self.busy = self.begun > 0
        self.barred = False


class Slots:
    """All instances of a model."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._slots: list[Slot] = []
        self.set(instances)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def set(self, instances: Sequence[Instance]) -> list[Slot]:
        """Have these instances from now on; the slots of those left out."""
        known = {id(slot.instance): slot for slot in self._slots}
        self._slots = [known.pop(id(each)) if id(each) in known else Slot(each) for each in instances]
        self._may_fail = len(instances) > 1 and any(hasattr(instance, "trouble") for instance in instances)
        left_out = list(known.values())
        for slot in left_out:
            slot.retired = True
        return left_out

    def any_idle(self) -> bool:
        """Is one without work, be it in trouble or not?"""
        return not all(slot.busy for slot in self._slots)

    def next(self) -> Slot | None:
        """One that may run the next batch."""
        return next((slot for slot in self._slots if self.may_run(slot)), None)

    def may_run(self, slot: Slot) -> bool:
        """Whether this one may run the next batch."""
        return not slot.busy and not (self._may_fail and slot.trouble and not all(each.trouble for each in self._slots))

    def next_ahead(self) -> Slot | None:
        """One behind whose batch another may be begun."""
        return next((slot for slot in self._slots if slot.begun == 1 and not slot.barred), None)
