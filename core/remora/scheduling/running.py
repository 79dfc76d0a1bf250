"""Runs a plan on an instance and accounts for it; the law: each ticket of a plan gets one answer or its stream's end,
whatever the instance does, and nothing is raised.
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
    """Listens to one scheduler. Called without its lock, from any of its threads; must not raise."""

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        """A batch ran; ``outcomes`` answer the plan's tickets in order, errors among them; None for open streams."""

    def streamed(self, ticket: Ticket, index: int, streamed: Streamed, begin_ns: int, now_ns: int) -> None:
        """A decoupled model sent its answer number ``index``, begun when the one before it was sent."""

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        """A request was answered without running."""


Answers = list[tuple[Ticket, Outcome]]


class Ran(NamedTuple):
    """What a plan came to: the answers that are there, and how many requests stay open."""

    answers: Answers
    left_open: int = 0


class Afterwards:
    """What is answered after its execution has returned: how much of it is open, and the thread for destructors.

    A destructor may interrupt any thread at any point, so all it may do is to leave its answer here.

    Args:
        opened: called before an execution leaves requests open.
        ended: called for each of them when it has its last answer, after that was handed on.
    """

    def __init__(self, opened: Callable[[], None], ended: Callable[[], None]) -> None:
        self._opened = opened
        self.ended = ended
        self._open: WeakSet[Streams | LateAnswers] = WeakSet()
        self._lock = threading.Lock()
        self._late: SimpleQueue[tuple[Streams | LateAnswers, int, Streamed] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, answers: Streams | LateAnswers) -> None:
        """An execution is about to leave requests open."""
        with self._lock:
            self._open.add(answers)
        self._opened()

    def any_open(self, instances: Collection[object]) -> bool:
        """Whether one of these instances has left a request open. Not for models that stream."""
        with self._lock:
            return any(isinstance(each, LateAnswers) and each.is_open_on(instances) for each in self._open)

    def send_soon(self, answers: Streams | LateAnswers, index: int, streamed: Streamed) -> None:
        """Have the thread send an answer; takes no lock."""
        self._late.put((answers, index, streamed))

    def start(self, name: str) -> None:
        """Start the thread, the first time; for one caller at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"remora {name} late answers", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (late := self._late.get()) is not None:
            answers, index, streamed = late
            answers.send(index, streamed)
            del late, answers  # what waits for the next one keeps none alive

    def catch_up(self) -> None:
        """Send in the caller's thread what destructors have left: for tests, which have no such thread."""
        while not self._late.empty():
            if (late := self._late.get()) is not None:
                answers, index, streamed = late
                answers.send(index, streamed)

    def end_all(self, error: RemoraError) -> None:
        """Answer what is open with an error: for a stop whose time is over."""
        with self._lock:
            open_ones = list(self._open)
        for answers in open_ones:
            answers.end_all(error)

    def close(self) -> None:
        """End the thread; nothing is open any more."""
        self._late.put(None)


