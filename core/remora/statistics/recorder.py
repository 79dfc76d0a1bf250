"""Recorder of executions, which updates statistics and logs the failures of models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from remora.backends import Execution
from remora.errors import RemoraError, UnavailableError
from remora.messages import Outcome, Response, Streamed, Ticket
from remora.scheduling.batching import Plan
from remora.statistics import CANCELED, OTHER, REJECTED, ModelStatistics, Phases
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

_FAILURE_LOG_NS = 10_000_000_000
"""Minimum interval between two logged failures of a model."""


class FailureLog:
    """Rate-limited log of requests that fail in a model. Thread-safe.

    Args:
        model: the model's name.
        clock: for the interval between two lines.
    """

    def __init__(self, model: str, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._next_ns = 0
        self._unlogged = 0

    def add(self, error: RemoraError) -> None:
        """Log the first and last line of an error, unless another was logged a moment ago."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            if now_ns < self._next_ns:
                self._unlogged += 1
                return
            unlogged, self._unlogged = self._unlogged, 0
            self._next_ns = now_ns + _FAILURE_LOG_NS
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [error.code]
        text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        more = f" (and {unlogged} earlier failures were not logged)" if unlogged else ""
        fields = {"model": self._model, "code": error.code}
        _log.warning("model '%s' failed a request: %s%s", self._model, text, more, extra={"fields": fields})


class StatisticsRecorder:
    """Recorder that updates a model's statistics and, if present, its failure log."""

    __slots__ = ("_clock", "_failures", "_statistics")

    def __init__(self, statistics: ModelStatistics, clock: Clock, failures: FailureLog | None = None) -> None:
        self._statistics = statistics
        self._clock = clock
        self._failures = failures

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        input_end = execution.input_end_ns or start_ns
        phases = Phases(start_ns, input_end, max(execution.output_start_ns or end_ns, input_end), end_ns)
        spent = (input_end - start_ns, phases.output_start_ns - input_end, end_ns - phases.output_start_ns)
        rows = plan.rows
        for ticket in plan.tickets:
            ticket.spent_ns = spent
            ticket.batch_rows = rows
        done: list[Ticket] = plan.tickets
        failed: list[Ticket] = []
        returned = 0
        if {Response} != set(map(type, outcomes)):  # rare, and this is the fastest check
            done, failed = _split(plan.tickets, outcomes)
            returned = sum(isinstance(outcome, RemoraError) and outcome.answered for outcome in outcomes)
            for outcome in outcomes if self._failures is not None else ():
                self._log(outcome)
        self._statistics.record_execution(done, failed, plan.rows, phases, plan.reason, self._clock.wall_ms(), returned)

    def streamed(self, ticket: Ticket, index: int, streamed: Streamed, begin_ns: int, now_ns: int) -> None:
        self._statistics.record_streamed(ticket, index, streamed, now_ns - begin_ns, now_ns)
        self._log(streamed.outcome)

    def _log(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, RemoraError) and outcome.from_model and self._failures is not None:
            self._failures.add(outcome)

    def cache_hit(self, ticket: Ticket, lookup_ns: int, begin_ns: int, now_ns: int) -> None:
        self._statistics.record_cache_hit(ticket, lookup_ns, begin_ns, now_ns)

    def cache_miss(self, spent_ns: int, now_ns: int) -> None:
        self._statistics.record_cache_miss(spent_ns, now_ns)

    def ensemble_ended(
        self, ticket: Ticket, spent_ns: tuple[int, int, int], error: RemoraError | None, first_ns: int, now_ns: int
    ) -> None:
        if error is None:
            self._statistics.record_ensemble(ticket, spent_ns, first_ns, now_ns, self._clock.wall_ms())
        else:
            reason = CANCELED if error.code == "CANCELLED" else OTHER
            self._statistics.record_failure(ticket, reason, now_ns)

    def refused(self, error: RemoraError) -> None:
        if isinstance(error, UnavailableError):
            self._statistics.record_rejection()

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        reason = CANCELED if error.code == "CANCELLED" else REJECTED
        self._statistics.record_failure(ticket, reason, now_ns)


def _split(tickets: Sequence[Ticket], outcomes: Sequence[Outcome | None]) -> tuple[list[Ticket], list[Ticket]]:
    """Return the answered and the failed tickets, without those of open streams."""
    done: list[Ticket] = []
    failed: list[Ticket] = []
    for ticket, outcome in zip(tickets, outcomes, strict=True):
        if isinstance(outcome, RemoraError):
            (done if outcome.answered else failed).append(ticket)
        elif outcome is not None:
            done.append(ticket)
    return done, failed
