"""Full GPUs and host policies: what the operator says about where instances live."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends import Capabilities, Execution, Source
from remora.config import Placement, placements
from remora.errors import UnavailableError
from remora.models.placement import (
    HostPolicy,
    PinnedInstance,
    PlacedModel,
    idle_gpu_reason,
    parse_cpus,
    parse_gpu_limits,
    parse_host_policies,
    policy_name,
)
from support.engine.fakes import FakeBackend, FakeInstance, config_of, ticket_of


def test_host_policies_are_read_by_name() -> None:
    found = parse_host_policies(("gpu_0,numa-node=1", "gpu_0,cpu-cores=0-2,8", "cpu,cpu-cores=3"))
    assert found == {"gpu_0": HostPolicy(frozenset({0, 1, 2, 8}), 1), "cpu": HostPolicy(frozenset({3}))}


@pytest.mark.parametrize("entry", ["cpu", "cpu,numa-node=x", "cpu,cpu-cores=", "cpu,memory=1", "cpu,cpu-cores=3-1"])
def test_a_policy_that_cannot_be_read_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"host-policy|list of processors"):
        parse_host_policies((entry,))


@given(st.sets(st.integers(0, 4096), min_size=1))
def test_a_list_of_processors_comes_back_as_it_was_written(cpus: set[int]) -> None:
    assert parse_cpus(",".join(map(str, cpus))) == cpus


@pytest.mark.parametrize("text", ["", "a", "0-99999", "-1", "1,,2"])
def test_an_invalid_list_of_processors_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of processors"):
        parse_cpus(text)


def test_limits_are_fractions_by_device() -> None:
    assert parse_gpu_limits(("0:0.5", "1:1")) == {0: 0.5, 1: 1.0}
    for entry in ("0", "0:2", "a:0.5", "0:nan", "0:-1"):
        with pytest.raises(ValueError, match="DEVICE:FRACTION"):
            parse_gpu_limits((entry,))


def test_a_group_names_its_policy_or_has_tritons() -> None:
    config = config_of(
        'instance_group { name: "a" kind: KIND_CPU count: 1 host_policy: "mine" } '
        'instance_group { name: "b" kind: KIND_GPU count: 1 gpus: 3 } '
        'instance_group { name: "c" kind: KIND_MODEL count: 1 } instance_group { name: "d" kind: KIND_CPU count: 1 }'
    )
    assert [policy_name(place) for place in placements(config)] == ["mine", "gpu_3", "model", "cpu"]


def placed(limits: dict[int, float], used: float | None, cpus: dict[str, frozenset[int]] | None = None) -> PlacedModel:
    here = Path()
    inner = FakeBackend().open(Source("m", 1, here, here, here), config_of(""))
    return PlacedModel(inner, limits, lambda device: used, cpus or {})


def test_nothing_is_made_on_a_gpu_that_is_too_full() -> None:
    with pytest.raises(UnavailableError, match=r"'m': 90% of the memory of GPU 0 is taken, and .* is 50%"):
        placed({0: 0.5}, 0.9).instance(config_of('name: "m"'), Placement("m_0", "GPU", 0))


@pytest.mark.parametrize(
    ("limits", "used", "place"),
    [
        ({0: 0.5}, 0.5, Placement("m_0", "GPU", 0)),
        ({1: 0.5}, 0.9, Placement("m_0", "GPU", 0)),
        ({0: 0.5}, None, Placement("m_0", "GPU", 0)),
        ({0: 0.5}, 0.9, Placement("m_0")),
    ],
)
def test_a_limit_binds_its_device_alone_and_only_when_that_is_known(
    limits: dict[int, float], used: float | None, place: Placement
) -> None:
    assert placed(limits, used).instance(config_of('name: "m"'), place).name == "m_0"


def test_an_instance_binds_each_thread_once_and_is_never_run_by_the_loop() -> None:
    bound: list[tuple[int, frozenset[int]]] = []
    inner = FakeInstance(quick=True)
    instance = PinnedInstance(inner, frozenset({1}), lambda thread, cpus: bound.append((thread, cpus)))
    assert not instance.quick
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(instance.execute, Execution([ticket_of().request])).result()
    assert bound == [(0, frozenset({1}))]
    assert len(inner.batches) == 3
    instance.close()
    assert inner.closed == 1


def test_a_bound_instance_is_in_trouble_when_its_inner_one_is() -> None:
    inner: Any = FakeInstance()
    assert PinnedInstance(inner, frozenset({1})).capabilities == Capabilities()
    inner.trouble, inner.fatal = "its GPU is lost", True
    bound = PinnedInstance(inner, frozenset({1}))
    assert (bound.capabilities.trouble, bound.capabilities.fatal) == ("its GPU is lost", True)


def test_a_bound_instance_shows_that_its_inner_one_has_lost_the_gpu_later() -> None:
    inner: Any = FakeInstance()
    bound = PinnedInstance(inner, frozenset({1}))
    inner.capabilities = Capabilities(unhealthy_reason=lambda: "its GPU is lost", fatal=True)
    assert (bound.capabilities.trouble, bound.capabilities.fatal) == ("its GPU is lost", True)


def test_a_bound_instance_answers_late_but_is_not_remote() -> None:
    inner: Any = FakeInstance()
    inner.capabilities = Capabilities(remote=True, ahead=True, answers_late=True)
    assert PinnedInstance(inner, frozenset({1})).capabilities == Capabilities(answers_late=True)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to processors here")
def test_a_bound_thread_runs_where_its_policy_says() -> None:
    cpu = min(os.sched_getaffinity(0))
    made = placed({}, None, {"cpu": frozenset({cpu})}).instance(config_of('name: "m"'), Placement("m_0"))
    assert isinstance(made, PinnedInstance)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(made.execute, Execution([ticket_of().request])).result()
        assert pool.submit(os.sched_getaffinity, 0).result() == {cpu}
    assert len(os.sched_getaffinity(0)) >= 1


def test_a_model_without_a_policy_is_left_as_it_is() -> None:
    made = placed({0: 0.1}, 0.0).instance(config_of('name: "m"'), Placement("m_0"))
    assert isinstance(made, FakeInstance)


@pytest.mark.parametrize(
    ("gpus", "kinds", "reason"),
    [
        (0, {}, "no NVIDIA GPU can be used"),
        (0, {"m": ["CPU"]}, "no NVIDIA GPU can be used"),
        (1, {}, ""),
        (1, {"m": ["CPU", "CPU"], "a": ["CPU"]}, "every model runs on the CPU (a, m)"),
        (1, {"m": ["CPU", "GPU"], "a": ["CPU"]}, ""),
        (2, {"m": ["MODEL"]}, ""),
    ],
)
def test_a_required_gpu_is_idle_without_a_device_or_without_an_instance_on_it(
    gpus: int, kinds: dict[str, list[str]], reason: str
) -> None:
    found = idle_gpu_reason(gpus, kinds)
    assert reason in found
    assert bool(found) == bool(reason)
