"""The stage finds what real threads would run into: locks are as strict there as the module's own."""

from __future__ import annotations

import pytest

from support.engine.fakes import FakeClock
from support.engine.interleaving import DeadlockError, Interleaving


def taken_twice(kind: str) -> None:
    stage = Interleaving(1, FakeClock())
    lock = getattr(stage.threading, kind)()

    def take() -> None:
        with lock, lock:
            pass

    stage.start(take)
    stage.run()


def test_a_lock_that_its_owner_takes_again_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="take"):
        taken_twice("Lock")


@pytest.mark.parametrize("kind", ["RLock", "Condition"])
def test_a_reentrant_lock_may_be_taken_again_by_its_owner(kind: str) -> None:
    taken_twice(kind)
