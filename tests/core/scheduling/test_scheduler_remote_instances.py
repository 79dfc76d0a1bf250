"""Instances in other processes: begun in a loop, ended by any thread; and instances that fail."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest

from remora.backends import Done, Execution, NotBegunError
from remora.config import BatchPolicy, QueuePolicy
from remora.errors import InternalError, UnavailableError
from remora.messages import Outcome, Response, Ticket, Watcher
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
    double,
    ticket_of,
)
from support.process.eventually import eventually
from support.process.no_threads import refuse_threads

PATIENCE_S = 30.0
DYNAMIC = BatchPolicy(max_batch_size=4, dynamic=True)


class FakeWatcher:
    """A loop that is the caller's as long as ``here`` is True."""

    here = True

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        raise AssertionError("fakes have nothing to watch")

    def call_next(self, work: Callable[[], None]) -> None:
        raise AssertionError("fakes do not poll")

    def is_current(self) -> bool:
        return self.here


class RemoteFake(FakeInstance):
    """Begins batches when ``takes``; they end when the test says so."""

    remote = True
    ahead = True
    trouble = ""
    takes = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[tuple[Execution, Done]] = []

    def begin(self, execution: Execution, watcher: Watcher, done: Done) -> bool:
        if self.failure is not None:
            raise self.failure
        if self.takes:
            self.begun.append((execution, done))
        return self.takes

    def end(self, result: Sequence[Outcome | None] | Exception | None = None) -> None:
        """The oldest batch that has begun ends."""
        execution, done = self.begun.pop(0)
        done([double(request) for request in execution.requests] if result is None else result)


class Bench:
    def __init__(
        self, instances: int = 1, *, threads: bool = False, policy: BatchPolicy = DYNAMIC, **settings: bool
    ) -> None:
        self.clock = FakeClock()
        self.instances = [RemoteFake(f"m_{index}") for index in range(instances)]
        self.recorder = FakeRecorder()
        self.replies = Replies()
        self.mailbox = FakeMailbox()
        self.watcher = self.mailbox.watcher = FakeWatcher()
        self.scheduler = Scheduler(
            BatchQueue(policy),
            self.instances,
            Signature(config_of(DOUBLER), "m"),
            self.recorder,
            self.clock,
            DispatchPolicy(threads=threads, **settings),
        )

    def submit(self, *, deadline_ns: int = 0, **settings: object) -> Ticket:
        ticket = ticket_of(**{"reply": self.replies, "mailbox": self.mailbox, **settings})  # type: ignore[arg-type]
        ticket.deadline_ns = deadline_ns
        self.scheduler.submit(ticket)
        return ticket

    def sizes(self, index: int = 0) -> list[int]:
        return [len(execution.requests) for execution, _ in self.instances[index].begun]


def test_what_arrives_in_one_turn_is_begun_as_one_batch_and_answered_when_it_ends() -> None:
    bench = Bench()
    tickets = [bench.submit() for _ in range(3)]
    assert bench.mailbox.turn() == 1
    assert bench.sizes() == [3]
    assert bench.scheduler.running == 3
    assert bench.replies.order == []
    bench.instances[0].end()
    assert bench.replies.order == tickets
    assert len(bench.recorder.runs) == 1
    assert bench.scheduler.running == bench.scheduler.pending == 0


def test_what_arrives_while_a_batch_runs_waits_without_bothering_the_loop() -> None:
    bench = Bench()
    bench.submit()
    bench.mailbox.turn()
    for _ in range(3):
        bench.submit()
    assert bench.mailbox.turn() == 0
    assert bench.scheduler.pending == 3


def test_the_next_batch_has_begun_before_the_answers_of_the_last_are_written() -> None:
    bench = Bench()
    begun_at_reply: list[list[int]] = []
    bench.submit(reply=lambda _ticket, _outcome: begun_at_reply.append(bench.sizes()))
    bench.mailbox.turn()
    bench.submit()
    bench.instances[0].end()
    assert begun_at_reply == [[1]]


