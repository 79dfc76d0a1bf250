"""Races of the sequence scheduler: clients, cancellations, time, dying instances and a stop, interleaved by seeds.

`RACE_SEEDS=5000` explores more of them than the usual run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution
from remora.config import sequence_policy
from remora.errors import CancelledError, InternalError, InvalidArgumentError, RemoraError, UnavailableError
from remora.messages import InferForm, Request, Response, Tensor, Ticket
from remora.scheduling import delivery as delivery_module
from remora.scheduling import pool as pool_module
from remora.scheduling import thread_dispatch as thread_dispatch_module
from remora.scheduling.sequences import scheduler as sequence_scheduler_module
from remora.scheduling.sequences.scheduler import SequenceOptions, SequenceScheduler
from remora.signature import Signature
from support.engine.fakes import FakeClock, FakeInstance, FakeRecorder, Replies, config_of, ticket_of
from support.engine.interleaving import Interleaving, Loop

SEEDS = int(os.environ.get("RACE_SEEDS", "60"))

MODEL = """
backend: "fake" max_batch_size: %(slots)d
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching { max_sequence_idle_microseconds: 100 %(strategy)s
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: 1 }
}
"""
STRATEGIES = {
    "direct": "direct { }",
    "direct, delayed": "direct { max_queue_delay_microseconds: 7 minimum_slot_utilization: 1 }",
    "oldest": "oldest { max_candidate_sequences: 2 }",
    "oldest, delayed": "oldest { max_candidate_sequences: 3 max_queue_delay_microseconds: 7 preserve_ordering: true }",
    "iterative": "oldest { max_candidate_sequences: 2 } iterative_sequence: true",
}


Story = tuple[int, int]
"""A sequence as its client sees it: the id, and how many times it has begun; iterative requests count as one."""


class Mortal(FakeInstance):
    """Adds IN to the state, one turn of its thread after the other; dies now and then; may ask for another turn."""

    def __init__(self, name: str, play: Play, *, iterative: bool, quick: bool) -> None:
        super().__init__(name, quick=quick)
        self._play = play
        self._iterative = iterative
        self._inside = 0

    def execute(self, execution: Execution) -> list[Any]:
        play, stage = self._play, self._play.stage
        self._inside += 1
        assert self._inside == 1, "two batches at a time in one instance"
        real = [request for request in execution.requests if request.inputs["READY"].item()]
        assert real, "a batch of nothing but padding"
        numbers = [play.story[request] for request in real]
        assert len(set(numbers)) == len(numbers), "two requests of one sequence in a batch"
        for request in real:
            others = [other for other in play.inside if play.story[other] == play.story[request]]
            assert all(play.may_overtake(request, other) for other in others), "two requests of one sequence at a time"
        play.inside |= set(real)
        stage.pause()
        dies = stage.random.random() < 0.1
        outcomes = [None if dies else self._answer(request) for request in execution.requests]
        stage.pause()
        play.inside -= set(real)
        self._inside -= 1
        if dies:
            play.ran += [(request, None) for request in real]
            raise InternalError("the instance died")
        if self._iterative:
            again = [at for at, outcome in enumerate(outcomes) if outcome and stage.random.random() < 0.4]
            execution.rescheduled = frozenset(again)
            for at in again:
                outcomes[at] = None
        return outcomes

    def _answer(self, request: Request) -> Response:
        total = request.inputs["SUM"] + request.inputs["IN"]
        if request.inputs["READY"].item():
            self._play.ran.append((request, int(total.item())))
        return Response([Tensor("OUT", "INT32", total), Tensor("SUM_OUT", "INT32", total)])


class Play:
    """One interleaving: three clients with two sequences each, one that cancels, one that moves the clock.

    With ``quick`` instances the clients' requests come in through an event loop, which may run them itself.
    """

    def __init__(self, seed: int, strategy: str, monkeypatch: pytest.MonkeyPatch, *, quick: bool = False) -> None:
        self.clock = FakeClock()
        self.stage = stage = Interleaving(seed, self.clock)
        for module in (pool_module, thread_dispatch_module, sequence_scheduler_module, delivery_module):
            monkeypatch.setattr(module, "threading", stage.threading)
        self.loop = Loop(stage) if quick else None
        self.iterative = "iterative" in strategy
        config = config_of(MODEL % {"slots": stage.random.randint(1, 2), "strategy": strategy})
        policy = sequence_policy(config)
        assert policy is not None
        self.inside: set[Request] = set()
        self.sent: dict[Story, list[Request]] = defaultdict(list)
        self.story: dict[Request, Story] = {}
        self.ran: list[tuple[Request, int | None]] = []
        self.replies = Replies()
        self.accepted: list[Ticket] = []
        self.clients = 0
        instances = [
            Mortal(f"m_{index}", self, iterative=self.iterative, quick=quick)
            for index in range(stage.random.randint(1, 2))
        ]
        self.scheduler = SequenceScheduler(
            policy,
            instances,
            Signature(config, "m"),
            FakeRecorder(),
            self.clock,
            SequenceOptions({"SUM": np.zeros((1, 1), np.int32)}),
        )
        if quick:
            self.scheduler.costs.learn(1, 1000)

    def submit(self, ticket: Ticket) -> None:
        """Hand a request in, from the loop if there is one. Raises what the scheduler does."""
        if self.loop is None:
            self.scheduler.submit(ticket)
            return
        taken: list[RemoraError | None] = []

        def take() -> None:
            try:
                self.scheduler.submit(ticket)
                taken.append(None)
            except RemoraError as error:
                taken.append(error)

        self.loop.events.append(take)
        self.stage.pause(lambda: bool(taken))
        if taken[0] is not None:
            raise taken[0]

    def turns(self) -> None:
        """The loop, until there is nothing more to come."""
        loop = self.loop
        assert loop is not None
        while self.clients or not self.stopped or loop.events:
            loop.turn()
            self.stage.pause(lambda: bool(loop.events or (self.stopped and not self.clients)))

    def client(self, first: int) -> None:
        """Sends to two sequences; knows for each whether it must begin it, unless it makes a mistake."""
        random, begun = self.stage.random, dict.fromkeys((first, first + 1), False)
        starts = dict.fromkeys(begun, 0)
        for _ in range(random.randint(3, 9)):
            number = random.choice(list(begun))
            start = not begun[number] if random.random() < 0.95 else begun[number]
            end = random.random() < 0.3
            ticket = ticket_of(reply=self.replies, mailbox=self.loop)
            ticket.request.form = InferForm(
                (),
                sequence_id=number,
                sequence_start=start,
                sequence_end=end,
                timeout_us=random.choice((0, 0, 30)),
            )
            starts[number] += start and not self.iterative
            self.story[ticket.request] = (number, starts[number])
            self.sent[self.story[ticket.request]].append(ticket.request)
            ticket.request.inputs["IN"] = np.array([[random.randint(1, 9)]], np.int32)
            try:
                self.submit(ticket)
            except InvalidArgumentError:
                assert not start, "START may always come"
                begun[number] = False
                continue
            except UnavailableError:
                break
            self.accepted.append(ticket)
            begun[number] = not end
            if random.random() < 0.4:
                self.stage.pause(lambda ticket=ticket: ticket in self.replies.outcomes)
        self.clients -= 1

    def stopper(self) -> None:
        if self.stage.random.random() < 0.7:
            self.stage.pause(lambda: not self.clients)
        assert self.scheduler.stop()
        self.stopped = True

    def run(self) -> None:
        self.stopped = False
        if self.loop is not None:
            self.stage.start(self.turns, name="loop")
        for first in (1, 3, 5):
            self.clients += 1
            self.stage.start(self.client, first, name=f"client {first}")
        self.stage.start(self.stage.canceller, self.accepted)
        self.stage.start(self.stage.clockwork, 8, (1_000, 20_000, 60_000, 100_000))
        self.stage.start(self.stopper)
        self.stage.run()

    # -- what must be true afterwards ---------------------------------------------------------------------------------

    def check(self) -> None:
        assert self.scheduler.pending == self.scheduler.running == 0
        assert self.scheduler.open_sequences == 0
        for ticket in self.accepted:
            self.replies.only(ticket)  # answered, and once
        assert set(self.replies.outcomes) == set(self.accepted)
        self._check_order()
        self._check_values()

    def may_overtake(self, later: Request, earlier: Request) -> bool:
        """Return True if ``later`` may run before the end of ``earlier``, a request of the same id.

        Only an iterative request may, if one between them was cancelled: that ends the sequence while ``earlier`` is
        in flight, so ``later`` began another sequence, which may have a slot at another instance.
        """
        sent = self.sent[self.story[earlier]]
        between = sent[sent.index(earlier) + 1 : sent.index(later)]
        return self.iterative and any(request.cancelled for request in between)

    def _check_order(self) -> None:
        """Requests of one sequence ran in the order they came; those that did not run have an answer that says why."""
        place = {ticket.request: at for at, ticket in enumerate(self.accepted)}
        last: dict[Story, Request] = {}
        for request, _ in self.ran:
            story = self.story[request]
            latest = last.setdefault(story, request)
            if place[request] >= place[latest]:
                last[story] = request
            else:
                assert self.may_overtake(latest, request), "out of order"
        ran = {request for request, _ in self.ran}
        for ticket in self.accepted:
            if ticket.request not in ran:
                assert isinstance(self.replies.only(ticket), CancelledError | UnavailableError)

    def _check_values(self) -> None:
        """Each answer is what a loop over the requests that ran would give."""
        sums: dict[Story, int] = {}
        expected: dict[Request, int | None] = {}
        for request, value in self.ran:
            story = self.story[request]
            if request.form.sequence_start or self.iterative:  # a turn without an answer renews no state
                sums[story] = 0
            if value is not None:
                sums[story] += int(request.inputs["IN"].item())
                assert value == sums[story], "the state of another sequence"
            expected[request] = value
        for ticket in self.accepted:
            outcome = self.replies.only(ticket)
            if isinstance(outcome, Response):
                assert [tensor.name for tensor in outcome.outputs] == ["OUT"]
                assert outcome.outputs[0].data.item() == expected[ticket.request]
            else:
                assert isinstance(outcome, RemoraError)


@pytest.mark.parametrize("quick", [False, True], ids=["threads", "quick"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_interleaving_loses_answers_order_or_state(
    strategy: str, monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    for seed in range(SEEDS // 2 if quick else SEEDS):
        play = Play(seed, STRATEGIES[strategy], monkeypatch, quick=quick)
        try:
            play.run()
            play.check()
        except BaseException as error:
            error.add_note(f"seed {seed} of '{strategy}', {'quick' if quick else 'threads'}")
            raise


def test_a_cancelled_request_is_answered_at_once_whatever_holds_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS // 5):
        play = Play(seed, STRATEGIES["oldest"], monkeypatch)
        tickets: list[Ticket] = []

        def ask(number: int, play: Play = play, tickets: list[Ticket] = tickets) -> None:
            ticket = ticket_of(reply=play.replies)
            ticket.request.form = InferForm((), sequence_id=number, sequence_start=True)
            tickets.append(ticket)
            play.scheduler.submit(ticket)

        def story(play: Play = play, tickets: list[Ticket] = tickets) -> None:
            for number in range(1, 7):  # more than there are slots
                ask(number)
            play.stage.pause(lambda: any(ticket in play.replies.outcomes for ticket in tickets))
            now_ns = play.clock.now_ns
            last = tickets[-1]
            last.cancel()
            play.stage.pause(lambda: last in play.replies.outcomes)
            assert isinstance(play.replies.only(last), CancelledError)
            assert play.clock.now_ns == now_ns, "only time has brought the answer"
            assert play.scheduler.stop()

        play.stage.start(story)
        play.stage.run()
