"""The sequence scheduler against a simple reference: any story of clients, time, cancellation and dying instances.

The reference is a page of loops over lists: it knows which sequences hold a slot, which wait for one in which order,
the requests of each sequence, and its state. `SEQUENCE_STEPS=10000` takes more steps than the usual run, and plants
mistakes into the deciders to see whether the tests notice them (`make stories`).
"""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from remora.config import sequence_policy
from remora.errors import CancelledError, InternalError, InvalidArgumentError, UnavailableError
from remora.messages import InferForm, Outcome, Request, Response, Tensor, Ticket
from remora.scheduling.sequences import direct as direct_batching
from remora.scheduling.sequences import scheduler as sequence_scheduler
from remora.scheduling.sequences import states as sequence_states
from remora.scheduling.sequences import table as sequences
from remora.scheduling.sequences.scheduler import SequenceOptions, SequenceScheduler
from remora.signature import Signature
from support.engine.fakes import FakeClock, FakeInstance, FakeRecorder, Replies, config_of, ticket_of

STEPS = int(os.environ.get("SEQUENCE_STEPS", "2000"))
STORY = 50
IDLE_US = 100
TIMEOUTS = st.sampled_from([0, 30, 60, 200])

MODEL = """
backend: "fake" max_batch_size: %(slots)d
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching { max_sequence_idle_microseconds: 100 %(strategy)s
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
  state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: 1 }
}
"""


@dataclass(eq=False)
class Known:
    """What the reference knows of one sequence."""

    number: int
    asked: list[Ticket] = field(default_factory=list)  # not answered yet
    alive: bool = False  # a request without START may follow
    doomed: bool = False  # it ends with the request that its instance has
    quiet_since: int = 0  # 0 while it has something to do
    gives_up_ns: int = 0  # when its wait for a slot is over; 0 for never
    state: int = 0


