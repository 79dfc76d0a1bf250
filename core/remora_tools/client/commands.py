"""Arguments of the commands that talk to a running server."""

from __future__ import annotations

import argparse
from pathlib import Path

from remora.cli.arguments import (
    Run,
    add_header,
    add_imports,
    add_inputs,
    add_server,
    add_timeout,
    add_url,
    bind,
    count,
    pair,
)

# -- infer -------------------------------------------------------------------------------------------------------------


def add_infer(infer: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora infer`."""
    infer.description = "Run a model once and print its outputs, through a server or with the engine in this process."
    infer.add_argument("model", metavar="MODEL", help="name of the model")
    infer.add_argument(
        "--version", type=count, dest="model_version", metavar="N", help="model version (default: the newest)"
    )
    where = infer.add_mutually_exclusive_group()
    add_url(where)
    where.add_argument(
        "--repository", type=Path, metavar="PATH", help="load the model from this repository, without a server"
    )
    add_header(infer)
    add_inputs(infer)
    infer.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="output to return (default: all); repeatable"
    )
    infer.add_argument(
        "--classes", type=count, default=0, metavar="K", help="return the K highest classes instead of the values"
    )
    infer.add_argument(
        "--repeat", type=count, default=1, metavar="N", help="send the request N times in sequence (default 1)"
    )
    infer.add_argument("--json-out", action="store_true", help="print the response as JSON, with all values")
    add_timeout(infer, 60.0)

    def run(options: argparse.Namespace) -> int:
        from remora_tools.client import infer as command

        return command.infer(options)

    bind(infer, run)


# -- models ------------------------------------------------------------------------------------------------------------


def add_models(models: argparse.ArgumentParser) -> None:
    """Add the actions of `remora models`."""
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
        add_server(parser)
        add_timeout(parser, 600.0)
        if action == "list":
            parser.add_argument("--ready", action="store_true", help="print only ready versions")
            parser.add_argument("--json-out", action="store_true", help="print the index as JSON")
        elif action == "load":
            parser.add_argument(
                "--config", type=Path, metavar="FILE", help="configuration to use instead of the model's own"
            )
            parser.add_argument(
                "--file",
                type=pair,
                action="append",
                default=[],
                metavar="PATH=FILE",
                help="file to send as part of the model, such as 1/model.onnx=new.onnx; requires --config; repeatable",
            )
        else:
            parser.add_argument("--dependents", action="store_true", help="also unload the models of an ensemble")
        bind(parser, _models_command(action))


def _models_command(action: str) -> Run:
    def run(options: argparse.Namespace) -> int:
        from remora_tools.client import models as command

        return {"list": command.show, "load": command.load, "unload": command.unload}[action](options)

    return run


# -- explain -----------------------------------------------------------------------------------------------------------


def add_explain(explain: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora explain`."""
    explain.description = (
        "Show how recent requests of a model were batched and what other settings would do, predicted by the scheduler "
        "on a simulated clock. For a language model, show where the time of its last answers went."
    )
    explain.add_argument("model", metavar="MODEL", help="name of the model")
    explain.add_argument(
        "--version", type=count, dest="model_version", metavar="N", help="model version (default: the newest)"
    )
    add_server(explain)
    explain.add_argument(
        "--request", metavar="ID", default="", help="explain the answer to this request of a language model"
    )
    explain.add_argument("--json-out", action="store_true", help="print the explanation as JSON")
    add_timeout(explain, 60.0)

    def run(options: argparse.Namespace) -> int:
        from remora_tools.client import explain as command

        return command.explain(options)

    bind(explain, run)


def add_startup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora startup`."""
    parser.description = "Print the startup phases of a running server and its concurrent model loads."
    add_server(parser)
    add_imports(parser)
    parser.add_argument("--json-out", action="store_true", help="print the report as JSON")
    add_timeout(parser, 10.0)

    def run(options: argparse.Namespace) -> int:
        from remora_tools.client import startup as command

        return command.startup(options)

    bind(parser, run)


# -- release -----------------------------------------------------------------------------------------------------------


_RELEASE_VERBS = {
    "start": "send a part of the requests to a version",
    "weight": "change the part of the requests that a version gets",
    "promote": "make the canary the stable version",
    "rollback": "send all requests to the stable version again",
    "alias": "let a name stand for a version, or for none",
    "shadow": "copy a part of the requests to a version, model or server and compare the answers",
    "end": "forget the release, so that the version policy decides again",
    "status": "print the versions, their weights and answers, and the latest decisions",
}


def add_release(releases: argparse.ArgumentParser) -> None:
    """Add the verbs of `remora release`."""
    releases.description = "Divide the requests to a model of a running server among its versions (docs/releases.md)."
    verbs = releases.add_subparsers(metavar="VERB", required=True)
    for verb, text in _RELEASE_VERBS.items():
        parser = verbs.add_parser(verb, help=text, description=f"{text.capitalize()}.")
        parser.set_defaults(verb=verb)
        parser.add_argument("model", metavar="MODEL", help="name of the model")
        if verb == "start":
            parser.add_argument("version_number", type=count, metavar="VERSION", help="version in the repository")
            _add_release_start(parser)
        elif verb == "shadow":
            _add_release_shadow(parser)
        elif verb == "weight":
            parser.add_argument("share", metavar="PERCENT", help="part of the requests, such as 25%%")
        elif verb == "alias":
            parser.add_argument("alias", metavar="NAME", help="name, which clients write as MODEL@NAME")
            parser.add_argument(
                "version_number", type=count, nargs="?", metavar="VERSION", help="version (default: remove the name)"
            )
        if verb in ("start", "weight", "promote", "rollback"):
            parser.add_argument("--name", default="", metavar="ARM", help="arm other than canary, for A/B tests")
            parser.add_argument("--reason", default="", metavar="TEXT", help="reason to keep with the decision")
        if verb == "end":
            parser.add_argument(
                "--serve-latest", action="store_true", help="also if the version that serves then was rolled back"
            )
        add_server(parser)
        add_timeout(parser, 600.0)
        parser.add_argument("--json-out", action="store_true", help="print the state as JSON")
        bind(parser, _release)


def _add_release_shadow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version_number",
        type=count,
        nargs="?",
        metavar="VERSION",
        help="version (default: the one that serves; without --to-model and --to: end the shadow)",
    )
    parser.add_argument(
        "--to-model", default="", dest="other_model", metavar="NAME", help="another model of the server"
    )
    parser.add_argument(
        "--to", default="", metavar="NAME", help="another server, named by the server's option --shadow-url"
    )
    parser.add_argument("--share", default="100", metavar="PERCENT", help="part of the requests (default: all)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="difference that numbers may have (default: none)"
    )
    parser.add_argument("--top-k", type=count, default=0, metavar="K", help="compare only the K largest elements")
    parser.add_argument(
        "--compare", default="", metavar="NAME", help="function that compares, named by the option --shadow-compare"
    )


def _add_release_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--canary", default="0", metavar="PERCENT", help="part of the requests (default: none yet)")
    parser.add_argument(
        "--steps", default="", metavar="PERCENT,...", help="with --auto: weights that follow a good judgement"
    )
    parser.add_argument(
        "--sticky",
        default="",
        metavar="BY",
        help="identity of a client: request (its id, the default), header:NAME or parameter:NAME",
    )
    parser.add_argument("--log", action="store_true", help="log which version each request gets, for A/B tests")
    parser.add_argument("--auto", action="store_true", help="promote or roll back by the judgement")
    parser.add_argument(
        "--bake", default="", metavar="TIME", help="with --auto: least duration of each step (default 10m)"
    )
    parser.add_argument(
        "--alpha", type=float, metavar="P", help="with --auto: probability of a wrong decision (default 0.05)"
    )
    parser.add_argument(
        "--slow-ms", type=float, metavar="MS", help="with --auto: latency limit (default: from the stable version)"
    )
    parser.add_argument(
        "--least", type=int, metavar="N", help="with --auto: least number of answers of the canary (default 100)"
    )


def _release(options: argparse.Namespace) -> int:
    from remora_tools.client import release as command

    return command.release(options)