def test_a_batch_that_ends_in_another_thread_is_followed_by_one_that_a_thread_or_the_loop_takes() -> None:
    bench = Bench()
    bench.submit()
    bench.mailbox.turn()
    bench.submit()
    bench.watcher.here = bench.mailbox.here = False
    bench.instances[0].end()
    assert bench.sizes() == []
    assert bench.mailbox.turn() == 0
    assert len(bench.scheduler.step().tickets) == 1, "the instance's thread has it"


def test_a_batch_that_failed_answers_its_requests_and_the_instance_goes_on() -> None:
    bench = Bench()
    ticket = bench.submit()
    bench.mailbox.turn()
    bench.instances[0].end(InternalError("the process is gone"))
    assert isinstance(bench.replies.only(ticket), InternalError)
    after = bench.submit()
    bench.mailbox.turn()
    bench.instances[0].end()
    assert isinstance(bench.replies.only(after), Response)


def test_an_instance_that_cannot_begin_answers_with_what_it_raised() -> None:
    bench = Bench()
    bench.instances[0].failure = TypeError("what is that")
    ticket = bench.submit()
    bench.mailbox.turn()
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, InternalError)
    assert "what is that" in str(outcome)
    assert bench.scheduler.running == 0


def test_a_cancelled_request_is_answered_and_not_begun() -> None:
    bench = Bench()
    gone, stays = bench.submit(), bench.submit()
    gone.cancel()
    bench.mailbox.turn()
    assert bench.sizes() == [1]
    assert bench.replies.order == [gone]
    bench.instances[0].end()
    assert bench.replies.order == [gone, stays]


def test_a_loop_that_cannot_watch_leaves_the_batch_to_a_thread() -> None:
    bench = Bench()
    bench.mailbox.watcher = None
    bench.submit()
    assert bench.mailbox.turn() == 0
    assert len(bench.scheduler.step().tickets) == 1


@pytest.mark.parametrize("why", ["may_wait", "decoupled"])
def test_what_may_have_to_wait_and_what_streams_is_left_to_a_thread(why: str) -> None:
    bench = Bench(**{why: True})
    bench.submit()
    assert bench.mailbox.turn() == 0
    assert len(bench.scheduler.step().tickets) == 1


def test_an_instance_that_stays_when_others_come_is_still_known_to_run_its_batch() -> None:
    bench = Bench()
    bench.submit()
    bench.mailbox.turn()
    bench.instances.append(RemoteFake("m_new"))
    bench.scheduler.set_instances(bench.instances)
    bench.submit()
    bench.mailbox.turn()
    assert (bench.sizes(0), bench.sizes(1)) == ([1], [1])


def test_a_batch_that_does_not_suit_the_loop_is_run_once_by_the_instances_own_thread() -> None:
    bench = Bench(2, threads=True)
    answered = threading.Semaphore(0)
    for instance in bench.instances:
        instance.takes = False
    for _ in range(6):
        bench.submit(reply=lambda _ticket, _outcome: answered.release())
    while bench.mailbox.turn():
        pass
    for _ in range(6):
        assert answered.acquire(timeout=PATIENCE_S)
    assert sum(len(batch) for instance in bench.instances for batch in instance.batches) == 6
    assert bench.scheduler.stop(PATIENCE_S)


@pytest.mark.parametrize("rested", [False, True], ids=["no thread yet", "the busy one has a thread that rests"])
def test_what_needs_a_thread_is_run_by_an_idle_instance_while_a_loop_uses_the_first(rested: bool) -> None:
    bench = Bench(2, threads=True)
    answered = threading.Semaphore(0)

    def submit_from_a_thread() -> bool:
        bench.submit(mailbox=None, reply=lambda _ticket, _outcome: answered.release())
        return answered.acquire(timeout=PATIENCE_S)

    if rested:
        assert submit_from_a_thread()
    bench.submit()
    assert bench.mailbox.turn() == 1
    assert bench.sizes(0) == [1], "a loop has begun a batch on the first instance"
    assert submit_from_a_thread(), "a call that the first instance waits for needs the second one"
    bench.instances[0].end()
    assert bench.scheduler.stop(PATIENCE_S)