class Runner:
    """Runs plans of a model whose executions return their answers, or leave some of them open. Thread-safe.

    Args:
        signature: gives outputs their wire shape.
        recorder: is told of every execution and failure.
        now: the scheduler's clock, nanoseconds.
        costs: learns how long batches take.
        afterwards: what is answered later.
        deliver: hands on what is answered later.
    """

    def __init__(
        self,
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        costs: CostModel,
        afterwards: Afterwards,
        deliver: Callable[[Answers], None],
    ) -> None:
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._costs = costs
        self._afterwards = afterwards
        self._deliver = deliver

    def run(self, instance: Instance, plan: Plan) -> Ran:
        """Run a plan; its answers, without those of tickets that the model wants to see again or answers later."""
        late = self._late(instance, plan)
        execution, start_ns = self._execution(plan, late)
        result: Sequence[Outcome | None] | BaseException
        try:
            result = instance.execute(execution)
        except (Exception, SystemExit) as error:  # the model's or the backend's; the instance goes on
            result = error
        return self._settle(instance, plan, execution, start_ns, result, late)

    def _late(self, instance: Instance, plan: Plan) -> LateAnswers | None:
        if not getattr(instance, "answers_late", False):
            return None
        return LateAnswers(instance, plan.tickets, self._answer_late)

    def _execution(self, plan: Plan, late: LateAnswers | None) -> tuple[Execution, int]:
        if late is None:
            return _execution(plan, self._now())
        send_soon = self._afterwards.send_soon
        return _execution(plan, self._now(), late.send, lambda index, streamed: send_soon(late, index, streamed))

    def _answer_late(self, ticket: Ticket, outcome: Response | RemoraError) -> None:
        if isinstance(outcome, Response) and self._signature.reshapes:
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        self._recorder.streamed(ticket, 0, Streamed(outcome, True), ticket.start_ns, self._now())
        self._deliver([(ticket, outcome)])
        self._afterwards.ended()

    def begin(self, slot: Slot, plan: Plan, watcher: Watcher, ended: Callable[[Ran | None], None]) -> bool:
        """Begin a plan that runs elsewhere, behind what the instance runs now; ``ended`` gets its answers, in any
        thread, or None when nothing of it has run. False when `run` must do it."""
        instance = cast("RemoteInstance", slot.instance)
        late = self._late(instance, plan)
        execution, begun_ns = self._execution(plan, late)

        def done(result: Sequence[Outcome | None] | Exception) -> None:
            if isinstance(result, NotBegunError):
                ended(None)
                return
            start_ns = max(begun_ns, slot.free_ns)  # it may have waited for the one before it
            if start_ns > begun_ns:
                for ticket in plan.tickets:
                    ticket.start_ns = start_ns
            slot.free_ns = execution.output_start_ns
            ended(self._settle(instance, plan, execution, start_ns, result, late))

        try:
            return instance.begin(execution, watcher, done)
        except Exception as error:
            done(error)
            return True

    def _settle(
        self,
        instance: Instance,
        plan: Plan,
        execution: Execution,
        start_ns: int,
        result: Sequence[Outcome | None] | BaseException,
        late: LateAnswers | None,
    ) -> Ran:
        tickets = plan.tickets
        without: Collection[int] = execution.again
        open_ones: Collection[int] = ()
        try:
            if isinstance(result, BaseException):
                raise result
            outcomes = cast("Sequence[Outcome]", result)
            if len(outcomes) != len(tickets):
                raise InternalError(
                    f"instance '{instance.name}' gave {len(outcomes)} answers to {len(tickets)} requests"
                )
            if late is not None and execution.late:
                outcomes, open_ones = self._open_late(late, outcomes, execution.late)
                without = {*without, *open_ones}
            if self._signature.reshapes:
                outcomes = [self._to_wire(outcome) for outcome in outcomes]
        except (Exception, SystemExit) as error:
            outcomes = [failure_of(error, instance.name)] * len(tickets)
        end_ns = self._now()
        self._costs.learn(plan.rows, end_ns - start_ns)
        self._recorder.executed(plan, execution, outcomes, start_ns, end_ns)
        answers = list(zip(tickets, outcomes, strict=True))
        if without:
            answers = [answer for index, answer in enumerate(answers) if index not in without]
        return Ran(answers, len(open_ones))

    def _open_late(
        self, late: LateAnswers, outcomes: Sequence[Outcome], indices: Collection[int]
    ) -> tuple[list[Outcome], Collection[int]]:
        """The outcomes with those that have come meanwhile, and which requests stay open."""
        self._afterwards.add(late)
        came = late.open(indices)
        return [came.get(index, outcome) for index, outcome in enumerate(outcomes)], set(indices) - came.keys()

    def _to_wire(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Response):
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        return outcome


