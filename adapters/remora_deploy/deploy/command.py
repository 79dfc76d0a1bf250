"""Command `remora deploy`: deployments, and the actions on a service."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from remora.cli.stderr import Parser, print_error
from remora.errors import RemoraError
from remora_deploy.deploy import (
    ACTIONS,
    PLATFORMS,
    Connection,
    PlatformModule,
    find_platform,
    images,
    programs,
    uploads,
)
from remora_deploy.deploy.golden import Golden
from remora_deploy.deploy.plan import Call, CallError, Platform, RefusedError, shown
from remora_deploy.deploy.running import Runner
from remora_deploy.deploy.shares import flags_of

_LINES = 50


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    try:
        module, action, options = parse(arguments)
        return _act(module, options, action) if action else _deploy(module, options)
    except ValueError as error:
        print_error("remora deploy", error)
        return 2
    except (RefusedError, CallError) as error:
        print_error("remora deploy", error)
        return 1


def parse(arguments: Sequence[str]) -> tuple[PlatformModule, str, argparse.Namespace]:
    """Return module, action ("" for a deployment) and options. Raises ValueError."""
    action = arguments[0] if arguments and arguments[0] in ACTIONS else ""
    rest = arguments[1:] if action else arguments
    if not rest or rest[0] not in PLATFORMS:
        raise ValueError(f"expected a platform, one of {', '.join(PLATFORMS)}")
    module = find_platform(rest[0])
    prog = f"remora deploy {action} {rest[0]}" if action else f"remora deploy {rest[0]}"
    options = _parser(module, prog, rest[0], action).parse_args(rest[1:])
    if not action:
        if "://" in (getattr(options, "image", None) or ""):
            raise ValueError(f"--image {options.image}: expected a name such as REGISTRY/remora:1, not a URL")
        options.environ = tuple(_pair(each) for each in options.env)
        if options.release is not None:
            _apply_release(options)
    return module, action, options


def _deploy(module: PlatformModule, options: argparse.Namespace) -> int:
    golden = _golden(options)
    if options.dry_run:
        _print_plan(module.build(options, golden))
        return 0
    connection = module.connect(options)
    try:
        return 0 if _runner(connection).deploy(module.build(options, golden)) else 1
    finally:
        connection.close()


def _act(module: PlatformModule, options: argparse.Namespace, action: str) -> int:
    body = _read(options.request) if action == "invoke" else b""
    golden = _golden(options) if action == "rollback" else None
    connection = module.connect(options)
    runner = _runner(connection)
    try:
        platform = module.find_service(options)
        if action == "invoke":
            sys.stdout.buffer.write(runner.invoke(platform, body))
            sys.stdout.buffer.flush()
            return 0
        if action == "status":
            return 0 if runner.status(platform) else 1
        if action == "logs":
            return 0 if runner.logs(platform, options.lines) else 1
        plan = platform.rollback if action == "rollback" else platform.undeploy
        if options.dry_run:
            for step in plan(runner.read(platform)):
                print(shown(step.call))
            return 0
        if action == "rollback":
            return 0 if runner.rollback(platform, golden) else 1
        return 0 if runner.change(platform, plan, f"{platform.name} is removed") else 1
    finally:
        connection.close()


def _print_plan(platform: Platform) -> None:
    """Print every call of a first deployment, with its undoing."""
    for check in platform.checks():
        print(f"# preflight: {check.what}\n{shown(check.call)}")
    state = {read.name: None for read in platform.reads()}
    for read in platform.reads():
        call = read.make(state)
        if call is not None:
            print(f"# read: {read.name}\n{shown(call)}")
    for step in platform.steps(state):
        print(f"# {step.phase}\n{shown(step.call)}")
        for undo in step.undo:
            print(f"# undo on failure\n{shown(undo.call)}")
    print("# An existing service is updated instead of created.")


def _runner(connection: Connection) -> Runner:
    """Return the runner whose local calls are uploads, images of registries and values."""

    def write(line: str) -> None:
        print(line, flush=True)

    return Runner(with_local_calls(connection), write, time.monotonic, time.sleep)


def with_local_calls(connection: Connection) -> Callable[[Call], Any]:
    """Return the function that makes uploads and requests itself and passes on other calls."""
    config = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    docker = images.docker_login(config)

    def perform(call: Call) -> Any:
        match call.target:
            case "storage":
                return uploads.upload(call.arguments["folder"], call.arguments["name"], connection.environ())
            case "registry":
                image, architecture = call.arguments["image"], call.arguments["architecture"]
                return images.inspect(image, architecture, lambda host: connection.login(host) or docker(host))
            case "http":
                return programs.request(call)
            case "local":
                return call.arguments["value"]
            case _:
                return connection(call)

    return perform


def _parser(module: PlatformModule, prog: str, platform: str, action: str) -> argparse.ArgumentParser:
    description = f"{ACTIONS[action].capitalize()}." if action else f"Deploy models to {platform}, or update a service."
    parser = Parser(prog=prog, description=description)
    parser.add_argument("name", metavar="NAME", help="name of the service")
    module.add_place(parser)
    if action == "logs":
        parser.add_argument("--lines", type=int, default=_LINES, metavar="N", help="number (default %(default)s)")
    elif action == "invoke":
        parser.add_argument("--request", type=Path, required=True, metavar="FILE", help="body of a V2 request")
    elif action in ("rollback", "undeploy"):
        parser.add_argument("--dry-run", action="store_true", help="print the calls only")
        if action == "rollback":
            _add_golden(parser)
    elif not action:
        _add_flags(parser)
        module.add_flags(parser)
        parser.add_argument(
            "--release",
            nargs="?",
            const="",
            metavar="RELEASE",
            help="take --traffic, --shadow or --mirror from a release: a model's name, the file of a server's state, a "
            "release.yaml, or versions such as stable=2,canary=3:10%% (default: the only release in --model)",
        )
    return parser


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--image", required=True, metavar="IMAGE", help="container image, in a registry that the platform reads")
    add("--model", default="", metavar="PATH", help="model repository: a folder, or its location in a bucket")
    add("--bucket", default="", metavar="URL", help="where a folder is uploaded to, below a digest of its content")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the server; repeatable")
    _add_golden(parser)
    add("--dry-run", action="store_true", help="print the calls only, without credentials")


def _add_golden(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--request", type=Path, metavar="FILE", help="golden request: the body of a V2 request")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="expected response to --request")


def _apply_release(options: argparse.Namespace) -> None:
    """Set the platform's flags for shares and copies by a release. Raises ValueError."""
    from remora.api.models import find_release  # because it imports the engine's models

    try:
        flags = flags_of(find_release(options.release, [options.model] if options.model else []))
    except RemoraError as error:
        raise ValueError(str(error)) from error
    for name, value in flags.items():
        names = ("shadow", "mirror") if name == "shadow" else (name,)
        flag = next((each for each in names if hasattr(options, each)), "")
        if not flag:
            raise ValueError(
                f"--release: this platform has no {name} of a release; `remora release` has one in a server"
            )
        setattr(options, flag, value)


def _golden(options: argparse.Namespace) -> Golden | None:
    if options.expect and not options.request:
        raise ValueError("--expect needs --request")
    if not options.request:
        return None
    return Golden(_read(options.request), _read(options.expect) if options.expect else b"")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _pair(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not mark or not name:
        raise ValueError(f"--env={name}: expected NAME=VALUE")
    return name, value