def test_every_idle_instance_is_given_a_batch() -> None:
    bench = Bench(2)
    for _ in range(6):
        bench.submit()
    bench.mailbox.turn()
    bench.mailbox.turn()
    assert bench.sizes(0) == [4]
    assert bench.sizes(1) == [2]


# -- ahead ----------------------------------------------------------------------------------------------------------


def begun_and_waiting(waiting: int, instances: int = 1, policy: BatchPolicy = DYNAMIC, deadline_ns: int = 0) -> Bench:
    """Each instance runs one request, and so many more have come in one turn."""
    bench = Bench(instances, policy=policy)
    for _ in range(instances):
        bench.submit()
        bench.mailbox.turn()
    for _ in range(waiting):
        bench.submit(deadline_ns=deadline_ns)
    while bench.mailbox.turn():
        pass
    return bench


def test_a_full_batch_is_begun_while_another_runs() -> None:
    bench = begun_and_waiting(4)
    assert bench.sizes() == [1, 4]
    assert (bench.scheduler.running, bench.scheduler.pending) == (5, 0)
    bench.instances[0].end()
    assert bench.sizes() == [4]
    bench.instances[0].end()
    assert len(bench.replies.order) == 5
    assert bench.scheduler.running == 0
    assert [plan.reason for plan, _ in bench.recorder.runs] == ["instance_idle", "full"]


def test_a_partial_batch_waits_for_the_end_of_the_running_one() -> None:
    bench = begun_and_waiting(3)
    assert bench.sizes() == [1]
    bench.instances[0].end()
    assert bench.sizes() == [3], "at once"


def test_nothing_goes_ahead_for_a_loop_that_cannot_watch() -> None:
    bench = begun_and_waiting(0)
    blind = FakeMailbox()
    for _ in range(4):
        bench.submit(mailbox=blind)
    assert blind.turn() == 0
    assert (bench.sizes(), bench.scheduler.pending) == ([1], 4)


def test_no_more_than_one_batch_goes_ahead() -> None:
    bench = begun_and_waiting(12)
    assert bench.sizes() == [1, 4]
    bench.instances[0].end()
    assert bench.sizes() == [4, 4], "the next one when the first has ended"
    assert bench.scheduler.pending == 4


def test_a_single_request_stays_in_the_queue_where_its_client_can_cancel_it() -> None:
    for policy in (BatchPolicy(max_batch_size=4), BatchPolicy(max_batch_size=1, dynamic=True)):
        bench = begun_and_waiting(2, policy=policy)
        assert bench.sizes() == [1]
        bench.instances[0].end()
        assert bench.sizes() == [1]
        bench.submit()
        assert bench.mailbox.turn() == 0, "the loop does not come for what cannot go ahead"


def test_nothing_goes_ahead_that_another_instance_could_run_sooner() -> None:
    bench = begun_and_waiting(4, instances=2)
    assert (bench.sizes(0), bench.sizes(1)) == ([1], [1])
    for _ in range(4):
        bench.submit()
    while bench.mailbox.turn():
        pass
    assert (bench.sizes(0), bench.sizes(1)) == ([1, 4], [1])
    bench.instances[1].end()
    assert bench.sizes(1) == [4]


def test_what_may_expire_or_be_overtaken_does_not_go_ahead() -> None:
    assert begun_and_waiting(4, deadline_ns=10**15).sizes() == [1]
    levels = BatchPolicy(max_batch_size=4, dynamic=True, priority_levels=2)
    assert begun_and_waiting(4, policy=levels).sizes() == [1]
    times = BatchPolicy(max_batch_size=4, dynamic=True, queue=QueuePolicy(default_timeout_ns=10**9))
    assert begun_and_waiting(4, policy=times).sizes() == [1]


