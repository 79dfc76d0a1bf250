"""Statistics of each model version [T01-T03], which `remora.statistics.recorder` fills.

The V2 statistics API, Prometheus and `explain` read from here; nothing is formatted here. Recording is cheap, and
reading takes a consistent snapshot.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from remora.calls import BatchStats, Duration, ModelStats, ResponseStats
from remora.errors import RemoraError
from remora.messages import Response, Streamed, Ticket
from remora.options import BOOLEANS

_QUANTILES: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Settings of ``--metrics-config`` [P03, P06]."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = _QUANTILES

    @classmethod
    def of(cls, entries: tuple[str, ...]) -> MetricsSettings:
        """Return the settings of KEY=VALUE entries.

        Unknown keys are ignored, as in Triton. Raises ValueError for an entry without "=", a switch that is not a
        boolean, and quantiles that are not numbers between 0 and 1.
        """
        for entry in entries:
            if "=" not in entry:
                raise ValueError(f"--metrics-config={entry}: give KEY=VALUE")
        values = dict(entry.partition("=")[::2] for entry in entries)
        quantiles = _QUANTILES
        if "summary_quantiles" in values:
            text = values["summary_quantiles"].strip("\"'")
            try:
                quantiles = tuple(float(pair.partition(":")[0]) for pair in text.split(","))
            except ValueError:
                quantiles = (math.nan,)
            if not all(0 <= value <= 1 for value in quantiles):
                raise ValueError(f"--metrics-config=summary_quantiles={text}: quantiles are numbers between 0 and 1")

        def is_on(name: str, default: str) -> bool:
            word = values.get(name, default)
            if word.lower() not in BOOLEANS:
                raise ValueError(f"--metrics-config={name}={word}: expected true or false")
            return BOOLEANS[word.lower()]

        return cls(
            is_on("counter_latencies", "true"),
            is_on("summary_latencies", "false"),
            is_on("histogram_latencies", "false"),
            quantiles,
        )


LATENCY_BOUNDS_NS: tuple[int, ...] = tuple(
    int(seconds * 1e9)
    for seconds in (
        0.0001,
        0.00025,
        0.0005,
        0.001,
        0.0025,
        0.005,
        0.01,
        0.025,
        0.05,
        0.1,
        0.25,
        0.5,
        1.0,
        2.5,
        5.0,
        10.0,
    )
)
"""Upper bounds of the latency histograms' buckets; the last bucket is unbounded."""

FIRST_RESPONSES = "nv_inference_first_response_histogram_ms"
"""Triton's metric name for the time to first response, by which models configure its buckets [C19, P05]."""

FIRST_RESPONSE_BOUNDS_MS: tuple[float, ...] = (100, 500, 2000, 5000)
"""Default upper bounds of the buckets of the time to first response [P05]."""

SUMMARY_SAMPLES = 4096
"""Maximum number of requests from which the summaries' quantiles are computed [P06]."""

REJECTED, CANCELED, BACKEND, OTHER = "REJECTED", "CANCELED", "BACKEND", "OTHER"
FAILURE_REASONS = (REJECTED, CANCELED, BACKEND, OTHER)


RECENT_BATCHES = 1024
"""Number of latest executions kept for each model, for `remora explain`."""


class Phases(NamedTuple):
    """Times of one execution: begin, inputs ready, results ready, end (monotonic nanoseconds)."""

    start_ns: int
    input_end_ns: int
    output_start_ns: int
    end_ns: int


class Histogram(NamedTuple):
    """Counts per bucket of LATENCY_BOUNDS_NS (one more than bounds), and the sum."""

    counts: tuple[int, ...]
    sum_ns: int


class HeldLoad(NamedTuple):
    """Bytes of requests and of unread answers that a server's connections hold.

    ``limit`` is 0 without one; ``refused`` counts refusals by the limit that was met.
    """

    requests: int
    answers: int
    limit: int
    refused: Mapping[str, int]


class ServerLoad(NamedTuple):
    """Load of a server.

    It has the answers by HTTP status, the lateness of the event loop, the held bytes, and the connections that the
    server closed, by reason.
    """

    answers: Mapping[int, int]
    lateness: Histogram | None = None
    held: HeldLoad | None = None
    closed: Mapping[str, int] = {}


class FirstResponses(NamedTuple):
    """Histogram of the time to first response, in whole milliseconds.

    There is one more count than bounds.
    """

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]
    sum_ms: int


class StatisticsSample(NamedTuple):
    """One request of an execution: its end, and its durations by phase in nanoseconds [P06]."""

    end_ns: int
    request_ns: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int


