"""What a scheduler tells about its work: the seam between scheduling and statistics, so that neither knows the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from remora.backends import Execution
from remora.errors import RemoraError
from remora.messages import Outcome, Ticket
from remora.scheduling.batching import Plan


class Recorder(Protocol):
    """Listens to one scheduler. Called without its lock, from any of its threads; must not raise."""

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome], start_ns: int, end_ns: int
    ) -> None:
        """A batch ran; ``outcomes`` answer the plan's tickets in order, errors among them."""

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        """A request was answered without running."""
