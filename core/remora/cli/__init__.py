"""Command line `remora`.

The flags of `serve` are the fields of the option dataclasses. The exit code is 0, 1 (failed) or 2 (wrong usage).
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from remora._version import __version__
from remora.cli.stderr import Parser, print_error
from remora.errors import ConfigError
from remora.options import BOOLEANS

if TYPE_CHECKING:
    from remora.options import ServerOptions
    from remora.server.early_port import EarlyPort
    from remora.server.host import Host

_Layout = argparse.RawDescriptionHelpFormatter
_WIDTH = 100
"""Columns of the usage of `serve` after a wrong value; the terminal's width would cost every start an import."""

_ALIASES = {
    "model_repository": ("--model-store",),
    "model_name": ("--model_name",),  # as KServe's own runtimes take both
    "http_port": ("--http_port",),
    "disable_auto_complete_config": ("--strict-model-config",),
}


_SERVE_HELP = "serve models over HTTP and gRPC"
_SYNONYMS = {
    # Flags of other servers, with ours or an explanation.
    "--port": "--http-port",
    "-p": "--http-port",
    "--host": "--http-address",
    "--bind": "--http-address",
    "--workers": "one process serves all models; instance_group in a model's configuration runs it in parallel",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    entered_ns = time.monotonic_ns()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if any("=" in word or "://" in word for word in argv):
        from remora.system.command_line import conceal

        conceal()
    # `remora --model-repository DIR ...` is `remora serve --model-repository DIR ...`: as with tritonserver.
    if argv and argv[0].startswith("--") and argv[0] not in ("--help", "--version"):
        argv.insert(0, "serve")
    if argv and argv[0] == "serve":
        gc.disable()  # because scanning takes a tenth of the startup time and finds little: tuning.freeze
    options = parse_arguments(argv)
    options.entered_ns = entered_ns
    command = getattr(options, "command", None)
    if command is None:
        build_parser().print_help()
        return 2
    try:
        return int(command(options))
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        from remora.cli.interrupts import INTERRUPTED  # imported here, because most commands end without it

        return INTERRUPTED


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments.

    Only the command in use gets its arguments, and `serve` only the flags in use, because that starts faster.
    """
    if argv and argv[0] == "serve" and not {"-h", "--help", "--help-all"} & set(argv):
        options, unknown = build_parser(serve_flags={word.partition("=")[0] for word in argv}).parse_known_args(argv)
        if not unknown:
            return options
    try:
        parser = build_parser(only=argv[0] if argv else "")
    except ConfigError as error:
        print_error("remora", error)
        sys.exit(1)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        _fail_with_hint(options, unknown)
    return options


def _fail_with_hint(options: argparse.Namespace, unknown: Sequence[str]) -> NoReturn:
    """Exit with the usage of the command and a hint for the first unknown flag."""
    from difflib import get_close_matches

    parser: argparse.ArgumentParser = getattr(options, "parser", None) or build_parser()
    flag = unknown[0].partition("=")[0]
    flags = [each for action in parser._actions for each in action.option_strings]
    synonym = _SYNONYMS.get(flag) if parser.prog.endswith(" serve") else None
    close = [synonym] if synonym in flags else get_close_matches(flag, flags, n=1)
    hint = f"; did you mean {close[0]}?" if close and flag.startswith("-") else f"; {synonym}" if synonym else ""
    # Print flags without values because a value may be a secret after a misspelled flag.
    shown = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
    parser.error(f"unrecognized arguments: {' '.join(shown)}{hint}")


def build_parser(serve_flags: Container[str] | None = None, only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    With ``serve_flags`` it has `serve` alone, with these flags; with ``only`` that command alone has arguments.
    """
    parser = Parser(
        prog="remora",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="One inference engine for every cloud.",
        formatter_class=_Layout if serve_flags is None else partial(_Layout, width=_WIDTH),
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", prog="remora", help=argparse.SUPPRESS)
    serve = commands.add_parser(
        "serve",
        formatter_class=argparse.HelpFormatter
        if serve_flags is None
        else partial(argparse.HelpFormatter, width=_WIDTH),
        help=_SERVE_HELP,
        usage="%(prog)s [PATH ...] [--OPTION VALUE ...]\n       %(prog)s --help | --help-all",
        description="Serve the models at each PATH until SIGTERM.",
        allow_abbrev=False,
        add_help=False,
    )
    if only in (None, "serve"):
        _add_serve(serve, serve_flags)
    if serve_flags is None:
        _add_commands(parser, commands, only)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Any, only: str | None) -> None:
    """Add the commands beside `serve`.

    Those of other packages are added if a name or the help asks for them.
    """
    from remora import plugins

    found = {name: row for name, row in plugins.COMMANDS.items() if plugins.is_present(row.target)}
    targets: dict[str, Callable[[], Any]] = {name: partial(plugins.load, row.target) for name, row in found.items()}
    if only is not None and only != "serve" and only not in found:
        for entry in plugins.installed("commands"):
            if entry.name not in plugins.COMMANDS and entry.name != "serve":
                place = f"of {entry.dist.name}" if entry.dist is not None else "of another package"
                found[entry.name] = plugins.Command("Other packages", place, "")
                targets[entry.name] = partial(plugins.load_installed, entry)
    rows = [(plugins.START, "serve", _SERVE_HELP)]
    for name, row in found.items():
        command = commands.add_parser(name, help=row.help)
        rows.append((row.heading, name, row.help))
        if only in (None, name):
            targets[name]()(command)
    parser.epilog = _in_groups(rows)


class _ShortHelp(argparse.Action):
    """Flag of `serve` that prints the help with the basic options alone."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the help and exit."""
        from remora.options import EngineOptions, ServerOptions

        further = {
            field.name
            for kind in (EngineOptions, ServerOptions)
            for field in fields(kind)
            if not field.metadata["basic"]
        }
        hidden = [action for action in parser._actions if action.dest in further]
        for action in hidden:
            action.help = argparse.SUPPRESS
        parser.epilog = f"{parser.prog} --help-all shows the other {len(hidden)} options."
        parser.print_help()
        parser.exit()


def command_parsers() -> list[tuple[str, argparse.ArgumentParser]]:
    """Return the parser of each command and action by its words, for the reference."""
    found: list[tuple[str, argparse.ArgumentParser]] = []
    pending = [("", build_parser())]
    while pending:
        words, parser = pending.pop(0)
        inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        pending = [(f"{words} {name}".strip(), sub) for each in inner for name, sub in each.choices.items()] + pending
        if words and (not inner or parser.description):
            found.append((words, parser))
    return found


def _in_groups(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return the text of commands, given as heading, name and help, by heading.

    argparse cannot group them.
    """
    lines: list[str] = []
    for heading in dict.fromkeys(heading for heading, _, _ in rows):
        lines += ["", f"{heading}:", *(f"  {name:<10} {text}" for title, name, text in rows if title == heading)]
    return "\n".join([*lines[1:], "", "remora COMMAND --help shows the arguments of a command."])


def _add_serve(serve: argparse.ArgumentParser, flags: Container[str] | None) -> None:
    from remora.options import IGNORED_FLAGS, EngineOptions, ServerOptions

    serve.add_argument("paths", nargs="*", metavar="PATH", help=_help(EngineOptions, "paths"))
    serve.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="Show these options and exit.")
    serve.add_argument("--help-all", action="help", help="Show all options and exit.")
    serve.add_argument(
        "--host-platform",
        metavar="NAME",
        help="Take ports, routes and settings from the environment of a platform, such as container.",
    )
    for kind in (EngineOptions, ServerOptions):
        add_options(serve, kind, skip=("paths",), only=flags)
    for flag in IGNORED_FLAGS:
        if flags is not None and f"--{flag}" not in flags:
            continue
        serve.add_argument(f"--{flag}", action="append", nargs="?", help=argparse.SUPPRESS)
    serve.set_defaults(command=_serve, parser=serve)


def _serve(options: argparse.Namespace) -> int:
    from remora.options import cache_settings
    from remora.server.host import Host, find_adapter, optional_ports

    try:
        host = find_adapter(options.host_platform).host(os.environ) if options.host_platform else Host()
    except (ValueError, OSError) as error:
        print_error("remora serve", error)
        return 2
    if options.paths or getattr(options, "model_repository", None):  # in place of the platform's models
        host = replace(host, engine=replace(host.engine, paths=(), model_repository=()))
    host = replace(host, engine=read_options(options, host.engine), server=read_options(options, host.server))
    if host.engine.reload:
        if host.engine.model_control_mode not in ("none", "poll"):
            print_error(
                "remora serve",
                f"--reload excludes --model-control-mode={host.engine.model_control_mode}: it replaces the models that "
                "are served from the start",
            )
            return 2
        host = replace(host, engine=replace(host.engine, model_control_mode="poll", repository_poll_secs=1))
    if not host.engine.paths and not host.engine.model_repository:
        print_error(
            "remora serve", "expected a PATH or --model-repository: a repository, a model directory or a model file"
        )
        return 2
    if host.engine.load_model and host.engine.model_control_mode not in ("explicit", "ondemand"):
        print_error("remora serve", "--load-model requires --model-control-mode=explicit or ondemand")
        return 2
    try:
        host = replace(host, extra_ports=(*host.extra_ports, *optional_ports(host.server, os.environ)))
    except ValueError as error:
        print_error("remora serve", error)
        return 2
    try:
        host = replace(host, server=checked_options(host.server))
        cache_settings(host.engine)
    except ValueError as error:
        print_error("remora serve", error)
        return 1  # tritonserver's exit code, which scripts test
    set_up_logging(host.server)
    if host.server.log_export != "off":
        from remora.server.option_checks import export_log

        try:
            export_log(host.server.log_export)
        except ValueError as error:
            print_error("remora serve", error)
            return 2
    _warn_of_ignored(options)
    if options.host_platform in (None, "container"):  # the gateways of the others authenticate clients
        _warn_of_exposure(host)
    return _start(host, options.entered_ns)


def checked_options(options: ServerOptions) -> ServerOptions:
    """Return server options with their secrets resolved. Raises ValueError for invalid options."""
    if options.frontends != "0":
        from remora.server.option_checks import front_count

        front_count(options.frontends, cores=1)
    for flag, size in (
        ("--http-max-input-size", options.http_max_input_size),
        ("--grpc-max-message-size", options.grpc_max_message_size),
    ):
        if size <= 0:
            raise ValueError(f"{flag}={size}: expected more than 0 bytes")
    found: dict[str, Any] = {}
    for field in ("http_restricted_api", "grpc_restricted_protocol"):
        entries = getattr(options, field)
        if entries:
            from remora.protocols.restriction import Restrictions, fill_in_secrets

            flag = f"--{field.replace('_', '-')}"
            found[field] = fill_in_secrets(entries, flag, _secret_at)
            Restrictions(found[field], flag)
    if options.http_self_signed and not options.http_server_cert:
        found |= _self_signed()
    if options.api_key:
        from remora.protocols.api_keys import hashed_entries

        found["api_key"] = hashed_entries(options.api_key, _secret_at)
    if not options.api_keys_file and os.environ.get("REMORA_API_KEYS_FILE"):
        found["api_keys_file"] = os.environ["REMORA_API_KEYS_FILE"]
    return replace(options, **found) if found else options


def _self_signed() -> dict[str, str]:
    """Return the options of a self-signed certificate. Raises ValueError."""
    from remora.errors import RemoraError
    from remora.server.tls import make_self_signed
    from remora.system.environment import cache_directory

    try:
        cert, key = make_self_signed(cache_directory("tls", os.environ))
    except RemoraError as error:
        raise ValueError(str(error)) from error
    print(f"remora serve: the certificate for localhost is {cert}: curl --cacert {cert}", file=sys.stderr)
    return {"http_server_cert": str(cert), "http_server_key": str(key)}


def _secret_at(place: str) -> str:
    """Read a secret from a file, or from an environment variable for ``env:NAME``.

    Raises ValueError.
    """
    scheme, _, name = place.partition(":")
    if scheme == "env":
        secret = os.environ.get(name)
        if secret is None:
            raise ValueError(f"the variable {name} that should hold a secret is not set")
        return secret
    try:
        with open(place, encoding="utf-8") as file:
            return file.read().rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the file {place} that should hold a secret cannot be read: {reason}") from error


def _start(host: Host, entered_ns: int) -> int:
    """Load the models while the rest of the server is imported, then serve."""
    from remora.startup import SLOW_IMPORT_NS, Ledger
    from remora.system import tuning
    from remora.system.clock import SystemClock
    from remora.system.environment import keep_runtimes_quiet
    from remora.system.imports import time_imports
    from remora.system.machine import process_age_s

    now_ns = SystemClock.monotonic_ns
    ledger = Ledger(now_ns, now_ns() - int(process_age_s() * 1e9))
    ledger.mark("interpreter", entered_ns)
    ledger.mark("options")
    # Until the server can shut down in order: no request is in flight, and a load may take long.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    early = open_early_port(host)
    settings = tuning.Tuning()
    tuning.apply(settings, os.environ)
    keep_runtimes_quiet()  # workers inherit the settings
    end_of_timing = time_imports(now_ns, ledger.imported, SLOW_IMPORT_NS)
    from remora.engine import Engine
    from remora.errors import RemoraError
    from remora.server.startup import with_gpu_requirement, with_hooks, with_secrets, with_workers
    from remora.system.threads import run_in_daemon

    ledger.mark("import of the engine")
    try:
        chosen = with_gpu_requirement(with_hooks(host.engine, os.environ), os.environ)
        engine = Engine(options=with_workers(with_secrets(chosen, os.environ)), ledger=ledger)
    except (ValueError, RemoraError) as error:
        print_error("remora serve", error)
        return 2
    loading = run_in_daemon(engine.start, "remora start")
    loading.add_done_callback(lambda done: end_of_timing())
    from remora.server.main import serve  # imports asyncio and the codecs while the models load

    ledger.mark("import of the server")
    return serve(engine, loading, host, settings, early)


def open_early_port(host: Host) -> EarlyPort | None:
    """Open the HTTP port, or return None and leave the error message to the server."""
    from remora.server.early_port import EarlyPort

    options = host.server
    if not options.allow_http or options.http_restricted_api or options.http_server_cert:
        return None
    try:
        return EarlyPort(options.http_address, options.http_port, reuse_port=options.reuse_http_port)
    except OSError:
        return None


def with_flags(host: Host, words: Sequence[str]) -> Host:
    """Return a host with flags of `serve` applied over its options."""
    if not words:
        return host
    parsed = parse_arguments(["serve", *words])
    return replace(host, engine=read_options(parsed, host.engine), server=read_options(parsed, host.server))


def _warn_of_exposure(host: Host) -> None:
    options = host.server
    others = options.grpc_address, options.metrics_address, host.extra_ports
    if options.http_address.startswith("127.") and not any(others):  # the default, without another import
        return
    import logging

    from remora.server.option_checks import exposure

    warning = exposure(options, host.extra_ports)
    if warning:
        logging.getLogger("remora.server").warning("%s", warning)


def _warn_of_ignored(options: argparse.Namespace) -> None:
    import logging

    from remora.options import IGNORED_FLAGS

    for flag, why in IGNORED_FLAGS.items():
        if getattr(options, flag.replace("-", "_"), None) is not None:
            logging.getLogger("remora").warning("--%s has no effect: %s", flag, why)


def set_up_logging(options: Any) -> None:
    """Log one line per record to standard error."""
    from remora.system import logs
    from remora.system.logs import LogSettings

    chosen = {name: getattr(options, name) for name in ("log_info", "log_warning", "log_error", "log_format")}
    logs.OURS.set_up(LogSettings(log_verbose_level=max(options.log_verbose, 0), **chosen))


# -- options from dataclasses -----------------------------------------------------------------------------------------


def add_options(
    parser: argparse.ArgumentParser, kind: type[Any], *, skip: Sequence[str] = (), only: Container[str] | None = None
) -> None:
    """Add a flag for each field of an option dataclass, or just those in ``only``."""
    group = parser.add_argument_group((kind.__doc__ or kind.__name__).splitlines()[0].rstrip("."))
    for field in fields(kind):
        flags = [f"--{field.name.replace('_', '-')}", *_ALIASES.get(field.name, ())]
        if field.name not in skip and (only is None or any(flag in only for flag in flags)):
            _add_option(group, field, flags)


def _add_option(group: Any, field: Field[Any], flags: list[str]) -> None:
    metadata = field.metadata
    settings: dict[str, Any] = {"dest": field.name, "default": None, "help": _describe(field)}
    if metadata["many"]:
        settings |= {"action": "append", "metavar": metadata["metavar"]}
    elif isinstance(_default(field), bool):
        settings |= {"type": _boolean, "nargs": "?", "const": True, "metavar": "true|false"}
    elif metadata["choices"]:
        words = {choice.lower(): choice for choice in metadata["choices"]}  # because Triton ignores case here
        settings |= {"choices": metadata["choices"], "type": lambda text: words.get(text.lower(), text)}
    else:
        kind = _KINDS.get(field.name if field.name == "log_verbose" else metadata["metavar"], type(_default(field)))
        settings |= {"type": kind, "metavar": metadata["metavar"]}
    group.add_argument(*flags, **settings)


def read_options(namespace: argparse.Namespace, defaults: Any) -> Any:
    """Return an option dataclass from parsed arguments, the rest from ``defaults``."""
    values: dict[str, Any] = {}
    for field in fields(defaults):
        value = getattr(namespace, field.name, None)
        if value is None or value == []:  # PATH... without a path is an empty list
            continue
        if field.metadata["many"]:
            value = tuple(value)
        values[field.name] = value
    return replace(defaults, **values)


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def _describe(field: Field[Any]) -> str:
    default = _default(field)
    text = str(field.metadata["help"]).replace("%", "%%")
    return text if field.metadata["many"] or default in ("", None) else f"{text} (default {str(default).lower()})"


def _help(kind: type[Any], name: str) -> str:
    return next(str(field.metadata["help"]) for field in fields(kind) if field.name == name)


def _level(text: str) -> int:
    """Parse a log level, either a number or a boolean for 1 and 0."""
    try:
        return int(BOOLEANS.get(text.lower(), text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _port(text: str) -> int:
    """Parse a port, where 0 means any free port."""
    if text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65_536:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, got {text!r}")


_KINDS: dict[str, Callable[[str], Any]] = {"log_verbose": _level, "PORT": _port}


def _boolean(text: str) -> bool:
    try:
        return BOOLEANS[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
