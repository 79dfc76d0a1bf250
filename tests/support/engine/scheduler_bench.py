"""Scheduler with fake instances and a fake clock."""

from __future__ import annotations

from remora.config import BatchPolicy
from remora.messages import Outcome, Response, Ticket
from remora.scheduling.batching import BatchQueue
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from support.engine.fakes import (
    DOUBLER,
    FakeClock,
    FakeInstance,
    FakeMailbox,
    FakeRecorder,
    Replies,
    config_of,
    ticket_of,
)

DYNAMIC = BatchPolicy(max_batch_size=8, dynamic=True)
PATIENCE_S = 30.0
"""How long a threaded test waits before it counts as a deadlock."""


class Bench:
    """A scheduler with everything around it faked."""

    def __init__(
        self,
        policy: BatchPolicy = DYNAMIC,
        *,
        instances: int = 1,
        quick: bool = False,
        threads: bool = False,
        may_wait: bool = False,
        ordered: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.instances = [FakeInstance(f"m_{index}", quick=quick) for index in range(instances)]
        self.recorder = FakeRecorder()
        self.replies = Replies()
        self.scheduler = Scheduler(
            BatchQueue(policy),
            self.instances,
            Signature(config_of(DOUBLER), "m"),
            self.recorder,
            self.clock,
            DispatchPolicy(threads=threads, may_wait=may_wait, ordered=ordered),
        )

    def submit(self, rows: int = 1, **settings: object) -> Ticket:
        ticket = ticket_of(rows, reply=self.replies, **settings)  # type: ignore[arg-type]
        self.scheduler.submit(ticket)
        return ticket


def values(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, Response)
    found: list[int] = outcome.outputs[0].data.reshape(-1).tolist()
    return found


def inline_bench(**settings: bool) -> tuple[Bench, FakeMailbox]:
    """A bench whose model has shown that it is quick."""
    bench = Bench(**{"quick": True, **settings})  # type: ignore[arg-type]
    bench.scheduler.costs.learn(1, 1000)
    return bench, FakeMailbox()
