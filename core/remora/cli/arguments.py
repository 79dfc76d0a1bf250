"""The commands besides `serve`: their arguments, and `version`; the law: a command's module is imported when it
runs, unless it is light.

Every command ends with 0 (done), 1 (failed, with the reason on stderr in one line) or 2 (wrong usage).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora.cli import platforms as cli_hosts
from remora.cli.output import UsageError, columns, reason_of
from remora.errors import RemoraError

Command = Callable[[argparse.Namespace], int]

DEFAULT_URL = "http://127.0.0.1:8000"
FORMATS = ("pbtxt", "json", "yaml")

_RUNTIMES = (
    # Distributions, not modules: what a model, a codec or a front end runs on.
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "tensorrt",
    "openvino",
    "tensorflow",
    "xgboost",
    "lightgbm",
    "scikit-learn",
    "protobuf",
    "orjson",
    "httptools",
    "uvloop",
    "fastapi",
    "grpcio",
    "obstore",
)


def add_commands(commands: Any) -> None:
    """Add all commands but `serve` to the parser's sub-commands."""
    _add_infer(commands)
    _add_config(commands)
    _add_models(commands)
    _add_explain(commands)
    for parser in cli_hosts.add_emulate(commands):
        _runs(parser, cli_hosts.emulate)
    _runs(cli_hosts.add_deploy(commands), cli_hosts.deploy)
    _runs(cli_hosts.add_manifests(commands), cli_hosts.manifests)
    _add_storage(commands)
    _add_startup(commands)
    _add_bench(commands)
    _add_cost(commands)
    backends = commands.add_parser(
        "backends",
        help="list what can run models here",
        description="List the backends: what each runs on, its version and devices, and the line that installs what is "
        "missing.",
    )
    backends.add_argument(
        "--backend-directory", default="", metavar="DIR", help="as for serve: backends of your own, by folder"
    )

    def list_backends(options: argparse.Namespace) -> int:
        from remora.cli import backends as cli_backends

        return cli_backends.backends(options)

    _runs(backends, list_backends)
    version = commands.add_parser(
        "version",
        help="print what is installed here",
        description="Print the versions of remora, Python and the runtimes that are installed.",
    )
    _runs(version, _version)


