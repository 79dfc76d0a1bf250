"""The commands about hosts, `emulate`, `deploy` and `manifests`; the law: the adapters do it, found when they run."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from remora.cli.output import UsageError

_EMULATE = """\
Play a platform's side of its contract against a server: start it as the platform would, probe it, send it what the
platform sends, stop it, and print what the platform would have minded. TARGET is the URL of a server that runs, or the
command that starts one, after --:

  remora emulate sagemaker --model models --body request.json -- python -m remora_adapters.sagemaker
"""


_DEPLOYS = {"sagemaker": "remora_adapters.sagemaker.deploying"}
"""Where a platform's own arguments of `deploy` are, and what it does: a module with ``main(arguments)``."""


def add_emulate(commands: Any) -> list[argparse.ArgumentParser]:
    """Add `emulate`; returns the parsers of its platforms."""
    emulate = commands.add_parser(
        "emulate",
        help="play a platform's side of its contract against a server",
        description=_EMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    platforms = import_module("remora_adapters.emulate").PLATFORMS
    kinds = emulate.add_subparsers(metavar="PLATFORM", dest="platform", required=True, help=", ".join(platforms))
    parsers = []
    for platform in platforms:
        parser = kinds.add_parser(platform, description=_EMULATE, formatter_class=argparse.RawDescriptionHelpFormatter)
        _add_emulate_options(parser)
        parsers.append(parser)
    return parsers


def add_manifests(commands: Any) -> argparse.ArgumentParser:
    """Add `manifests`; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "manifests",
        help="print deployment files computed from models",
        description="Load the models, measure, and print deployment files for a platform, each number with its reason.",
    )
    platforms = import_module("remora_adapters.manifests").PLATFORMS
    parser.add_argument("platform", choices=platforms, metavar="PLATFORM", help=", ".join(platforms))
    parser.add_argument("paths", nargs="+", metavar="PATH", help="the models, as for `remora serve`")
    parser.add_argument("--name", default="remora", metavar="NAME", help="of the service (default %(default)s)")
    parser.add_argument("--image", default="remora:cpu", metavar="IMAGE", help="what to run (default %(default)s)")
    parser.add_argument(
        "--models", default="", metavar="URL", help="where the deployment finds the models; PATH if it is a URL"
    )
    return parser


_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+~-]*|/[A-Za-z0-9._:/@+~-]*")


def manifests(options: argparse.Namespace) -> int:
    """Run `manifests`; returns the exit code. Raises UsageError for words that no file could hold, RemoraError."""
    location = options.models or options.paths[0]
    if not _NAME.fullmatch(options.name):
        raise UsageError(f"--name {options.name!r}: expected lower-case letters, digits and hyphens")
    for flag, word in (("--image", options.image), ("--models", location)):
        if not _WORD.fullmatch(word):
            raise UsageError(f"{flag} {word!r}: expected an image's name or a location, without blanks and quotes")
    platforms = import_module("remora_adapters.manifests")
    if options.platform in platforms.FETCHING and not options.models and "://" not in location:
        raise UsageError(
            f"a pod does not have '{location}' of this machine: --models says where it finds them, such as "
            "s3://bucket/models or a directory of the image"
        )
    facts = import_module("remora_adapters.manifests.facts").measure(
        options.paths, options.name, options.image, location
    )
    try:
        print(platforms.find_renderer(options.platform)(facts), end="")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _add_emulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="*", metavar="TARGET", help="a URL, or -- COMMAND [ARGUMENT ...]")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the folder that the platform puts in its place")
    parser.add_argument("--body", type=Path, metavar="FILE", help="an inference request that is answered well")
    parser.add_argument("--content-type", default="application/json", metavar="TYPE", help="of the body")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for the process; may be repeated"
    )
    parser.add_argument(
        "--with",
        dest="given",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what a single check needs, as it says when it is skipped; may be repeated",
    )
    parser.add_argument(
        "--startup-timeout", type=float, default=0.0, metavar="S", help="time to get ready; the platform's if not given"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="wait so many times as long as the platform, on a machine with other things to do (default %(default)s)",
    )
    parser.add_argument(
        "--api",
        type=int,
        default=0,
        metavar="PORT",
        help="check nothing: be the API that the platform's clients talk to, on this loopback port, until interrupted",
    )
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="run this check; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the checks and why they are there")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the report")


def emulate(options: argparse.Namespace) -> int:
    """Run `emulate`; returns the exit code."""
    code: int = import_module("remora_adapters.emulate.running").run(options)
    return code


def add_deploy(commands: Any) -> argparse.ArgumentParser:
    """Add `deploy`, whose arguments are the platforms' own; returns its parser."""
    deploy: argparse.ArgumentParser = commands.add_parser(
        "deploy",
        help="make or update an endpoint on a platform",
        description="Make or update an endpoint; remora deploy PLATFORM --help says what it takes.",
    )
    deploy.add_argument("platform", choices=sorted(_DEPLOYS), metavar="PLATFORM", help=", ".join(sorted(_DEPLOYS)))
    deploy.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the platform's own")
    return deploy


def deploy(options: argparse.Namespace) -> int:
    """Run `deploy`; returns the exit code."""
    code: int = import_module(_DEPLOYS[options.platform]).main(options.arguments)
    return code
