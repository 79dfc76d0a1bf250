"""Arguments that several commands share, and what runs a command.

A command is a row of `remora.plugins.COMMANDS`: a function that adds the command's arguments to its parser and ends
with `bind`. Only a command that is called is imported. Every command exits with 0 (done), 1 (failed, with the reason in
one line on stderr) or 2 (wrong usage).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from remora.cli.output import UsageError, reason_of
from remora.cli.stderr import print_error
from remora.errors import RemoraError

Run = Callable[[argparse.Namespace], int]
"""Runs a command with its parsed arguments and returns the exit code."""

DEFAULT_URL = "http://127.0.0.1:8000"


def bind(parser: argparse.ArgumentParser, command: Run) -> None:
    """Run ``command`` after ``parser`` and print its failures in one line."""

    def run(options: argparse.Namespace) -> int:
        try:
            if "profile" in options:
                from remora.cli.client import choose_server

                choose_server(options, DEFAULT_URL)
            return command(options)
        except UsageError as error:
            print_error(parser.prog, error)
            return 2
        except BrokenPipeError:
            raise  # not a failure: the reader of stdout closed the pipe
        except (RemoraError, OSError) as error:
            print_error(parser.prog, reason_of(error))
            for note in getattr(error, "__notes__", ()):
                print_error(parser.prog, note)
            return 1

    parser.set_defaults(command=run, parser=parser)


def add_inputs(parser: argparse.ArgumentParser, document: str = "--json") -> None:
    """Add the arguments of a request's inputs; ``document`` is the flag of a JSON document."""
    inputs = parser.add_argument_group("inputs")
    inputs.add_argument(
        "--random", action="store_true", help="generate every input that is not given, with fixed pseudo-random values"
    )
    inputs.add_argument(
        document, dest="json", metavar="FILE", help='V2 request, or {"NAME": VALUES, ...}; - reads standard input'
    )
    inputs.add_argument(
        "--npy", type=pair, action="append", default=[], metavar="NAME=FILE", help="input from a .npy file; repeatable"
    )
    inputs.add_argument(
        "--input",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="input values in row-major order; for a BYTES input one text or a JSON array of texts; repeatable",
    )
    inputs.add_argument(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="NAME=1x3x224x224",
        help="shape of an input; repeatable",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_header(parser)


def add_url(parser: Any) -> None:
    parser.add_argument("--url", default="", metavar="URL", help=f"URL of the server (default {DEFAULT_URL})")
    parser.add_argument(
        "--profile",
        default="",
        metavar="NAME",
        help="server of the file of profiles, with its URL and key (default: REMORA_PROFILE)",
    )


def add_header(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="request header; NAME=@FILE reads the value from a file; repeatable; REMORA_HEADERS holds more, one "
        "per line, and REMORA_API_KEY the API key",
    )
    parser.set_defaults(
        header_variable=os.environ.get("REMORA_HEADERS", ""), api_key_variable=os.environ.get("REMORA_API_KEY", "")
    )


def add_imports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--imports", action="store_true", help="add the table of slow imports")


def add_timeout(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=default_s,
        metavar="S",
        help="timeout of each response, in seconds (default %(default)g)",
    )


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"expected a non-negative integer, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=..., got {text!r}")
    return name, value


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, dims = pair(text)
    try:
        return name, tuple(count(dim) for dim in dims.split("x")) if dims else ()
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected NAME=1x3x224x224, got {text!r}") from None


def duration_ms(text: str) -> float:
    """Parse "2s", "1500ms" or "2" to milliseconds."""
    units = {"ms": 1.0, "s": 1e3, "": 1e3}
    number = text.rstrip("ms")
    unit = text[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a time such as 2s or 1500ms, got {text!r}")
    return value