def _runs(parser: argparse.ArgumentParser, command: Command) -> None:
    """Make ``parser`` end in ``command``, with its failures told in one line."""

    def run(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except UsageError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            raise  # whoever read our output has seen enough: nothing failed that is worth a line
        except (RemoraError, OSError) as error:
            print(f"{parser.prog}: {reason_of(error)}", file=sys.stderr)
            for note in getattr(error, "__notes__", ()):
                print(f"{parser.prog}: {note}", file=sys.stderr)
            return 1

    parser.set_defaults(command=run, parser=parser)


# -- infer ------------------------------------------------------------------------------------------------------------


def _add_infer(commands: Any) -> None:
    infer = commands.add_parser(
        "infer",
        help="send one inference request",
        description="Run a model once and show what it answers, over a server or with the engine in this process.",
    )
    infer.add_argument("model", metavar="MODEL", help="the model's name")
    infer.add_argument(
        "--version", type=_count, dest="model_version", metavar="N", help="a version; the newest if not given"
    )
    where = infer.add_mutually_exclusive_group()
    where.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="a running server (default %(default)s)")
    where.add_argument(
        "--repository", type=Path, metavar="PATH", help="load the model from here instead, without a server"
    )
    _add_header(infer)
    inputs = infer.add_argument_group("inputs")
    inputs.add_argument(
        "--random", action="store_true", help="make up every input that is not given; the same each time"
    )
    inputs.add_argument("--json", metavar="FILE", help='a V2 request, or {"NAME": VALUES, ...}; - reads standard input')
    inputs.add_argument(
        "--npy", type=_pair, action="append", default=[], metavar="NAME=FILE", help="an input from a .npy file"
    )
    inputs.add_argument(
        "--input",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="an input's values, row by row; for a BYTES input one text, or a JSON array of texts",
    )
    inputs.add_argument(
        "--shape", type=_shape, action="append", default=[], metavar="NAME=1x3x224x224", help="the shape of an input"
    )
    infer.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="an output wanted; all if not given"
    )
    infer.add_argument(
        "--classes", type=_count, default=0, metavar="K", help="the K highest classes instead of the values"
    )
    infer.add_argument(
        "--repeat", type=_count, default=1, metavar="N", help="send the request N times, one after the other"
    )
    infer.add_argument("--json-out", action="store_true", help="print the answer as JSON, with all values")
    _add_timeout(infer, 60.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import infer as cli_infer

        return cli_infer.infer(options)

    _runs(infer, run)


# -- config -----------------------------------------------------------------------------------------------------------


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="show, check or derive configurations; needs no server")
    kinds = config.add_subparsers(metavar="ACTION", required=True)

    show = kinds.add_parser(
        "show",
        help="print a configuration as it would be served",
        description="Print the complete configuration as it would be served: defaults filled in, and what it leaves "
        "out taken from the model where that is at hand.",
    )
    show.add_argument("path", type=Path, metavar="PATH", help="a configuration, a model's directory or a model file")
    show.add_argument("--as-written", action="store_true", help="fill in defaults only; do not open the model")
    _add_config_options(show, gpus=0)

    derive = kinds.add_parser(
        "derive",
        help="print the configuration a model has by itself",
        description="Print the configuration that follows from the model alone; one that is written is not looked at.",
    )
    derive.add_argument("path", type=Path, metavar="PATH", help="a model file or a model's directory")
    _add_config_options(derive, gpus=0)

    check = kinds.add_parser(
        "check",
        help="find what is wrong with configurations",
        description="Print every problem with its file, line and key. Models are not opened unless --open is given.",
    )
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="configurations, models or repositories")
    check.add_argument("--open", action="store_true", help="open each model too, and compare its configuration with it")
    check.add_argument(
        "--gpus",
        type=_count,
        default=None,
        metavar="N",
        help="GPUs of the machine that will serve; those that a configuration asks for if not given",
    )
    check.add_argument("--backend-directory", default="", metavar="DIR", help="custom backends by folder, as for serve")

    def run(action: str) -> Command:
        def command(options: argparse.Namespace) -> int:
            from remora.cli import check as cli_check
            from remora.cli import config as cli_config

            return {"show": cli_config.show, "derive": cli_config.derive, "check": cli_check.check}[action](options)

        return command

    for action, parser in (("show", show), ("derive", derive), ("check", check)):
        _runs(parser, run(action))


def _add_config_options(parser: argparse.ArgumentParser, *, gpus: int) -> None:
    parser.add_argument("--format", choices=FORMATS, default="pbtxt", help="notation (default %(default)s)")
    parser.add_argument(
        "--gpus",
        type=_count,
        default=gpus,
        metavar="N",
        help="GPUs of the machine that will serve (default %(default)s)",
    )


# -- models -----------------------------------------------------------------------------------------------------------


def _add_models(commands: Any) -> None:
    models = commands.add_parser("models", help="list, load or unload the models of a running server")
    kinds = models.add_subparsers(metavar="ACTION", required=True)
    for action, help_text in (
        ("list", "print every model with its versions, states and reasons"),
        ("load", "load or reload a model and wait until it is ready"),
        ("unload", "take a model out of service"),
    ):
        aliases = ["index"] if action == "list" else []
        parser = kinds.add_parser(action, aliases=aliases, help=help_text, description=f"{help_text.capitalize()}.")
        name_help = "only this model" if action == "list" else "the model's name"
        parser.add_argument("name", nargs="?" if action == "list" else None, metavar="NAME", help=name_help)
        _add_server(parser)
        _add_timeout(parser, 600.0)
        if action == "list":
            parser.add_argument("--ready", action="store_true", help="only versions that are ready")
            parser.add_argument("--json-out", action="store_true", help="print the index as JSON")
        elif action == "load":
            parser.add_argument(
                "--config", type=Path, metavar="FILE", help="serve it with this configuration instead of its own"
            )
            parser.add_argument(
                "--file",
                type=_pair,
                action="append",
                default=[],
                metavar="PATH=FILE",
                help="a file of the model, such as 1/model.onnx=new.onnx, sent along; needs --config",
            )
        else:
            parser.add_argument("--dependents", action="store_true", help="unload the models of an ensemble with it")
        _runs(parser, _models_command(action))


