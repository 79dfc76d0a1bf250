"""What a scheduler tells about its work: the seam between scheduling and statistics; neither knows the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from remora.backends import Execution
from remora.errors import RemoraError
from remora.messages import Outcome, Streamed, Ticket
from remora.scheduling.batching import Plan


class Recorder(Protocol):
    """Listens to one scheduler. Called without its lock, from any of its threads; must not raise."""

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        """A batch ran; ``outcomes`` answer the plan's tickets in order, errors among them; None for open streams."""

    def streamed(self, ticket: Ticket, index: int, streamed: Streamed, begin_ns: int, now_ns: int) -> None:
        """A decoupled model sent its answer number ``index``, begun when the one before it was sent."""

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        """A request was answered without running."""
