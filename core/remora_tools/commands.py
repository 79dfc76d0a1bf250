"""Arguments of `score`, `bench`, `replay` and `tune`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from remora.cli.arguments import (
    add_header,
    add_imports,
    add_inputs,
    add_server,
    add_timeout,
    bind,
    count,
    duration_ms,
    pair,
    seconds,
)
from remora_tools.deciders.arrivals import SHAPES
from remora_tools.deciders.objective import Slo

_MOST_PER_S = 1_000_000
"""Largest rate of an open loop; a process sends about 10,000 requests per second."""


def add_score(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora score`."""
    parser.description = (
        "Run every row of INPUT through a model in this process and write the results to OUTPUT. Formats: "
        ".csv, .jsonl, .npy, .parquet, or a folder of images; each file is local or in a bucket (s3://, gs://, az://). "
        "A run that is interrupted goes on where it stopped when the command is repeated. Rows that cannot be scored "
        "are written to a file beside OUTPUT with the reason."
    )
    parser.add_argument("models", metavar="PATH", help="model file, model directory or repository, or its URL")
    parser.add_argument(
        "input", metavar="INPUT", help="file with a row per line or record, or folder of images, or its URL"
    )
    parser.add_argument("output", metavar="OUTPUT", help="file or URL to write")
    parser.add_argument("--model", default="", metavar="NAME", help="model of a repository that holds several")
    parser.add_argument(
        "--column",
        type=pair,
        action="append",
        default=[],
        metavar="INPUT=COLUMN,...",
        help="columns of an input (default: the column of its name; all columns for the only input); repeatable",
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="COLUMN", help="column to copy to OUTPUT; repeatable"
    )
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        dest="outputs",
        metavar="NAME",
        help="output to write (default: all); repeatable",
    )
    numbers: dict[str, Any] = {"type": _numbers, "default": (), "metavar": "X,..."}
    parser.add_argument(
        "--pixel-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="factor of pixels from 0 to 255 (default %(default)g)",
    )
    parser.add_argument("--pixel-mean", **numbers, help="numbers to subtract from the channels after the factor")
    parser.add_argument("--pixel-std", **numbers, help="numbers to divide the channels by after that")
    parser.add_argument("--batch", type=count, default=0, metavar="ROWS", help="batch size (default: the fastest)")
    parser.add_argument(
        "--most-bad-rows", type=count, default=1000, metavar="N", help="stop after more bad rows (default %(default)s)"
    )
    parser.add_argument(
        "--segment-secs",
        type=count,
        default=10,
        metavar="S",
        help="secure the results every S seconds (default %(default)s)",
    )
    parser.add_argument(
        "--work-directory", type=Path, metavar="DIR", help="folder of unfinished results (default: OUTPUT.unfinished)"
    )
    parser.add_argument("--restart", action="store_true", help="discard the results of an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    parser.add_argument(
        "--backend-config", action="append", default=[], metavar="BACKEND,KEY=VALUE", help="as for serve; repeatable"
    )
    bind(parser, _score)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {text!r}") from None


