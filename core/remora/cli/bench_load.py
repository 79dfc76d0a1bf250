"""Command `remora bench load`, which measures a server's throughput and latency under load."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from remora.cli.client import ApiClient, call_json, model_path, open_client, request_headers
from remora.cli.load import GRPC, GRPC_STREAM, HTTP, Plan, Results, merge_results, results_from_json
from remora.cli.load.report import Level, as_csv, as_document, as_html, as_table
from remora.cli.load.requests import (
    bodies_of,
    grpc_message,
    http_message,
    in_sequence,
    infer_message,
    model_requests,
    server_address,
)
from remora.cli.output import UsageError
from remora.errors import RemoraError, UnavailableError
from remora.system.cpus import usable_cpus
from remora.traffic.stability import WINDOWS, Window, is_stable

_SATURATED = 0.9
"""Share of a processor above which the generator limits the load."""
_LATE = 0.02
"""Share of the requests of an open loop that may wait for a connection at the end."""
_START_NS = 50_000_000

Totals = Mapping[str, tuple[int, int]]
"""Count and nanoseconds by name, from a server's statistics."""


class _Offer(NamedTuple):
    """One load: connections of a closed loop, or a rate per second."""

    connections: int
    rate_per_s: float

    def text(self, shape: str) -> str:
        """Return the load for a table."""
        return f"{self.rate_per_s:g}/s {shape}" if self.rate_per_s else f"{self.connections} connections"


def bench_load(options: argparse.Namespace) -> int:
    """Run the command. Raises RemoraError, UsageError, OSError."""
    if not options.models and not options.path:
        raise UsageError("expected a MODEL, or --path with --body")
    if options.sequence and (options.grpc or options.path or len(options.models) != 1 or options.requests):
        raise UsageError("--sequence takes one MODEL over HTTP, without --requests")
    if options.stream and not options.grpc:
        raise UsageError("--stream needs --grpc: streams of HTTP are measured with --path")
    if options.rate and options.concurrency:
        raise UsageError("choose --concurrency (closed loop) or --rate (open loop)")
    offers = [_Offer(options.connections, rate) for rate in options.rate]
    offers = offers or [_Offer(count, 0.0) for count in options.concurrency or (1,)]
    client = open_client(options)
    try:
        plan = _plan(client, options)
        levels = []
        processes = options.processes or 1
        for offer in offers:
            level, processes = _measure(client, options, plan, offer, processes)
            levels.append(level)
            _progress(options, as_table([level]).splitlines()[1])
    finally:
        client.close()
    _write(options, levels)
    return 1 if any(not level.results.latency.count for level in levels) else 0


def _write(options: argparse.Namespace, levels: Sequence[Level]) -> None:
    title = f"remora bench load {' '.join(options.models) or options.path}"
    if options.csv:
        options.csv.write_text(as_csv(levels), encoding="utf-8")
    if options.html:
        options.html.write_text(as_html(title, levels), encoding="utf-8")
    print(json.dumps(as_document(levels), indent=2) if options.json_out else as_table(levels))


def _progress(options: argparse.Namespace, text: str) -> None:
    if not options.quiet:
        print(text, file=sys.stderr, flush=True)


# -- the plan ---------------------------------------------------------------------------------------------------------


def _plan(client: ApiClient, options: argparse.Namespace) -> Plan:
    """Return the plan without load: address and encoded requests."""
    parts, port = server_address(options.url)
    headers = request_headers(options)
    messages: list[bytes] = []
    if options.path:
        json_type = {"content-type": "application/json", **headers}
        bodies = bodies_of(options.body) if options.body else [b"{}"]
        messages = [http_message(parts, options.path, body, json_type) for body in bodies]
    for name in options.models:
        for request in model_requests(client, name, options):
            if options.grpc:
                version = "" if options.model_version is None else str(options.model_version)
                messages.append(grpc_message(name, version, request, streams=options.stream))
                continue
            path = f"{model_path(name, options.model_version)}/infer"
            for each in in_sequence(request) if options.sequence else (request,):
                messages.append(infer_message(parts, path, each, headers, as_json=options.encoding == "json"))
    host, tls = parts.hostname or "", parts.scheme == "https"
    if options.grpc:
        scheme, _, address = options.grpc.rpartition("://")
        host, _, port_text = address.rpartition(":")
        if not host or not port_text.isdigit() or scheme not in ("", "grpc", "grpcs"):
            raise UsageError(f"--grpc {options.grpc}: expected HOST:PORT or grpcs://HOST:PORT")
        port, tls = int(port_text), scheme == "grpcs"
    grpc = GRPC_STREAM if options.stream else GRPC
    return Plan(
        grpc if options.grpc else HTTP,
        host.strip("[]"),
        port,
        tls,
        tuple(messages),
        connections=1,
        rate_per_s=0.0,
        shape=options.arrivals,
        seed=options.seed or os.getpid(),
        part=0,
        parts=1,
        sequence=options.sequence,
        window_ns=int(options.window * 1e9),
        timeout_s=options.timeout,
        metadata=tuple(headers.items()) if options.grpc else (),
    )


