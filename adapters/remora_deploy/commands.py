"""Commands `emulate`, `deploy`, `manifests`, `image` and `build`.

They import the adapters when they run.
"""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path

from remora.cli.arguments import bind
from remora.cli.output import UsageError, columns

_EMULATE = """\
Emulate a platform against a server: start the server as the platform would, probe it, send the platform's requests,
stop it, and report violations of the contract. TARGET is a folder of models, which this remora serves, the URL of
a running server, or after -- the command that starts one:

  remora emulate sagemaker models
  remora emulate sagemaker --model models --body request.json -- python -m remora_adapters.sagemaker
"""


_DEPLOY = """\
Deploy models to a platform, or update a service: check, upload, deploy, compare, send a golden request. What served
before serves still after a failure.

  remora deploy PLATFORM NAME --image IMAGE --model PATH [...]
  remora deploy ACTION PLATFORM NAME [...]

See remora deploy PLATFORM --help for the arguments.
"""


def add_emulate(emulate: argparse.ArgumentParser) -> None:
    """Add the platforms of `remora emulate`."""
    emulate.description = _EMULATE
    emulate.formatter_class = argparse.RawDescriptionHelpFormatter
    platforms = import_module("remora_deploy.emulate").PLATFORMS
    kinds = emulate.add_subparsers(metavar="PLATFORM", dest="platform", required=True, help=", ".join(platforms))
    for platform in platforms:
        parser = kinds.add_parser(platform, description=_EMULATE, formatter_class=argparse.RawDescriptionHelpFormatter)
        _add_emulate_options(parser)
        bind(parser, _emulate)


def add_manifests(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora manifests`."""
    parser.description = (
        "Load and measure the models, and print deployment files for a platform with the reason for each number."
    )
    platforms = import_module("remora_deploy.manifests").PLATFORMS
    parser.add_argument("platform", choices=platforms, metavar="PLATFORM", help=", ".join(platforms))
    parser.add_argument("paths", nargs="+", metavar="PATH", help="models, as for `remora serve`")
    parser.add_argument("--name", default="remora", metavar="NAME", help="service name (default %(default)s)")
    parser.add_argument("--image", default="remora:cpu", metavar="IMAGE", help="container image (default %(default)s)")
    parser.add_argument(
        "--models",
        default="",
        metavar="URL",
        help="location of the models for the deployment (default: PATH if it is a URL)",
    )
    import_module("remora_deploy.manifests").add_choices(parser)
    bind(parser, _manifests)


_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+~-]*|/[A-Za-z0-9._:/@+~-]*")


def _manifests(options: argparse.Namespace) -> int:
    """Print the files and return the exit code.

    Raises UsageError for unprintable values, RemoraError.
    """
    location = options.models or options.paths[0]
    if not _NAME.fullmatch(options.name):
        raise UsageError(f"--name {options.name!r}: expected lower-case letters, digits and hyphens")
    words = [("--image", options.image), ("--models", location.replace("{version}", "0"))]
    flags = ("gpu_resource", "service_account", "secret", "namespace", "instance_type", "keda")
    words += [(f"--{flag.replace('_', '-')}", value) for flag in flags if (value := getattr(options, flag))]
    words += [("--job", place.replace("{task}", "0")) for place in options.job]
    for flag, word in words:
        if not _WORD.fullmatch(word):
            raise UsageError(f"{flag} {word!r}: expected an image name or a location, without spaces and quotes")
    platforms = import_module("remora_deploy.manifests")
    if options.platform in platforms.FETCHING and not options.models and "://" not in location:
        raise UsageError(
            f"a pod cannot read '{location}' of this machine: pass --models with a location that it can read, such as "
            "s3://bucket/models or a directory of the image"
        )
    try:
        choices = platforms.choices_of(options)
        facts = import_module("remora_deploy.manifests.facts").measure(
            options.paths, options.name, options.image, location, choices
        )
        print(platforms.find_renderer(options.platform)(facts), end="")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def add_image(image: argparse.ArgumentParser) -> None:
    """Add the actions of `remora image`."""
    kinds = image.add_subparsers(metavar="ACTION", required=True)
    images = import_module("remora_deploy.images")
    build = kinds.add_parser(
        "build",
        help="build an image with docker, podman or buildah",
        description="Build a container image from this installation, with the media types that all platforms accept.",
    )
    images.add_arguments(build)
    listing = kinds.add_parser("list", help="list the images", description="List the images that build can make.")
    bind(build, _build_image)
    bind(listing, _list_images)


def add_build(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora build`."""
    parser.description = (
        "Write a folder from which docker, podman, buildah or a cloud builds a container image: the files "
        "of SOURCE, the packages of its requirements.txt, this remora, and a Dockerfile. A Python file comes with the "
        "modules beside it that it imports. The same files give the same folder."
    )
    import_module("remora_deploy.images").add_model_arguments(parser)
    bind(parser, _build)


def _build(options: argparse.Namespace) -> int:
    code: int = import_module("remora_deploy.images.models").build(options)
    return code


def _build_image(options: argparse.Namespace) -> int:
    code: int = import_module("remora_deploy.images.building").build(options)
    return code


def _list_images(options: argparse.Namespace) -> int:
    rows = [("NAME", "PLATFORM", "CUDA", "EXTRAS")]
    for each in import_module("remora_deploy.images").IMAGES.values():
        rows.append((each.name, each.platform, each.cuda, ",".join(each.extras)))
    print(columns(rows))
    return 0


def _add_emulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="*", metavar="TARGET", help="folder, URL, or -- COMMAND [ARGUMENT ...]")
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder that the platform would mount")
    parser.add_argument("--body", type=Path, metavar="FILE", help="body of a valid inference request")
    parser.add_argument(
        "--content-type",
        default="application/json",
        metavar="TYPE",
        help="content type of --body (default %(default)s)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the process; repeatable",
    )
    parser.add_argument(
        "--with",
        dest="given",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="parameter of a single check, named where the check is skipped; repeatable",
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="time to become ready, in seconds (default: the platform's)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="factor for all timeouts of the platform, for slow machines (default %(default)s)",
    )
    parser.add_argument(
        "--api",
        type=int,
        default=0,
        metavar="PORT",
        help="run no checks; serve the platform's client API on this loopback port until interrupted",
    )
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="run only this check; repeatable")
    parser.add_argument("--list", action="store_true", help="print the checks and their reasons")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="report format (default %(default)s)"
    )


def _emulate(options: argparse.Namespace) -> int:
    code: int = import_module("remora_deploy.emulate.running").run(options)
    return code


def add_deploy(deploy: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora deploy`, most of which the platforms' modules define."""
    platforms = import_module("remora_deploy.deploy").PLATFORMS
    actions = import_module("remora_deploy.deploy").ACTIONS
    deploy.description = _DEPLOY
    deploy.epilog = "actions:\n" + "\n".join(f"  {name:<10} {text}" for name, text in actions.items())
    deploy.formatter_class = argparse.RawDescriptionHelpFormatter
    words = (*platforms, *actions)
    deploy.add_argument("platform", choices=words, metavar="PLATFORM|ACTION", help=f"platform: {', '.join(platforms)}")
    deploy.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the platform")
    bind(deploy, _deploy)


def _deploy(options: argparse.Namespace) -> int:
    code: int = import_module("remora_deploy.deploy.command").main([options.platform, *options.arguments])
    return code
