"""Runs a plan on an instance and accounts for it; the law: each ticket of a plan gets one answer or its stream's end,
whatever the instance does, and nothing is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import cast

from remora.backends import Execution, Instance, NotBegunError, RemoteInstance
from remora.errors import InternalError
from remora.messages import Outcome, Response, Streamed, Ticket, Watcher
from remora.scheduling.batching import Plan
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import failure_of
from remora.scheduling.recorder import Recorder
from remora.scheduling.slots import Slot
from remora.scheduling.streams import Streams
from remora.signature import Signature

Answers = list[tuple[Ticket, Outcome]]


class Runner:
    """Runs plans of a model whose executions return their answers. Thread-safe.

    Args:
        signature: gives outputs their wire shape.
        recorder: is told of every execution and failure.
        now: the scheduler's clock, nanoseconds.
        costs: learns how long batches take.
    """

    def __init__(self, signature: Signature, recorder: Recorder, now: Callable[[], int], costs: CostModel) -> None:
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._costs = costs

    def run(self, instance: Instance, plan: Plan) -> Answers:
        """Run a plan; its answers, without those of tickets that the model wants to see again."""
        execution, start_ns = _execution(plan, self._now())
        result: Sequence[Outcome | None] | BaseException
        try:
            result = instance.execute(execution)
        except (Exception, SystemExit) as error:  # the model's or the backend's; the instance goes on
            result = error
        return self._settle(instance, plan, execution, start_ns, result)

    def begin(self, slot: Slot, plan: Plan, watcher: Watcher, ended: Callable[[Answers | None], None]) -> bool:
        """Begin a plan that runs elsewhere, behind what the instance runs now; ``ended`` gets its answers, in any
        thread, or None when nothing of it has run. False when `run` must do it."""
        instance = cast("RemoteInstance", slot.instance)
        execution, begun_ns = _execution(plan, self._now())

        def done(result: Sequence[Outcome | None] | Exception) -> None:
            if isinstance(result, NotBegunError):
                ended(None)
                return
            start_ns = max(begun_ns, slot.free_ns)  # it may have waited for the one before it
            if start_ns > begun_ns:
                for ticket in plan.tickets:
                    ticket.start_ns = start_ns
            slot.free_ns = execution.output_start_ns
            ended(self._settle(instance, plan, execution, start_ns, result))

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
    ) -> Answers:
        tickets = plan.tickets
        try:
            if isinstance(result, BaseException):
                raise result
            outcomes = cast("Sequence[Outcome]", result)
            if len(outcomes) != len(tickets):
                raise InternalError(
                    f"instance '{instance.name}' gave {len(outcomes)} answers to {len(tickets)} requests"
                )
            if self._signature.reshapes:
                outcomes = [self._to_wire(outcome) for outcome in outcomes]
        except (Exception, SystemExit) as error:
            outcomes = [failure_of(error, instance.name)] * len(tickets)
        end_ns = self._now()
        self._costs.learn(plan.rows, end_ns - start_ns)
        self._recorder.executed(plan, execution, outcomes, start_ns, end_ns)
        answers = list(zip(tickets, outcomes, strict=True))
        again = execution.again
        return [answer for index, answer in enumerate(answers) if index not in again] if again else answers

    def _to_wire(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Response):
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        return outcome


class StreamRunner:
    """Runs plans of a decoupled model: answers come through streams, during an execution or after it.

    Args:
        signature, recorder, now, costs: as for `Runner`.
        opened: told how many streams an execution opens, before it runs.
        ended: told of each stream's end.
    """

    def __init__(
        self,
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        costs: CostModel,
        *,
        opened: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._costs = costs
        self._opened = opened
        self._ended = ended
        # What destructors send: they may interrupt any thread at any point, so all they may do is to leave it here.
        self._late: SimpleQueue[tuple[Streams, int, Streamed] | None] = SimpleQueue()
        self._late_thread: threading.Thread | None = None

    def run(self, instance: Instance, plan: Plan) -> Answers:
        """Run a plan; what fails here ends all its streams that are open. There are no other answers."""
        streams = Streams(plan.tickets, self._signature, self._recorder, self._now, self._ended)
        self._opened(len(plan.tickets))
        execution, start_ns = _execution(
            plan, self._now(), streams.send, lambda index, streamed: self._late.put((streams, index, streamed))
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
        return []

    def start(self, name: str) -> None:
        """Start the thread that sends what destructors have left; once, by one thread at a time."""
        if self._late_thread is None:
            self._late_thread = threading.Thread(
                target=self._serve_late, name=f"remora {name} late answers", daemon=True
            )
            self._late_thread.start()

    def catch_up(self) -> None:
        """Send in the caller's thread what destructors have left: for tests, which have no such thread."""
        while not self._late.empty():
            self._send_late(self._late.get())

    def close(self) -> None:
        """End the thread; no stream is open any more."""
        self._late.put(None)

    def _serve_late(self) -> None:
        while self._send_late(self._late.get()):
            pass

    def _send_late(self, late: tuple[Streams, int, Streamed] | None) -> bool:
        if late is not None:
            streams, index, streamed = late
            streams.send(index, streamed)
        return late is not None


def _execution(
    plan: Plan,
    start_ns: int,
    send: Callable[[int, Streamed], None] | None = None,
    send_soon: Callable[[int, Streamed], None] | None = None,
) -> tuple[Execution, int]:
    for ticket in plan.tickets:
        ticket.start_ns = start_ns
    return Execution([ticket.request for ticket in plan.tickets], send, send_soon), start_ns
