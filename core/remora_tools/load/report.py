"""Results of a load as table, JSON, CSV and HTML page. Pure."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from remora.cli.output import columns
from remora_tools.charts import chart, page
from remora_tools.deciders.latencies import Histogram
from remora_tools.load import Results
from remora_tools.load.resources import Usage

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
ROWS_PER_BATCH = "rows per batch"
"""The figure of the server that is not a time."""
_STREAMS = (("first", "first event"), ("between", "between events"))


class Level(NamedTuple):
    """Results at one load.

    Attributes:
        load: what the generator offered, such as "8 connections".
        results: of the stable windows.
        stable: True if throughput and latency had settled.
        processes: processes that sent the requests.
        server: mean times of a request in the server in microseconds, and `ROWS_PER_BATCH`; empty without statistics.
        notes: what limits the meaning of the results.
        usage: of the server's machine meanwhile.
        answered: False if no request was answered, or if all requests of the last window failed.
    """

    load: str
    results: Results
    stable: bool
    processes: int
    server: Mapping[str, float]
    notes: Sequence[str]
    usage: Usage = Usage()
    answered: bool = True


def as_document(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """Return the results as a JSON document. Times are in microseconds."""
    return [
        {
            "load": level.load,
            "requests_per_s": round(level.results.rate_per_s, 2),
            "requests": level.results.latency.count,
            "seconds": round(level.results.seconds, 3),
            "failures": level.results.failures,
            **({"failure_reasons": level.results.details} if level.results.details else {}),
            "stable": level.stable,
            "latency_us": _times(level.results.latency),
            "service_us": _times(level.results.service),
            **({"first_event_us": _times(level.results.first)} if level.results.first.count else {}),
            **({"between_events_us": _times(level.results.between)} if level.results.between.count else {}),
            **({"events_per_s": round(level.results.events_per_s, 2)} if level.results.first.count else {}),
            **({"tokens_per_s": round(level.results.tokens_per_s, 2)} if level.results.tokens else {}),
            "server_us": {name: round(us, 1) for name, us in level.server.items() if name != ROWS_PER_BATCH},
            **(
                {"server_rows_per_batch": round(level.server[ROWS_PER_BATCH], 1)}
                if ROWS_PER_BATCH in level.server
                else {}
            ),
            "machine": level.usage.columns(),
            "generator": {"processes": level.processes, "cpu": round(level.results.cpu, 3)},
            "notes": list(level.notes),
        }
        for level in levels
    ]


def _times(values: Histogram) -> dict[str, float]:
    found = {"mean": values.mean_ns / 1e3, **{f"p{p:g}": values.percentile(p) / 1e3 for p in PERCENTILES}}
    return {name: round(us, 1) for name, us in {**found, "max": values.percentile(100) / 1e3}.items()}


def as_table(levels: Sequence[Level]) -> str:
    """Return the results as a table for people, with the server's share and the notes below."""
    rows = [("load", "req/s", "failed", "mean us", "p50", "p90", "p95", "p99", "p99.9", "max", "")]
    for level in levels:
        times = [f"{us:.0f}" for us in _times(level.results.latency).values()]
        failed = sum(level.results.failures.values())
        rate = f"{level.results.rate_per_s:.1f}"
        rows.append((level.load, rate, str(failed), *times, "" if level.stable else "not stable"))  # type: ignore[arg-type]
    parts = [columns(rows)]
    for name, title in _STREAMS:
        found = [(level.load, getattr(level.results, name)) for level in levels]
        if any(values.count for _, values in found):
            table = [(title, "mean us", "p50", "p90", "p95", "p99", "p99.9", "max")]
            table += [(load, *(f"{us:.0f}" for us in _times(values).values())) for load, values in found]  # type: ignore[misc]
            parts.append(columns(table))
    for title, values_of in _RATES:
        if any(values_of(level) for level in levels):
            names = list(dict.fromkeys(name for level in levels for name in values_of(level)))
            table_ = [(title, *names)]
            for level in levels:
                values = values_of(level)
                table_.append((level.load, *(f"{values[name]:.1f}" if name in values else "-" for name in names)))
            parts.append(columns(table_))
    notes = [f"{level.load}: {note}" for level in levels for note in level.notes]
    for level in levels:
        for why, count in level.results.failures.items():
            detail = level.results.details.get(why)
            notes.append(f"{level.load}: {count} x {why}" + (f": {detail}" if detail else ""))
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _stream_rates(level: Level) -> dict[str, float]:
    results = level.results
    found = {"events/s": results.events_per_s} if results.first.count else {}
    return {**found, "tokens/s": results.tokens_per_s} if results.tokens else found


