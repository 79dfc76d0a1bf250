"""Execution of plans on instances, and delivery of the answers that arrive later.

Invariant: each ticket of a plan gets one answer or the end of its stream, whatever the instance does, and nothing is
raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol, cast
from weakref import WeakSet

from remora.backends import Execution, Instance, NotBegunError, RemoteInstance
from remora.errors import CancelledError, InternalError, RemoraError
from remora.messages import Outcome, Response, Streamed, Ticket, Watcher
from remora.scheduling.batching import Plan
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import deliver, failure_of
from remora.scheduling.slots import Slot
from remora.signature import Signature


class Recorder(Protocol):
    """Observer of one scheduler.

    Called without the scheduler's lock, from any of its threads; must not raise.
    """

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        """Record a batch.

        ``outcomes`` answer the plan's tickets in order, errors included; None for an open stream.
        """

    def streamed(self, ticket: Ticket, index: int, streamed: Streamed, begin_ns: int, now_ns: int) -> None:
        """Record answer number ``index`` of a decoupled model.

        ``begin_ns`` is when its previous answer was sent.
        """

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        """Record a request that was answered without running."""


Answers = list[tuple[Ticket, Outcome]]


class Ran(NamedTuple):
    """Result of a plan: the answers that are ready, and the number of requests still open."""

    answers: Answers
    left_open: int = 0


class OpenRequests:
    """Requests that are answered after their execution returned.

    A thread sends the answers of destructors: a destructor may interrupt any thread at any point, so it may only queue
    its answer here.

    Args:
        opened: called before an execution leaves requests open.
        ended: called for each of them after its last answer was delivered.
    """

    def __init__(self, opened: Callable[[], None], ended: Callable[[], None]) -> None:
        self._opened = opened
        self.ended = ended
        self._open: WeakSet[Streams | LateAnswers] = WeakSet()
        self._lock = threading.Lock()
        self._late: SimpleQueue[tuple[Streams | LateAnswers, int, Streamed] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, answers: Streams | LateAnswers) -> None:
        """Register an execution that is about to leave requests open."""
        with self._lock:
            self._open.add(answers)
        self._opened()

    def any_open(self, instances: Collection[object]) -> bool:
        """Return True if one of these instances left a request open. Not for decoupled models."""
        with self._lock:
            return any(isinstance(each, LateAnswers) and each.is_open_on(instances) for each in self._open)

    def send_soon(self, answers: Streams | LateAnswers, index: int, streamed: Streamed) -> None:
        """Queue an answer for the thread without taking a lock."""
        self._late.put((answers, index, streamed))

    def start(self, name: str) -> None:
        """Start the thread on the first call. Not thread-safe."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"remora {name} late answers", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (late := self._late.get()) is not None:
            answers, index, streamed = late
            answers.send(index, streamed)
            del late, answers  # because waiting for the next answer must not keep this one alive

    def catch_up(self) -> None:
        """Send the queued answers in the caller's thread, for tests without the thread."""
        while not self._late.empty():
            if (late := self._late.get()) is not None:
                answers, index, streamed = late
                answers.send(index, streamed)

    def end_all(self, error: RemoraError) -> None:
        """Answer all open requests with an error, after a stop timed out."""
        with self._lock:
            open_ones = list(self._open)
        for answers in open_ones:
            answers.end_all(error)

    def close(self) -> None:
        """End the thread, after the last open request."""
        self._late.put(None)