def _score(options: argparse.Namespace) -> int:
    from remora_tools.score import score

    return score(options)


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora tune`."""
    parser.description = (
        "Search batch size, queue delay, instances, threads and accelerators of the models at PATH: the "
        "highest throughput that holds the objective, or with --rate the fewest instances. Models are loaded and "
        "measured in this process. Ensembles and several models are tuned together. The exit code is 1 if no measured "
        "configuration holds the objective; an interrupt prints the best so far."
    )
    parser.add_argument("models", metavar="PATH", help="model file, model directory, repository or Python file")
    parser.add_argument(
        "--slo", type=objective_of, required=True, metavar="p99<=20ms", help="percentile of the latency and its limit"
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="model to tune (default: all); repeatable"
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=0.0,
        metavar="R",
        help="requests per second to hold with the fewest instances",
    )
    parser.add_argument(
        "--budget", type=duration_s_of, default=120.0, metavar="2m", help="time for measurements (default 2m)"
    )
    parser.add_argument(
        "--memory", type=bytes_of, default=0, metavar="2GiB", help="most resident memory of the process and its workers"
    )
    parser.add_argument(
        "--window", type=duration_s_of, default=1.0, metavar="1s", help="least time of a measurement (default 1s)"
    )
    parser.add_argument("--batch", type=count, default=0, metavar="ROWS", help="rows of each request (default 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write a page with the Pareto chart")
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="also write the results as JSON")
    parser.add_argument("--apply", action="store_true", help="write the best settings into each model's config.pbtxt")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    parser.add_argument(
        "--backend-config", action="append", default=[], metavar="BACKEND,KEY=VALUE", help="as for serve; repeatable"
    )
    add_inputs(parser, "--request")
    parser.set_defaults(output=[], classes=0)
    bind(parser, _tune)


def _tune(options: argparse.Namespace) -> int:
    from remora_tools.tune import tune

    return tune(options)


def objective_of(text: str) -> Slo:
    """Parse "p99<=20ms"."""
    match = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)\s*<=?\s*(\d.*)", text.strip(), re.ASCII)
    if match is None or not 0 < float(match[1]) < 100:
        raise argparse.ArgumentTypeError(f"expected a percentile and its limit such as 'p99<=20ms', got {text!r}")
    return Slo(float(match[1]), round(duration_s_of(match[2]) * 1e9))


def duration_s_of(text: str) -> float:
    """Parse "2m", "90s", "20ms" or "500us" to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)", text.strip(), re.ASCII)
    value = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]] if match else 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a time such as 2m, 90s or 20ms, got {text!r}")
    return value


def bytes_of(text: str) -> int:
    """Parse "2GiB" or "500MiB" to bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B?)?", text.strip(), re.ASCII)
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    value = int(float(match[1]) * units[(match[2] or "")[:1]]) if match else 0
    if not 0 < value < 1 << 60:
        raise argparse.ArgumentTypeError(f"expected an amount of memory such as 2GiB, got {text!r}")
    return value


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora replay`."""
    parser.description = (
        "Send the requests that 'remora serve --capture' has written to a server, in their order, and "
        "compare the answers with the captured ones. The exit code is 1 if an answer differs."
    )
    parser.add_argument(
        "file",
        metavar="FILE|URL",
        help="file of captured requests (.jsonl, .parquet), or folder of such files; local or in a bucket (s3://, "
        "gs://, az://)",
    )
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--against", dest="url", default="", metavar="URL", help="URL of the server")
    server.add_argument("--profile", default="", metavar="NAME", help="server of the file of profiles, with its key")
    parser.add_argument("--model", default="", metavar="NAME", help="send the requests of this model alone")
    parser.add_argument(
        "--relative", type=float, default=0.0, metavar="R", help="tolerance of floats, relative (default: exact)"
    )
    parser.add_argument(
        "--absolute", type=float, default=0.0, metavar="A", help="tolerance of floats, absolute (default: exact)"
    )
    parser.add_argument("--most", type=count, default=0, metavar="N", help="send at most N requests (default: all)")
    parser.add_argument(
        "--show", type=count, default=10, metavar="N", help="print the first N differences (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", dest="json_out", help="print the counts as JSON")
    add_header(parser)
    add_timeout(parser, 60.0)
    bind(parser, _replay)


def _replay(options: argparse.Namespace) -> int:
    from remora_tools.replay import replay

    return replay(options)


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add the actions of `remora bench`."""
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "coldstart",
        help="measure the time from process start to the first response",
        description="Start `remora serve PATH...` as a child process, send each model one generated request, and "
        "print the time to the first response, then the phases of the start. Exit with 1 and the slowest phase if the "
        "first response exceeds the budget.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="models to serve, as for `remora serve`")
    parser.add_argument("--budget", type=duration_ms, metavar="2s", help="maximum time to the first response")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="starts; reports the median (default 1)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the report for --baseline")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="saved report to compare with")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="FLAG", help="server flag, as --FLAG=X; repeatable"
    )
    add_imports(parser)
    parser.add_argument("--json-out", action="store_true", help="print the report as JSON")
    add_header(parser)
    add_timeout(parser, 300.0)
    bind(parser, _coldstart)
    _add_load(kinds)


def _coldstart(options: argparse.Namespace) -> int:
    from remora_tools.coldstart import coldstart

    return coldstart(options)


