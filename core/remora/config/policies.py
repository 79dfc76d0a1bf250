"""Frozen policies for schedulers and lifecycle, derived from a configuration.

Each is built by one pure function from a complete and valid configuration (see `normalising`, `validating`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from remora.config.datatypes import dtype_name
from remora.proto.model_config_pb2 import (
    ModelConfig,
    ModelInstanceGroup,
    ModelQueuePolicy,
    ModelSequenceBatching,
    ModelVersionPolicy,
)

_NS_PER_US = 1000


class QueuePolicy(NamedTuple):
    """Limits of one priority level's queue: timeout and size [D08-D12].

    ``default_timeout_ns`` 0 means no timeout; ``max_size`` counts requests, 0 means no limit.
    """

    reject_on_timeout: bool = True
    default_timeout_ns: int = 0
    allow_override: bool = False
    max_size: int = 0


class BatchPolicy(NamedTuple):
    """Batching of a model: batch sizes, queue delay and priorities [D01-D08].

    ``max_batch_size`` 0 is a model without batching. ``dynamic`` is True if the server forms batches. ``preferred`` is
    ascending. ``queue`` is the policy of every priority level that is missing in ``level_queues``, which pairs levels
    with policies; without priorities there is one level, and ``default_level`` is 1.
    """

    max_batch_size: int = 0
    dynamic: bool = False
    preferred: tuple[int, ...] = ()
    max_delay_ns: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_level: int = 1
    queue: QueuePolicy = QueuePolicy()
    level_queues: tuple[tuple[int, QueuePolicy], ...] = ()
    ragged_inputs: frozenset[str] = frozenset()

    @property
    def levels(self) -> int:
        """The number of priority levels, up to 2**64-1, so never allocate per level."""
        return max(self.priority_levels, 1)

    def queue_at(self, level: int) -> QueuePolicy:
        return dict(self.level_queues).get(level, self.queue)


class SequenceControl(NamedTuple):
    """A control tensor, which gives the model its position in a sequence [S09].

    ``kind`` is ``"START"``, ``"READY"``, ``"END"`` or ``"CORRID"``. ``datatype`` is the wire's name of its type.
    ``false_true`` are the two values of a flag; empty for the correlation id.
    """

    name: str
    kind: str
    datatype: str
    false_true: tuple[float, ...] = ()


class SequenceState(NamedTuple):
    """State tensor that the server keeps for each sequence [S13].

    It names the model's input and output. ``datatype`` is the wire's name. ``dims`` exclude the batch dimension; -1 is
    variable.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]


class SequencePolicy(NamedTuple):
    """Sequence batching of a model [S04-S09, S13, S14].

    ``slots`` is the number of concurrent sequences per instance. ``oldest`` selects the strategy. A direct batch waits
    up to ``max_delay_ns`` until ``minimum_utilization`` of an instance's slots have a request; oldest ones are batched
    by ``batching``. ``idle_ns`` is the maximum time between requests of a sequence. ``states`` are the implicit states.
    """

    slots: int = 1
    oldest: bool = False
    idle_ns: int = 1_000_000_000
    max_delay_ns: int = 0
    minimum_utilization: float = 0.0
    iterative: bool = False
    states: tuple[SequenceState, ...] = ()
    controls: tuple[SequenceControl, ...] = ()
    batching: BatchPolicy = BatchPolicy()


class Placement(NamedTuple):
    """Placement of one instance. ``kind`` is ``"CPU"``, ``"GPU"`` or ``"MODEL"`` [I01-I04].

    ``host_policy`` is the one that its group names, "" for none [I06].
    """

    name: str
    kind: str = "CPU"
    device_id: int = 0
    host_policy: str = ""


class RatePolicy(NamedTuple):
    """Requirements of one instance under the rate limiter [I08-I10].

    ``resources`` are ((name, device), count); device None means a resource shared by all devices. ``priority`` 2 gets
    half the turns of 1; 0 counts as 1.
    """

    resources: tuple[tuple[tuple[str, int | None], int], ...] = ()
    priority: int = 1


def batch_policy(config: ModelConfig) -> BatchPolicy:
    """Return the batching of a valid configuration.

    Without ``dynamic_batching`` requests run alone [D01].
    """
    ragged = frozenset(row.name for row in config.input if row.allow_ragged_batch)
    if not config.HasField("dynamic_batching"):
        return BatchPolicy(max_batch_size=config.max_batch_size, ragged_inputs=ragged)
    batching = config.dynamic_batching
    return BatchPolicy(
        max_batch_size=config.max_batch_size,
        dynamic=True,
        preferred=tuple(sorted(set(batching.preferred_batch_size))),
        max_delay_ns=batching.max_queue_delay_microseconds * _NS_PER_US,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_level=batching.default_priority_level or 1,
        queue=_queue_policy(batching.default_queue_policy),
        level_queues=tuple(
            (level, _queue_policy(own)) for level, own in sorted(batching.priority_queue_policy.items())
        ),
        ragged_inputs=ragged,
    )