def split_plan(plan: Plan, connections: int, rate_per_s: float, processes: int) -> list[Plan]:
    """Return the plans of the processes that offer a load together."""
    processes = min(processes, connections)
    return [
        replace(
            plan,
            connections=connections // processes + (part < connections % processes),
            rate_per_s=rate_per_s,
            part=part,
            parts=processes,
        )
        for part in range(processes)
    ]


# -- one load ---------------------------------------------------------------------------------------------------------


def _measure(
    client: ApiClient, options: argparse.Namespace, plan: Plan, offer: _Offer, processes: int
) -> tuple[Level, int]:
    """Measure a load, and return the number of processes that it takes."""
    most = options.processes or max(usable_cpus() - 1, 1)
    while True:
        plans = split_plan(plan, offer.connections, offer.rate_per_s, processes)
        windows, stable, server = _run(client, options, plans)
        results = merge_results(windows, same_time=False)
        if results.cpu < _SATURATED or processes >= min(most, offer.connections):
            break
        processes = min(processes * 2, most)
        _progress(options, f"the generator is saturated: again with {processes} processes")
    notes = []
    if results.cpu >= _SATURATED:
        notes.append(f"the generator is saturated ({results.cpu:.0%} of a processor): the server can do more")
    if offer.rate_per_s and results.waiting > _LATE * offer.rate_per_s * results.seconds:
        notes.append(
            f"{results.rate_per_s:.1f} of {offer.rate_per_s:g} requests per second were answered; {results.waiting} "
            f"were waiting for one of {offer.connections} connections at the end"
        )
    return Level(offer.text(options.arrivals), results, stable, len(plans), server, notes), processes


def _run(
    client: ApiClient, options: argparse.Namespace, plans: Sequence[Plan]
) -> tuple[list[Results], bool, dict[str, float]]:
    """Return the windows to report, whether they are stable, and the server's mean times."""
    windows: list[Results] = []
    totals: list[Totals] = []
    warm_up = max(round(options.warm_up / options.window), 0)
    longest = max(round(options.duration / options.window), 1)
    with _generators(plans) as next_window:
        for _ in range(warm_up):
            next_window()
        totals.append(_statistics(client, options))
        while len(windows) < longest:
            windows.append(next_window())
            totals.append(_statistics(client, options))
            if not options.fixed and is_stable([_settled(each) for each in windows]):
                break
    stable = is_stable([_settled(each) for each in windows])
    used = WINDOWS if stable and not options.fixed else len(windows)
    return windows[-used:], stable, mean_times(totals[-used - 1], totals[-1])


def _settled(results: Results) -> Window:
    return Window(results.rate_per_s, results.service.mean_ns)


@contextmanager
def _generators(plans: Sequence[Plan]) -> Iterator[Callable[[], Results]]:
    """Start a process for each plan and yield a function that waits for their next window.

    Raises UnavailableError for a process that cannot connect or that ends.
    """
    words = [sys.executable, "-m", "remora.cli.load.generator"]
    running: list[subprocess.Popen[str]] = []

    def line_of(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        document = json.loads(line) if line.startswith('{"error"') else {}
        if not line or document:
            raise UnavailableError(document.get("error") or "a process of the load generator ended")
        return line

    def say(process: subprocess.Popen[str], text: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{text}\n")
        process.stdin.flush()

    try:
        for plan in plans:
            running.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            say(running[-1], json.dumps(plan.to_json()))
        for process in running:
            line_of(process)
        begin_ns = time.monotonic_ns() + _START_NS
        for process in running:
            say(process, str(begin_ns))
        yield lambda: merge_results(
            [results_from_json(json.loads(line_of(process))) for process in running], same_time=True
        )
    finally:
        for process in running:
            process.kill()
            process.communicate()


# -- the server's statistics ------------------------------------------------------------------------------------------


def _statistics(client: ApiClient, options: argparse.Namespace) -> Totals:
    """Return the totals of the models, empty if the server has no statistics."""
    totals: dict[str, tuple[int, int]] = {}
    for name in options.models:
        try:
            document = call_json(client, "GET", f"{model_path(name, options.model_version)}/stats")
            rows = document["model_stats"]
        except (RemoraError, KeyError, TypeError):
            return {}
        for row in rows:
            for key, value in row["inference_stats"].items():
                count, ns = totals.get(key, (0, 0))
                totals[key] = count + int(value.get("count", 0)), ns + int(value.get("ns", 0))
            executed, inferred = totals.get("executions", (0, 0))
            totals["executions"] = executed + int(row["execution_count"]), inferred + int(row["inference_count"])
    return totals


def mean_times(before: Totals, after: Totals) -> dict[str, float]:
    """Return mean microseconds per request between two statistics, and the mean rows of a batch."""
    found: dict[str, float] = {}
    names = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}
    for key, name in {"success": "whole", **names}.items():
        count, ns = (after.get(key, (0, 0))[part] - before.get(key, (0, 0))[part] for part in (0, 1))
        if count > 0:
            found[name] = ns / count / 1e3
    batches, rows = (after.get("executions", (0, 0))[n] - before.get("executions", (0, 0))[n] for n in (0, 1))
    if batches > 0:
        found["rows per batch"] = rows / batches
    return found
