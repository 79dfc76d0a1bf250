"""Ensemble scheduler over fake models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from remora.errors import (
    RemoraError,
)
from remora.messages import (
    Array,
    Data,
    InferForm,
    InputSpec,
    Mailbox,
    Outcome,
    Response,
    Streamed,
    Tensor,
    Ticket,
)
from remora.scheduling.ensembles.scheduler import EnsembleScheduler
from remora.signature import Signature, UnreadableError
from support.engine.fakes import FakeClock, Replies, config_of

PATIENCE_S = 30.0
ONE = 'input { name: "I" data_type: TYPE_INT32 dims: -1 } output { name: "O" data_type: TYPE_INT32 dims: -1 }'
TWO = 'input { name: "J" data_type: TYPE_INT32 dims: -1 } ' + ONE
ROW = "data_type: TYPE_INT32 dims: -1"


def steps_text(*steps: tuple[str, str, str]) -> str:
    """Steps as (model, "I=a J=b", "O=c")."""

    def maps(kind: str, pairs: str) -> str:
        parts = [pair.split("=") for pair in pairs.split()]
        return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in parts)

    return "".join(
        f'step {{ model_name: "{model}" model_version: -1 {maps("input_map", inputs)} {maps("output_map", outputs)} }}'
        for model, inputs, outputs in steps
    )


CHAIN = steps_text(("first", "I=IN", "O=middle"), ("second", "I=middle", "O=OUT"))
FORK = steps_text(("first", "I=IN", "O=x"), ("second", "I=IN", "O=y"), ("third", "I=x J=y", "O=OUT"))


@dataclass(eq=False)
class FakeStep:
    """A composing model; requests wait in ``tickets`` until the test answers them, or for ever."""

    name: str
    text: str = ONE
    decoupled: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    refusal: RemoraError | None = None
    lent: int = 0
    taken: int = 0
    devices: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        self.signature = Signature(config_of(self.text), self.name)

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Callable[[Ticket, Outcome], None],
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        blocking_instances: frozenset[object] = frozenset(),
        keep_on_device: bool = False,
    ) -> Ticket:
        if self.refusal is not None:
            raise self.refusal
        request = self.signature.request(form, data)
        request.blocking_instances = blocking_instances
        request.keep_on_device = keep_on_device
        ticket = Ticket(request, reply, mailbox, context)
        self.tickets.append(ticket)
        return ticket

    def labels_of(self, output: str) -> Sequence[str]:
        return ()

    def unreadable(self, error: UnreadableError) -> RemoraError:
        return error

    def release(self) -> None:
        self.taken += 1

    def answer(self, *outputs: Array, spent_ns: tuple[int, int, int] = (1, 20, 300)) -> None:
        """Answer the oldest request that waits, in the test's thread."""
        ticket = self.tickets.pop(0)
        ticket.spent_ns = spent_ns
        self.deliver(ticket, Response([Tensor("O", "INT32", array) for array in outputs]))

    def fail(self, error: RemoraError) -> None:
        self.deliver(self.tickets.pop(0), error)

    @staticmethod
    def deliver(*pairs: Ticket | Outcome) -> None:
        """Alternating tickets and outcomes, as one delivery."""
        mailbox = pairs[0].mailbox  # type: ignore[union-attr]
        assert mailbox is not None
        mailbox.post(list(zip(pairs[::2], pairs[1::2], strict=True)))  # type: ignore[arg-type]


@dataclass
class FakeModels:
    """Lends its steps."""

    steps: Mapping[str, FakeStep]
    missing: RemoraError | None = None

    def acquire(self, name: str, version: int = -1) -> FakeStep:
        if self.missing is not None:
            raise self.missing
        self.steps[name].lent += 1
        return self.steps[name]


@dataclass
class FakeEnsembleRecorder:
    """Remembers the requests that ended."""

    ended: list[tuple[tuple[int, int, int], RemoraError | None]] = field(default_factory=list)

    def ensemble_ended(
        self, ticket: Ticket, spent_ns: tuple[int, int, int], error: RemoraError | None, first_ns: int, now_ns: int
    ) -> None:
        self.ended.append((spent_ns, error))


class Bench:
    """An ensemble of fakes with one input IN and one output OUT unless told otherwise."""

    def __init__(
        self,
        steps: str = CHAIN,
        *,
        models: Collection[FakeStep] = (),
        inputs: str = f'input {{ name: "IN" {ROW} }}',
        outputs: str = f'output {{ name: "OUT" {ROW} }}',
        more: str = "",
        scheduling: str = "",
    ) -> None:
        names = ("first", "second", "third")
        self.models = {name: FakeStep(name, TWO if name == "third" else ONE) for name in names}
        self.models.update((model.name, model) for model in models)
        config = config_of(
            f'name: "e" platform: "ensemble" {inputs} {outputs} {more} ensemble_scheduling {{ {steps} {scheduling} }}'
        )
        self.signature = Signature(config, "e")
        self.clock = FakeClock()
        self.recorder = FakeEnsembleRecorder()
        self.lender = FakeModels(self.models)
        decoupled = {model.name for model in self.models.values() if model.decoupled}
        self.scheduler = EnsembleScheduler(config, decoupled, self.lender, self.signature, self.recorder, self.clock)
        self.replies = Replies()

    def __getitem__(self, name: str) -> FakeStep:
        return self.models[name]

    def ask(
        self,
        form: InferForm | None = None,
        *,
        mailbox: Mailbox | None = None,
        **inputs: Array,
    ) -> Ticket:
        inputs = inputs or {"IN": np.arange(4, dtype=np.int32)}
        specs = tuple(InputSpec(name, "INT32", array.shape) for name, array in inputs.items())
        form = form or InferForm(specs)
        request = self.signature.request(form, list(inputs.values()))
        ticket = Ticket(request, self.replies, mailbox)
        self.scheduler.submit(ticket)
        return ticket

    def error_of(self, ticket: Ticket) -> RemoraError:
        outcome = self.replies.only(ticket)
        assert isinstance(outcome, RemoraError)
        return outcome

    def streamed(self, ticket: Ticket) -> list[tuple[object, bool]]:
        """What came of a stream: the values, or the error's text, and whether it was the final one."""
        found: list[tuple[object, bool]] = []
        for each in self.replies.outcomes.get(ticket, []):
            assert isinstance(each, Streamed)
            value: object = each.outcome
            if isinstance(each.outcome, Response):
                value = each.outcome.outputs[0].data.tolist()
            elif each.outcome is not None:
                value = str(each.outcome)
            found.append((value, each.final))
        return found


def numbers(*values: int) -> Array:
    return np.array(values, np.int32)
