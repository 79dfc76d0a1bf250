"""Cost of scale to zero against always on, replayed from a request log.

The functions are pure. Times are seconds since any epoch, money is in the caller's currency. The replay has one
instance; a warm instance batches all arrivals, so requests do not queue behind each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from remora.system.json_text import read_json

_HOUR_S = 3600.0
_CANDIDATES = 12
_TIME_KEYS = ("timestamp", "time", "ts", "@timestamp")


class Rates(NamedTuple):
    """Prices and durations.

    Attributes:
        per_hour: price of an instance for an hour, busy or idle.
        cold_start_s: from the decision to start until the first answer: node, image, process, models.
        busy_s: how long a request occupies its instance.
        per_delayed: cost of one request that waits for a cold start; 0 if such delays are acceptable.
    """

    per_hour: float
    cold_start_s: float
    busy_s: float = 0.0
    per_delayed: float = 0.0


class Replay(NamedTuple):
    """Cost of a log with one retention time.

    Attributes:
        retention_s: how long an idle instance is kept; infinite for always on.
        billed_s: seconds during which an instance existed, cold starts included.
        starts: cold starts; the instance is warm when the log begins.
        delayed: requests that waited for a cold start.
        cost: money for the span of the log.
    """

    retention_s: float
    billed_s: float
    starts: int
    delayed: int
    cost: float


def replay(arrivals: Sequence[float], retention_s: float, rates: Rates) -> Replay:
    """Replay ascending ``arrivals``, at least one.

    The span ends when the last request completes; idle time after that is not billed, also not for always on.

    >>> replay([0, 10, 5000], 60, Rates(per_hour=3.6, cold_start_s=30))
    Replay(retention_s=60, billed_s=100.0, starts=1, delayed=1, cost=0.1)
    """
    billed_s, starts, delayed = 0.0, 0, 0
    started_at = ready = arrivals[0]
    free_at = started_at + rates.busy_s
    for arrival in arrivals[1:]:
        if arrival > free_at + retention_s:
            billed_s += free_at + retention_s - started_at
            starts += 1
            started_at, ready = arrival, arrival + rates.cold_start_s
        delayed += arrival < ready
        free_at = max(free_at, max(arrival, ready) + rates.busy_s)
    billed_s += free_at - started_at
    cost = billed_s * rates.per_hour / _HOUR_S + delayed * rates.per_delayed
    return Replay(retention_s, billed_s, starts, delayed, cost)


def break_even_gap_s(rates: Rates) -> float:
    """Return the pause before one request at which stopping the instance breaks even.

    Shorter pauses are cheaper to wait out. If several requests end the pause, they share the cold start, and stopping
    pays off a little sooner. A retention of this length costs at most twice the optimum for known arrivals.
    """
    return rates.cold_start_s + (rates.per_delayed / rates.per_hour * _HOUR_S if rates.per_hour else math.inf)


def candidates(arrivals: Sequence[float], rates: Rates) -> list[float]:
    """Return retention times to replay, ascending from none to always on."""
    longest = max((later - earlier - rates.busy_s for earlier, later in pairwise(arrivals)), default=0.0)
    chosen = {0.0}
    if longest > 1:
        chosen |= {longest ** (step / _CANDIDATES) for step in range(1, _CANDIDATES)}
    if break_even_gap_s(rates) < longest:
        chosen.add(break_even_gap_s(rates))
    return [*sorted(chosen), math.inf]


def best(arrivals: Sequence[float], rates: Rates, most_delayed: float = 1.0) -> tuple[Replay, list[Replay]]:
    """Return the cheapest allowed retention and all replays.

    A retention is allowed if it delays at most the share ``most_delayed`` of the requests; always on delays none. Of
    equal costs the longest retention wins.
    """
    tried = [replay(arrivals, retention_s, rates) for retention_s in candidates(arrivals, rates)]
    allowed = [each for each in tried if each.delayed <= most_delayed * len(arrivals)]
    return min(allowed, key=lambda each: (round(each.cost, 9), -each.retention_s)), tried


class LogError(ValueError):
    """Error in a request log, with the line and the reason in its text."""


def read_arrivals(lines: Iterable[str]) -> list[float]:
    """Return the times of a request log's lines in ascending order.

    A line begins with a time, or is a JSON object with a time under timestamp, time, ts or @timestamp. A time is in
    seconds since any epoch, or ISO 8601; without an offset it is UTC.

    Raises LogError for a line without a time, and for a log without lines.
    """
    found = sorted(_times(lines))
    if not found:
        raise LogError("the log holds no requests")
    return found


def _times(lines: Iterable[str]) -> Iterator[float]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            value = _json_time(text) if text.startswith("{") else text.split()[0].strip("[],")
            yield _seconds(value)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise LogError(
                f"line {number} has no time: expected seconds or ISO 8601 at its start, or a JSON object with "
                f"{', '.join(_TIME_KEYS)}"
            ) from None


def _json_time(text: str) -> object:
    document = read_json(text)
    for key in _TIME_KEYS:
        if key in document:
            return document[key]
    raise KeyError(_TIME_KEYS)


def _seconds(value: object) -> float:
    if isinstance(value, str) and not value.replace(".", "", 1).replace("-", "", 1).isdigit():
        stamp = datetime.fromisoformat(value.replace("Z", "+00:00"))
        return (stamp if stamp.tzinfo else datetime.fromisoformat(f"{stamp.isoformat()}+00:00")).timestamp()
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(value)
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(value)
    return seconds