def sequence_policy(config: ModelConfig) -> SequencePolicy | None:
    """Return the sequence batching of a valid configuration, or None.

    Direct is the default [S07].
    """
    if not config.HasField("sequence_batching"):
        return None
    sequences = config.sequence_batching
    is_oldest = sequences.HasField("oldest")
    delay_us = (sequences.oldest if is_oldest else sequences.direct).max_queue_delay_microseconds
    most = max(config.max_batch_size, 1)
    batching = BatchPolicy(max_batch_size=config.max_batch_size)
    if is_oldest and config.max_batch_size > 0:
        batching = batching._replace(
            dynamic=True,
            preferred=tuple(sorted(set(sequences.oldest.preferred_batch_size))),
            max_delay_ns=delay_us * _NS_PER_US,
            preserve_ordering=sequences.oldest.preserve_ordering,
        )
    return SequencePolicy(
        slots=(sequences.oldest.max_candidate_sequences or most) if is_oldest else most,
        oldest=is_oldest,
        idle_ns=sequences.max_sequence_idle_microseconds * _NS_PER_US,
        max_delay_ns=delay_us * _NS_PER_US,
        minimum_utilization=0.0 if is_oldest else sequences.direct.minimum_slot_utilization,
        iterative=sequences.iterative_sequence,
        states=_states(sequences),
        controls=tuple(_control(row.name, control) for row in sequences.control_input for control in row.control),
        batching=batching,
    )


def placements(config: ModelConfig) -> tuple[Placement, ...]:
    """Return the placements of the instances of a valid configuration [I01-I05].

    Passive groups have none. Instance ``i`` of a group is named ``<group>_<i>``. A group on GPUs has ``count``
    instances on each of them.
    """
    found: list[Placement] = []
    for group, devices in _groups(config):
        kind = ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")
        policy = group.host_policy
        found += [Placement(f"{group.name}_{index}", kind, device, policy) for index, device in enumerate(devices)]
    return tuple(found)


def rate_policies(config: ModelConfig) -> tuple[RatePolicy, ...]:
    """Return the rate limiter requirements of each of the `placements`, in their order."""
    found: list[RatePolicy] = []
    for group, devices in _groups(config):
        limits = group.rate_limiter
        for device in devices:
            needs = {(row.name, None if getattr(row, "global") else device): row.count for row in limits.resources}
            found.append(RatePolicy(tuple(needs.items()), limits.priority))
    return tuple(found)


def _groups(config: ModelConfig) -> Iterator[tuple[ModelInstanceGroup, list[int]]]:
    """Yield the groups whose instances serve, with the device of every instance."""
    for group in config.instance_group:
        if not group.passive:
            devices = group.gpus if group.kind == ModelInstanceGroup.KIND_GPU else (0,)
            yield group, [device for _ in range(group.count) for device in devices]


def select_versions(policy: ModelVersionPolicy, available: Sequence[int]) -> list[int]:
    """Return the available versions that the policy selects, ascending.

    Unset means the latest [M02].
    """
    versions = sorted(set(available))
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return versions
    if choice == "specific":
        wanted = set(policy.specific.versions)
        return [version for version in versions if version in wanted]
    count = policy.latest.num_versions if choice == "latest" else 1
    return versions[-count:] if count else []


def _control(name: str, control: ModelSequenceBatching.Control) -> SequenceControl:
    kind = ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix("CONTROL_SEQUENCE_")
    if kind == "CORRID":
        return SequenceControl(name, kind, dtype_name(control.data_type))
    if control.int32_false_true:
        return SequenceControl(name, kind, "INT32", tuple(control.int32_false_true))
    if control.fp32_false_true:
        return SequenceControl(name, kind, "FP32", tuple(control.fp32_false_true))
    return SequenceControl(name, kind, "BOOL", tuple(control.bool_false_true))


def _states(sequences: ModelSequenceBatching) -> tuple[SequenceState, ...]:
    """Return the first state of each input and output name. Triton ignores the others too."""
    found: list[SequenceState] = []
    for row in sequences.state:
        if all(row.input_name != state.input_name and row.output_name != state.output_name for state in found):
            found.append(SequenceState(row.input_name, row.output_name, dtype_name(row.data_type), tuple(row.dims)))
    return tuple(found)


def _queue_policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        reject_on_timeout=policy.timeout_action == ModelQueuePolicy.REJECT,
        default_timeout_ns=policy.default_timeout_microseconds * _NS_PER_US,
        allow_override=policy.allow_timeout_override,
        max_size=policy.max_queue_size,
    )