def _models_command(action: str) -> Command:
    def run(options: argparse.Namespace) -> int:
        from remora.cli import models as cli_models

        return {"list": cli_models.show, "load": cli_models.load, "unload": cli_models.unload}[action](options)

    return run


# -- explain ----------------------------------------------------------------------------------------------------------


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="say why batches have the size they have, and what would change it",
        description="Show how the requests of a model were batched lately, and what other settings would do, predicted "
        "by the scheduler itself on a simulated clock.",
    )
    explain.add_argument("model", metavar="MODEL", help="the model's name")
    explain.add_argument(
        "--version", type=_count, dest="model_version", metavar="N", help="a version; the newest if not given"
    )
    _add_server(explain)
    explain.add_argument("--json-out", action="store_true", help="print the explanation as JSON")
    _add_timeout(explain, 60.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import explain as cli_explain

        return cli_explain.explain(options)

    _runs(explain, run)


# -- storage and startup ----------------------------------------------------------------------------------------------


def _add_storage(commands: Any) -> None:
    from remora.cli import storage as cli_storage

    _runs(cli_storage.add_pull(commands), cli_storage.pull)
    listing, clear = cli_storage.add_cache(commands)
    _runs(listing, cli_storage.show)
    _runs(clear, cli_storage.clear)


def _add_startup(commands: Any) -> None:
    parser = commands.add_parser(
        "startup",
        help="where the time of a server's start went",
        description="Print the phases of a running server's start, what went on beside them, and slow imports.",
    )
    _add_server(parser)
    parser.add_argument("--json-out", action="store_true", help="print it as JSON")
    _add_timeout(parser, 10.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import startup as cli_startup

        return cli_startup.startup(options)

    _runs(parser, run)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure, and fail what is too slow")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "coldstart",
        help="start a server, ask it once, and tell where the time went",
        description="Start `remora serve PATH...` in a process of its own, send each model a request made up, and "
        "print the start's phases. With a budget it fails when the first answer came later, naming the phase to blame.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="what to serve, as for `remora serve`")
    parser.add_argument("--budget", type=_duration_ms, metavar="2s", help="the most that may pass until an answer")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="starts; the median counts (default 1)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the report, to compare later ones with")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="a report that --save kept: names what grew")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="a flag for the server, --FLAG=X")
    parser.add_argument("--json-out", action="store_true", help="print the report as JSON")
    _add_header(parser)
    _add_timeout(parser, 300.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import startup as cli_startup

        return cli_startup.coldstart(options)

    _runs(parser, run)


# -- cost -------------------------------------------------------------------------------------------------------------


def _add_cost(commands: Any) -> None:
    from remora.cli import cost as cli_cost

    _runs(cli_cost.add_cost(commands), cli_cost.cost)


# -- version ----------------------------------------------------------------------------------------------------------


def _version(options: argparse.Namespace) -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from remora._version import __version__

    rows = [("remora", __version__), ("python", platform.python_version())]
    for name in _RUNTIMES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            continue
    print(columns(rows))
    return 0


# -- argument types ---------------------------------------------------------------------------------------------------


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="the server (default %(default)s)")
    _add_header(parser)


def _add_header(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="send this header; NAME=@FILE reads the value from a file; may be repeated; the environment variable "
        "REMORA_HEADERS holds more of them, one a line",
    )
    parser.set_defaults(header_variable=os.environ.get("REMORA_HEADERS", ""))


def _add_timeout(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=default_s,
        metavar="S",
        help="seconds to wait for an answer (default %(default)g)",
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"expected a whole number that is not negative, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=..., got {text!r}")
    return name, value


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, dims = _pair(text)
    try:
        return name, tuple(_count(dim) for dim in dims.split("x")) if dims else ()
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected NAME=1x3x224x224, got {text!r}") from None


def _duration_ms(text: str) -> float:
    """ "2s", "1500ms" or "2"."""
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
