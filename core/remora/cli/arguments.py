"""Arguments of all commands except `serve`.

Invariant: parsing imports no command module except the light ones. Every command exits with 0 (done), 1 (failed, with
the reason in one line on stderr) or 2 (wrong usage).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora.cli import functions, platforms, traffic
from remora.cli.output import UsageError, reason_of
from remora.errors import RemoraError

Command = Callable[[argparse.Namespace], int]

DEFAULT_URL = "http://127.0.0.1:8000"
FORMATS = ("pbtxt", "json", "yaml")


def add_commands(commands: Any) -> None:
    """Add all commands except `serve` to the sub-commands of the parser."""
    from remora.cli import export_llm as cli_export_llm

    _add_infer(commands)
    _add_config(commands)
    _add_models(commands)
    _add_explain(commands)
    for parser in platforms.add_emulate(commands):
        _bind(parser, platforms.emulate)
    _bind(platforms.add_deploy(commands), platforms.deploy)
    _bind(platforms.add_manifests(commands), platforms.manifests)
    for parser, command in platforms.add_image(commands):
        _bind(parser, command)
    _add_storage(commands)
    _bind(functions.add_init(commands), functions.init)
    _bind(functions.add_export(commands), functions.export)
    _bind(cli_export_llm.add_export_llm(commands), cli_export_llm.export_llm)
    _bind(platforms.add_build(commands), platforms.build)
    _add_startup(commands)
    _add_bench(commands)
    _add_replay(commands)
    _bind(traffic.add_score(commands, _count, _pair), traffic.score)
    tune = traffic.add_tune(commands, _count)
    _add_inputs(tune, "--request")
    tune.set_defaults(output=[], classes=0)
    _bind(tune, traffic.tune)
    for parser in traffic.add_release(commands, _count, _add_release_server):
        _bind(parser, traffic.release)
    _add_cost(commands)
    _add_keys(commands)
    backends = commands.add_parser(
        "backends",
        help="list the backends and their installed runtimes",
        description="List the backends with runtime, version and devices, and the command that installs a missing "
        "runtime.",
    )
    backends.add_argument(
        "--backend-directory", default="", metavar="DIR", help="directory of custom backends, as for serve"
    )

    def list_backends(options: argparse.Namespace) -> int:
        from remora.cli import backends as cli_backends

        return cli_backends.backends(options)

    _bind(backends, list_backends)
    version = commands.add_parser(
        "version",
        help="print the installed versions",
        description="Print the versions of remora, Python and the installed runtimes.",
    )

    def print_versions(options: argparse.Namespace) -> int:
        from remora.cli import versions as cli_versions

        return cli_versions.versions(options)

    _bind(version, print_versions)


def _bind(parser: argparse.ArgumentParser, command: Command) -> None:
    """Run ``command`` after ``parser`` and print its failures in one line."""

    def run(options: argparse.Namespace) -> int:
        try:
            if "profile" in options:
                from remora.cli.profiles import choose_server

                choose_server(options, DEFAULT_URL)
            return command(options)
        except UsageError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            raise  # not a failure: the reader of stdout closed the pipe
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
        description="Run a model once and print its outputs, through a server or with the engine in this process.",
    )
    infer.add_argument("model", metavar="MODEL", help="name of the model")
    infer.add_argument(
        "--version", type=_count, dest="model_version", metavar="N", help="model version (default: the newest)"
    )
    where = infer.add_mutually_exclusive_group()
    _add_url(where)
    where.add_argument(
        "--repository", type=Path, metavar="PATH", help="load the model from this repository, without a server"
    )
    _add_header(infer)
    _add_inputs(infer)
    infer.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="output to return (default: all); repeatable"
    )
    infer.add_argument(
        "--classes", type=_count, default=0, metavar="K", help="return the K highest classes instead of the values"
    )
    infer.add_argument(
        "--repeat", type=_count, default=1, metavar="N", help="send the request N times in sequence (default 1)"
    )
    infer.add_argument("--json-out", action="store_true", help="print the response as JSON, with all values")
    _add_timeout(infer, 60.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import infer as cli_infer

        return cli_infer.infer(options)

    _bind(infer, run)


def _add_inputs(parser: argparse.ArgumentParser, document: str = "--json") -> None:
    """Add the arguments of a request's inputs; ``document`` is the flag of a JSON document."""
    inputs = parser.add_argument_group("inputs")
    inputs.add_argument(
        "--random", action="store_true", help="generate every input that is not given, with fixed pseudo-random values"
    )
    inputs.add_argument(
        document, dest="json", metavar="FILE", help='V2 request, or {"NAME": VALUES, ...}; - reads standard input'
    )
    inputs.add_argument(
        "--npy", type=_pair, action="append", default=[], metavar="NAME=FILE", help="input from a .npy file; repeatable"
    )
    inputs.add_argument(
        "--input",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="input values in row-major order; for a BYTES input one text or a JSON array of texts; repeatable",
    )
    inputs.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=1x3x224x224",
        help="shape of an input; repeatable",
    )


