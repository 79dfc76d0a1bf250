"""Results of `remora tune` as table, JSON and HTML page. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remora.cli.output import columns
from remora_tools.charts import Dot, chart, page
from remora_tools.tuning import Decision, Goal, Plan, Point, System, describe

_MIB = 1 << 20
_PLOT_COLUMNS, _PLOT_ROWS = 60, 12


class Outcome(NamedTuple):
    """A finished search with all measured points.

    ``stanzas`` are the fields to write by model.
    """

    system: System
    goal: Goal
    points: Sequence[Point]
    decision: Decision
    stanzas: Mapping[str, str]
    seconds: float


def plan_text(system: System, plan: Plan) -> str:
    """Return a plan in words, with the names of the models if there are several."""
    if len(plan) == 1:
        return describe(plan[0])
    return "; ".join(f"{space.name}: {describe(settings)}" for space, settings in zip(system.models, plan, strict=True))


def point_row(system: System, goal: Goal, point: Point) -> tuple[str, ...]:
    """Return a line of the table of measurements."""
    latency = f"{point.latency_ns / 1e6:.2f}" if point.latency_ns < math.inf else "failed"
    held = "" if point.latency_ns <= goal.slo.limit_ns else "over"
    memory = f"{point.memory_bytes / _MIB:,.0f}"
    times = str(point.measurements)
    return (plan_text(system, point.plan), point.load.text(), f"{point.rate_per_s:,.1f}", latency, held, memory, times)


def table_head(goal: Goal) -> tuple[str, ...]:
    """Return the heads of the table of measurements."""
    return ("configuration", "load", "req/s", f"p{goal.slo.percent:g} ms", "", "MiB", "measured")


def as_table(outcome: Outcome) -> str:
    """Return the best measurement of each plan, the best plans first."""
    rows = [point_row(outcome.system, outcome.goal, point) for point in best_points(outcome)]
    return columns([table_head(outcome.goal), *rows])


def best_points(outcome: Outcome) -> list[Point]:
    """Return one point for each plan, the best first.

    It has the highest throughput within the objective, or the lowest latency.
    """
    limit_ns = outcome.goal.slo.limit_ns

    def key(point: Point) -> tuple[bool, float]:
        held = point.latency_ns <= limit_ns
        return (held, point.rate_per_s if held else -point.latency_ns)

    found: dict[Plan, Point] = {}
    for point in outcome.points:
        if point.plan not in found or key(point) > key(found[point.plan]):
            found[point.plan] = point
    return sorted(found.values(), key=key, reverse=True)


def as_text(outcome: Outcome) -> str:
    """Return the decision with its reasons, the comparison and the stanzas."""
    system, goal, _, decision, stanzas, seconds = outcome
    lines = [as_table(outcome), ""]
    best, present = decision.best, decision.present
    if best is None or not decision.holds:
        lines += decision.why
        if best is not None:
            lines.append(f"closest: {plan_text(system, best.plan)}: {_figures(goal, best)}")
        return "\n".join(lines)
    wanted = f"{goal.slo.text()}" + (f" at {goal.rate_per_s:g} requests per second" if goal.rate_per_s else "")
    lines.append(f"best for {wanted}: {plan_text(system, best.plan)}")
    lines.append(f"  {_figures(goal, best)}")
    if present is not None and best.plan != present.plan:
        lines.append(f"present: {plan_text(system, present.plan)}")
        lines.append(f"  {_figures(goal, present)}{_comparison(goal, best, present)}")
    elif best.plan == system.present:
        lines.append("  these are the present settings")
    lines += [f"why: {each}" for each in decision.why]
    lines.append(f"took {seconds:.0f} s")
    for name, text in stanzas.items():
        lines += ["", f"# {name}/config.pbtxt", text.rstrip("\n")]
    return "\n".join(lines)


def _figures(goal: Goal, point: Point) -> str:
    latency = f"{point.latency_ns / 1e6:.2f} ms" if point.latency_ns < math.inf else "with failures"
    memory = f", {point.memory_bytes / _MIB:,.0f} MiB" if point.memory_bytes else ""
    return (
        f"{point.rate_per_s:,.1f} requests per second, p{goal.slo.percent:g} {latency} at {point.load.text()}{memory}"
    )


def _comparison(goal: Goal, best: Point, present: Point) -> str:
    if present.latency_ns > goal.slo.limit_ns:
        return "; does not hold the objective"
    if goal.rate_per_s or not present.rate_per_s:
        return ""
    return f"; the best one answers {best.rate_per_s / present.rate_per_s:.2f} times as many"


def as_document(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as a JSON document, with times in milliseconds."""
    system, goal, points, decision, stanzas, seconds = outcome
    return {
        "objective": {
            "percentile": goal.slo.percent,
            "limit_ms": goal.slo.limit_ns / 1e6,
            "rate_per_s": goal.rate_per_s or None,
            "memory_bytes": goal.memory_bytes or None,
        },
        "holds": decision.holds,
        "best": _point_document(system, decision.best),
        "present": _point_document(system, decision.present),
        "why": list(decision.why),
        "measured": [_point_document(system, point) for point in points],
        "config_pbtxt": dict(stanzas),
        "seconds": round(seconds, 1),
    }