class Runner:
    """Executor of plans for a model that is not decoupled. Thread-safe.

    An execution returns its answers or leaves some requests open.

    Args:
        signature: converts outputs to their wire shape.
        recorder: records every execution and failure.
        now: the scheduler's clock, nanoseconds.
        costs: learns the durations of batches.
        open_requests: holds the requests that are answered later.
        deliver: delivers the answers that arrive later.
    """

    def __init__(
        self,
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        costs: CostModel,
        open_requests: OpenRequests,
        deliver: Callable[[Answers], None],
    ) -> None:
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._costs = costs
        self._open_requests = open_requests
        self._deliver = deliver

    def run(self, slot: Slot, plan: Plan) -> Ran:
        """Run a plan and return its answers.

        Tickets that the model reschedules or answers later are not among them.
        """
        instance = slot.instance
        start_ns = self._now()
        late = self._late(slot, plan) if slot.answers_late else None
        execution = self._execution(plan, late, start_ns)
        result: Sequence[Outcome | None] | BaseException
        try:
            result = instance.execute(execution)
        except (Exception, SystemExit) as error:  # of the model or the backend; the instance continues
            result = error
        return self._complete(instance, plan, execution, start_ns, result, late)

    def _late(self, slot: Slot, plan: Plan) -> LateAnswers:
        return LateAnswers(slot.instance, plan.tickets, self._answer_late)

    def _execution(self, plan: Plan, late: LateAnswers | None, start_ns: int) -> Execution:
        if late is None:
            return _execution(plan, start_ns)
        send_soon = self._open_requests.send_soon
        return _execution(plan, start_ns, late.send, lambda index, streamed: send_soon(late, index, streamed))

    def _answer_late(self, ticket: Ticket, outcome: Response | RemoraError) -> None:
        if isinstance(outcome, Response) and self._signature.reshapes:
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        self._recorder.streamed(ticket, 0, Streamed(outcome, True), ticket.start_ns, self._now())
        self._deliver([(ticket, outcome)])
        self._open_requests.ended()

    def begin(self, slot: Slot, plan: Plan, watcher: Watcher, ended: Callable[[Ran | None], None]) -> bool:
        """Begin a plan on a remote instance, queued behind the one it runs now.

        ``ended`` receives the answers, in any thread, or None if nothing of the plan has run. Returns False if `run`
        must be used instead.
        """
        instance = cast("RemoteInstance", slot.instance)
        begun_ns = self._now()
        late = self._late(slot, plan) if slot.answers_late else None
        execution = self._execution(plan, late, begun_ns)

        def done(result: Sequence[Outcome | None] | Exception) -> None:
            if isinstance(result, NotBegunError):
                ended(None)
                return
            start_ns = max(begun_ns, slot.free_ns)  # it may have waited for the previous batch
            if start_ns > begun_ns:
                for ticket in plan.tickets:
                    ticket.start_ns = start_ns
            slot.free_ns = execution.output_start_ns
            ended(self._complete(instance, plan, execution, start_ns, result, late))

        try:
            return instance.begin(execution, watcher, done)
        except Exception as error:
            done(error)
            return True

    def _complete(
        self,
        instance: Instance,
        plan: Plan,
        execution: Execution,
        start_ns: int,
        result: Sequence[Outcome | None] | BaseException,
        late: LateAnswers | None,
    ) -> Ran:
        tickets = plan.tickets
        excluded: Collection[int] = execution.rescheduled
        open_indices: Collection[int] = ()
        try:
            if isinstance(result, BaseException):
                raise result
            outcomes = cast("Sequence[Outcome]", result)
            if len(outcomes) != len(tickets):
                raise InternalError(
                    f"instance '{instance.name}' returned {len(outcomes)} responses for {len(tickets)} requests"
                )
            if late is not None and execution.late:
                outcomes, open_indices = self._open_late(late, outcomes, execution.late)
                excluded = {*excluded, *open_indices}
            if self._signature.reshapes:
                outcomes = [self._to_wire(outcome) for outcome in outcomes]
        except (Exception, SystemExit) as error:
            outcomes = [failure_of(error, instance.name)] * len(tickets)
        end_ns = self._now()
        self._costs.learn(plan.rows, end_ns - start_ns)
        self._recorder.executed(plan, execution, outcomes, start_ns, end_ns)
        answers = list(zip(tickets, outcomes, strict=True))
        if excluded:
            answers = [answer for index, answer in enumerate(answers) if index not in excluded]
        return Ran(answers, len(open_indices))

    def _open_late(
        self, late: LateAnswers, outcomes: Sequence[Outcome], indices: Collection[int]
    ) -> tuple[list[Outcome], Collection[int]]:
        """Return the outcomes, with those that arrived meanwhile, and the requests still open."""
        self._open_requests.add(late)
        early = late.open(indices)
        return [early.get(index, outcome) for index, outcome in enumerate(outcomes)], set(indices) - early.keys()

    def _to_wire(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Response):
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        return outcome


class StreamRunner:
    """Executor of plans for a decoupled model, which streams its answers.

    Streams may outlast the execution.

    Args:
        signature, recorder, now, costs: as for `Runner`.
        open_requests: holds the streams that outlast their execution.
    """

    def __init__(
        self,
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        costs: CostModel,
        open_requests: OpenRequests,
    ) -> None:
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._costs = costs
        self._open_requests = open_requests

    def run(self, slot: Slot, plan: Plan) -> Ran:
        """Run a plan.

        A failure ends all its open streams. The result contains no answers.
        """
        instance, open_requests, start_ns = slot.instance, self._open_requests, self._now()
        streams = Streams(plan.tickets, self._signature, self._recorder, self._now, open_requests.ended)
        open_requests.add(streams)
        execution = _execution(
            plan, start_ns, streams.send, lambda index, streamed: open_requests.send_soon(streams, index, streamed)
        )
        try:
            for index, outcome in enumerate(instance.execute(execution)):
                if outcome is not None:
                    streams.send(index, outcome if isinstance(outcome, Streamed) else Streamed(outcome, True))
            for index in execution.rescheduled:
                streams.leave(index)
        except (Exception, SystemExit) as error:
            streams.end_all(failure_of(error, instance.name))
        end_ns = self._now()
        self._costs.learn(plan.rows, end_ns - start_ns)
        self._recorder.executed(plan, execution, [None] * len(plan.tickets), start_ns, end_ns)
        return Ran([], len(plan.tickets))


