"""Service level objective: a percentile of latency and its limit. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Slo(NamedTuple):
    """Service level objective: a percentile of latency and its limit."""

    percent: float
    limit_ns: int

    def text(self) -> str:
        """Return the objective as on the command line."""
        return f"p{self.percent:g}<={self.limit_ns / 1e6:g}ms"
