"""The policies that schedulers and lifecycle read: tables of configurations and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends import Placement
from remora.config import (
    BatchPolicy,
    QueuePolicy,
    RatePolicy,
    batch_policy,
    normalise,
    parse_config,
    placements,
    rate_policies,
    select_versions,
)
from remora.proto.model_config_pb2 import ModelConfig


def config_of(text: str, *, gpus: int = 0) -> ModelConfig:
    config = parse_config(text, path="test", syntax="pbtxt")
    normalise(config, "m", gpus=range(gpus))
    return config


def test_without_dynamic_batching_every_request_runs_alone() -> None:
    assert batch_policy(config_of("max_batch_size: 8")) == BatchPolicy(max_batch_size=8)


def test_dynamic_batching_prefers_whole_batches_and_does_not_wait() -> None:
    policy = batch_policy(config_of("max_batch_size: 8 dynamic_batching { }"))
    assert policy == BatchPolicy(max_batch_size=8, dynamic=True, preferred=(8,))


def test_preferred_sizes_are_ascending_and_times_are_nanoseconds() -> None:
    text = """max_batch_size: 8 input { name: "A" allow_ragged_batch: true } input { name: "B" }
    dynamic_batching { preferred_batch_size: [ 4, 2, 4 ] max_queue_delay_microseconds: 300 preserve_ordering: true }"""
    assert batch_policy(config_of(text)) == BatchPolicy(
        max_batch_size=8,
        dynamic=True,
        preferred=(2, 4),
        max_delay_ns=300_000,
        preserve_ordering=True,
        ragged_inputs=frozenset({"A"}),
    )


def test_each_priority_level_has_its_own_queue_policy_or_the_usual_one() -> None:
    text = """max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2
    default_queue_policy { max_queue_size: 9 }
    priority_queue_policy { key: 3 value {
      timeout_action: DELAY default_timeout_microseconds: 7 allow_timeout_override: true } } }"""
    policy = batch_policy(config_of(text))
    usual = QueuePolicy(max_size=9)
    assert (policy.priority_levels, policy.default_level) == (3, 2)
    assert [policy.queue_at(level) for level in (1, 2, 3)] == [usual, usual, QueuePolicy(False, 7000, True, 0)]


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("", 0, [Placement("m_0")]),
        ('backend: "onnxruntime"', 0, [Placement("m_0"), Placement("m_1")]),
        ("instance_group { kind: KIND_CPU count: 2 }", 0, [Placement("m_0_0"), Placement("m_0_1")]),
        ('instance_group { name: "g" } instance_group { }', 0, [Placement("g_0"), Placement("m_1_0")]),
        ("instance_group { passive: true } instance_group { }", 0, [Placement("m_1_0")]),
        ("instance_group { kind: KIND_MODEL }", 0, [Placement("m_0_0", "MODEL")]),
        ("", 2, [Placement("m_0", "GPU", 0), Placement("m_1", "GPU", 1)]),
        ("instance_group { kind: KIND_GPU gpus: [ 1 ] }", 2, [Placement("m_0_0", "GPU", 1)]),
    ],
)
def test_instances_are_named_after_their_group(text: str, gpus: int, expected: list[Placement]) -> None:
    assert placements(config_of(text, gpus=gpus)) == tuple(expected)


def test_a_group_has_its_count_on_each_of_its_gpus() -> None:
    found = placements(config_of("instance_group { count: 2 gpus: [ 0, 1 ] }", gpus=2))
    assert sorted(place.device_id for place in found) == [0, 0, 1, 1]
    assert len({place.name for place in found}) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [9]),
        ("version_policy { }", [9]),
        ("version_policy { latest { num_versions: 2 } }", [3, 9]),
        ("version_policy { latest { num_versions: 99 } }", [1, 2, 3, 9]),
        ("version_policy { latest { } }", []),
        ("version_policy { all { } }", [1, 2, 3, 9]),
        ("version_policy { specific { versions: [ 3, 1, 5 ] } }", [1, 3]),
        ("version_policy { specific { } }", []),
    ],
)
def test_the_version_policy_chooses_among_the_versions_that_are_there(text: str, expected: list[int]) -> None:
    policy = parse_config(text, path="test", syntax="pbtxt").version_policy
    assert select_versions(policy, [9, 1, 3, 2]) == expected


@given(available=st.lists(st.integers(0, 20)), count=st.integers(0, 25))
def test_the_latest_versions_are_the_highest_ones(available: list[int], count: int) -> None:
    policy = ModelConfig().version_policy
    policy.latest.num_versions = count
    chosen = select_versions(policy, available)
    assert chosen == sorted(set(available))[max(len(set(available)) - count, 0) :]


def test_each_placement_has_the_needs_of_its_group_on_its_own_device() -> None:
    text = """instance_group { count: 2 gpus: [ 0, 1 ] rate_limiter {
      resources [ { name: "A" count: 3 }, { name: "B" global: true count: 2 } ] priority: 2 } }
    instance_group { passive: true rate_limiter { priority: 9 } }
    instance_group { kind: KIND_CPU }"""
    config = config_of(text, gpus=2)
    found = rate_policies(config)
    assert len(found) == len(placements(config))
    on_device = [RatePolicy(((("A", device), 3), (("B", None), 2)), 2) for device in (0, 1)]
    assert found == (*on_device, *on_device, RatePolicy((), 0))
