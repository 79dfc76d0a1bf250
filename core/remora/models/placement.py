"""Placement limits of instances by GPU memory and by host policy.

`PlacedModel` applies them to any backend's model [I06, I07].
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from remora.backends import BackendModel, Capabilities, Execution, Instance, capabilities_of, runs_user_code
from remora.config import BatchingChoice, Placement
from remora.errors import UnavailableError
from remora.messages import Outcome
from remora.proto.model_config_pb2 import ModelConfig

MAX_CPU = 4096


class HostPolicy(NamedTuple):
    """The CPUs for the instances of a policy. ``numa_node`` adds those of a node, -1 for none."""

    cpus: frozenset[int] = frozenset()
    numa_node: int = -1


def parse_host_policies(entries: Sequence[str]) -> dict[str, HostPolicy]:
    """Parse the policies, by name, from ``NAME,numa-node=N`` and ``NAME,cpu-cores=0-3,8``.

    Raises ValueError.
    """
    policies: dict[str, HostPolicy] = {}
    for entry in entries:
        name, _, setting = entry.partition(",")
        key, _, value = setting.partition("=")
        policy = policies.get(name, HostPolicy())
        if key == "numa-node" and value.isdecimal():
            policies[name] = policy._replace(numa_node=int(value))
        elif key == "cpu-cores" and value:
            policies[name] = policy._replace(cpus=parse_cpus(value))
        else:
            raise ValueError(f"--host-policy={entry}: give NAME,numa-node=N or NAME,cpu-cores=0-3,8")
    return policies


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a CPU list such as ``0-3,8``. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"'{text}' is not a list of processors such as 0-3,8")
        low, high = int(first), int(last or first)
        if low > high or high > MAX_CPU:
            raise ValueError(f"'{text}' is not a list of processors between 0 and {MAX_CPU}")
        found.update(range(low, high + 1))
    return frozenset(found)


def idle_gpu_reason(gpus: int, kinds: Mapping[str, Sequence[str]]) -> str:
    """Return why no model uses a GPU though one is required, or "" if one does.

    ``gpus`` is the number of usable GPUs, ``kinds`` the instance kinds of each loaded model.
    """
    if not gpus:
        return (
            "--require-gpu: no NVIDIA GPU can be used; check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES and "
            "--min-supported-compute-capability, and that the container was given the GPU"
        )
    if not kinds or any(kind != "CPU" for placed in kinds.values() for kind in placed):
        return ""
    return (
        f"--require-gpu: {gpus} usable GPU(s), but every model runs on the CPU ({', '.join(sorted(kinds))}); the log "
        "gives the reason where a GPU is preferred: a runtime without CUDA, or a driver older than the runtime's CUDA"
    )


def parse_gpu_limits(entries: Sequence[str]) -> dict[int, float]:
    """Parse ``DEVICE:FRACTION``, the used memory above which no more models are loaded.

    Raises ValueError.
    """
    limits: dict[int, float] = {}
    for entry in entries:
        device, _, fraction = entry.partition(":")
        try:
            share = float(fraction)
        except ValueError:
            share = -1
        if not device.isdecimal() or not 0 <= share <= 1:
            raise ValueError(f"--model-load-gpu-limit={entry}: give DEVICE:FRACTION, a fraction between 0 and 1")
        limits[int(device)] = share
    return limits


def policy_name(placement: Placement) -> str:
    """Return the host policy that a placement's group names, or Triton's default for its device."""
    if placement.host_policy:
        return placement.host_policy
    return f"gpu_{placement.device_id}" if placement.kind == "GPU" else placement.kind.lower()


class PlacedModel:
    """A backend model whose instances respect the operator's device limits.

    Args:
        inner: the backend's model.
        limits: from `parse_gpu_limits`.
        used: returns the used fraction of a device's memory by its number; None if unknown.
        cpus: the CPUs of each host policy.
    """

    def __init__(
        self,
        inner: BackendModel,
        limits: Mapping[int, float],
        used: Callable[[int], float | None],
        cpus: Mapping[str, frozenset[int]],
    ) -> None:
        self._inner = inner
        self._limits = limits
        self._used = used
        self._cpus = cpus

    @property
    def generation(self) -> object:
        """Generative side of the backend's model, None if it has none."""
        return getattr(self._inner, "generation", None)

    @property
    def batching(self) -> BatchingChoice | None:
        """Choice of batching that the backend's model made, None if it made none."""
        return getattr(self._inner, "batching", None)

    def complete(self, config: ModelConfig) -> None:
        """Complete the configuration as the backend does."""
        self._inner.complete(config)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Create the backend's instance, bound to its policy's CPUs.

        Raises UnavailableError if its GPU is too full.
        """
        if placement.kind == "GPU" and placement.device_id in self._limits:
            limit, used = self._limits[placement.device_id], self._used(placement.device_id)
            if used is not None and used > limit:
                raise UnavailableError(
                    f"can not create model '{config.name}': {used:.0%} of the memory of GPU {placement.device_id} is "
                    f"taken, and --model-load-gpu-limit is {limit:.0%}"
                )
        instance = self._inner.instance(config, placement)
        cpus = self._cpus.get(policy_name(placement), frozenset())
        return PinnedInstance(instance, cpus) if cpus else instance

    def close(self) -> None:
        """Close the backend's model."""
        self._inner.close()


class PinnedInstance:
    """An instance whose thread is bound to some CPUs.

    The event loop never runs it, because its affinity differs.
    """

    quick = False

    def __init__(
        self,
        inner: Instance,
        cpus: frozenset[int],
        bind: Callable[[int, frozenset[int]], None] | None = None,
    ) -> None:
        self.name = inner.name
        self.close = inner.close
        self._inner = inner
        self._cpus = cpus
        self._bind = bind or _bind
        self._bound = threading.local()

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the inner instance, which may change, without those of the event loop."""
        inner = self._inner
        return replace(capabilities_of(inner), remote=False, ahead=False, runs_user_code=runs_user_code(inner))

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch. The first call in a thread binds that thread."""
        if not getattr(self._bound, "done", False):
            self._bind(0, self._cpus)
            self._bound.done = True
        return self._inner.execute(execution)


def _bind(thread: int, cpus: frozenset[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread, cpus)
