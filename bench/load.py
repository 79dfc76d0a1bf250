"""Loads of the benchmarks, by `remora bench load` in processes beside the server."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from coldstart import REMORA


def levels(port: int, *words: str) -> list[dict[str, Any]]:
    """Return the results of each load in turn. Raises CalledProcessError if one had no answer."""
    command = [REMORA, "bench", "load", "--url", f"http://127.0.0.1:{port}", "--quiet", "--json-out", *words]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def p99_ms(port: int, model: str, rate: float, connections: int, seconds: float) -> float:
    """Return the 99th percentile of latency at a constant rate, counted from the scheduled times."""
    load = (f"--rate={rate:g}", "--arrivals=constant", f"--connections={connections}")
    (level,) = levels(port, model, *load, f"--duration={seconds:g}", "--fixed", "--warm-up=0.5", "--window=0.5")
    assert not level["failures"], level["failures"]
    return float(level["latency_us"]["p99"]) / 1e3