# -- config -----------------------------------------------------------------------------------------------------------


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="show, check or derive model configurations, without a server")
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
        type=_count,
        default=None,
        metavar="N",
        help="GPUs of the serving machine (default: as many as the configuration uses)",
    )
    check.add_argument("--backend-directory", default="", metavar="DIR", help="custom backends, as for serve")

    def run(action: str) -> Command:
        def command(options: argparse.Namespace) -> int:
            from remora.cli import check as cli_check
            from remora.cli import config as cli_config

            return {"show": cli_config.show, "derive": cli_config.derive, "check": cli_check.check}[action](options)

        return command

    for action, parser in (("show", show), ("derive", derive), ("check", check)):
        _bind(parser, run(action))


def _add_config_options(parser: argparse.ArgumentParser, *, gpus: int) -> None:
    parser.add_argument("--format", choices=FORMATS, default="pbtxt", help="output format (default %(default)s)")
    parser.add_argument(
        "--gpus",
        type=_count,
        default=gpus,
        metavar="N",
        help="GPUs of the serving machine (default %(default)s)",
    )


# -- models -----------------------------------------------------------------------------------------------------------


def _add_models(commands: Any) -> None:
    models = commands.add_parser("models", help="list, load or unload the models of a running server")
    kinds = models.add_subparsers(metavar="ACTION", required=True)
    for action, help_text in (
        ("list", "print every model with the state of each version and its reason"),
        ("load", "load or reload a model and wait until it is ready"),
        ("unload", "unload a model"),
    ):
        aliases = ["index"] if action == "list" else []
        parser = kinds.add_parser(action, aliases=aliases, help=help_text, description=f"{help_text.capitalize()}.")
        name_help = "print only this model" if action == "list" else "name of the model"
        parser.add_argument("name", nargs="?" if action == "list" else None, metavar="NAME", help=name_help)
        _add_server(parser)
        _add_timeout(parser, 600.0)
        if action == "list":
            parser.add_argument("--ready", action="store_true", help="print only ready versions")
            parser.add_argument("--json-out", action="store_true", help="print the index as JSON")
        elif action == "load":
            parser.add_argument(
                "--config", type=Path, metavar="FILE", help="configuration to use instead of the model's own"
            )
            parser.add_argument(
                "--file",
                type=_pair,
                action="append",
                default=[],
                metavar="PATH=FILE",
                help="file to send as part of the model, such as 1/model.onnx=new.onnx; requires --config; repeatable",
            )
        else:
            parser.add_argument("--dependents", action="store_true", help="also unload the models of an ensemble")
        _bind(parser, _models_command(action))