class StreamRunner:
    """Runs plans of a decoupled model: answers come through streams, during an execution or after it.

    Args:
        signature, recorder, now, costs: as for `Runner`.
        afterwards: what is answered later.
    """

    def __init__(
        self,
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        costs: CostModel,
        afterwards: Afterwards,
    ) -> None:
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._costs = costs
        self._afterwards = afterwards

    def run(self, instance: Instance, plan: Plan) -> Ran:
        """Run a plan; what fails here ends all its streams that are open. There are no other answers."""
        afterwards = self._afterwards
        streams = Streams(plan.tickets, self._signature, self._recorder, self._now, afterwards.ended)
        afterwards.add(streams)
        execution, start_ns = _execution(
            plan, self._now(), streams.send, lambda index, streamed: afterwards.send_soon(streams, index, streamed)
        )
        try:
            for index, outcome in enumerate(instance.execute(execution)):
                if outcome is not None:
                    streams.send(index, outcome if isinstance(outcome, Streamed) else Streamed(outcome, True))
            for index in execution.again:
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
) -> tuple[Execution, int]:
    for ticket in plan.tickets:
        ticket.start_ns = start_ns
    return Execution([ticket.request for ticket in plan.tickets], send, send_soon), start_ns


class Streams:
    """The open streams of one execution, one for each of its tickets.

    Args:
        tickets: in the order of the execution's requests.
        signature: gives outputs their wire shape.
        recorder: is told of every answer.
        now: the engine's monotonic clock.
        ended: called once for each stream, after its last answer was handed on.
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
        # One lock for each: a client that does not read its answers holds up the sender of that stream alone.
        self._locks = [threading.RLock() for _ in tickets]
        self._open = [True] * len(tickets)
        self._sent = [0] * len(tickets)
        self._last_ns = [0] * len(tickets)

    def send(self, index: int, streamed: Streamed) -> None:
        """Hand one answer on. Answers of one stream arrive in the order they were sent.

        May hold up the caller as long as the ticket's reply does (see ``Ticket``), for the final one never.
        """
        outcome = streamed.outcome
        if isinstance(outcome, Response) and self._signature.reshapes:
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        ticket = self._tickets[index]
        with self._locks[index]:  # held over the delivery, which keeps the order
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
        """Take nothing more here: the request runs again and its next execution goes on with the stream [S14]."""
        with self._locks[index]:
            was_open, self._open[index] = self._open[index], False
        if was_open:
            self._ended()

    def end_all(self, error: RemoraError) -> None:
        """End every stream that is still open with an error; cancelled ones say that they were cancelled."""
        for index, ticket in enumerate(self._tickets):
            end = CancelledError("request was cancelled") if ticket.request.cancelled else error
            self.send(index, Streamed(end, True))


class LateAnswers:
    """The answers of an execution of a model that is not decoupled to requests that it has returned without.

    Args:
        instance: runs them.
        tickets: in the order of the execution's requests.
        answer: hands an answer on; called once for each request that is open.
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
        """Answer a request; kept for `open` when the execution has not returned yet."""
        outcome = streamed.outcome
        if outcome is None:
            outcome = InternalError("a model that is not decoupled has sent an end without an answer", from_model=True)
        with self._lock:
            if self._open is None:
                self._early.setdefault(index, outcome)
                return
            if index not in self._open:
                return
            self._open.discard(index)
        self._answer(self._tickets[index], outcome)

    def open(self, indices: Collection[int]) -> dict[int, Response | RemoraError]:
        """The execution has returned without answers to these requests; gives those that have come meanwhile.

        A request that is cancelled from now on ends: its execution is over, and nothing waits for its answer.
        """
        with self._lock:
            found = {index: self._early[index] for index in indices if index in self._early}
            left = self._open = set(indices) - found.keys()
            watched = tuple(left)
        for index in watched:
            self._tickets[index].request.when_cancelled(partial(self._cancel, index))
        return found

    def is_open_on(self, instances: Collection[object]) -> bool:
        """Whether one of these instances still owes an answer."""
        return bool(self._open) and self._instance in instances

    def _cancel(self, index: int) -> None:
        self.send(index, Streamed(CancelledError("request was cancelled"), True))

    def end_all(self, error: RemoraError) -> None:
        """Answer every request that is still open with an error."""
        with self._lock:
            left = tuple(self._open or ())
        for index in left:
            self.send(index, Streamed(error, True))