def _add_load(kinds: Any) -> None:
    parser = kinds.add_parser(
        "load",
        help="measure throughput and latency of a server under load",
        description="Send requests over persistent connections and print throughput, percentiles of latency and the "
        "server's share of it. A closed loop (--concurrency) sends the next request after the answer. An open loop "
        "(--rate) sends by a schedule and counts latency from the scheduled time. A load is measured until throughput "
        "and latency of three windows differ by less than 10 percent from their mean.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        type=_weighted,
        metavar="MODEL[=N]",
        help="model; several get requests in turn, one with =N gets N of each round",
    )
    parser.add_argument(
        "--version", type=count, dest="model_version", metavar="N", help="model version (default: the newest)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=lambda text: [_at_least_one(each) for each in text.split(",")],
        default=[],
        metavar="N,...",
        help="connections with one request in flight each (default 1)",
    )
    load.add_argument(
        "--rate",
        type=lambda text: [_rate(each) for each in text.split(",")],
        default=[],
        metavar="R,...",
        help="requests per second of an open loop",
    )
    load.add_argument(
        "--arrivals", choices=SHAPES, default=SHAPES[0], help="schedule of an open loop (default %(default)s)"
    )
    load.add_argument(
        "--connections",
        type=_at_least_one,
        default=64,
        metavar="N",
        help="connections of an open loop (default %(default)s)",
    )
    load.add_argument("--seed", type=count, default=0, metavar="N", help="seed of the schedule and of sequence ids")
    load.add_argument(
        "--processes", type=count, default=0, metavar="N", help="processes that send (default: more when saturated)"
    )
    time = parser.add_argument_group("time, in seconds")
    time.add_argument(
        "--warm-up", type=seconds, default=1.0, metavar="S", help="unmeasured start (default %(default)g)"
    )
    time.add_argument(
        "--window", type=seconds, default=1.0, metavar="S", help="length of a window (default %(default)g)"
    )
    time.add_argument(
        "--duration", type=seconds, default=10.0, metavar="S", help="longest time of a load (default %(default)g)"
    )
    time.add_argument("--fixed", action="store_true", help="measure for the whole --duration, stable or not")
    how = parser.add_argument_group("requests")
    how.add_argument("--requests", type=Path, metavar="FILE", help="V2 requests or inputs, a JSON document per line")
    how.add_argument("--batch", type=count, default=0, metavar="ROWS", help="repeat the first row of each input")
    how.add_argument("--encoding", choices=("binary", "json"), default="binary", help="tensors over HTTP")
    how.add_argument(
        "--grpc",
        default="",
        metavar="HOST:PORT",
        help="send over gRPC, with TLS to grpcs://HOST:PORT; --url serves the metadata",
    )
    how.add_argument("--stream", action="store_true", help="send over one gRPC stream for each connection")
    how.add_argument("--sequence", type=count, default=0, metavar="N", help="send sequences of N requests")
    how.add_argument("--path", default="", metavar="PATH", help="send to this path instead, such as /v1/completions")
    how.add_argument("--body", type=Path, metavar="FILE", help="bodies for --path, a JSON document per line")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--metrics-url",
        default="",
        metavar="URL",
        help="metrics of the server, for the use of its machine (default: port 8002 if --url has port 8000)",
    )
    results.add_argument("--json-out", action="store_true", help="print the results as JSON, times in microseconds")
    results.add_argument("--csv", type=Path, metavar="FILE", help="also write the results as CSV")
    results.add_argument("--html", type=Path, metavar="FILE", help="also write a page with curves of latency")
    results.add_argument("--quiet", action="store_true", help="print no progress")
    add_inputs(parser)
    parser.set_defaults(output=[], classes=0)
    add_server(parser)
    add_timeout(parser, 60.0)
    bind(parser, _load)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_PER_S:
        raise argparse.ArgumentTypeError(f"expected requests per second, above 0 to {_MOST_PER_S:,}, got {text!r}")
    return value


def _weighted(text: str) -> tuple[str, int]:
    """Parse "MODEL" or "MODEL=3" to a name and a weight."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return text, 1
    try:
        return name, _at_least_one(weight)
    except argparse.ArgumentTypeError:
        # With the whole argument, because a part of a URL no longer shows that it is one.
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 99999 after MODEL=, got {text!r}") from None


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 100_000):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 99999, got {text!r}")
    return int(text)


def _load(options: argparse.Namespace) -> int:
    from remora_tools.bench_load import bench_load

    return bench_load(options)