def _point_document(system: System, point: Point | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {
        "models": {
            space.name: {
                "max_batch_size": settings.limit,
                "dynamic_batching": settings.dynamic,
                "preferred_batch_size": list(settings.preferred),
                "max_queue_delay_microseconds": settings.delay_us,
                "instances": settings.instances,
                "threads": settings.runtime.threads or None,
                "accelerator": settings.runtime.provider or None,
            }
            for space, settings in zip(system.models, point.plan, strict=True)
        },
        "connections": point.load.connections or None,
        "requests_per_s": round(point.rate_per_s, 2),
        "latency_ms": round(point.latency_ns / 1e6, 3) if point.latency_ns < math.inf else None,
        "memory_bytes": point.memory_bytes,
        "measurements": point.measurements,
    }


def as_html(title: str, outcome: Outcome) -> str:
    """Return a page without scripts and external resources, with the Pareto chart."""
    return page(
        title,
        [
            (f"Throughput and p{outcome.goal.slo.percent:g}", _pareto_chart(outcome)),
            ("Result", f"<pre>{html.escape(as_text(outcome))}</pre>"),
        ],
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one exceeds in throughput at the same or a lower latency."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (each.latency_ns, -each.rate_per_s)):
        if not front or point.rate_per_s > front[-1].rate_per_s:
            front.append(point)
    return front


def as_plot(outcome: Outcome) -> str:
    """Return the Pareto chart for a terminal: throughput to the right, latency upwards."""
    points = [point for point in outcome.points if point.latency_ns < math.inf]
    if not points:
        return "nothing was measured without failures"
    most_rate, most_ns = _axes(outcome, points)
    limit_ns, slo = outcome.goal.slo.limit_ns, outcome.goal.slo
    cells = [[" "] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]

    def row_of(ns: float) -> int:
        return _PLOT_ROWS - 1 - int(min(ns / most_ns, 1.0) * (_PLOT_ROWS - 1))

    if limit_ns <= most_ns:
        cells[row_of(limit_ns)] = ["-"] * _PLOT_COLUMNS
    marked = [("P", outcome.decision.present), ("B", outcome.decision.best)]
    layers = [
        (".", points),
        ("o", pareto_front(points)),
        *((sign, [each]) for sign, each in marked if each is not None),
    ]
    for sign, shown in layers:
        for point in shown:
            column = int(point.rate_per_s / most_rate * (_PLOT_COLUMNS - 1))
            cells[row_of(point.latency_ns)][column] = sign
    title = f"p{slo.percent:g} up to {most_ns / 1e6:.3g} ms, over requests per second up to {most_rate:,.0f}"
    legend = f"B best, P present, o Pareto front, . other measurements, --- {slo.text()}"
    return "\n".join([title, *(f"|{''.join(row).rstrip()}" for row in cells), "+" + "-" * _PLOT_COLUMNS, legend])


def _axes(outcome: Outcome, points: Sequence[Point]) -> tuple[float, float]:
    """Return the highest throughput and latency of a chart, which ends at three times the objective."""
    most_rate = max((point.rate_per_s for point in points), default=1.0) * 1.05 or 1.0
    limit_ns = outcome.goal.slo.limit_ns
    most_ns = min(max((point.latency_ns for point in points), default=limit_ns), 3 * limit_ns)
    return most_rate, max(most_ns, 1.0) * 1.05


def _pareto_chart(outcome: Outcome) -> str:
    points = [point for point in outcome.points if point.latency_ns < math.inf]
    limit_ns = outcome.goal.slo.limit_ns
    most_rate, most_ns = _axes(outcome, points)

    def place(point: Point) -> tuple[float, float]:
        return point.rate_per_s / most_rate, min(point.latency_ns / most_ns, 1.0)

    lines = [("Pareto front", [place(point) for point in pareto_front(points)])]
    if limit_ns <= most_ns:
        lines.append((outcome.goal.slo.text(), [(0.0, limit_ns / most_ns), (1.0, limit_ns / most_ns)]))
    dots = []
    for point in points:
        text = f"{plan_text(outcome.system, point.plan)}, {_figures(outcome.goal, point)}"
        for name, marked in (("best", outcome.decision.best), ("present", outcome.decision.present)):
            if marked is not None and (point.plan, point.load) == (marked.plan, marked.load):
                dots.append(Dot(*place(point), f"{name}: {text}", marked=True))
                break
        else:
            dots.append(Dot(*place(point), text))
    ticks = [(part, f"{most_rate * part:.0f}/s") for part in (0.25, 0.5, 0.75, 1.0)]
    return chart(lines, ticks, f"p{outcome.goal.slo.percent:g}: {most_ns / 1e6:.3g} ms", dots)
