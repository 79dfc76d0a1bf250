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
from urllib.parse import SplitResult

from remora.api.system import usable_cpus
from remora.cli.client import (
    ApiClient,
    HttpClient,
    call_json,
    model_path,
    open_client,
    raise_for_status,
    request_headers,
)
from remora.cli.output import UsageError, check_writable, one_line, write_whole
from remora.errors import RemoraError, UnavailableError
from remora.system.json_text import read_json
from remora_tools.deciders.stability import WINDOWS, Window, is_stable
from remora_tools.load import GRPC, GRPC_STREAM, HTTP, MOST_WAITING, Plan, Results, merge_results, results_from_json
from remora_tools.load.report import ROWS_PER_BATCH, Level, as_csv, as_document, as_html, as_table
from remora_tools.load.requests import (
    bodies_of,
    grpc_message,
    http_message,
    in_sequence,
    infer_message,
    interleave,
    model_requests,
    server_address,
)
from remora_tools.load.resources import Usage, mean_usage, read_usage

_SATURATED = 0.9
"""Share of a processor above which the generator limits the load."""
_LATE = 0.02
"""Share of the requests of an open loop that may wait for a connection at the end."""
_MANY_WAITING = MOST_WAITING // 2
"""Number of waiting requests from which there may be more that the generator does not count."""
_START_NS = 50_000_000
_HTTP_PORT, _METRICS_PORT = 8000, 8002
"""Triton's ports, which are ours, too."""
_METRICS_TIMEOUT_S = 5.0

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
    if options.sequence and (options.path or len(options.models) != 1 or options.requests):
        raise UsageError("--sequence takes one MODEL, without --path and --requests")
    if options.stream and not options.grpc:
        raise UsageError("--stream needs --grpc: streams of HTTP are measured with --path")
    if options.rate and options.concurrency:
        raise UsageError("choose --concurrency (closed loop) or --rate (open loop)")
    for path in (options.csv, options.html):
        if path is not None:
            check_writable(path)
    offers = [_Offer(options.connections, rate) for rate in options.rate]
    offers = offers or [_Offer(count, 0.0) for count in options.concurrency or (1,)]
    progress = _Progress(options.quiet)
    server = _Server(open_client(options), options)
    loads = _Loads(server, options, progress)
    try:
        plan = _plan(server.client, options)
        for offer in offers:
            loads.measure(plan, offer)
            progress.note(as_table(loads.levels[-1:]).splitlines()[1])
    finally:
        progress.clear()
        server.close()
        if loads.levels:  # also after Ctrl-C, or if the server is gone: what was measured stays true
            _write(options, loads.levels)
    return 1 if any(not level.answered for level in loads.levels) else 0


def _write(options: argparse.Namespace, levels: Sequence[Level]) -> None:
    """Print the results, then write them to files, whose disk may be full."""
    title = f"remora bench load {' '.join(name for name, _ in options.models) or options.path}"
    print(json.dumps(as_document(levels), indent=2) if options.json_out else as_table(levels), flush=True)
    if options.csv:
        write_whole(options.csv, lambda file: file.write(as_csv(levels).encode()))
    if options.html:
        write_whole(options.html, lambda file: file.write(as_html(title, levels).encode()))


