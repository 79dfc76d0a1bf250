"""The event loop's mailbox: one wake-up for a batch, in the loop's thread, and nothing raised."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from remora.errors import CancelledError
from remora.messages import Outcome, Ticket
from remora.scheduling.delivery import run_replies
from remora.server.loop import Lateness, LoopMailbox, PerTurn
from remora.statistics import LATENCY_BOUNDS_NS
from support.engine.fakes import ticket_of

OUTCOME = CancelledError("done")
PATIENCE_S = 60.0


class CountingLoop:
    """Passes calls on to a loop and counts the wake-ups."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.wakes = 0

    def call_soon_threadsafe(self, *call: Any) -> None:
        self.wakes += 1
        self.loop.call_soon_threadsafe(*call)

    def call_soon(self, *call: Any) -> None:
        self.loop.call_soon(*call)


def test_a_batch_from_another_thread_is_answered_in_the_loop_in_one_wake_up() -> None:
    async def main() -> None:
        counting = CountingLoop(asyncio.get_running_loop())
        mailbox = LoopMailbox(counting)  # type: ignore[arg-type]
        done = asyncio.Event()
        threads: list[int] = []

        def reply(_ticket: Ticket, _outcome: Outcome) -> None:
            threads.append(threading.get_ident())
            if len(threads) == 3:
                done.set()

        deliveries: list[tuple[Ticket, Outcome]] = [(ticket_of(reply=reply), OUTCOME) for _ in range(3)]
        thread = threading.Thread(target=mailbox.post, args=(deliveries,))
        thread.start()
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        thread.join()
        assert set(threads) == {threading.get_ident()}
        assert counting.wakes == 1

    asyncio.run(main())


def test_a_batch_from_the_loop_itself_is_answered_at_once() -> None:
    async def main() -> list[Outcome]:
        answered: list[Outcome] = []
        mailbox = LoopMailbox(asyncio.get_running_loop())
        mailbox.post([(ticket_of(reply=lambda _, outcome: answered.append(outcome)), OUTCOME)])
        return answered

    assert asyncio.run(main()) == [OUTCOME]


def test_deferred_work_runs_after_what_has_arrived_in_this_turn() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        mailbox = LoopMailbox(loop)
        loop.call_soon(order.append, "arrived with it")
        assert mailbox.defer(lambda: order.append("deferred"))
        order.append("this turn")
        await asyncio.sleep(0)
        return order

    assert asyncio.run(main()) == ["this turn", "arrived with it", "deferred"]


def test_another_thread_may_not_defer() -> None:
    async def main() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        assert await asyncio.to_thread(mailbox.defer, lambda: pytest.fail("it ran")) is False

    asyncio.run(main())


def test_what_collected_work_defers_runs_directly_after_it() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        mailbox = LoopMailbox(loop)

        def submit() -> None:
            order.append("submitted")
            assert mailbox.defer(run)
            loop.call_soon(order.append, "next turn")
            order.append("all submitted")

        def run() -> None:
            order.append("run")
            assert mailbox.defer(lambda: order.append("run again"))

        assert mailbox.collect(submit)
        order.append("this turn")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return order

    assert asyncio.run(main()) == ["this turn", "submitted", "all submitted", "run", "next turn", "run again"]


def test_collected_work_that_fails_still_has_its_deferred_work_run() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: order.append(str(context["exception"])))
        mailbox = LoopMailbox(loop)

        def fail() -> None:
            mailbox.defer(lambda: order.append("run"))
            raise OSError("failed")

        mailbox.collect(fail)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return order

    assert asyncio.run(main()) == ["run", "failed"]


def test_nothing_is_collected_where_no_other_request_can_arrive() -> None:
    async def main() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        mailbox.alone = lambda: True
        assert not mailbox.collect(lambda: pytest.fail("it ran"))

    asyncio.run(main())


def test_another_thread_may_not_collect() -> None:
    async def main() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        assert await asyncio.to_thread(mailbox.collect, lambda: pytest.fail("it ran")) is False

    asyncio.run(main())


def test_answers_after_the_end_of_the_loop_are_dropped_without_a_word() -> None:
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    loop.close()
    deliveries: list[tuple[Ticket, Outcome]] = [(ticket_of(reply=lambda *_: pytest.fail("answered")), OUTCOME)]
    thread = threading.Thread(target=mailbox.post, args=(deliveries,))
    thread.start()
    thread.join()