def test_what_cannot_go_ahead_now_is_not_looked_at_for_every_request_that_comes() -> None:
    bench = begun_and_waiting(4, deadline_ns=10**15)
    for _ in range(3):
        bench.submit()
        assert bench.mailbox.turn() == 0
    bench.instances[0].end()
    assert bench.sizes() == [4]
    bench.submit()
    while bench.mailbox.turn():
        pass
    assert bench.sizes() == [4, 4], "behind the next one it may"


def test_an_instance_that_does_not_say_so_gets_one_batch_at_a_time() -> None:
    bench = Bench()
    bench.instances[0].ahead = False
    bench.scheduler.set_instances(bench.instances)
    for _ in range(9):
        bench.submit()
        bench.mailbox.turn()
    assert bench.sizes() == [1]


def test_a_cancelled_request_does_not_go_ahead_and_is_answered() -> None:
    bench = Bench()
    bench.submit()
    bench.mailbox.turn()
    tickets = [bench.submit() for _ in range(4)]
    tickets[1].cancel()
    bench.mailbox.turn()
    assert bench.replies.order == [tickets[1]]
    assert bench.sizes() == [1], "three are not a full batch"
    bench.instances[0].end()
    assert bench.sizes() == [3]


def test_a_batch_that_the_instance_does_not_take_ahead_keeps_its_place() -> None:
    bench = Bench()
    bench.submit()
    bench.mailbox.turn()
    bench.instances[0].takes = False
    waiting = [bench.submit() for _ in range(6)]
    while bench.mailbox.turn():
        pass
    assert bench.sizes() == [1]
    assert (bench.scheduler.running, bench.scheduler.pending) == (1, 6)
    bench.instances[0].takes = True
    bench.instances[0].end()
    bench.instances[0].end()
    assert bench.replies.order[1:] == waiting[:4]


def test_a_batch_that_never_had_its_turn_runs_again_in_its_place_and_counts_once() -> None:
    bench = begun_and_waiting(4)
    later = [bench.submit() for _ in range(2)]
    gone = bench.instances[0].begun
    bench.instances[0].begun = []
    gone[0][1](InternalError("the process is gone"))
    gone[1][1](NotBegunError())
    assert isinstance(bench.replies.outcomes[bench.replies.order[0]][0], InternalError)
    assert len(bench.replies.order) == 1, "no other request got an answer"
    while bench.mailbox.turn():
        pass
    assert bench.sizes() == [4], "before those that came later"
    bench.instances[0].end()
    bench.instances[0].end()
    assert bench.replies.order[-2:] == later
    assert len(bench.replies.order) == 7
    assert len(bench.recorder.runs) == 3
    assert bench.scheduler.running == bench.scheduler.pending == 0


def test_the_time_of_a_batch_that_went_ahead_counts_from_the_end_of_the_one_before_it() -> None:
    bench = Bench()
    bench.submit()
    bench.mailbox.turn()
    bench.clock.advance(1000)
    tickets = [bench.submit() for _ in range(4)]
    bench.mailbox.turn()
    first, _ = bench.instances[0].begun[0]
    bench.clock.advance(5000)
    first.output_start_ns = bench.clock.monotonic_ns() - 100  # by the instance's own clock: the loop heard of it later
    bench.instances[0].end()
    bench.clock.advance(3000)
    bench.instances[0].end()
    (begin, _), (start, end) = bench.recorder.spans
    assert (start - begin, end - start) == (5900, 3100)
    assert {ticket.start_ns for ticket in tickets} == {start}


def test_an_instance_that_is_left_out_ends_both_of_its_batches_first() -> None:
    bench = begun_and_waiting(4)
    left = bench.instances[0]
    done = threading.Event()

    def swap() -> None:
        bench.scheduler.set_instances([RemoteFake("m_new")])
        done.set()

    threading.Thread(target=swap, daemon=True).start()
    eventually(lambda: any(slot.instance is not left for slot in bench.scheduler._pool.slots))
    left.end()
    assert not done.is_set()
    left.end()
    assert done.wait(PATIENCE_S)
    assert len(bench.replies.order) == 5