class _Progress:
    """Progress on stderr.

    Each load has a line, and on a terminal each window rewrites one.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._width = 0

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def window(self, load: str, number: int, results: Results) -> None:
        """Show the results of a window; number 0 is one of the warm-up."""
        if self._quiet or not self._terminal:
            return
        text = describe_window(load, number, results)
        print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def clear(self) -> None:
        """Remove the line that is rewritten."""
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


def describe_window(load: str, number: int, results: Results) -> str:
    """Return a line about a window."""
    failed = sum(results.failures.values())
    return (
        f"{load}, {f'window {number}' if number else 'warm-up'}: {results.rate_per_s:,.1f} req/s, "
        f"p99 {results.latency.percentile(99) / 1e6:,.2f} ms{f', {failed} failed' if failed else ''}"
    )


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
    version = "" if options.model_version is None else str(options.model_version)
    several: list[list[bytes]] = []
    for name, _ in options.models:
        requests = model_requests(client, name, options)
        if options.sequence:
            requests = [each for request in requests for each in in_sequence(request, options.sequence)]
        path = f"{model_path(name, options.model_version)}/infer"
        several.append(
            [
                grpc_message(name, version, request, streams=options.stream)
                if options.grpc
                else infer_message(parts, path, request, headers, as_json=options.encoding == "json")
                for request in requests
            ]
        )
    if several:
        messages += interleave(several, [weight for _, weight in options.models])
    host, tls = parts.hostname or "", parts.scheme == "https"
    if options.grpc:
        scheme, _, address = options.grpc.rpartition("://")
        host, _, port_text = address.rpartition(":")
        if not host or not port_text.isdigit() or scheme not in ("", "grpc", "grpcs") or "@" in host:
            raise UsageError("--grpc: expected HOST:PORT or grpcs://HOST:PORT without user")
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
        window_ns=int(min(options.window, options.duration) * 1e9),
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


class _Loads:
    """Measurement of one load after the other, with the results so far in ``levels``."""

    def __init__(self, server: _Server, options: argparse.Namespace, progress: _Progress) -> None:
        self._server = server
        self._options = options
        self._progress = progress
        self._processes = options.processes or 1
        self._most = options.processes or max(usable_cpus() - 1, 1)
        self.levels: list[Level] = []

    def measure(self, plan: Plan, offer: _Offer) -> None:
        """Measure a load, again with more processes while the generator is saturated.

        Raises RemoraError. An exception, which may be KeyboardInterrupt, leaves what was measured before it.
        """
        load, place = offer.text(self._options.arrivals), len(self.levels)
        while True:
            plans = split_plan(plan, offer.connections, offer.rate_per_s, self._processes)
            run = _Run(self._server, self._options)
            try:
                run.measure(plans, lambda number, found: self._progress.window(load, number, found))
            except (KeyboardInterrupt, RemoraError) as error:
                reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
                if run.windows:
                    self.levels[place:] = [run.level(offer, load, len(plans), [f"the load ended early: {reason}"])]
                elif self.levels[place:]:
                    level = self.levels[place]
                    note = f"the repetition with {len(plans)} processes ended early: {reason}"
                    self.levels[place] = level._replace(notes=[*level.notes, note])
                raise
            self.levels[place:] = [run.level(offer, load, len(plans))]
            if run.cpu < _SATURATED or self._processes >= min(self._most, offer.connections):
                return
            self._processes = min(self._processes * 2, self._most)
            self._progress.note(f"the generator is saturated: again with {self._processes} processes")


class _Window(NamedTuple):
    """Results of a window, and the totals and the use of the server's machine at its end."""

    results: Results
    totals: Totals | None
    usage: Sequence[Usage]


