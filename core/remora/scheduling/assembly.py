"""Choice of the scheduler of a model version, from its configuration.

Sequence batching, ensembles, the response cache and admission are imported for the models that use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remora.backends import Instance
from remora.config import batch_policy, sequence_policy
from remora.messages import Array
from remora.proto.model_config_pb2 import ModelConfig
from remora.scheduling.batching import BatchQueue, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.running import Recorder
from remora.scheduling.scheduler import ModelScheduler, RequestScheduler, Scheduler
from remora.signature import Signature
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.cache import ResponseCache
    from remora.scheduling.ensembles.request import StepModels
    from remora.scheduling.ensembles.scheduler import EnsembleRecorder
    from remora.scheduling.rate_limiter import Turn
    from remora.scheduling.response_cache import CacheRecorder, RefusalRecorder

    class ModelRecorder(Recorder, EnsembleRecorder, CacheRecorder, RefusalRecorder, Protocol):
        """Observer of all schedulers of a model."""


class Steps(NamedTuple):
    """The models of an ensemble: their look-up, and the names of the decoupled ones."""

    models: StepModels
    decoupled: frozenset[str]


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Settings of a model's scheduler that are not in its configuration.

    Attributes:
        turns: one per instance, under a rate limiter [I08].
        initial_states: initial values of the sequence states [S13].
        hold: number of queued requests before which a dynamic batcher dispatches nothing [D16].
        backlog_hold: with ``hold``, number of requests waiting for a slot before which a direct sequence batcher
            dispatches nothing [S15].
        refuse_late: refuse requests on arrival that are predicted to miss their deadline.
    """

    turns: Sequence[Turn] = ()
    initial_states: Mapping[str, Array] = field(default_factory=dict)
    hold: int = 0
    backlog_hold: int = 0
    refuse_late: bool = False


class CacheUse(NamedTuple):
    """A response cache and a model's key scope in it."""

    cache: ResponseCache
    scope: bytes
    composed: bool
    """True if other models compute the responses."""


def make_scheduler(
    config: ModelConfig,
    instances: Sequence[Instance],
    signature: Signature,
    recorder: ModelRecorder,
    clock: Clock,
    options: SchedulingOptions,
    steps: Steps | None = None,
) -> ModelScheduler:
    """Return the scheduler for a complete and valid configuration.

    ``steps`` are given for an ensemble.
    """
    decoupled = config.model_transaction_policy.decoupled
    if steps is not None:
        from remora.scheduling.ensembles.scheduler import EnsembleScheduler

        return EnsembleScheduler(config, steps.decoupled, steps.models, signature, recorder, clock)
    sequences = sequence_policy(config)
    if sequences is not None:
        from remora.scheduling.sequences.scheduler import SequenceOptions, SequenceScheduler

        chosen = SequenceOptions(options.initial_states, decoupled, options.hold, options.backlog_hold)
        return SequenceScheduler(sequences, instances, signature, recorder, clock, chosen, turns=options.turns)
    policy = batch_policy(config)
    queue: Queue = BatchQueue(policy, hold=options.hold)
    costs = CostModel()
    if options.refuse_late:
        from remora.scheduling.admission import AdmittingQueue  # imported here because few servers enable it

        queue = AdmittingQueue(queue, policy, costs, len(instances))
    dispatch = DispatchPolicy(
        may_wait=bool(options.turns) or (policy.dynamic and (policy.max_delay_ns > 0 or options.hold > 0)),
        decoupled=decoupled,
        ordered=policy.preserve_ordering and not decoupled,
    )
    return Scheduler(queue, instances, signature, recorder, clock, dispatch, turns=options.turns, costs=costs)


def add_cache(inner: RequestScheduler, use: CacheUse, recorder: ModelRecorder, clock: Clock) -> RequestScheduler:
    """Return a scheduler that answers from the response cache where it can."""
    from remora.scheduling.response_cache import CachedScheduler, OffLoopScheduler

    caching = CachedScheduler(inner, use.cache, use.scope, recorder, clock, composed=use.composed)
    return OffLoopScheduler(caching, use.cache.run, recorder, clock) if use.cache.remote else caching
