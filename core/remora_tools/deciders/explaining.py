"""Explanation of a model's batch sizes and prediction of setting changes (`remora explain`).

Pure. Measured and predicted values are kept apart. Predictions run the production batching code on a simulated clock;
too little traffic gives no prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles
from typing import NamedTuple

from remora.api.models import BatchQueue
from remora.calls import ModelStats
from remora.config import BatchPolicy, QueuePolicy, batch_policy
from remora.management.explanation import Explanation, Measured, Prediction
from remora.models.served_model import ServedModel
from remora.statistics import RanBatch
from remora_tools.deciders.simulation import Simulated, arrivals, request_at, simulate

ENOUGH_REQUESTS = 200
"""Below this number of requests, rate and wait are reported but nothing is predicted."""

_STREAM = 2000
"""Requests of a simulated stream: enough for a p99, at a cost of a few milliseconds."""

_STEADY = 0.95
"""Above this fraction of the throughput, waits grow for as long as the load lasts."""


class Setup(NamedTuple):
    """A model's scheduling settings.

    ``not_simulated`` is the reason why nothing can be predicted, or ""; ``batching`` is the choice of batching that
    the configuration left open, or "".
    """

    policy: BatchPolicy
    instances: int
    not_simulated: str = ""
    batching: str = ""


class Curve:
    """Batch duration by rows, linear between measured points and extrapolated by regression.

    With one measured size, larger batches are assumed to cost in proportion, which is the pessimistic choice.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._points = sorted(points.items())
        sizes = [size for size, _ in self._points]
        mean_size, mean_ns = fmean(sizes), fmean(ns for _, ns in self._points)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        slope = sum((size - mean_size) * (ns - mean_ns) for size, ns in self._points) / spread if spread else 0.0
        self._slope = max(slope, 0.0) if spread else self._points[0][1] / self._points[0][0]
        self.largest = sizes[-1]

    def __call__(self, rows: int) -> float:
        points = self._points
        if rows <= points[0][0]:
            return points[0][1]
        if rows >= self.largest:
            return points[-1][1] + (rows - self.largest) * self._slope
        upper = next(place for place, (size, _) in enumerate(points) if size >= rows)
        (low, low_ns), (high, high_ns) = points[upper - 1], points[upper]
        return low_ns + (high_ns - low_ns) * (rows - low) / (high - low)


def setup_of(model: ServedModel) -> Setup:
    """Return a served model's scheduling settings."""
    why = ""
    if model.steps is not None:
        why = "an ensemble runs no batches: explain the models of its steps"
    elif model.config.HasField("sequence_batching"):
        why = "nothing is predicted for sequences: when a request comes depends on the answer before it"
    elif model.decoupled:
        why = "nothing is predicted for decoupled models: how long a request runs is up to its stream"
    elif model.takes_turns:
        why = "nothing is predicted under the rate limiter: when an instance may run is up to the other models"
    return Setup(batch_policy(model.config), model.instance_count, why, model.batching)


def explain_batches(model: ServedModel, now_ns: int) -> Explanation:
    """Explain the last batches of a served model; ``now_ns`` is the time on its clock."""
    statistics = model.statistics
    return explain(setup_of(model), statistics.recent(), statistics.snapshot(model.name, model.version_text), now_ns)


def explain(setup: Setup, runs: Sequence[RanBatch], stats: ModelStats, now_ns: int) -> Explanation:
    """Explain a model version.

    Args:
        setup: its scheduling settings.
        runs: its last batches, oldest first.
        stats: its statistics since load, for the duration of batch sizes that are not in ``runs``. The cost model
            cannot provide them because it keeps one value per power of two.
        now_ns: current time on the clock of the runs.
    """
    model, version = stats.name, stats.version
    runs = [run for run in runs if run.requests]
    notes = [setup.batching] if setup.batching else []
    measured = measure(runs, setup.instances, now_ns) if len(runs) > 1 else None
    requests = measured.requests if measured else sum(run.requests for run in runs)
    if setup.not_simulated:
        notes.append(setup.not_simulated)
    elif measured is None or requests < ENOUGH_REQUESTS or not measured.arrivals_per_s:
        notes.append(f"not enough traffic seen: {requests} requests of the {ENOUGH_REQUESTS} a prediction needs")
    else:
        curve = Curve({**_ever(stats), **_means(runs)})
        predicted = predict(setup, measured, curve)
        notes += _assumptions(measured, predicted)
        return Explanation(model, version, measured, predicted, _advice(measured, predicted), tuple(notes))
    return Explanation(model, version, measured, (), (), tuple(notes))


