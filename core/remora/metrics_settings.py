"""What is shown of the metrics, as ``--metrics-config`` says it; the law: pure, and a switch is on or off."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remora.options import BOOLEANS

_QUANTILES: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """What ``--metrics-config`` says (spec P03, P06)."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = _QUANTILES

    @classmethod
    def of(cls, entries: tuple[str, ...]) -> MetricsSettings:
        """Settings from KEY=VALUE entries; keys nobody knows are left alone, as Triton does.

        Raises ValueError for an entry without "=", a switch that is neither on nor off, and quantiles that are no
        numbers between 0 and 1.
        """
        for entry in entries:
            if "=" not in entry:
                raise ValueError(f"--metrics-config={entry}: give KEY=VALUE")
        given = dict(entry.partition("=")[::2] for entry in entries)
        quantiles = _QUANTILES
        if "summary_quantiles" in given:
            text = given["summary_quantiles"].strip("\"'")
            try:
                quantiles = tuple(float(pair.partition(":")[0]) for pair in text.split(","))
            except ValueError:
                quantiles = (math.nan,)
            if not all(0 <= value <= 1 for value in quantiles):
                raise ValueError(f"--metrics-config=summary_quantiles={text}: quantiles are numbers between 0 and 1")

        def is_on(name: str, unsaid: str) -> bool:
            word = given.get(name, unsaid)
            if word.lower() not in BOOLEANS:
                raise ValueError(f"--metrics-config={name}={word}: expected true or false")
            return BOOLEANS[word.lower()]

        return cls(
            is_on("counter_latencies", "true"),
            is_on("summary_latencies", "false"),
            is_on("histogram_latencies", "false"),
            quantiles,
        )
