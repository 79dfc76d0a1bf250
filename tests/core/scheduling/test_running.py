"""Streamed answers of decoupled models [K08]: in order, ended exactly once, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from remora.backends import Execution
from remora.config import BatchPolicy
from remora.errors import CancelledError, InternalError, UnavailableError
from remora.messages import Outcome, Response, Streamed, Tensor, Ticket
from remora.scheduling.batching import BatchQueue
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from support.engine.fakes import DOUBLER, FakeClock, FakeRecorder, Replies, config_of, ticket_of

PATIENCE_S = 30.0
RESHAPED = DOUBLER.replace("dims: 1 }\n", "dims: 1 reshape { } }\n")


class Streamer:
    """A decoupled instance whose execution is whatever the test says."""

    name = "s_0"
    quick = False

    def __init__(self, execute: Callable[[Execution], Sequence[Outcome | None]]) -> None:
        self.body = execute
        self.executions: list[Execution] = []

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        self.executions.append(execution)
        return self.body(execution)

    def close(self) -> None:
        pass


class Bench:
    """A scheduler of one decoupled instance, turned by hand."""

    def __init__(
        self,
        execute: Callable[[Execution], Sequence[Outcome | None]],
        *,
        config: str = DOUBLER,
        threads: bool = False,
    ) -> None:
        self.clock, self.recorder, self.replies = FakeClock(), FakeRecorder(), Replies()
        self.instance = Streamer(execute)
        self.scheduler = Scheduler(
            BatchQueue(BatchPolicy(max_batch_size=8, dynamic=True)),
            [self.instance],
            Signature(config_of(config), "s"),
            self.recorder,
            self.clock,
            DispatchPolicy(threads=threads, decoupled=True),
        )

    def run(self, count: int = 1) -> list[Ticket]:
        """Submit ``count`` requests and run them as one batch."""
        tickets = [ticket_of(reply=self.replies) for _ in range(count)]
        for ticket in tickets:
            self.scheduler.submit(ticket)
        self.scheduler.step()
        return tickets

    def answers(self, ticket: Ticket) -> list[Outcome]:
        return self.replies.outcomes.get(ticket, [])


def response(value: int) -> Response:
    return Response([Tensor("OUT", "INT32", np.array([value], np.int32))])


def piece(value: int, *, final: bool = False) -> Streamed:
    return Streamed(response(value), final)


def values(answers: list[Outcome]) -> list[int | None]:
    found: list[int | None] = []
    for answer in answers:
        assert isinstance(answer, Streamed)
        found.append(int(answer.outcome.outputs[0].data[0]) if isinstance(answer.outcome, Response) else None)
    return found


END = Streamed(None, True)


def test_answers_arrive_in_order_and_nothing_after_the_final_one() -> None:
    def execute(execution: Execution) -> list[None]:
        for streamed in (piece(1), piece(2), END, piece(3), END):
            execution.send(0, streamed)
        return [None]

    bench = Bench(execute)
    (ticket,) = bench.run()
    assert values(bench.answers(ticket)) == [1, 2, None]
    assert [(index, streamed.final) for _, index, streamed in bench.recorder.streams] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert bench.scheduler.running == 0


def test_each_request_of_a_batch_has_its_own_stream() -> None:
    def execute(execution: Execution) -> list[None]:
        execution.send(1, piece(10))
        execution.send(0, piece(20, final=True))
        execution.send(1, piece(11, final=True))
        return [None, None]

    bench = Bench(execute)
    first, second = bench.run(2)
    assert values(bench.answers(first)) == [20]
    assert values(bench.answers(second)) == [10, 11]


def test_a_model_may_answer_after_its_execution_and_counts_as_running_until_then() -> None:
    bench = Bench(lambda _execution: [None])
    (ticket,) = bench.run()
    assert bench.scheduler.running == 1
    assert not bench.scheduler.stop(0)
    bench.instance.executions[0].send(0, piece(5))
    bench.instance.executions[0].send(0, END)
    assert values(bench.answers(ticket)) == [5, None]
    assert bench.scheduler.running == 0
    assert bench.scheduler.stop(0)


def test_an_outcome_that_is_returned_ends_the_stream() -> None:
    bench = Bench(lambda _execution: [response(3), UnavailableError("not now")])
    first, second = bench.run(2)
    assert values(bench.answers(first)) == [3]
    (failed,) = bench.answers(second)
    assert isinstance(failed, Streamed)
    assert failed.final
    assert isinstance(failed.outcome, UnavailableError)


def test_an_execution_that_raises_ends_what_is_open_and_nothing_else() -> None:
    def execute(execution: Execution) -> list[None]:
        execution.send(0, piece(1, final=True))
        execution.send(1, piece(2))
        raise ZeroDivisionError("by zero")

    bench = Bench(execute)
    done, opened = bench.run(2)
    assert values(bench.answers(done)) == [1]
    last = bench.answers(opened)[-1]
    assert isinstance(last, Streamed)
    assert last.final
    assert isinstance(last.outcome, InternalError)
    assert len(bench.answers(opened)) == 2
    assert bench.scheduler.running == 0


def test_a_cancelled_stream_that_fails_ends_with_cancelled_error() -> None:
    def execute(execution: Execution) -> list[None]:
        for request in execution.requests:
            request.cancelled = True
        raise ZeroDivisionError

    bench = Bench(execute)
    (ticket,) = bench.run()
    (answer,) = bench.answers(ticket)
    assert isinstance(answer, Streamed)
    assert isinstance(answer.outcome, CancelledError)


def test_streamed_outputs_have_the_wires_shape() -> None:
    bench = Bench(lambda _execution: [response(3)], config=RESHAPED)
    (ticket,) = bench.run()
    (answer,) = bench.answers(ticket)
    assert isinstance(answer, Streamed)
    assert isinstance(answer.outcome, Response)
    assert answer.outcome.outputs[0].data.shape == (1, 1)


def test_threads_that_end_one_stream_at_the_same_time_end_it_once() -> None:
    bench = Bench(lambda _execution: [None])
    (ticket,) = bench.run()
    send = bench.instance.executions[0].send
    start = threading.Barrier(4)

    def end() -> None:
        start.wait(PATIENCE_S)
        for _ in range(50):
            send(0, piece(1))
        send(0, END)

    threads = [threading.Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    answers = bench.answers(ticket)
    assert [isinstance(answer, Streamed) and answer.final for answer in answers] == [False] * (len(answers) - 1) + [
        True
    ]
    assert bench.scheduler.running == 0


def test_what_destructors_send_is_sent_by_another_thread() -> None:
    sent_by: list[str] = []
    ended = threading.Event()

    def execute(execution: Execution) -> list[Outcome | None]:
        execution.send_soon(0, END)
        return [None]

    bench = Bench(execute, threads=True)

    def reply(_ticket: Ticket, _outcome: Outcome) -> None:
        sent_by.append(threading.current_thread().name)
        ended.set()

    bench.scheduler.submit(ticket_of(reply=reply))
    assert ended.wait(PATIENCE_S)
    assert bench.scheduler.stop(PATIENCE_S)
    assert sent_by == ["remora s_0 late answers"]


def test_a_client_that_holds_up_one_stream_of_a_batch_holds_up_no_other() -> None:
    bench = Bench(lambda _execution: [None, None])
    inside, go = threading.Event(), threading.Event()

    def reply(ticket: Ticket, outcome: Outcome) -> None:
        if ticket is tickets[0]:
            inside.set()
            go.wait(PATIENCE_S)
        bench.replies(ticket, outcome)

    tickets = [ticket_of(reply=reply) for _ in range(2)]
    for ticket in tickets:
        bench.scheduler.submit(ticket)
    bench.scheduler.step()
    send = bench.instance.executions[0].send
    slow = threading.Thread(target=send, args=(0, piece(1)))
    slow.start()
    assert inside.wait(PATIENCE_S)
    send(1, piece(2, final=True))
    assert values(bench.answers(tickets[1])) == [2]
    go.set()
    slow.join(PATIENCE_S)
