"""A model that streams is held up while its client does not read, and given up only when the client is silent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

from remora.messages import Response, Streamed, Tensor, Ticket
from remora.server import held_mailbox
from remora.server.held_mailbox import AHEAD, HeldMailbox
from remora.server.loop import LoopMailbox
from support.engine.fakes import ticket_of

PATIENCE_S = 60.0


class Client:
    """A client that reads when the test says so."""

    def __init__(self) -> None:
        self.unsent = 0
        self.resume: Callable[[], None] | None = None
        self.gone = asyncio.Event()
        self.stopped = asyncio.Event()

    def when_sent(self, resume: Callable[[], None]) -> None:
        self.resume = resume
        self.stopped.set()

    def give_up(self, reason: str) -> None:
        assert "took nothing" in reason
        self.gone.set()

    def read(self) -> None:
        self.unsent = 0
        resume, self.resume = self.resume, None
        assert resume is not None
        resume()


class Sender:
    """A model's thread that sends as fast as it may."""

    def __init__(self, count: int, mailbox: HeldMailbox, ticket: Ticket) -> None:
        self.sent = 0
        self._count = count
        self._mailbox = mailbox
        self._ticket = ticket
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        answer = Response([Tensor("OUT", "UINT8", np.zeros(1000, np.uint8))])
        for index in range(self._count):
            self._mailbox.post([(self._ticket, Streamed(answer, index == self._count - 1))])
            self.sent += 1


def play(scenario: Callable[[HeldMailbox, Client, Ticket, asyncio.Event], object]) -> None:
    async def run() -> None:
        client, done = Client(), asyncio.Event()
        held = HeldMailbox(LoopMailbox(asyncio.get_running_loop()), client)
        taken = 0

        def reply(_: Ticket, outcome: object) -> None:
            nonlocal taken
            assert isinstance(outcome, Streamed)
            taken += 1
            if taken > 3:
                client.unsent += 1000  # the connection's buffer is full
            if outcome.final:
                held.end()
                done.set()
            else:
                held.sent()

        ticket = ticket_of(reply=reply, mailbox=held)
        held.release_with(ticket.request)
        await scenario(held, client, ticket, done)  # type: ignore[misc]

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


async def stopped_or_done(client: Client, done: asyncio.Event) -> bool:
    """Wait until the client's buffer is full or the last response was taken; return False for the latter."""
    waits = [asyncio.ensure_future(event.wait()) for event in (client.stopped, done)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    return not done.is_set()


def test_a_sender_is_held_up_until_its_client_reads_and_nothing_is_lost() -> None:
    async def scenario(held: HeldMailbox, client: Client, ticket: Ticket, done: asyncio.Event) -> None:
        sender = Sender(10 * AHEAD, held, ticket)
        while await stopped_or_done(client, done):
            client.stopped.clear()
            assert client.unsent <= (AHEAD + 1) * 1000
            asyncio.get_running_loop().call_soon(client.read)
            await asyncio.sleep(0)
        await asyncio.to_thread(sender.thread.join, PATIENCE_S)
        assert sender.sent == 10 * AHEAD

    play(scenario)


def test_a_client_that_takes_nothing_for_long_is_given_up_and_its_sender_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_mailbox, "SILENT_S", 0.01)

    async def scenario(held: HeldMailbox, client: Client, ticket: Ticket, done: asyncio.Event) -> None:
        sender = Sender(10 * AHEAD, held, ticket)
        await client.gone.wait()
        assert sender.sent < 10 * AHEAD
        ticket.cancel()  # as an exchange does that is given up
        await asyncio.to_thread(sender.thread.join, PATIENCE_S)
        assert not sender.thread.is_alive()

    play(scenario)


def test_a_client_that_reads_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_mailbox, "SILENT_S", 0.01)
    reads = 0

    def unsent(self: Client) -> int:
        nonlocal reads
        reads += 1
        return 10**9 - reads  # each look finds a little less

    async def scenario(held: HeldMailbox, client: Client, ticket: Ticket, done: asyncio.Event) -> None:
        monkeypatch.setattr(Client, "unsent", property(unsent, lambda self, value: None), raising=False)
        sender = Sender(2 * AHEAD, held, ticket)
        await client.stopped.wait()
        start = reads
        while reads < start + 2 * AHEAD:
            await asyncio.sleep(0)
        assert not client.gone.is_set()
        ticket.cancel()
        await asyncio.to_thread(sender.thread.join, PATIENCE_S)

    play(scenario)


def test_the_loops_own_thread_is_never_held_up() -> None:
    async def scenario(held: HeldMailbox, client: Client, ticket: Ticket, done: asyncio.Event) -> None:
        answer = Response([Tensor("OUT", "UINT8", np.zeros(1000, np.uint8))])
        for _ in range(10 * AHEAD):
            held.post([(ticket, Streamed(answer, False))])
        assert client.unsent > AHEAD * 1000

    play(scenario)
