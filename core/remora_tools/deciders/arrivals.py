"""Schedules of request arrivals for open-loop load. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator

CONSTANT, POISSON = "constant", "poisson"
SHAPES = (POISSON, CONSTANT)


def arrivals(rate_per_s: float, shape: str, seed: int = 0, *, part: int = 0, parts: int = 1) -> Iterator[int]:
    """Yield the times of requests in nanoseconds from the start, ascending and without end.

    Args:
        rate_per_s: requests per second of all parts together.
        shape: ``poisson`` for independent arrivals, ``constant`` for equal gaps.
        seed: the same seed gives the same schedule.
        part: number of this generator; constant schedules of the parts interleave.
        parts: number of generators.
    """
    gap_ns = 1e9 * parts / rate_per_s
    if shape == CONSTANT:
        number = 0
        while True:
            yield int((number + part / parts) * gap_ns)
            number += 1
    source = random.Random(f"{seed} {part}")
    time_ns = 0.0
    while True:
        time_ns += source.expovariate(1.0) * gap_ns
        yield int(time_ns)