class _Run:
    """Windows of one load, with the server's figures for them.

    The figures are mean times from its statistics, and the use of its machine from its metrics.
    """

    def __init__(self, server: _Server, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._before: Totals | None = None
        self.windows: list[_Window] = []

    def measure(self, plans: Sequence[Plan], show: Callable[[int, Results], None]) -> None:
        """Measure until the windows are stable or the time is over. Raises RemoraError."""
        server, options = self._server, self._options
        server.usage()  # metrics that do not answer delay this, and no window
        window_s = plans[0].window_ns / 1e9
        with _generators(plans) as next_window:
            for _ in range(max(round(options.warm_up / window_s), 0)):
                show(0, next_window())
            self._before = server.statistics()
            server.usage()  # the next one counts from here
            for number in range(1, max(round(options.duration / window_s), 1) + 1):
                results = next_window()
                self.windows.append(_Window(results, server.statistics(), server.usage()))
                show(number, results)
                if not options.fixed and self.stable:
                    return

    @property
    def stable(self) -> bool:
        """True if the last windows agree."""
        return is_stable([_settled(each.results) for each in self.windows])

    @property
    def _reported(self) -> list[_Window]:
        return self.windows[-WINDOWS:] if self.stable and not self._options.fixed else self.windows

    @property
    def cpu(self) -> float:
        """Share of a processor that the generator's busiest process used."""
        return max(each.results.cpu for each in self._reported)

    def level(self, offer: _Offer, load: str, processes: int, notes: Sequence[str] = ()) -> Level:
        """Return the results of the windows to report, with notes on what limits their meaning."""
        windows = self._reported
        skipped = len(self.windows) - len(windows)
        before = self.windows[skipped - 1].totals if skipped else self._before
        results = merge_results([each.results for each in windows], same_time=False)
        usage = mean_usage([reading for each in windows for reading in each.usage])
        last = windows[-1]
        times = mean_times(before, last.totals)
        # A window without failures may be too short for an answer.
        is_lost = bool(last.results.failures) and not last.results.latency.count
        lost = ["all requests of the last window failed"] if is_lost else []
        notes = [*notes, *lost, *limits_of(offer.connections, offer.rate_per_s, results)]
        answered = results.latency.count > 0 and not is_lost
        return Level(load, results, self.stable, processes, times, notes, usage, answered)


def limits_of(connections: int, rate_per_s: float, results: Results) -> Iterator[str]:
    """Return notes on what limited a load: the generator, or a server slower than it."""
    if results.cpu >= _SATURATED:
        yield f"the generator is saturated ({results.cpu:.0%} of a processor): the server can do more"
    if rate_per_s and results.waiting > min(_LATE * rate_per_s * results.seconds, _MANY_WAITING):
        yield (
            f"{results.rate_per_s:.1f} of {rate_per_s:g} requests per second were answered; {results.waiting} "
            f"{'or more ' if results.waiting > _MANY_WAITING else ''}were waiting for one of {connections} "
            "connections at the end"
        )


def _settled(results: Results) -> Window:
    return Window(results.rate_per_s, results.service.mean_ns)


@contextmanager
def _generators(plans: Sequence[Plan]) -> Iterator[Callable[[], Results]]:
    """Start a process for each plan and yield a function that waits for their next window.

    Raises UnavailableError for a process that cannot connect or that ends.
    """
    words = [sys.executable, "-m", "remora_tools.load.generator"]
    running: list[subprocess.Popen[str]] = []

    def line_of(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        document = read_json(line) if line.startswith('{"error"') else {}
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


# -- statistics and metrics of the server -----------------------------------------------------------------------------


class _Server:
    """Statistics and metrics of the server under load, as far as it has them. Raises UsageError."""

    def __init__(self, client: ApiClient, options: argparse.Namespace) -> None:
        self.client = client
        self._names = [name for name, _ in options.models]
        self._version = options.model_version
        self._required = bool(options.metrics_url)
        parts, port = server_address(options.url)
        url = options.metrics_url or (_metrics_url(parts) if port == _HTTP_PORT else "")
        # A key is not for other hosts.
        headers = request_headers(options) if url and server_address(url)[0].hostname == parts.hostname else {}
        self._metrics = HttpClient(url, min(options.timeout, _METRICS_TIMEOUT_S), headers) if url else None

    def statistics(self) -> Totals | None:
        """Return the totals of the models, or None if the server does not state them."""
        totals: dict[str, tuple[int, int]] = {}
        try:
            for name in self._names:
                document = call_json(self.client, "GET", f"{model_path(name, self._version)}/stats")
                for row in document["model_stats"]:
                    for key, value in row["inference_stats"].items():
                        count, ns = totals.get(key, (0, 0))
                        totals[key] = count + int(value.get("count", 0)), ns + int(value.get("ns", 0))
                    batches, rows = totals.get("executions", (0, 0))
                    totals["executions"] = batches + int(row["execution_count"]), rows + int(row["inference_count"])
        except (RemoraError, KeyError, TypeError, ValueError, AttributeError):
            return None
        return totals

    def usage(self) -> list[Usage]:
        """Return a reading of the metrics, or none if there are no metrics.

        Raises RemoraError if --metrics-url names them.
        """
        if self._metrics is None:
            return []
        try:
            answer = raise_for_status(self._metrics, self._metrics.exchange("GET", ""))
        except RemoraError:
            if self._required:
                raise
            self._metrics = None
            return []
        return [read_usage(answer.body.decode(errors="replace"))]

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        if self._metrics is not None:
            self._metrics.close()


def _metrics_url(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{_METRICS_PORT}/metrics"


def mean_times(before: Totals | None, after: Totals | None) -> dict[str, float]:
    """Return mean microseconds per request between two statistics, and the mean rows of a batch.

    Without one of the statistics there are no times, because those of the other have another span.
    """
    if before is None or after is None:
        return {}
    found: dict[str, float] = {}
    names = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}
    for key, name in {"success": "whole", **names}.items():
        count, ns = (after.get(key, (0, 0))[part] - before.get(key, (0, 0))[part] for part in (0, 1))
        if count > 0:
            found[name] = ns / count / 1e3
    batches, rows = (after.get("executions", (0, 0))[n] - before.get("executions", (0, 0))[n] for n in (0, 1))
    if batches > 0:
        found[ROWS_PER_BATCH] = rows / batches
    return found
