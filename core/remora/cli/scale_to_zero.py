"""When an instance that nobody asks should go: scale to zero against always on, replayed from a request log. Pure.

One law: time is seconds since any moment, money is in the caller's currency, and neither is read from anywhere. One
instance is replayed; an instance that holds a batch serves all that arrive, so requests do not queue behind each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

_HOUR_S = 3600.0
_CANDIDATES = 12
_TIME_KEYS = ("timestamp", "time", "ts", "@timestamp")


class Rates(NamedTuple):
    """What things cost, and how long they take.

    Attributes:
        per_hour: an instance for an hour, whether it works or not.
        cold_start_s: from the decision to start until the first answer: node, image, process, models.
        busy_s: how long a request keeps its instance.
        per_delayed: what one request that waits for a start costs besides; 0 when nobody minds.
    """

    per_hour: float
    cold_start_s: float
    busy_s: float = 0.0
    per_delayed: float = 0.0


class Replay(NamedTuple):
    """What a log would have cost with one retention.

    Attributes:
        retention_s: how long an idle instance stays; infinite for always on.
        billed_s: seconds for which an instance was there, starting included.
        starts: cold starts; the instance is there when the log begins.
        delayed: requests that waited for a start.
        cost: money for the span of the log.
    """

    retention_s: float
    billed_s: float
    starts: int
    delayed: int
    cost: float


def replay(arrivals: Sequence[float], retention_s: float, rates: Rates) -> Replay:
    """Replay a log. ``arrivals`` are in ascending order, at least one.

    The span ends with the last request's work; what an instance stays beyond it is not billed, for always on neither.

    >>> replay([0, 10, 5000], 60, Rates(per_hour=3.6, cold_start_s=30))
    Replay(retention_s=60, billed_s=100.0, starts=1, delayed=1, cost=0.1)
    """
    billed_s, starts, delayed = 0.0, 0, 0
    begun = ready = arrivals[0]
    free_at = begun + rates.busy_s
    for arrival in arrivals[1:]:
        if arrival > free_at + retention_s:
            billed_s += free_at + retention_s - begun
            starts += 1
            begun, ready = arrival, arrival + rates.cold_start_s
        delayed += arrival < ready
        free_at = max(free_at, max(arrival, ready) + rates.busy_s)
    billed_s += free_at - begun
    cost = billed_s * rates.per_hour / _HOUR_S + delayed * rates.per_delayed
    return Replay(retention_s, billed_s, starts, delayed, cost)


def break_even_gap_s(rates: Rates) -> float:
    """The pause at which going costs as much as staying, when one request ends it: shorter ones are cheaper waited out.

    Where many end it, those that come while the instance starts share its start, and going pays a little sooner.
    Whoever keeps an instance for just so long never pays more than twice what knowing the future would have cost.
    """
    return rates.cold_start_s + (rates.per_delayed / rates.per_hour * _HOUR_S if rates.per_hour else math.inf)


def candidates(arrivals: Sequence[float], rates: Rates) -> list[float]:
    """Retentions worth a replay, ascending: none, steps up to the longest pause, the break-even gap, always on."""
    longest = max((later - earlier - rates.busy_s for earlier, later in pairwise(arrivals)), default=0.0)
    chosen = {0.0}
    if longest > 1:
        chosen |= {longest ** (step / _CANDIDATES) for step in range(1, _CANDIDATES)}
    if break_even_gap_s(rates) < longest:
        chosen.add(break_even_gap_s(rates))
    return [*sorted(chosen), math.inf]


def best(arrivals: Sequence[float], rates: Rates, most_delayed: float = 1.0) -> tuple[Replay, list[Replay]]:
    """The cheapest retention of those that delay at most this share of the requests, and all that were tried.

    Of equals it is the longest. There is always one: an instance that is always on delays nobody.
    """
    tried = [replay(arrivals, retention_s, rates) for retention_s in candidates(arrivals, rates)]
    allowed = [each for each in tried if each.delayed <= most_delayed * len(arrivals)]
    return min(allowed, key=lambda each: (round(each.cost, 9), -each.retention_s)), tried


class LogError(ValueError):
    """A request log that cannot be read; the text says which line and why."""


def read_arrivals(lines: Iterable[str]) -> list[float]:
    """The times of a request log's lines, in ascending order.

    A line begins with a time, or is a JSON object with one under timestamp, time, ts or @timestamp. A time is seconds
    since the epoch (or since anything), or ISO 8601; without an offset it is taken for UTC.

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
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise LogError(
                f"line {number} has no time: expected seconds or ISO 8601 at its start, or a JSON object with "
                f"{', '.join(_TIME_KEYS)}"
            ) from None


def _json_time(text: str) -> object:
    document = json.loads(text)
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
