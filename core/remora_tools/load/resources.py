"""Use of processors, memory and GPUs of the server's machine, from its metrics. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_MIB = 1 << 20


class Usage(NamedTuple):
    """Reading of the metrics, or the mean of several, with None for what the metrics lack.

    Attributes:
        cpu: share of all processors in use, 0 to 1.
        memory_bytes: memory in use, of the container if the metrics have it.
        gpu: share of the GPUs in use, the mean of all.
        gpu_memory_bytes: memory in use on all GPUs.
        gpu_watts: power of all GPUs.
    """

    cpu: float | None = None
    memory_bytes: float | None = None
    gpu: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_watts: float | None = None

    def columns(self) -> dict[str, float]:
        """Return the known values by name, shares in percent and memory in MiB."""
        values = {
            "cpu %": _scaled(self.cpu, 100),
            "memory MiB": _scaled(self.memory_bytes, 1 / _MIB),
            "gpu %": _scaled(self.gpu, 100),
            "gpu memory MiB": _scaled(self.gpu_memory_bytes, 1 / _MIB),
            "gpu W": self.gpu_watts,
        }
        return {name: round(value, 1) for name, value in values.items() if value is not None}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_usage(text: str) -> Usage:
    """Return the reading in a text of Prometheus, from the families that Triton and remora have."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        if name.startswith(("nv_cpu_", "nv_gpu_", "remora_memory_used_")) and math.isfinite(number := _number(value)):
            found.setdefault(name, []).append(number)

    def total(name: str) -> float | None:
        return sum(found[name]) if name in found else None

    shares = found.get("nv_gpu_utilization", [])
    own_memory = total("remora_memory_used_bytes")
    return Usage(
        total("nv_cpu_utilization"),
        own_memory if own_memory is not None else total("nv_cpu_memory_used_bytes"),
        sum(shares) / len(shares) if shares else None,
        total("nv_gpu_memory_used_bytes"),
        total("nv_gpu_power_usage"),
    )


def mean_usage(readings: Sequence[Usage]) -> Usage:
    """Return the mean of each value over the readings that have it."""
    known = ([value for value in values if value is not None] for values in zip(*readings, strict=True))
    return Usage(*(sum(values) / len(values) if values else None for values in known)) if readings else Usage()
