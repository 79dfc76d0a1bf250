"""Two sides of a channel in one process: no message stays unread, in either mode of reading."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator

import pytest

from remora.backends.worker.polling import Look
from remora.backends.worker.wire import Message, MessageKind

channels = pytest.importorskip("remora.backends.worker.channel", reason="needs mmap and select.poll")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous shared memory")

PATIENCE_S = 60.0


@pytest.fixture
def sides() -> Iterator[tuple[channels.MemoryChannel, channels.MemoryChannel]]:
    gone, lifeline = os.pipe()
    ours, theirs = channels.create(1 << 16)
    theirs = channels.Ends(*map(os.dup, theirs))  # as another process would have them
    both = channels.MemoryChannel(ours, gone, serves=True), channels.MemoryChannel(theirs, gone, serves=False)
    yield both
    for side in both:
        side.close()
    os.close(lifeline)
    os.close(gone)


def test_a_message_that_arrives_while_the_role_is_given_back_wakes_the_background(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    arrived = threading.Semaphore(0)
    stop = threading.Event()

    def background() -> None:
        poller = select.poll()
        poller.register(server.back_fd, select.POLLIN)
        while not stop.is_set():
            poller.poll()
            server.background(lambda _message: arrived.release())

    reader = threading.Thread(target=background)
    reader.start()
    turns = threading.Barrier(2, timeout=PATIENCE_S)

    def send() -> None:
        for number in range(3000):
            turns.wait()
            worker.send(MessageKind.LOG, number)

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(3000):
        turns.wait()
        with server.front():
            pass
        assert arrived.acquire(timeout=PATIENCE_S), f"message {number} was left lying"
    sender.join()
    stop.set()
    server.rouse()
    reader.join()


def test_a_wake_up_is_kept_for_later_only_if_the_reader_still_looks(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    seen: list[MessageKind] = []
    server.enter()
    worker.send(MessageKind.LOG)
    server.background(lambda message: seen.append(message.kind))  # the front reads: it is not the background's turn
    assert seen == []
    server.leave()
    assert select.select([server.back_fd], [], [], 0)[0], "who leaves a message behind wakes the background"
    server.background(lambda message: seen.append(message.kind))
    assert seen == [MessageKind.LOG]


class DeafLoop:
    """Loop that reads nothing, as one that is closed or blocked."""

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        return lambda: None


def test_the_background_reads_what_a_loop_has_left_for_some_time(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    late: list[int] = []

    def look(now_s: float) -> list[int]:
        server.read_for_loop(lambda message: late.append(message.number), now_s, 1.0)
        return late

    server.watch(DeafLoop(), lambda _fd: None)
    assert look(0.0) == []
    worker.send(MessageKind.LOG, 1)
    assert look(5.0) == []
    assert look(5.9) == []
    assert server.poll_in_loop(lambda _message: None, last=True) is Look.FOUND
    worker.send(MessageKind.LOG, 2)
    assert look(6.1) == [], "another message has waited"
    assert look(7.2) == [2]
    worker.send(MessageKind.LOG, 3)
    assert look(8.0) == [2]
    assert look(9.0) == [2, 3]


def test_the_background_leaves_to_the_front_what_it_has_not_read(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    server.watch(DeafLoop(), lambda _fd: None)
    with server.front():
        worker.send(MessageKind.LOG, 1)
        for now_s in range(3):
            server.read_for_loop(lambda _message: pytest.fail("the background has read"), now_s, 1.0)
        message = server.next(0)
        assert message is not None
        assert message.number == 1


def test_the_last_messages_are_read_after_a_reader_has_handled_its_own(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    order: list[int] = []
    reads, waits, role = threading.Event(), threading.Event(), server._reading

    class Role:
        """The lock of the reader role, for which only the last read waits."""

        release = role.release

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if not blocking or timeout >= 0:
                return role.acquire(blocking=False)
            waits.set()
            return role.acquire()

    def handle(message: Message) -> None:
        reads.set()
        assert waits.wait(PATIENCE_S)
        order.append(message.number)

    server._reading = Role()
    worker.send(MessageKind.LOG, 1)
    reader = threading.Thread(target=server.background, args=(handle,))
    reader.start()
    assert reads.wait(PATIENCE_S)
    server.background(handle, last=True)
    order.append(0)
    waits.set()
    reader.join()
    server._reading = role
    assert order == [1, 0]


def test_an_execution_disturbs_no_reader_and_is_found_by_the_next_one(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    with worker.front():
        pass
    server.send(MessageKind.EXECUTE, 1)
    poller = select.poll()
    poller.register(worker.back_fd, select.POLLIN)
    assert not poller.poll(0)
    server.send(MessageKind.CANCEL, 2)
    assert poller.poll(0)
    with worker.front():
        assert [message.number for message in (worker.next(0), worker.next(0)) if message] == [1, 2]


def test_who_has_read_all_leaves_nothing_to_the_background(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    poller = select.poll()
    poller.register(worker.back_fd, select.POLLIN)
    with worker.front():
        for number in range(3):
            server.send(MessageKind.CANCEL, number)
        first = worker.next(0)
        assert first is not None
        assert [first.number, *(message.number for message in worker.rest())] == [0, 1, 2]
    assert not poller.poll(0)


def test_an_execution_wakes_who_waits_for_one(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    numbers: list[int] = []

    def front() -> None:
        with worker.front():
            for _ in range(300):
                while (message := worker.next(PATIENCE_S)) is None:
                    pass
                numbers.append(message.number)
                turns.release()

    turns = threading.Semaphore(0)
    reader = threading.Thread(target=front)
    reader.start()
    for number in range(300):
        server.send(MessageKind.EXECUTE, number)
        assert turns.acquire(timeout=PATIENCE_S / 2), f"message {number} was left lying"
    reader.join()
    assert numbers == list(range(300))


class Always:
    """Budget that allows a poll of a second."""

    def __init__(self) -> None:
        self.found = self.lost = 0
        self.waits: list[int] = []

    def allowance(self, now_ns: int) -> int:
        return 1_000_000_000

    def record_found(self) -> None:
        self.found += 1

    def record_loss(self, now_ns: int) -> None:
        self.lost += 1

    def record_wait(self, waited_ns: int) -> None:
        self.waits.append(waited_ns)


def readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def test_a_front_that_polls_gets_the_next_message(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    worker._polls, worker.budget = True, Always()
    messages = []

    def read() -> None:
        with worker.front():
            messages.append(worker.poll_next(PATIENCE_S))

    reader = threading.Thread(target=read)
    reader.start()
    server.send(MessageKind.LOG, 7)
    reader.join(PATIENCE_S)
    assert [message.number for message in messages] == [7]


def test_a_front_sleeps_after_its_poll_and_is_woken(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    worker._polls = True  # with a budget of zero
    messages = []

    def read() -> None:
        with worker.front():
            messages.append(worker.poll_next(PATIENCE_S))

    reader = threading.Thread(target=read)
    reader.start()
    server.send(MessageKind.LOG, 7)
    reader.join(PATIENCE_S)
    assert [message.number for message in messages] == [7]


def test_a_loop_that_polls_is_not_woken_until_its_poll_ends(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    seen: list[int] = []

    class Watcher:
        def watch(self, fd: int, work: object) -> object:
            self.fd = fd
            return lambda: None

    watcher = Watcher()
    server.watch(watcher, lambda _: None)

    def look(*, last: bool) -> Look:
        found: Look = server.poll_in_loop(lambda message: seen.append(message.number), last=last)
        return found

    assert look(last=False) is Look.NOTHING
    worker.send(MessageKind.LOG, 1)
    assert not readable(watcher.fd)
    assert look(last=False) is Look.FOUND
    assert seen == [1]
    worker.send(MessageKind.LOG, 2)
    assert readable(watcher.fd)
    assert look(last=False) is Look.FOUND
    assert look(last=False) is Look.NOTHING
    assert look(last=True) is Look.ENDED
    os.eventfd_read(watcher.fd)
    worker.send(MessageKind.LOG, 3)
    assert readable(watcher.fd)
    assert seen == [1, 2]


def test_a_poll_of_the_loop_ends_where_a_thread_reads(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides
    worker.send(MessageKind.LOG, 1)
    with server.front():
        assert server.poll_in_loop(lambda message: None, last=False) is Look.ENDED
        message = server.next(PATIENCE_S)
    assert message is not None
    assert message.number == 1


def test_a_poll_whose_handler_fails_gives_the_loop_back_to_wake_ups(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, worker = sides

    class Watcher:
        def watch(self, fd: int, work: object) -> object:
            self.fd = fd
            return lambda: None

    watcher = Watcher()
    server.watch(watcher, lambda _: None)
    worker.send(MessageKind.LOG, 1)
    os.eventfd_read(watcher.fd)

    def fail(message: object) -> None:
        raise channels.WireError("invalid")

    with pytest.raises(channels.WireError):
        server.poll_in_loop(fail, last=False)
    worker.send(MessageKind.LOG, 2)
    assert readable(watcher.fd)


def test_a_closed_channel_ends_a_poll_of_the_loop(
    sides: tuple[channels.MemoryChannel, channels.MemoryChannel],
) -> None:
    server, _ = sides
    server.close()
    assert server.poll_in_loop(lambda message: None, last=False) is Look.ENDED