def test_a_reply_that_raises_keeps_its_neighbours_waiting_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answered: list[Outcome] = []

    def fail(_ticket: Ticket, _outcome: Outcome) -> None:
        raise OSError("closed")

    run_replies(
        [(ticket_of(reply=fail), OUTCOME), (ticket_of(reply=lambda _, outcome: answered.append(outcome)), OUTCOME)]
    )
    assert answered == [OUTCOME]
    assert "could not be delivered" in caplog.text


def test_the_loop_watches_a_socket_until_that_is_removed() -> None:
    async def main() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        reading, writing = os.pipe()
        heard: list[bytes] = []
        woken = asyncio.Event()

        def work(fd: int) -> None:
            heard.append(os.read(fd, 1))
            woken.set()

        end = mailbox.watch(reading, work)
        os.close(reading)  # the loop has a duplicate
        os.write(writing, b"a")
        await asyncio.wait_for(woken.wait(), PATIENCE_S)
        await asyncio.to_thread(end)
        await asyncio.sleep(0)
        assert heard == [b"a"]
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"b")  # the reading end is closed
        os.close(writing)

    asyncio.run(main())


def test_ending_a_watch_after_its_loop_closes_the_duplicate() -> None:
    reading, writing = os.pipe()
    loop = asyncio.new_event_loop()
    end = LoopMailbox(loop).watch(reading, lambda _fd: None)
    loop.close()
    end()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)


def test_only_the_loops_own_thread_is_current() -> None:
    async def main() -> tuple[bool, bool]:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        return mailbox.is_current(), await asyncio.to_thread(mailbox.is_current)

    assert asyncio.run(main()) == (True, False)


def test_a_closed_loop_is_not_current_in_the_next_loop_of_its_thread() -> None:
    async def first() -> LoopMailbox:
        return LoopMailbox(asyncio.get_running_loop())

    async def second() -> None:
        assert mailbox.is_closed()
        assert not mailbox.is_current()
        assert not mailbox.defer(lambda: pytest.fail("it ran"))
        mailbox.post([(ticket_of(reply=lambda *_: pytest.fail("answered")), OUTCOME)])

    mailbox = asyncio.run(first())
    asyncio.run(second())


def test_a_stopped_loop_is_not_current_and_answers_when_it_runs_again() -> None:
    answered: list[Outcome] = []
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    assert not mailbox.is_closed()
    assert not mailbox.is_current()
    assert not mailbox.defer(lambda: pytest.fail("it ran"))
    mailbox.post([(ticket_of(reply=lambda _, outcome: answered.append(outcome)), OUTCOME)])
    assert answered == []
    loop.run_until_complete(asyncio.sleep(0))
    assert answered == [OUTCOME]
    loop.close()


class Clocked:
    """Loop whose time is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[float], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, work: Callable[[float], None], argument: float) -> asyncio.TimerHandle:
        assert due == argument
        self.due.append((due, work))
        return cast(asyncio.TimerHandle, self)

    def cancel(self) -> None:
        self.due.clear()

    def run_late(self, seconds: float) -> None:
        due, work = self.due.pop()
        self.now = due + seconds
        work(due)


def test_the_lateness_of_a_loop_is_that_of_its_timers() -> None:
    loop = Clocked()
    lateness = Lateness(cast(asyncio.AbstractEventLoop, loop))
    for seconds in (0.0, 0.04, 20.0):
        loop.run_late(seconds)
    histogram = lateness.histogram()
    assert sum(histogram.counts) == 4  # the first sample is taken at once
    assert histogram.counts[LATENCY_BOUNDS_NS.index(50_000_000)] == 1
    assert histogram.counts[-1] == 1
    assert histogram.sum_ns == pytest.approx(20.04e9)
    lateness.stop()
    assert not loop.due


def test_bytes_that_are_computed_once_in_a_turn_are_fresh_in_the_next() -> None:
    async def main() -> None:
        versions = iter(range(10))
        text = PerTurn(lambda: b"%d" % next(versions), LoopMailbox(asyncio.get_running_loop()))
        assert [text.get() for _ in range(5)] == [b"0"] * 5
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [text.get() for _ in range(5)] == [b"1"] * 5
        assert await asyncio.to_thread(text.get) == b"2"  # another thread has no turn

    asyncio.run(main())


def test_without_a_loop_bytes_are_computed_at_each_read() -> None:
    versions = iter(range(10))
    text = PerTurn(lambda: b"%d" % next(versions), None)
    assert [text.get() for _ in range(3)] == [b"0", b"1", b"2"]