class Reference:
    """The rules of sequences, told without any thought of speed."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.live: list[Known] = []  # in the order in which they began
        self.holders: list[Known] = []
        self.backlog: list[Known] = []
        self.told: dict[Ticket, type[Outcome]] = {}

    def settle(self, now_ns: int) -> None:
        """Time has passed: the silent lose their slots, those behind get them, and some have waited for too long."""
        for known in list(self.holders):
            if known.quiet_since and now_ns - known.quiet_since >= IDLE_US * 1000:
                self.leave(known)
        self.fill()
        for known in list(self.backlog):
            if 0 < known.gives_up_ns <= now_ns:
                self.told |= dict.fromkeys(known.asked, UnavailableError)
                known.asked.clear()
                self.leave(known)

    def fill(self) -> None:
        while self.backlog and len(self.holders) < self.slots:
            known = self.backlog.pop(0)
            self.holders.append(known)
            known.gives_up_ns = 0

    def leave(self, known: Known) -> None:
        """The sequence is over."""
        assert not known.asked
        for line in (self.holders, self.backlog, self.live):
            if known in line:
                line.remove(known)

    def open(self, number: int) -> Known | None:
        """The sequence that takes a request with this id: the last one, unless its END has arrived."""
        return next((known for known in self.live if known.number == number and known.alive), None)

    def of(self, ticket: Ticket) -> Known:
        """The sequence in which a request waits for its answer."""
        return next(known for known in self.live if ticket in known.asked)

    def may_go_on(self, number: int, now_ns: int) -> bool:
        known = self.open(number)
        if known is None:
            return False
        silent = known.quiet_since and now_ns - known.quiet_since >= IDLE_US * 1000
        late = known in self.backlog and 0 < known.gives_up_ns <= now_ns
        return not silent and not late

    def arrive(self, number: int, ticket: Ticket, now_ns: int) -> None:
        self.settle(now_ns)
        known = self.open(number)
        if known is None:
            known = Known(number)
            self.live.append(known)
            self.backlog.append(known)
        known.asked.append(ticket)
        known.alive = not ticket.request.form.sequence_end
        known.quiet_since = 0
        timeout_us = ticket.request.form.timeout_us
        if timeout_us and known in self.backlog:
            end_ns = now_ns + timeout_us * 1000
            known.gives_up_ns = min(known.gives_up_ns or end_ns, end_ns)
        self.fill()

    def cancelled(self, ticket: Ticket) -> None:
        """One request was cancelled: all that wait in its sequence go with it, but for the first of one with a slot,
        which its instance has already."""
        known = self.of(ticket)
        kept = 1 if known in self.holders else 0
        if kept and known.asked[0] is ticket:
            return  # its instance finds out
        self.told |= dict.fromkeys(known.asked[kept:], CancelledError)
        del known.asked[kept:]
        known.alive = False
        if kept:
            known.doomed = True
        else:
            self.leave(known)

    def dropped(self, ticket: Ticket) -> None:
        """An instance has found out that a request was cancelled."""
        known = self.of(ticket)
        assert known.asked[0] is ticket
        self.told |= dict.fromkeys(known.asked, CancelledError)
        known.asked.clear()
        self.leave(known)

    def ran(self, ticket: Ticket, died: bool, now_ns: int) -> int:
        """A request has run; what its answer says."""
        form = ticket.request.form
        known = self.of(ticket)
        assert known in self.holders, "it ran without a slot"
        assert known.asked.pop(0) is ticket, "out of order"
        if form.sequence_start:
            known.state = 0
        if not died:
            known.state += int(ticket.request.inputs["IN"].item())
        if form.sequence_end or known.doomed:
            self.leave(known)
        elif not known.asked:
            known.quiet_since = now_ns
        return known.state


class Stories(RuleBasedStateMachine):
    """Clients ask, time passes, instances run and die, requests are cancelled."""

    strategy = ""
    padded = False

    @initialize(instances=st.sampled_from([1, 1, 2]), slots=st.sampled_from([1, 1, 2]))
    def begin(self, instances: int, slots: int) -> None:
        config = config_of(MODEL % {"slots": slots, "strategy": self.strategy % {"slots": slots}})
        policy = sequence_policy(config)
        assert policy is not None
        assert policy.slots == slots
        self.clock = FakeClock()
        self.replies = Replies()
        self.reference = Reference(instances * slots)
        self.accepted: list[Ticket] = []
        self.instances = [FakeInstance(f"m_{index}") for index in range(instances)]
        self.homes: dict[Known, int] = {}
        self.slots: dict[Known, int] = {}
        for instance in self.instances:
            instance.answer = self.answer
        self.scheduler = SequenceScheduler(
            policy,
            self.instances,
            Signature(config, "m"),
            FakeRecorder(),
            self.clock,
            SequenceOptions({"SUM": np.zeros((1, 1), np.int32)}, threads=False),
        )

    @staticmethod
    def answer(request: Request) -> Outcome:
        total = request.inputs["SUM"] + request.inputs["IN"]
        return Response([Tensor("OUT", "INT32", total), Tensor("SUM_OUT", "INT32", total)])

    @rule(
        number=st.integers(1, 4),
        value=st.integers(-9, 9),
        start=st.booleans(),
        end=st.sampled_from([True, False, False, False]),
        timeout_us=TIMEOUTS,
    )
    def arrive(self, number: int, value: int, start: bool, end: bool, timeout_us: int) -> None:
        ticket = ticket_of(reply=self.replies, arrival_ns=self.clock.now_ns)
        ticket.request.form = InferForm(
            (), sequence_id=number, sequence_start=start, sequence_end=end, timeout_us=timeout_us
        )
        ticket.request.inputs["IN"] = np.array([[value]], np.int32)
        if start or self.reference.may_go_on(number, self.clock.now_ns):
            self.accepted.append(ticket)
            self.scheduler.submit(ticket)
            self.reference.arrive(number, ticket, self.clock.now_ns)
        else:
            with pytest.raises(InvalidArgumentError, match="must specify the START flag"):
                self.scheduler.submit(ticket)
            self.reference.settle(self.clock.now_ns)

    @precondition(lambda self: self.going())
    @rule(
        choice=st.integers(0, 99),
        value=st.integers(-9, 9),
        end=st.sampled_from([True, False, False, False]),
        timeout_us=TIMEOUTS,
    )
    def follow(self, choice: int, value: int, end: bool, timeout_us: int) -> None:
        going = self.going()
        self.arrive(going[choice % len(going)], value, False, end, timeout_us)

    @precondition(lambda self: self.ends())
    @rule(choice=st.integers(0, 99), value=st.integers(-9, 9), early_ns=st.sampled_from([0, 1]))
    def follow_when_its_time_ends(self, choice: int, value: int, early_ns: int) -> None:
        number, end_ns = self.ends()[choice % len(self.ends())]
        self.clock.advance(max(end_ns - early_ns - self.clock.now_ns, 0))
        self.arrive(number, value, False, False, 0)

    def ends(self) -> list[tuple[int, int]]:
        """The sequences that time may end, and when: the silent ones, and those that give up to wait for a slot."""
        quiet = [known for known in self.reference.holders if known.quiet_since]
        late = [known for known in self.reference.backlog if known.gives_up_ns]
        silence = [(known.number, known.quiet_since + IDLE_US * 1000) for known in quiet]
        return silence + [(known.number, known.gives_up_ns) for known in late]

    def going(self) -> list[int]:
        numbers = dict.fromkeys(known.number for known in self.reference.live)
        return [number for number in numbers if self.reference.may_go_on(number, self.clock.now_ns)]

    @rule(index=st.integers(0, 1), dies=st.sampled_from([False, False, False, True]))
    def run(self, index: int, dies: bool) -> None:
        index %= len(self.instances)
        instance, before = self.instances[index], len(self.instances[index].batches)
        instance.failure = InternalError("the instance died") if dies else None
        waits = any(self.homes[known] == index for known in self.ready())
        plan = self.scheduler.step(index)
        for ticket, _ in plan.dropped:
            self.reference.dropped(ticket)
        assert bool(plan.tickets) >= waits, "an idle instance let a request wait"
        for place, request in enumerate(instance.batches[before] if plan.tickets else ()):
            inputs = request.inputs
            if not inputs["READY"].item():
                assert not any(inputs[name].any() for name in ("IN", "SUM", "START", "END", "ID"))
                continue
            form = request.form
            ticket = next(each for each in self.accepted if each.request is request)
            assert self.slots.get(self.reference.of(ticket)) == place or not self.padded, "not at the place of its slot"
            assert [inputs[name].item() for name in ("START", "END", "ID")] == [
                form.sequence_start,
                form.sequence_end,
                form.sequence_id,
            ]
            total = self.reference.ran(ticket, dies, self.clock.now_ns)
            outcome = self.replies.only(ticket)
            if dies:
                assert outcome is instance.failure
            else:
                assert isinstance(outcome, Response)
                assert [(tensor.name, tensor.data.item()) for tensor in outcome.outputs] == [("OUT", total)]
        self.reference.fill()

    def ready(self) -> list[Known]:
        """The sequences with a slot whose first request may run."""
        asked = [known for known in self.reference.holders if known.asked]
        return [known for known in asked if not known.asked[0].request.cancelled]

    @rule(us=st.sampled_from([1, 30, 60, 100]))
    def wait(self, us: int) -> None:
        self.clock.advance(us * 1000)

    @rule()
    def look(self) -> None:
        self.scheduler.sweep()
        self.reference.settle(self.clock.now_ns)

    @precondition(lambda self: any(known.asked for known in self.reference.live))
    @rule(choice=st.integers(0, 99))
    def cancel(self, choice: int) -> None:
        waiting = [ticket for known in self.reference.live for ticket in known.asked]
        ticket = waiting[choice % len(waiting)]
        ticket.cancel()
        self.scheduler.sweep()
        self.reference.cancelled(ticket)
        self.reference.settle(self.clock.now_ns)

    @invariant()
    def what_was_foretold_has_come(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for ticket, kind in self.reference.told.items():
            assert isinstance(self.replies.only(ticket), kind)
        waiting = {ticket for known in self.reference.live for ticket in known.asked}
        assert {ticket for ticket in self.accepted if ticket not in self.replies.outcomes} == waiting

    @invariant()
    def the_same_sequences_live_at_the_same_kind_of_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        rows = self.scheduler.report().live
        known = self.reference.live
        assert [row.id for row in rows] == [each.number for each in known]
        pairs = list(zip(known, rows, strict=True))
        active = [(each, row) for each, row in pairs if row.state == "active"]
        assert {each for each, _ in active} == set(self.reference.holders)
        assert {each for each, row in pairs if row.state == "backlog"} == set(self.reference.backlog)
        places = [(row.instance, row.slot) for _, row in active]
        assert len(set(places)) == len(places)
        self.slots = {each: row.slot for each, row in active}
        homes = {each: int(row.instance.removeprefix("m_")) for each, row in active}
        for each, index in homes.items():
            assert bool(each.quiet_since) == (not each.asked)
            assert self.homes.get(each, index) == index, "a sequence has moved"
        self.homes = homes

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for instance in self.instances:
            instance.failure = None
        for _ in range(len(self.accepted) + 2):  # each round at least one request runs, or all that is left ends
            ran = [self.scheduler.step(index).tickets for index in range(len(self.instances))]
            if not any(ran):
                self.clock.advance(10**9)
                self.scheduler.sweep()
        assert self.scheduler.open_sequences == 0
        assert self.scheduler.pending == 0
        for ticket in self.accepted:
            self.replies.only(ticket)


class DirectStories(Stories):
    strategy = "direct { }"
    padded = True


class OldestStories(Stories):
    strategy = "oldest { max_candidate_sequences: %(slots)d }"


TestDirect = DirectStories.TestCase
TestOldest = OldestStories.TestCase
TestDirect.settings = TestOldest.settings = settings(max_examples=max(STEPS // STORY, 1), stateful_step_count=STORY)


# -- do the stories notice? ------------------------------------------------------------------------------------------

STORIES = settings(
    max_examples=400,
    stateful_step_count=50,
    phases=(Phase.generate,),
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)

TABLE = [
    ("            sequence.states = {}\n", "            pass\n"),
    ("            self._close(sequence)\n        sequence.waiting", "            pass\n        sequence.waiting"),
    ("if form.sequence_end and not self._policy.iterative:\n", "if form.sequence_end and sequence.place:\n"),
    ("        if self._open.get(sequence.id) is sequence:\n", "        if sequence.id in self._open:\n"),
    ("if now_ns - since < self._policy.idle_ns and", "if now_ns - since <= self._policy.idle_ns and"),
    ("return now_ns - self._quiet.get(sequence, now_ns) < self._policy.idle_ns", "return True"),
    ("return not 0 < sequence.expires_ns <= now_ns", "return True"),
    ("self._backlog.popitem(last=False)", "self._backlog.popitem(last=True)"),
    ("            heapq.heappush(self._free, sequence.place)\n", ""),
    ("elif self._policy.iterative or ticket.request.form.sequence_end:", "elif self._policy.iterative:"),
    ("            sequence.doomed = True\n", "            pass\n"),
    ("sequence.doomed = True\n            self._close(sequence)\n", "sequence.doomed = True\n"),
    ("or at_ns < sequence.expires_ns:", "or at_ns > sequence.expires_ns:"),
    ("sequence.place is None or sequence.running is not None", "sequence.place is None"),
    ("        while sequence.waiting:\n            self._waiting -= 1\n", "        while sequence.waiting:\n"),
    ("            self._go_on(other, now_ns, orders)\n", ""),
]
DIRECT = [
    ("chosen[slot] if slot in chosen else self._controls.null(oldest.request) for slot in range(max(chosen) + 1)",
     "chosen[slot] for slot in sorted(chosen)"),
    ("        cancelled = [slot for", "        cancelled = [] and [slot for"),
    ("            del self._ready[slot]\n", "            pass\n"),
]  # fmt: skip
STATES = [
    ("name: kept.get(name, begin)", "name: begin"),
    ("        request.states.update(renewed)\n", ""),
    ("            if tensor.name in wanted:\n", "            if True:\n"),
    ("        request.states = kept\n", "        request.states = dict(kept)\n"),
]
MUTANTS = [
    *((sequences, "SequenceTable", *row) for row in TABLE),
    *((direct_batching, "DirectQueue", *row) for row in DIRECT),
    *((sequence_states, "States", *row) for row in STATES),
]


@pytest.mark.skipif("SEQUENCE_STEPS" not in os.environ, reason="planting mistakes takes a minute: make stories")
@pytest.mark.parametrize(
    ("module", "name", "right", "wrong"), MUTANTS, ids=[f"{row[1]}-{number}" for number, row in enumerate(MUTANTS)]
)
def test_a_planted_mistake_is_noticed(
    module: types.ModuleType, name: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1, "the code has changed: plant the mistake anew"
    mutant = types.ModuleType("sequences_with_a_mistake")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(right, wrong), mutant.__name__, "exec"), mutant.__dict__)
    monkeypatch.setattr(sequence_scheduler, name, getattr(mutant, name))
    assert any(notices(stories) for stories in (DirectStories, OldestStories))


def notices(stories: type[Stories]) -> bool:
    try:
        run_state_machine_as_test(stories, settings=STORIES)
    except (Exception, pytest.fail.Exception):  # the latter where an error was foretold that did not come
        return True
    return False