class RanBatch(NamedTuple):
    """One execution.

    Attributes:
        end_ns: its end.
        requests: answered requests.
        rows: batch size.
        wait_ns: total queue time of the requests.
        run_ns: duration.
        reason: the dispatch reason.
    """

    end_ns: int
    requests: int
    rows: int
    wait_ns: int
    run_ns: int
    reason: str


class CacheSample(NamedTuple):
    """One cache look-up: its time, its result, and durations in nanoseconds [P07]."""

    end_ns: int
    hit: bool
    cache_ns: int
    request_ns: int
    queue_ns: int


class _Sums:
    """Number and total nanoseconds of the durations that V2's statistics have [T01]."""

    __slots__ = (
        "cache_hit", "cache_miss", "compute_infer", "compute_input", "compute_output", "fail", "queue", "success",
    )  # fmt: skip

    def __init__(self) -> None:
        self.success, self.fail, self.queue = [0, 0], [0, 0], [0, 0]
        self.compute_input, self.compute_infer, self.compute_output = [0, 0], [0, 0], [0, 0]
        self.cache_hit, self.cache_miss = [0, 0], [0, 0]

    def durations(self) -> dict[str, Duration]:
        """Return the sums by the names of `ModelStats`."""
        return {name: Duration(*getattr(self, name)) for name in self.__slots__}


_ARRIVAL = attrgetter("arrival_ns")


class _Latencies:
    """Buckets of the latency and of the queue time of successful requests."""

    __slots__ = ("queue", "request")

    def __init__(self) -> None:
        self.request = [0] * (len(LATENCY_BOUNDS_NS) + 1)
        self.queue = [0] * (len(LATENCY_BOUNDS_NS) + 1)

    def add(self, request_ns: int, queue_ns: int, number: int = 1) -> None:
        """Count ``number`` requests of the same durations."""
        self.request[bisect_left(LATENCY_BOUNDS_NS, request_ns)] += number
        self.queue[bisect_left(LATENCY_BOUNDS_NS, queue_ns)] += number


class _FirstAnswers:
    """Buckets and sum of the time to first response; without bounds nothing is counted."""

    __slots__ = ("bounds_ms", "buckets", "sum_ms")

    def __init__(self, bounds_ms: tuple[float, ...]) -> None:
        self.bounds_ms = bounds_ms
        self.buckets = [0] * (len(bounds_ms) + 1)
        self.sum_ms = 0

    def add(self, tickets: Sequence[Ticket], now_ns: int) -> None:
        """Count the tickets, which are answered now for the first time."""
        for ticket in tickets:
            wait_ms = (now_ns - ticket.arrival_ns) // 1_000_000
            self.buckets[bisect_left(self.bounds_ms, wait_ms)] += 1
            self.sum_ms += wait_ms


class _Samples:
    """Latest requests and cache look-ups for quantiles, at most ``most`` of each."""

    __slots__ = ("lookups", "most", "requests")

    def __init__(self, most: int) -> None:
        self.most = most
        self.requests: deque[StatisticsSample] | None = deque(maxlen=most) if most else None
        self.lookups: deque[CacheSample] | None = deque(maxlen=most) if most else None


class _Executions:
    """Counts of executions, by dispatch reason and batch size, and the latest ones."""

    __slots__ = ("by_rows", "count", "dispatches", "last_ms", "recent")

    def __init__(self) -> None:
        self.count = 0
        self.last_ms = 0
        self.dispatches: dict[str, int] = {}
        self.by_rows: dict[int, list[int]] = {}
        self.recent: deque[RanBatch] = deque(maxlen=RECENT_BATCHES)

    def add(self, rows: int, spent: tuple[int, int, int], now_ms: int) -> None:
        """Count an execution of so many rows, with the durations of its phases."""
        self.count += 1
        self.last_ms = now_ms
        batch = self.by_rows.setdefault(rows, [0, 0, 0, 0])
        batch[0] += 1
        batch[1] += spent[0]
        batch[2] += spent[1]
        batch[3] += spent[2]