def measure(runs: Sequence[RanBatch], instances: int, now_ns: int) -> Measured:
    """Summarize at least two runs."""
    span_ns = max(runs[-1].end_ns - runs[0].end_ns, 1)
    later = runs[1:]  # those between the end of the first run and the end of the last
    requests = sum(run.requests for run in later)
    rows = sum(run.rows for run in later)
    return Measured(
        requests=requests,
        batches=len(later),
        seconds=round(span_ns / 1e9, 3),
        seconds_ago=round(max(now_ns - runs[-1].end_ns, 0) / 1e9, 3),
        arrivals_per_s=round(requests / span_ns * 1e9, 3),
        rows_per_request=round(rows / requests, 3),
        mean_wait_us=round(sum(run.wait_ns for run in later) / requests / 1e3, 1),
        mean_batch_rows=round(rows / len(later), 2),
        busy=round(min(sum(run.run_ns for run in later) / span_ns / instances, 1.0), 3),
        batch_sizes={str(size): count for size, count in sorted(Counter(run.rows for run in later).items())},
        reasons=dict(Counter(run.reason for run in later).most_common()),
        batch_us={str(size): round(ns / 1e3, 1) for size, ns in sorted(_means(later).items())},
    )


def predict(setup: Setup, measured: Measured, curve: Curve) -> tuple[Prediction, ...]:
    """Predict the current settings and changes to them that could matter."""
    found: list[Prediction] = []
    rows = max(round(measured.rows_per_request), 1)
    for change, policy, instances in alternatives(setup, curve):
        limit = max(policy.max_batch_size // rows, 1) if policy.dynamic else 1
        flood = [request_at(1, rows) for _ in range(max(limit * instances * 20, 100))]
        most = simulate(BatchQueue(policy), flood, curve, instances)
        throughput = len(flood) / most.end_ns * 1e9
        found.append(
            _prediction(change, throughput, measured.arrivals_per_s, rows, policy, instances, curve, most.batches)
        )
    return tuple(found)


def _prediction(
    change: str,
    throughput: float,
    per_s: float,
    rows: int,
    policy: BatchPolicy,
    instances: int,
    curve: Curve,
    full: Sequence[int],
) -> Prediction:
    found = Simulated()
    if per_s < _STEADY * throughput:
        found = simulate(BatchQueue(policy), arrivals(per_s, _STREAM, rows=(rows,)), curve, instances)
    waits = found.waits_ns
    batches = found.batches or full
    return Prediction(
        change,
        round(throughput, 1),
        round(fmean(waits) / 1e3, 1) if waits else None,
        round(quantiles(waits, n=100)[98] / 1e3, 1) if waits else None,
        round(fmean(batches), 2),
        max(full) > curve.largest,
        sum(size > curve.largest for size in batches) > len(batches) / 20,
    )


def alternatives(setup: Setup, curve: Curve) -> list[tuple[str, BatchPolicy, int]]:
    """Return (change in configuration syntax, policy, instances), the current settings first."""
    policy, instances = setup.policy, setup.instances
    # Without the queue policy, which rejects and reorders requests, because only batching is compared.
    policy = policy._replace(queue=QueuePolicy(), level_queues=(), priority_levels=0, default_level=1)
    limit = policy.max_batch_size
    found = [("as it is", policy, instances)]
    batching = policy
    if not policy.dynamic and limit > 1:
        batching = policy._replace(dynamic=True, preferred=(limit,))
        found.append(("dynamic_batching { }", batching, instances))
    if batching.dynamic:
        if policy.max_delay_ns:
            found.append(("max_queue_delay_microseconds: 0", policy._replace(max_delay_ns=0), instances))
        run_us = max(round(curve(1) / 1e3), 1)
        for delay_us in (run_us, 2 * run_us):
            delayed = batching._replace(max_delay_ns=delay_us * 1000)
            if delayed.max_delay_ns != policy.max_delay_ns:
                found.append((f"max_queue_delay_microseconds: {delay_us}", delayed, instances))
        half = limit // 2
        if half > 1:
            delay_us = batching.max_delay_ns // 1000 or run_us
            preferring = batching._replace(preferred=(half,), max_delay_ns=delay_us * 1000)
            text = f"preferred_batch_size: {half} max_queue_delay_microseconds: {delay_us}"
            if preferring != policy:
                found.append((text, preferring, instances))
            found.append((f"max_batch_size: {half}", _limited(policy, half), instances))
        found.append((f"max_batch_size: {limit * 2}", _limited(policy, limit * 2), instances))
    found.append((f"instance_group {{ count: {instances + 1} }}", policy, instances + 1))
    return found


def _limited(policy: BatchPolicy, limit: int) -> BatchPolicy:
    preferred = tuple(size for size in policy.preferred if size <= limit and size != policy.max_batch_size)
    return policy._replace(max_batch_size=limit, preferred=preferred or (limit,))


def _ever(stats: ModelStats) -> dict[int, float]:
    """Return rows -> mean nanoseconds over all batches since the model was loaded."""
    return {
        batch.batch_size: (batch.compute_input.ns + batch.compute_infer.ns + batch.compute_output.ns)
        / batch.compute_infer.count
        for batch in stats.batches
        if batch.compute_infer.count
    }


def _means(runs: Sequence[RanBatch]) -> dict[int, float]:
    spent: dict[int, list[int]] = {}
    for run in runs:
        spent.setdefault(run.rows, []).append(run.run_ns)
    return {rows: fmean(ns) for rows, ns in spent.items()}


def _advice(measured: Measured, predicted: Sequence[Prediction]) -> tuple[str, ...]:
    """Return the changes that improve on the current settings."""
    now, *others = predicted
    found: list[str] = []
    known = [other for other in others if not other.throughput_extrapolated]
    fastest = max(known, key=lambda other: other.throughput_per_s, default=now)
    pressed = measured.arrivals_per_s > now.throughput_per_s / 2  # at a lower load more throughput is of no use
    if pressed and fastest.throughput_per_s > 1.1 * now.throughput_per_s:
        gain = fastest.throughput_per_s / now.throughput_per_s
        found.append(f"{fastest.change}: {gain:.1f} times the throughput")
    steady = [other for other in others if other.p99_wait_us is not None and not other.waits_extrapolated]
    soonest = min(steady, key=lambda other: other.p99_wait_us or 0.0, default=now)
    if soonest is not now and (now.p99_wait_us is None or (soonest.p99_wait_us or 0.0) < 0.9 * now.p99_wait_us):
        before = "without bound" if now.p99_wait_us is None else f"{now.p99_wait_us:.0f} us"
        found.append(f"{soonest.change}: p99 wait {soonest.p99_wait_us:.0f} us instead of {before}")
    return tuple(dict.fromkeys(found)) or ("none of these changes would help by more than a tenth",)


def _assumptions(measured: Measured, predicted: Sequence[Prediction]) -> list[str]:
    notes = [
        "predicted by the scheduler itself on a simulated clock, from the measured batch times, for requests that come "
        f"independently of each other at {measured.arrivals_per_s:.0f}/s; nothing but the model's own time is counted"
    ]
    if predicted[0].mean_wait_us is None:
        notes.append(
            "the model is saturated: the rate measured is what it could serve, and more may have been asked for; waits "
            "are predicted only where they do not grow without bound"
        )
    notes.append("an added instance is assumed to slow no other down, which requires a separate core or device")
    if any(row.throughput_extrapolated or row.waits_extrapolated for row in predicted):
        notes.append("extrapolated: rests on larger batches than were seen, at what the measured ones suggest")
    return notes
