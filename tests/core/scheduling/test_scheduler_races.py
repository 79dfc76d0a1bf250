"""Races of the scheduler: callers, an event loop, cancellations, time, instances that die and a stop, by seeds.

`RACE_SEEDS=5000` explores more of them than the usual run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from remora.backends import Done, Execution, NotBegunError
from remora.config import BatchPolicy, QueuePolicy
from remora.errors import CancelledError, InternalError, UnavailableError
from remora.messages import Outcome, Response, Ticket, Watcher
from remora.scheduling import delivery as delivery_module
from remora.scheduling import expiry as expiry_module
from remora.scheduling import pool as pool_module
from remora.scheduling import running as running_module
from remora.scheduling import thread_dispatch as thread_dispatch_module
from remora.scheduling.batching import BatchQueue
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from support.engine.fakes import DOUBLER, FakeClock, FakeInstance, FakeRecorder, Replies, config_of, double, ticket_of
from support.engine.interleaving import Interleaving, Loop

SEEDS = int(os.environ.get("RACE_SEEDS", "40"))
MODELS = {
    "plain": BatchPolicy(max_batch_size=4),
    "dynamic": BatchPolicy(max_batch_size=4, dynamic=True),
    "delayed": BatchPolicy(max_batch_size=4, dynamic=True, max_delay_ns=7_000),
    "ordered": BatchPolicy(max_batch_size=2, dynamic=True, preserve_ordering=True),
    "timeouts": BatchPolicy(
        max_batch_size=2,
        dynamic=True,
        queue=QueuePolicy(default_timeout_ns=30_000, allow_override=True, max_size=9),
    ),
}


class Mortal(FakeInstance):
    """Runs a batch one turn of its thread after the other; dies now and then."""

    def __init__(self, name: str, play: Play, *, quick: bool) -> None:
        super().__init__(name, quick=quick)
        self.play = play
        self.inside = 0

    def execute(self, execution: Execution) -> list[Outcome]:
        self.inside += 1
        assert self.inside == 1, "two batches at a time in one instance"
        self.play.stage.pause()
        outcomes = self.outcomes(execution)
        self.inside -= 1
        if isinstance(outcomes, Exception):
            raise outcomes
        return outcomes

    def outcomes(self, execution: Execution) -> list[Outcome] | Exception:
        self.play.ran += [id(request) for request in execution.requests]
        if self.play.stage.random.random() < 0.1:
            return InternalError("the instance died")
        return [double(request) for request in execution.requests]


class Remote(Mortal):
    """Begins batches for the loop, one while another runs, unless it would rather not; they end in their order, in the
    loop or in another thread. When it dies, the one behind never has its turn."""

    remote = True
    ahead = True
    trouble = ""

    def __init__(self, name: str, play: Play, *, quick: bool) -> None:
        super().__init__(name, play, quick=quick)
        self.begun: list[tuple[Execution, Done]] = []

    def begin(self, execution: Execution, watcher: Watcher, done: Done) -> bool:
        if self.play.stage.random.random() < 0.2:
            return False
        assert not self.inside, "a batch was begun while a thread runs one"
        assert len(self.begun) < 2, "two batches went ahead"
        self.begun.append((execution, done))
        if len(self.begun) == 1:
            self.run_next()
        return True

    def execute(self, execution: Execution) -> list[Outcome]:
        assert not self.begun, "a thread runs a batch while another was begun"
        return super().execute(execution)

    def run_next(self) -> None:
        (self.play.loop.events if self.play.stage.random.random() < 0.7 else self.play.elsewhere).append(self.end)

    def end(self) -> None:
        execution, done = self.begun.pop(0)
        result = self.outcomes(execution)
        never: list[tuple[Execution, Done]] = []
        if isinstance(result, Exception):
            never, self.begun = self.begun, []
        elif self.begun:
            self.run_next()
        done(result)
        for _, other in never:
            other(NotBegunError())


class Play:
    """One interleaving."""

    def __init__(self, seed: int, policy: BatchPolicy, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.clock = FakeClock()
        self.stage = stage = Interleaving(seed, self.clock)
        for module in (pool_module, thread_dispatch_module, expiry_module, delivery_module, running_module):
            monkeypatch.setattr(module, "threading", stage.threading)
        self.loop = Loop(stage)
        self.elsewhere: list[Callable[[], None]] = []
        self.ran: list[int] = []
        self.replies = Replies()
        self.accepted: list[Ticket] = []
        self.actors = 0
        count = stage.random.randint(1, 3)
        make = Remote if kind == "remote" else Mortal
        self.instances = [make(f"m_{index}", self, quick=kind == "quick") for index in range(count)]
        self.scheduler = Scheduler(
            BatchQueue(policy),
            self.instances,
            Signature(config_of(DOUBLER), "m"),
            FakeRecorder(),
            self.clock,
            DispatchPolicy(may_wait=policy.max_delay_ns > 0, ordered=policy.preserve_ordering),
        )
        if kind == "quick":
            self.scheduler.costs.learn(1, 1000)

    def submit(self, mailbox: Loop | None) -> None:
        ticket = ticket_of(
            self.stage.random.randint(1, 2),
            reply=self.replies,
            mailbox=mailbox,
            timeout_us=self.stage.random.choice((0, 0, 20)),
        )
        try:
            self.scheduler.submit(ticket)
        except UnavailableError:
            return
        self.accepted.append(ticket)

    def caller(self) -> None:
        for _ in range(self.stage.random.randint(0, 6)):
            self.submit(None)
            self.stage.pause()
        self.actors -= 1

    def turns(self) -> None:
        """The loop: takes in requests and what has happened, until there is nothing more to come."""
        left, through = self.stage.random.randint(0, 9), False
        while True:
            for _ in range(min(left, self.stage.random.randint(0, 3))):
                self.submit(self.loop)
                left -= 1
            self.loop.turn()
            if not left and not through:
                self.actors, through = self.actors - 1, True
            if self.stopped and not self.loop.events:
                return
            self.stage.pause(lambda left=left: bool(left or self.loop.events or self.stopped))

    def keeper(self) -> None:
        while not self.stopped:
            self.stage.pause(lambda: bool(self.elsewhere) or self.stopped)
            while self.elsewhere:
                self.elsewhere.pop(0)()
            for instance in self.instances:
                if isinstance(instance, Remote):
                    instance.trouble = self.stage.random.choice(("", "", "", "being started again"))

    def stopper(self) -> None:
        if self.stage.random.random() < 0.7:
            self.stage.pause(lambda: not self.actors)
        assert self.scheduler.stop()
        assert not self.scheduler.pending, "a stop left requests behind"
        self.stopped = True

    def run(self) -> None:
        self.stopped = False
        self.actors = 3
        for name in ("caller 1", "caller 2"):
            self.stage.start(self.caller, name=name)
        self.stage.start(self.turns, name="loop")
        self.stage.start(self.stage.canceller, self.accepted)
        self.stage.start(self.stage.clockwork, 6, (1_000, 8_000, 40_000))
        for actor in (self.keeper, self.stopper):
            self.stage.start(actor)
        self.stage.run()

    def check(self) -> None:
        assert self.scheduler.pending == self.scheduler.running == 0
        assert set(self.replies.outcomes) == set(self.accepted)
        for ticket in self.accepted:
            outcome = self.replies.only(ticket)  # answered, and once
            if isinstance(outcome, Response):
                assert (outcome.outputs[0].data == ticket.request.inputs["IN"] * 2).all(), (
                    "the answer of another request"
                )
            else:
                assert isinstance(outcome, CancelledError | UnavailableError | InternalError)
        assert len(set(self.ran)) == len(self.ran), "a request ran twice"


@pytest.mark.parametrize("kind", ["threads", "quick", "remote"])
@pytest.mark.parametrize("model", MODELS)
def test_no_interleaving_loses_an_answer_or_gives_two(model: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS):
        play = Play(seed, MODELS[model], monkeypatch, kind)
        try:
            play.run()
            play.check()
        except BaseException as error:
            error.add_note(f"seed {seed} of '{model}', {kind}")
            raise
