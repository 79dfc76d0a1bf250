"""Runs warmup samples on every instance of a model that does not serve yet (spec K06).

Each instance gets a scheduler of its own for the time of the warmup, so that batches are made, run, answered and
counted as later ones are. Law: a sample that fails fails the load, with Triton's text: it names itself and the reason
of each request, or only the reason where the sample is no request to the model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from remora.backends import Execution, Instance
from remora.config import BatchPolicy, read_data
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError
from remora.messages import Outcome, Streamed, Ticket
from remora.models.served_model import ServedModel
from remora.models.warmup_samples import INPUT_LIMIT_BYTES, Sample, derived_sample, samples_of
from remora.scheduling.batching import BatchQueue, Plan
from remora.scheduling.scheduler import Scheduler
from remora.statistics import ModelStatistics, StatisticsRecorder
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

WARMUP = "warmup"
"""The reason that statistics show for these executions."""

ANSWER_LIMIT_S = 600
"""How long a sample may take: a model that never answers must not stay in loading for ever."""

_STOP_LIMIT_S = 5
_LONG_NS = 10**15


def warm_up(
    model: ServedModel, instances: Sequence[Instance], directory: Path, clock: Clock, *, derive: bool = False
) -> None:
    """Run the model's samples on each instance; their files lie in ``directory``/warmup.

    With ``derive``, a model without samples whose instances are all quick runs a few rows of zeros; when these fail,
    the log says so and the model serves.

    Raises RemoraError: a sample cannot be made, or failed.
    """

    def read(name: str) -> bytes:
        return read_data(directory / "warmup", name, "warmup input_data_file", INPUT_LIMIT_BYTES)

    for warmup in model.config.model_warmup:
        if not warmup.batch_size:
            _log.warning("warmup sample '%s' of model '%s' has no batch_size: it is not run", warmup.name, model.name)
    for sample in samples_of(model.config, read):
        for instance in instances:
            _run(model, instance, sample, clock)
    if derive and instances and not model.config.model_warmup and all(instance.quick for instance in instances):
        derived = derived_sample(model.config)
        if derived is not None:
            try:
                for instance in instances:
                    _run(model, instance, derived, clock)
            except RemoraError as error:
                _log.warning("model '%s' serves all the same: %s", model.name, error)


class _WarmupRecorder(StatisticsRecorder):
    """Counts executions under the reason that they had: no client asked for them."""

    __slots__ = ("_ended",)

    def __init__(self, statistics: ModelStatistics, clock: Clock, ended: SimpleQueue[RemoraError | None]) -> None:
        super().__init__(statistics, clock)
        self._ended = ended

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        super().executed(plan._replace(reason=WARMUP), execution, outcomes, start_ns, end_ns)
        for _ in execution.again:  # iterative sequences go on with another execution; here one is what was asked for
            self._ended.put(None)


def _run(model: ServedModel, instance: Instance, sample: Sample, clock: Clock) -> None:
    """Run one sample on one instance.

    Raises InvalidArgumentError with the reasons when requests of it fail, and the reason itself when they are none.
    """
    # Only a full batch is dispatched: the requests of one round run together however slowly they are handed in.
    policy = BatchPolicy(max_batch_size=sample.batch_size, dynamic=True, max_delay_ns=_LONG_NS)
    ended: SimpleQueue[RemoraError | None] = SimpleQueue()
    scheduler = Scheduler(
        BatchQueue(policy),
        [instance],
        model.signature,
        _WarmupRecorder(model.statistics, clock, ended),
        clock,
        may_wait=True,
        decoupled=model.decoupled,
    )
    try:
        for _ in range(sample.rounds):
            _run_round(model, scheduler, sample, ended)
    finally:
        scheduler.stop(_STOP_LIMIT_S)
    for rows, ns in scheduler.costs.curve().items():
        model.scheduler.costs.learn(rows, round(ns))


def _run_round(
    model: ServedModel, scheduler: Scheduler, sample: Sample, ended: SimpleQueue[RemoraError | None]
) -> None:
    def reply(_ticket: Ticket, outcome: Outcome) -> None:
        streamed = outcome if isinstance(outcome, Streamed) else Streamed(outcome, final=True)
        if streamed.final:
            ended.put(streamed.outcome if isinstance(streamed.outcome, RemoraError) else None)

    requests = [model.signature.request(sample.form, sample.data) for _ in range(sample.batch_size)]
    for request in requests:
        request.inputs.update({**model.initial_states, **sample.extra})
    for request in requests:
        scheduler.submit(Ticket(request, reply))
    failures = [failure for failure in [_next(ended) for _ in requests] if failure is not None]
    if failures:
        reasons = "".join(f"{failure}; " for failure in failures)
        raise InvalidArgumentError(f"failed to run warmup sample '{sample.name}': {reasons}")


def _next(ended: SimpleQueue[RemoraError | None]) -> RemoraError | None:
    try:
        return ended.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        return UnavailableError(f"there was no answer within {ANSWER_LIMIT_S} s")
