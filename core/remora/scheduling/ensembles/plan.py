"""Dataflow of an ensemble: which steps run, on which values, and when [E01, E02, E05, E07].

This module has no threads, clock or arrays: values arrive with the response of a step, and the steps to start are
returned as data. `ensembles.request` executes them. Invariants:

1. A step runs once for each set of inputs that belong together, as soon as the last of them is available.
2. A step on which no requested output depends never runs.
3. A value is released when its last reader has it.
4. Answers are in the order of the responses from which they were computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from remora.messages import OutputSpec
from remora.proto.model_config_pb2 import ModelConfig

T = TypeVar("T")

_FLOWS_KEPT = 256


class EnsembleStep(NamedTuple):
    """One model of an ensemble and its place in the dataflow.

    ``inputs`` and ``outputs`` pair the model's tensor with the ensemble's. ``version`` is -1 for the highest ready one.
    ``decoupled``: the model returns any number of responses. ``requests`` are its outputs that the ensemble uses.
    """

    number: int
    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    decoupled: bool
    requests: tuple[OutputSpec, ...]


class Start(NamedTuple, Generic[T]):
    """An execution of ``step`` to start now.

    ``inputs`` are values by the model's names; missing values are left out. ``iteration`` distinguishes the executions
    of one step: it counts the responses of the decoupled step before it.
    """

    step: EnsembleStep
    iteration: int
    inputs: dict[str, T]


class Progress(NamedTuple, Generic[T]):
    """Consequences of an event.

    ``starts`` run now, in parallel. ``answers`` are responses of the ensemble, in order, each with the available values
    of the requested outputs. ``ended``: nothing runs and nothing will. ``stuck``: it ended without an answer, because
    an input was missing.
    """

    starts: list[Start[T]]
    answers: list[dict[str, T]]
    ended: bool = False
    stuck: bool = False


class Flow(NamedTuple):
    """A plan reduced to what a set of requested outputs needs.

    ``readers`` are the steps that take a tensor; all of them get its value. ``uses`` counts the readers and the answer.
    ``shared`` are the tensors that are used in several places, including two inputs of one model. ``places`` are the
    answer's outputs in order. ``streamed``: any number of answers.
    """

    readers: Mapping[str, tuple[EnsembleStep, ...]]
    uses: Mapping[str, int]
    shared: frozenset[str]
    places: tuple[str, ...]
    streamed: bool


class EnsemblePlan:
    """The steps of an ensemble as its configuration connects them. Immutable except for a memo.

    Args:
        steps: in the configuration's order; checked by `check_ensemble` and `check_steps`.
        inputs: names of the ensemble's inputs.
        optional: those of them that may be left out.
        outputs: names of its outputs, in the configuration's order.
        max_inflight: executions of one step in flight above which the sender of a decoupled response is blocked; 0 for
            no limit [E06].
    """

    def __init__(
        self,
        steps: Iterable[EnsembleStep],
        inputs: Collection[str],
        optional: Collection[str],
        outputs: Collection[str],
        max_inflight: int = 0,
    ) -> None:
        self.steps: Final = tuple(steps)
        self.inputs: Final = frozenset(inputs)
        self.optional: Final = frozenset(optional)
        # Triton stores them in a hash table, which reverses the configuration's order.
        self.outputs: Final = tuple(reversed(tuple(outputs)))
        self.max_inflight: Final = max_inflight
        self._makers = {tensor: step for step in self.steps for _, tensor in step.outputs if tensor not in self.inputs}
        self._flows: dict[tuple[str, ...], Flow] = {}

    @staticmethod
    def of(config: ModelConfig, decoupled: Collection[str] = ()) -> EnsemblePlan:
        """Return the plan of a valid configuration.

        ``decoupled`` names the decoupled composing models [E05].
        """
        steps = [
            EnsembleStep(
                index,
                step.model_name,
                step.model_version if step.model_version > 0 else -1,
                tuple(sorted(step.input_map.items())),
                tuple(sorted(step.output_map.items())),
                step.model_name in decoupled,
                tuple(OutputSpec(name) for name in sorted(step.output_map)),
            )
            for index, step in enumerate(config.ensemble_scheduling.step)
        ]
        return EnsemblePlan(
            steps,
            [row.name for row in config.input],
            [row.name for row in config.input if row.optional],
            [row.name for row in config.output],
            config.ensemble_scheduling.max_inflight_requests,
        )

    @property
    def models(self) -> tuple[tuple[str, int], ...]:
        """(name, version) of the composing models without duplicates, in the order of the steps."""
        return tuple(dict.fromkeys((step.model, step.version) for step in self.steps))

    def flow(self, requested: tuple[str, ...]) -> Flow:
        """Return the part of the plan that computes these outputs."""
        known = self._flows.get(requested)
        if known is None:
            if len(self._flows) >= _FLOWS_KEPT:
                self._flows.clear()
            known = self._flows[requested] = self._cut(requested)
        return known

    def _cut(self, requested: Collection[str]) -> Flow:
        needed: set[int] = set()
        look = list(requested)
        while look:
            maker = self._makers.get(look.pop())
            if maker is not None and maker.number not in needed:
                needed.add(maker.number)
                look += [tensor for _, tensor in maker.inputs]
        readers: dict[str, tuple[EnsembleStep, ...]] = {}
        for step in self.steps:
            for tensor in dict.fromkeys(tensor for _, tensor in step.inputs) if step.number in needed else ():
                readers[tensor] = (*readers.get(tensor, ()), step)
        uses = {tensor: len(steps) for tensor, steps in readers.items()}
        places = tuple(name for name in self.outputs if name in requested)
        for name in places:
            uses[name] = uses.get(name, 0) + 1
        goes = Counter(tensor for step in self.steps if step.number in needed for _, tensor in step.inputs)
        goes.update(places)
        shared = frozenset(tensor for tensor, count in goes.items() if count > 1)
        return Flow(readers, uses, shared, places, bool(places) and self.source(places[0]) >= 0)

    def returns_to(self, step: EnsembleStep) -> bool:
        """Return True if a later step runs on the same model, and so may need the same instance."""
        seen: set[int] = set()
        look = [step]
        while look:
            produced = {tensor for _, tensor in look.pop().outputs}
            for other in self.steps:
                if other.number not in seen and any(tensor in produced for _, tensor in other.inputs):
                    seen.add(other.number)
                    look.append(other)
        return any(self.steps[index].model == step.model for index in seen)

    def source(self, tensor: str) -> int:
        """Return the decoupled step whose responses a tensor follows, or -1.

        The tensor may follow it directly or through other steps.
        """
        maker = self._makers.get(tensor)
        while maker is not None and not maker.decoupled:
            maker = self._makers.get(maker.inputs[0][1])
        return -1 if maker is None else maker.number


class _StoredValue(Generic[T]):
    """A value and the number of its remaining readers. ``given`` is False for a missing value."""

    __slots__ = ("given", "left", "value")

    def __init__(self, value: T | None, given: bool, left: int) -> None:
        self.value = value
        self.given = given
        self.left = left


class EnsembleRun(Generic[T]):
    """The state of one request in an ensemble. Not thread-safe: its owner's lock guards it."""

    __slots__ = ("_answered", "_flow", "_next", "_open", "_plan", "_responses", "_started", "_values", "_waiting")

    def __init__(self, plan: EnsemblePlan, requested: tuple[str, ...]) -> None:
        self._plan = plan
        self._flow = plan.flow(requested)
        self._values: dict[tuple[str, int], _StoredValue[T]] = {}
        self._waiting: dict[tuple[int, int], int] = {}
        self._open: dict[int, int] = {}
        self._responses: dict[int, int] = {}
        self._answered: dict[int, bool] = {}
        self._next = 0
        self._started = False

    @property
    def streamed(self) -> bool:
        """True if the request may get any number of answers."""
        return self._flow.streamed

    @property
    def places(self) -> tuple[str, ...]:
        """The outputs of an answer if the steps return all of them."""
        return self._flow.places

    def open(self, step: EnsembleStep) -> int:
        """Return the number of executions of a step in flight."""
        return self._open.get(step.number, 0)

    def is_shared(self, tensor: str) -> bool:
        """Return True if a tensor is used in several places."""
        return tensor in self._flow.shared

    def readers(self, step: EnsembleStep) -> list[EnsembleStep]:
        """Return the steps that take an output of this one."""
        return [reader for _, tensor in step.outputs for reader in self._flow.readers.get(tensor, ())]

    def begin(self, given: Mapping[str, T]) -> Progress[T]:
        """Begin with the request's inputs. Called once."""
        fresh: list[tuple[str, T | None, bool]] = [(name, value, True) for name, value in given.items()]
        fresh += [(name, None, False) for name in self._plan.optional if name not in given]
        return self._progress(self._provide(fresh, 0))

    def answered(self, start: Start[Any], outputs: Mapping[str, T] | None, *, final: bool) -> Progress[T]:
        """Record a response of an execution (None: no response) and, if ``final``, its end.

        ``outputs`` are by the model's names. Outputs that the ensemble does not use are ignored; outputs that it uses
        and that are missing count as missing values [E07].
        """
        step = start.step
        if final:
            self._open[step.number] -= 1
        starts: list[Start[T]] = []
        if outputs is not None:
            iteration = start.iteration
            if step.decoupled:
                iteration = self._responses.get(step.number, 0)
                self._responses[step.number] = iteration + 1
            inputs = self._plan.inputs
            starts = self._provide(
                [(tensor, outputs.get(name), name in outputs) for name, tensor in step.outputs if tensor not in inputs],
                iteration,
            )
        return self._progress(starts)

    def _provide(self, fresh: Iterable[tuple[str, T | None, bool]], iteration: int) -> list[Start[T]]:
        """Store values and return the executions that now have all their inputs."""
        flow = self._flow
        starts: list[Start[T]] = []
        for tensor, value, given in fresh:
            uses = flow.uses.get(tensor, 0)
            if not uses:
                continue
            self._values[tensor, iteration] = _StoredValue(value, given, uses)
            for step in flow.readers.get(tensor, ()):
                if self._is_last(step.number, len({name for _, name in step.inputs}), iteration):
                    starts.append(self._start(step, iteration))
            if tensor in flow.places and self._is_last(-1, len(flow.places), iteration):
                self._answered[iteration] = True
        return starts

    def _is_last(self, reader: int, needs: int, iteration: int) -> bool:
        """Count one more value of a reader and return True if it was the last."""
        key = (reader, iteration)
        missing = self._waiting.get(key, needs) - 1
        if missing:
            self._waiting[key] = missing
        else:
            self._waiting.pop(key, None)
        return not missing

    def _start(self, step: EnsembleStep, iteration: int) -> Start[T]:
        self._started = True
        self._open[step.number] = self._open.get(step.number, 0) + 1
        taken = {tensor: self._take(tensor, iteration) for tensor in dict.fromkeys(name for _, name in step.inputs)}
        inputs: dict[str, T] = {}
        for name, tensor in step.inputs:
            kept = taken[tensor]
            if kept.given:
                inputs[name] = kept.value  # type: ignore[assignment]  # given values are T
        return Start(step, iteration, inputs)

    def _take(self, tensor: str, iteration: int) -> _StoredValue[T]:
        kept = self._values[tensor, iteration]
        kept.left -= 1
        if not kept.left:
            del self._values[tensor, iteration]
        return kept

    def _progress(self, starts: list[Start[T]]) -> Progress[T]:
        answers: list[dict[str, T]] = []
        while self._answered.pop(self._next, False):
            answer: dict[str, T] = {}
            for name in self._flow.places:
                kept = self._take(name, self._next)
                if kept.given:
                    answer[name] = kept.value  # type: ignore[assignment]  # given values are T
            answers.append(answer)
            self._next += 1
        ended = not any(self._open.values())
        # A decoupled step may return no response at all, unlike one that never ran because an input was missing.
        stuck = ended and not self._next and not (self.streamed and self._started)
        return Progress(starts, answers, ended, stuck)
