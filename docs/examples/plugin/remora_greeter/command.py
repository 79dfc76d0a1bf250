"""Command `remora greet`: ask a server's greeters."""

from __future__ import annotations

import argparse

from remora.cli.arguments import add_server, add_timeout, bind
from remora.cli.client import call_json, open_client


def add_greet(parser: argparse.ArgumentParser) -> None:
    """Ask the greeters of a running server."""
    parser.description = "Print which models of a running server greet a name."
    parser.add_argument("name", metavar="NAME", help="whom to greet")
    add_server(parser)
    add_timeout(parser, 10.0)
    bind(parser, _greet)


def _greet(options: argparse.Namespace) -> int:
    answer = call_json(open_client(options), "GET", f"/greetings/{options.name}")
    print(f"{', '.join(answer['greeters'])} greet {answer['name']}")
    return 0