def test_a_stop_is_not_done_while_something_waits_that_had_gone_ahead_in_vain() -> None:
    bench = begun_and_waiting(4)
    bench.watcher.here = bench.mailbox.here = False
    gone = bench.instances[0].begun
    gone[0][1](InternalError("the process is gone"))
    gone[1][1](NotBegunError())
    assert not bench.scheduler.stop(0)
    bench.scheduler.step()
    assert bench.scheduler.stop(0)
    assert len(bench.replies.order) == 5


def test_a_stop_runs_what_had_gone_ahead_in_vain() -> None:
    bench = Bench(threads=True)
    bench.submit()
    bench.mailbox.turn()
    for _ in range(4):
        bench.submit()
    bench.mailbox.turn()
    gone = bench.instances[0].begun
    stopped: list[bool] = []
    stopper = threading.Thread(target=lambda: stopped.append(bench.scheduler.stop(PATIENCE_S)))
    stopper.start()
    bench.watcher.here = bench.mailbox.here = False
    gone[0][1](InternalError("the process is gone"))
    gone[1][1](NotBegunError())
    stopper.join(PATIENCE_S)
    assert stopped == [True]
    assert len(bench.replies.order) == 5
    assert bench.scheduler.running == bench.scheduler.pending == 0


# -- trouble --------------------------------------------------------------------------------------------------------


def test_an_instance_in_trouble_gets_nothing_while_another_can_run() -> None:
    bench = Bench(2)
    bench.instances[0].trouble = "it is being started again"
    bench.submit()
    bench.mailbox.turn()
    assert (bench.sizes(0), bench.sizes(1)) == ([], [1])
    waits = bench.submit()
    bench.mailbox.turn()
    assert bench.scheduler.pending == 1, "it waits for the one that is well"
    bench.instances[1].end()
    bench.instances[1].end()
    assert isinstance(bench.replies.only(waits), Response)


def test_requests_fail_at_once_when_all_instances_are_unhealthy() -> None:
    bench = Bench(2)
    for instance in bench.instances:
        instance.trouble = "it is being started again"
    bench.submit()
    bench.mailbox.turn()
    assert bench.sizes(0) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_threads_of_instances_that_come_and_go_lose_nothing(seed: int) -> None:
    bench = Bench(3, threads=True)
    choose = random.Random(seed)
    answered = threading.Semaphore(0)
    for _ in range(200):
        bench.instances[choose.randrange(3)].trouble = choose.choice(["", "", "gone"])
        bench.submit(mailbox=None, reply=lambda _ticket, _outcome: answered.release())
    for instance in bench.instances:
        instance.trouble = ""
    bench.submit(mailbox=None, reply=lambda _ticket, _outcome: answered.release())
    for _ in range(201):
        assert answered.acquire(timeout=PATIENCE_S)
    bench.instances[0].trouble = "gone"
    assert bench.scheduler.stop(PATIENCE_S), "a thread that was passed over ends too"
    with pytest.raises(UnavailableError):
        bench.submit()


@pytest.mark.parametrize("instances", [1, 2])
def test_a_batch_that_its_instance_does_not_take_is_refused_if_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, instances: int
) -> None:
    bench = Bench(instances, threads=True)
    if instances > 1:  # the first one has a thread, and is busy
        bench.instances[0].takes = False
        first = bench.submit()
        bench.mailbox.turn()
        eventually(lambda: first in bench.replies.outcomes and not bench.scheduler.running)
        bench.instances[0].takes = True
        bench.submit()
        bench.mailbox.turn()
    bench.instances[-1].takes = False
    refused = bench.submit()
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        bench.mailbox.turn()
    assert isinstance(bench.replies.only(refused), UnavailableError)
    bench.instances[-1].takes = True
    bench.submit()
    bench.mailbox.turn()
    assert bench.sizes(instances - 1) == [1]