class ModelStatistics:
    """The statistics of one model version, from its load to its unload [T02]. Thread-safe.

    ``samples`` is the number of single requests kept for quantiles, 0 to keep only sums. ``first_bounds_ms`` are the
    buckets of the time to first response, which is not counted without them.
    """

    def __init__(self, samples: int = 0, first_bounds_ms: tuple[float, ...] = ()) -> None:
        self._lock = threading.Lock()
        self._first = _FirstAnswers(first_bounds_ms)
        self._samples = _Samples(samples)
        self._sums = _Sums()
        self._latencies = _Latencies()
        self._executions = _Executions()
        self._responses: dict[int, dict[str, list[int]]] = {}
        self.first_answer_ns = 0
        """Time of the first answer by the clock; 0 before that."""
        self.inference_count = 0
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.returned_errors = 0
        """Requests that the model answered with an error. They are among the successes, as in Triton's statistics."""

    @property
    def execution_count(self) -> int:
        """Number of executions."""
        return self._executions.count

    @property
    def last_inference_ms(self) -> int:
        """Wall-clock time of the last execution; 0 before that."""
        return self._executions.last_ms

    @property
    def dispatches(self) -> dict[str, int]:
        """Number of executions by dispatch reason."""
        return self._executions.dispatches

    def forget(self) -> None:
        """Reset all numbers, because requests before the model served were not from clients."""
        fresh = ModelStatistics(self._samples.most, self._first.bounds_ms)
        with self._lock:
            vars(self).update({name: value for name, value in vars(fresh).items() if name != "_lock"})

    def record_execution(
        self,
        done: Sequence[Ticket],
        failed: Sequence[Ticket],
        rows: int,
        phases: Phases,
        reason: str,
        now_ms: int,
        returned: int = 0,
    ) -> None:
        """Count one execution: answered and failed tickets, rows, phases and dispatch reason.

        ``returned`` of the answered tickets have an error that the model returned.
        """
        start, input_end, output_start, end = phases
        spent = (input_end - start, output_start - input_end, end - output_start)
        with self._lock:
            executions = self._executions
            executions.add(rows, spent, now_ms)
            executions.dispatches[reason] = executions.dispatches.get(reason, 0) + 1
            wait_ns = self._record_done(done, start, end, spent) if done else 0
            if returned:
                self._record_returned(returned)
            executions.recent.append(RanBatch(end, len(done), rows, wait_ns, end - start, reason))
            if self._first.bounds_ms:
                self._first.add((*done, *failed), end)
            for ticket in failed:
                self._sums.fail[0] += 1
                self._sums.fail[1] += end - ticket.arrival_ns
                self.failures[BACKEND] += 1

    def _record_returned(self, count: int) -> None:
        self.returned_errors += count
        self.failures[BACKEND] += count

    def _record_done(self, done: Sequence[Ticket], start: int, end: int, spent: tuple[int, int, int]) -> int:
        """Count answered requests and return their total queue time."""
        count = len(done)
        if not self.first_answer_ns:
            self.first_answer_ns = end
        total_ns = queue_ns = 0
        add_latency = self._latencies.add
        for arrival, same in groupby(done, _ARRIVAL):  # often that of the turn of the loop
            number = len(list(same))
            total_ns += (end - arrival) * number
            queue_ns += (start - arrival) * number
            add_latency(end - arrival, start - arrival, number)
        self.inference_count += sum([ticket.request.rows for ticket in done])
        if self._samples.requests is not None:
            self._samples.requests.extend(
                StatisticsSample(end, end - ticket.arrival_ns, start - ticket.arrival_ns, *spent) for ticket in done
            )
        spent_input, spent_infer, spent_output = spent
        sums = self._sums
        for row, ns in (
            (sums.success, total_ns),
            (sums.queue, queue_ns),
            (sums.compute_input, spent_input * count),
            (sums.compute_infer, spent_infer * count),
            (sums.compute_output, spent_output * count),
        ):
            row[0] += count
            row[1] += ns
        return queue_ns

    def record_streamed(self, ticket: Ticket, index: int, streamed: Streamed, spent_ns: int, now_ns: int) -> None:
        """Count one response of a decoupled model, and its request if it is the final one [T03]."""
        rows = _rows_of(streamed.outcome)
        with self._lock:
            if self._first.bounds_ms and not index and streamed.outcome is not None:
                self._first.add([ticket], now_ns)
            response = self._responses.setdefault(index, {name: [0, 0] for name in ResponseStats._fields})
            for name in rows:
                response[name][0] += 1
                response[name][1] += spent_ns if name != "compute_output" else 0
            if not streamed.final:
                return
            if isinstance(streamed.outcome, RemoraError) and not streamed.outcome.answered:
                self._sums.fail[0] += 1
                self._sums.fail[1] += now_ns - ticket.arrival_ns
                self.failures[CANCELED if streamed.outcome.code == "CANCELLED" else BACKEND] += 1
            else:
                self._record_done([ticket], ticket.start_ns, now_ns, (0, now_ns - ticket.start_ns, 0))
                self._record_returned(isinstance(streamed.outcome, RemoraError))

    def record_ensemble(
        self, ticket: Ticket, spent_ns: tuple[int, int, int], first_ns: int, now_ns: int, now_ms: int
    ) -> None:
        """Count a request that an ensemble answered.

        ``spent_ns`` are the sums of its steps' phases [E08]. ``first_ns`` is the time of its first answer, 0 if there
        was no answer.
        """
        with self._lock:
            if self._first.bounds_ms and first_ns:
                self._first.add([ticket], first_ns)
            self._executions.add(ticket.request.rows, spent_ns, now_ms)
            self._record_done([ticket], ticket.start_ns, now_ns, spent_ns)

    def record_cache_hit(self, ticket: Ticket, lookup_ns: int, begin_ns: int, now_ns: int) -> None:
        """Count a cache hit: a success, but neither an inference nor an execution [K05]."""
        request_ns, queue_ns = now_ns - ticket.arrival_ns, begin_ns - ticket.arrival_ns
        with self._lock:
            sums = self._sums
            for row, ns in ((sums.success, request_ns), (sums.queue, queue_ns), (sums.cache_hit, lookup_ns)):
                row[0] += 1
                row[1] += ns
            self._latencies.add(request_ns, queue_ns)
            if self._first.bounds_ms:
                self._first.add([ticket], now_ns)
            if self._samples.lookups is not None:
                self._samples.lookups.append(CacheSample(now_ns, True, lookup_ns, request_ns, queue_ns))

    def record_cache_miss(self, spent_ns: int, now_ns: int) -> None:
        """Count the cache's cost for a request that had to run [K05].

        The request itself is counted like any other.
        """
        with self._lock:
            self._sums.cache_miss[0] += 1
            self._sums.cache_miss[1] += spent_ns
            if self._samples.lookups is not None:
                self._samples.lookups.append(CacheSample(now_ns, False, spent_ns, 0, 0))

    def record_failure(self, ticket: Ticket, reason: str, now_ns: int) -> None:
        """Count a request that failed without running: timed out, cancelled, or lost by the server."""
        with self._lock:
            self._sums.fail[0] += 1
            self._sums.fail[1] += now_ns - ticket.arrival_ns
            self.failures[reason] += 1

    def record_rejection(self) -> None:
        """Count a request refused on arrival.

        It is visible in the metrics alone, not in `fail` [D12, T02].
        """
        with self._lock:
            self.failures[REJECTED] += 1

    def record_unreadable(self) -> None:
        """Count a request whose bytes Triton's backends refuse: a failure of zero duration [T02]."""
        with self._lock:
            self._sums.fail[0] += 1
            self.failures[BACKEND] += 1

    def snapshot(self, name: str, version: str, *, responses: bool = True) -> ModelStats:
        """Return all numbers at one point in time.

        ``responses`` False omits the statistics by response index.
        """
        with self._lock:
            batches = tuple(
                BatchStats(rows, *(Duration(row[0], ns) for ns in row[1:]))
                for rows, row in sorted(self._executions.by_rows.items())
            )
            return ModelStats(
                name,
                version,
                self.last_inference_ms,
                self.inference_count,
                self.execution_count,
                **self._sums.durations(),
                batches=batches,
                responses={
                    str(index): ResponseStats(**{name: Duration(*row) for name, row in rows.items()})
                    for index, rows in (sorted(self._responses.items()) if responses else ())
                },
            )

    def recent(self) -> list[RanBatch]:
        """Return the latest executions, oldest first."""
        with self._lock:
            return list(self._executions.recent)

    def samples(self, since_ns: int) -> list[StatisticsSample]:
        """Return the kept requests that ended at ``since_ns`` or later."""
        with self._lock:
            return [sample for sample in self._samples.requests or () if sample.end_ns >= since_ns]

    def cache_samples(self, since_ns: int) -> list[CacheSample]:
        """Return the kept cache look-ups at ``since_ns`` or later."""
        with self._lock:
            return [sample for sample in self._samples.lookups or () if sample.end_ns >= since_ns]

    def first_responses(self) -> FirstResponses | None:
        """Return the histogram of the time to first response, or None if it is not counted."""
        first = self._first
        if not first.bounds_ms:
            return None
        with self._lock:
            return FirstResponses(first.bounds_ms, tuple(first.buckets), first.sum_ms)

    def histograms(self) -> tuple[Histogram, Histogram]:
        """Return the histograms of latency and queue time of successful requests."""
        with self._lock:
            return (
                Histogram(tuple(self._latencies.request), self._sums.success[1]),
                Histogram(tuple(self._latencies.queue), self._sums.queue[1]),
            )


def _rows_of(outcome: Response | RemoraError | None) -> tuple[str, ...]:
    """Return the fields of ResponseStats in which a response counts."""
    if outcome is None:
        return ("compute_infer", "empty_response")
    if isinstance(outcome, Response):
        return ("compute_infer", "compute_output", "success")
    return ("cancel",) if outcome.code == "CANCELLED" else ("compute_infer", "fail")