def _add_release_server(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    _add_timeout(parser, 600.0)


def _models_command(action: str) -> Command:
    def run(options: argparse.Namespace) -> int:
        from remora.cli import models as cli_models

        return {"list": cli_models.show, "load": cli_models.load, "unload": cli_models.unload}[action](options)

    return run


# -- explain ----------------------------------------------------------------------------------------------------------


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show why batches have their size and answers take their time, and what would change it",
        description="Show how recent requests of a model were batched and what other settings would do, predicted "
        "by the scheduler on a simulated clock. For a language model, show where the time of its last answers went.",
    )
    explain.add_argument("model", metavar="MODEL", help="name of the model")
    explain.add_argument(
        "--version", type=_count, dest="model_version", metavar="N", help="model version (default: the newest)"
    )
    _add_server(explain)
    explain.add_argument(
        "--request", metavar="ID", default="", help="explain the answer to this request of a language model"
    )
    explain.add_argument("--json-out", action="store_true", help="print the explanation as JSON")
    _add_timeout(explain, 60.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import explain as cli_explain

        return cli_explain.explain(options)

    _bind(explain, run)


# -- storage and startup ----------------------------------------------------------------------------------------------


def _add_storage(commands: Any) -> None:
    from remora.cli import storage as cli_storage

    _bind(cli_storage.add_pull(commands), cli_storage.pull)
    listing, clear = cli_storage.add_cache(commands)
    _bind(listing, cli_storage.show)
    _bind(clear, cli_storage.clear)


def _add_startup(commands: Any) -> None:
    parser = commands.add_parser(
        "startup",
        help="show the startup times of a server",
        description="Print the startup phases of a running server, its concurrent model loads and slow imports.",
    )
    _add_server(parser)
    parser.add_argument("--json-out", action="store_true", help="print the report as JSON")
    _add_timeout(parser, 10.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import startup as cli_startup

        return cli_startup.startup(options)

    _bind(parser, run)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure against a budget")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "coldstart",
        help="measure the time from process start to the first response",
        description="Start `remora serve PATH...` as a child process, send each model one generated request, and "
        "print the startup phases. Exit with 1 and the slowest phase if the first response exceeds the budget.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="models to serve, as for `remora serve`")
    parser.add_argument("--budget", type=_duration_ms, metavar="2s", help="maximum time to the first response")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="starts; reports the median (default 1)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the report for --baseline")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="saved report to compare with")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="FLAG", help="server flag, as --FLAG=X; repeatable"
    )
    parser.add_argument("--json-out", action="store_true", help="print the report as JSON")
    _add_header(parser)
    _add_timeout(parser, 300.0)

    def run(options: argparse.Namespace) -> int:
        from remora.cli import startup as cli_startup

        return cli_startup.coldstart(options)

    _bind(parser, run)
    load = traffic.add_bench_load(kinds, _count, _seconds)
    _add_inputs(load)
    load.set_defaults(output=[], classes=0)
    _add_server(load)
    _add_timeout(load, 60.0)
    _bind(load, traffic.bench_load)


# -- keys -------------------------------------------------------------------------------------------------------------


def _add_replay(commands: Any) -> None:
    parser = traffic.add_replay(commands, _count, float)
    _add_header(parser)
    _add_timeout(parser, 60.0)
    _bind(parser, traffic.replay)


def _add_keys(commands: Any) -> None:
    from remora.options.roles import ROLES

    keys = commands.add_parser("keys", help="make and revoke API keys of a server", description="Manage API keys.")
    verbs = keys.add_subparsers(metavar="VERB", required=True)
    new = verbs.add_parser(
        "new",
        help="add a key and print it",
        description="Add a key to the file and print it, once, on the last line. The file holds only its hash.",
    )
    new.add_argument("--name", required=True, metavar="NAME", help="name of the key, for traces and errors")
    new.add_argument(
        "--role", required=True, action="append", choices=tuple(ROLES), help="what the key permits; repeatable"
    )
    for flag, kind, text in (
        ("--rate", _count, "requests a second that the key may send (default: no limit)"),
        ("--burst", _count, "requests at once beyond that rate (default: those of one second)"),
        ("--concurrent", _count, "requests in flight at the same time (default: no limit)"),
    ):
        new.add_argument(flag, type=kind, default=0, metavar="N", help=text)
    listing = verbs.add_parser("list", help="list the keys", description="List the names and roles of the keys.")
    revoke = verbs.add_parser("revoke", help="remove a key", description="Remove a key from the file.")
    revoke.add_argument("--name", required=True, metavar="NAME", help="name of the key")
    for parser, verb in ((new, "new"), (listing, "list"), (revoke, "revoke")):
        parser.add_argument(
            "--file", required=True, type=Path, metavar="FILE", help="file of keys, as for serve --api-keys-file"
        )

        def run(options: argparse.Namespace, verb: str = verb) -> int:
            from remora.cli import keys as cli_keys

            return cli_keys.VERBS[verb](options)

        _bind(parser, run)


# -- cost -------------------------------------------------------------------------------------------------------------


def _add_cost(commands: Any) -> None:
    from remora.cli import cost as cli_cost

    _bind(cli_cost.add_cost(commands), cli_cost.cost)


# -- argument types ---------------------------------------------------------------------------------------------------


def _add_server(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    _add_header(parser)


def _add_url(parser: Any) -> None:
    parser.add_argument("--url", default="", metavar="URL", help=f"URL of the server (default {DEFAULT_URL})")
    parser.add_argument(
        "--profile",
        default="",
        metavar="NAME",
        help="server of the file of profiles, with its URL and key (default: REMORA_PROFILE)",
    )


def _add_header(parser: argparse.ArgumentParser) -> None:
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


def _add_timeout(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=default_s,
        metavar="S",
        help="timeout of each response, in seconds (default %(default)g)",
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"expected a non-negative integer, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
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