def _execution(
    plan: Plan,
    start_ns: int,
    send: Callable[[int, Streamed], None] | None = None,
    send_soon: Callable[[int, Streamed], None] | None = None,
) -> Execution:
    requests = []
    for ticket in plan.tickets:
        ticket.start_ns = start_ns
        requests.append(ticket.request)
    return Execution(requests, send, send_soon)


class Streams:
    """Open streams of one execution, one for each ticket.

    Args:
        tickets: in the order of the execution's requests.
        signature: converts outputs to their wire shape.
        recorder: records every answer.
        now: the engine's monotonic clock.
        ended: called once for each stream, after its last answer was delivered.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        ended: Callable[[], None],
    ) -> None:
        self._tickets = tickets
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._ended = ended
        # One lock for each stream, because a slow client must block only the sender of that stream.
        self._locks = [threading.RLock() for _ in tickets]
        self._open = [True] * len(tickets)
        self._sent = [0] * len(tickets)
        self._last_ns = [0] * len(tickets)

    def send(self, index: int, streamed: Streamed) -> None:
        """Deliver one answer. Answers of a stream arrive in the order in which they were sent.

        This may block for as long as the ticket's reply does (see ``Ticket``), but never for the final answer.
        """
        outcome = streamed.outcome
        if isinstance(outcome, Response) and self._signature.reshapes:
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        ticket = self._tickets[index]
        with self._locks[index]:  # held during the delivery to keep the order
            if not self._open[index]:
                return
            now_ns = self._now()
            begin_ns = self._last_ns[index] or ticket.start_ns
            self._recorder.streamed(ticket, self._sent[index], streamed, begin_ns, now_ns)
            self._last_ns[index] = now_ns
            self._sent[index] += 1
            self._open[index] = not streamed.final
            deliver([(ticket, streamed)])
        if streamed.final:
            self._ended()

    def leave(self, index: int) -> None:
        """Close the stream here, because the next execution of the request continues it [S14]."""
        with self._locks[index]:
            was_open, self._open[index] = self._open[index], False
        if was_open:
            self._ended()

    def end_all(self, error: RemoraError) -> None:
        """End all open streams with an error, those of cancelled requests with CancelledError."""
        for index, ticket in enumerate(self._tickets):
            end = CancelledError("request was cancelled") if ticket.request.cancelled else error
            self.send(index, Streamed(end, True))


class LateAnswers:
    """Answers that an execution of a model that is not decoupled sends after it returned.

    Args:
        instance: runs them.
        tickets: in the order of the execution's requests.
        answer: delivers an answer; called once for each open request.
    """

    def __init__(
        self, instance: object, tickets: Sequence[Ticket], answer: Callable[[Ticket, Response | RemoraError], None]
    ) -> None:
        self._instance = instance
        self._tickets = tickets
        self._answer = answer
        self._lock = threading.Lock()
        self._early: dict[int, Response | RemoraError] = {}
        self._open: set[int] | None = None

    def send(self, index: int, streamed: Streamed) -> None:
        """Answer a request.

        The answer is kept for `open` if the execution has not returned yet.
        """
        outcome = streamed.outcome
        if outcome is None:
            outcome = InternalError("a model that is not decoupled ended a request without a response", from_model=True)
        with self._lock:
            if self._open is None:
                self._early.setdefault(index, outcome)
                return
            if index not in self._open:
                return
            self._open.discard(index)
        self._answer(self._tickets[index], outcome)

    def open(self, indices: Collection[int]) -> dict[int, Response | RemoraError]:
        """Mark these requests as open and return the answers that have already arrived.

        From now on the cancellation of an open request ends it, because its execution has returned and no thread waits
        for its answer.
        """
        with self._lock:
            early = {index: self._early[index] for index in indices if index in self._early}
            self._open = set(indices) - early.keys()
            watched = tuple(self._open)
        for index in watched:
            self._tickets[index].request.when_cancelled(partial(self._cancel, index))
        return early

    def is_open_on(self, instances: Collection[object]) -> bool:
        """Return True if one of these instances still has to answer."""
        return bool(self._open) and self._instance in instances

    def _cancel(self, index: int) -> None:
        self.send(index, Streamed(CancelledError("request was cancelled"), True))

    def end_all(self, error: RemoraError) -> None:
        """Answer all open requests with an error."""
        with self._lock:
            indices = tuple(self._open or ())
        for index in indices:
            self.send(index, Streamed(error, True))
