"""Arguments of the server's own commands except `serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from remora.cli.arguments import Run, bind, count

FORMATS = ("pbtxt", "json", "yaml")


def add_config(config: argparse.ArgumentParser) -> None:
    """Add the actions of `remora config`."""
    kinds = config.add_subparsers(metavar="ACTION", required=True)

    show = kinds.add_parser(
        "show",
        help="print a configuration as the server would use it",
        description="Print the complete configuration as the server would use it, with defaults and with the values "
        "derived from the model if its files are present.",
    )
    show.add_argument("path", type=Path, metavar="PATH", help="configuration, model directory or model file")
    show.add_argument("--as-written", action="store_true", help="fill in only defaults, without opening the model")
    _add_config_options(show, gpus=0)

    derive = kinds.add_parser(
        "derive",
        help="print the configuration derived from the model alone",
        description="Print the configuration derived from the model alone, ignoring a configuration file.",
    )
    derive.add_argument("path", type=Path, metavar="PATH", help="model file or model directory")
    _add_config_options(derive, gpus=0)

    check = kinds.add_parser(
        "check",
        help="find errors in configurations",
        description="Print every problem with its file, line and key. Only --open opens the models.",
    )
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="configurations, models or repositories")
    check.add_argument("--open", action="store_true", help="open each model and compare it with its configuration")
    check.add_argument(
        "--gpus",
        type=count,
        default=None,
        metavar="N",
        help="GPUs of the serving machine (default: as many as the configuration uses)",
    )
    check.add_argument("--backend-directory", default="", metavar="DIR", help="custom backends, as for serve")

    def run(action: str) -> Run:
        def command(options: argparse.Namespace) -> int:
            from remora.cli import check as cli_check
            from remora.cli import config as cli_config

            return {"show": cli_config.show, "derive": cli_config.derive, "check": cli_check.check}[action](options)

        return command

    for action, parser in (("show", show), ("derive", derive), ("check", check)):
        bind(parser, run(action))


def _add_config_options(parser: argparse.ArgumentParser, *, gpus: int) -> None:
    parser.add_argument("--format", choices=FORMATS, default="pbtxt", help="output format (default %(default)s)")
    parser.add_argument(
        "--gpus",
        type=count,
        default=gpus,
        metavar="N",
        help="GPUs of the serving machine (default %(default)s)",
    )


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora backends`."""
    parser.description = (
        "List the backends with runtime, version and devices, and the command that installs a missing runtime."
    )
    parser.add_argument(
        "--backend-directory", default="", metavar="DIR", help="directory of custom backends, as for serve"
    )

    def run(options: argparse.Namespace) -> int:
        from remora.cli import backends as cli_backends

        return cli_backends.backends(options)

    bind(parser, run)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add what `remora version` runs."""
    parser.description = "Print the versions of remora, Python and the installed runtimes."

    def run(options: argparse.Namespace) -> int:
        from remora.cli import versions as cli_versions

        return cli_versions.versions(options)

    bind(parser, run)