_RATES: Sequence[tuple[str, Callable[[Level], Mapping[str, float]]]] = (
    ("streams", _stream_rates),
    ("in the server, mean us", lambda level: level.server),
    ("the server's machine", lambda level: level.usage.columns()),
)


def as_csv(levels: Sequence[Level]) -> str:
    """Return the results as CSV with one line per load."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    names = list(_times(Histogram()))
    server = list(next((level.server for level in levels if level.server), {}))
    streams = [pair for pair in _STREAMS if any(getattr(level.results, pair[0]).count for level in levels)]
    machine = list(dict.fromkeys(name for level in levels for name in level.usage.columns()))
    heads = ["load", "requests_per_s", "requests", "failures", "stable", *(f"latency_{name}_us" for name in names)]
    heads += [f"{title.replace(' ', '_')}_{name}_us" for _, title in streams for name in names]
    heads += ["events_per_s", "tokens_per_s"] if streams else []
    heads += ["server_rows_per_batch" if name == ROWS_PER_BATCH else f"server_{name}_us" for name in server]
    heads += ["machine_" + name.replace("%", "percent").replace(" ", "_").lower() for name in machine]
    lines.writerow([*heads, "processes", "generator_cpu"])
    for level in levels:
        results = level.results
        line = [level.load, round(results.rate_per_s, 2), results.latency.count, sum(results.failures.values())]
        times = list(_times(results.latency).values())
        for field, _ in streams:
            times += _times(getattr(results, field)).values()
        times += [round(results.events_per_s, 2), round(results.tokens_per_s, 2)] if streams else []
        inside: list[float | str] = [round(level.server[name], 1) if name in level.server else "" for name in server]
        inside += [level.usage.columns().get(name, "") for name in machine]
        lines.writerow([*line, level.stable, *times, *inside, level.processes, round(results.cpu, 3)])
    return out.getvalue()


# -- HTML -------------------------------------------------------------------------------------------------------------


def as_html(title: str, levels: Sequence[Level]) -> str:
    """Return a page without scripts and external resources: curves of latency, and the tables."""
    curves = [(level.load, level.results.latency) for level in levels if level.results.latency.count]
    return page(
        title,
        [
            ("Latency by percentile", _latency_chart(curves)),
            ("Latency by throughput", _throughput_chart(levels)),
            ("Results", f"<pre>{html.escape(as_table(levels))}</pre>"),
        ],
    )


def _latency_chart(curves: Sequence[tuple[str, Histogram]]) -> str:
    """Return the latency by percentile, with 90, 99 and 99.9 % at equal distances."""
    import math

    most = max((values.percentile(100) for _, values in curves), default=1) or 1
    lines = []
    for load, values in curves:
        points = [(min(-math.log10(max(1 - share, 1e-4)), 4) / 4, ns / most) for ns, share in values.curve()]
        lines.append((load, points))
    ticks = [(-math.log10(1 - p / 100) / 4, f"{p:g}%") for p in (50, 90, 99, 99.9, 99.99)]
    return chart(lines, ticks, f"{most / 1e6:.3g} ms")


def _throughput_chart(levels: Sequence[Level]) -> str:
    most_rate = max((level.results.rate_per_s for level in levels), default=1.0) or 1.0
    most = max((level.results.latency.percentile(99) for level in levels), default=1) or 1
    lines = []
    for percent in (50.0, 99.0):
        found = [(level.results.rate_per_s, level.results.latency.percentile(percent)) for level in levels]
        lines.append((f"p{percent:g}", [(rate / most_rate, ns / most) for rate, ns in sorted(found)]))
    ticks = [(part, f"{most_rate * part:.0f}/s") for part in (0.25, 0.5, 0.75, 1.0)]
    return chart(lines, ticks, f"{most / 1e6:.3g} ms")
