"""Amazon SageMaker host for endpoints with one model or many and for batch transform.

    python -m remora_adapters.sagemaker serve [FLAG ...]

The platform starts an image with the argument ``serve`` and configures it by environment variables (`settings`). Models
are in /opt/ml/model, in any layout that the engine reads, or as an ``inference.py`` of the toolkits.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remora.api.system import TemporaryFolder
from remora.cli import main as run
from remora.cli import with_flags
from remora.options import EngineOptions, ServerOptions
from remora.server.host import ExtraPort, Host, ServerContext, ServiceFactory
from remora_adapters.sagemaker.layout import Layout, find_models
from remora_adapters.sagemaker.settings import Rules, SageMakerSettings, rules_of, safe_ports, settings_of

if TYPE_CHECKING:
    from remora.server.http.exchange import Service

Find = Callable[[Path, Path], Layout]
_log = logging.getLogger("remora.sagemaker")
_DRAIN_S = 25
"""Less than the 30 s between SIGTERM and SIGKILL."""


def host(environ: Mapping[str, str]) -> Host:
    """Return the container's host.

    Raises ValueError for invalid settings and folders, OSError for unreadable folders.
    """
    settings = settings_of(environ)
    scratch = _scratch()
    find = partial(find_models, workers=settings.workers, script=settings.script)
    rules, script = settings.rules, False
    engine = EngineOptions(exit_timeout_secs=_DRAIN_S, model_load_gpu_limit=settings.gpu_limits)
    if settings.multi_model:
        engine = replace(engine, model_control_mode="explicit", paths=(_empty(scratch / "none"),))
    else:
        layout = find(settings.folder / "model", scratch)
        script, name = layout.script, layout.default or _default(layout, rules.model, settings.folder / "model")
        engine = replace(engine, **layout.places)
        rules = replace(rules, model=name)
        if layout.models:
            engine = replace(engine, model_control_mode="explicit", load_model=(name,))
    front = _front(rules, scratch, find, script=script, unused=settings.unused)
    found = Host(engine, _server_options(settings), front)
    found = with_flags(found, settings.flags)
    _keep_to_range(found.server, settings)
    return found


def extra_port(options: ServerOptions, environ: Mapping[str, str]) -> ExtraPort:
    """Return the port of Triton's SageMaker front end (``--allow-sagemaker``, [N01]).

    Raises ValueError if another port is outside ``--sagemaker-safe-port-range``.
    """
    if options.sagemaker_safe_port_range:
        ports = safe_ports("--sagemaker-safe-port-range", options.sagemaker_safe_port_range)
        _refuse_unsafe(options, ports)
    # Only the start script of Triton's image reads SAGEMAKER_MULTI_MODEL; the server's default ping mode is "ready".
    rules = replace(rules_of(environ, Path("/opt/ml"), multi_model=False), as_triton=True)
    scratch = _scratch()
    return ExtraPort("SageMaker", "0.0.0.0", options.sagemaker_port, _front(rules, scratch))


def _scratch() -> Path:
    """Return a folder for generated files that is removed when the process ends."""
    folder = TemporaryFolder("sagemaker")
    atexit.register(folder.remove)
    return folder.path


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    return run(command_of(sys.argv[1:] if arguments is None else arguments))


def command_of(words: Sequence[str]) -> list[str]:
    """Return the command for an image's arguments.

    The platform appends ``serve`` to the arguments of the entrypoint, which may contain flags.
    """
    if words[:1] == ["serve"]:
        words = words[1:]
    elif words[-1:] == ["serve"]:
        words = words[:-1]
    return ["serve", "--host-platform", "sagemaker", *words]


def _front(
    rules: Rules,
    scratch: Path,
    find: Find = find_models,
    *,
    script: bool = False,
    unused: Sequence[tuple[str, str]] = (),
) -> ServiceFactory:
    def front(context: ServerContext) -> Service:
        for name, why in unused:  # once logging is configured
            _log.warning("%s has no effect: %s", name, why)
        from remora_adapters.sagemaker.front import MALFORMED, SageMakerService
        from remora_adapters.sagemaker.hosted import HostedModels  # imported while the models load
        from remora_adapters.sagemaker.routes import binary_headers

        over = partial(context.rest.over, malformed=MALFORMED, binary_headers=binary_headers)
        hosted = HostedModels(rules.models_root, context.engine, scratch / "models", over, find)
        context.engine.measure_other_models(hosted.served)
        atexit.register(hosted.close)
        return SageMakerService(context, rules, hosted, script=script)

    return front


def _server_options(settings: SageMakerSettings) -> ServerOptions:
    verbose, info, warning, error = settings.log
    return ServerOptions(
        http_address="0.0.0.0",
        http_port=settings.port,
        http_max_input_size=settings.max_body_bytes,
        allow_grpc=settings.grpc_port > 0,
        grpc_port=settings.grpc_port or ServerOptions().grpc_port,
        allow_metrics=settings.metrics_port > 0,
        metrics_port=settings.metrics_port or ServerOptions().metrics_port,
        log_verbose=verbose,
        log_info=info,
        log_warning=warning,
        log_error=error,
    )


def _default(layout: Layout, named: str, folder: Path) -> str:
    """Return the default model, the named or only one. Raises ValueError [N08]."""
    if not layout.models:
        return named if named and (folder / named).is_dir() else ""
    if named and named not in layout.models:
        raise ValueError(
            f"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME={named}: no such folder in {folder}, only {', '.join(layout.models)}"
        )
    if not named and len(layout.models) > 1:
        raise ValueError(
            f"{folder} holds {len(layout.models)} models ({', '.join(layout.models)}): set "
            "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to the one to serve"
        )
    return named or layout.models[0]


def _keep_to_range(options: ServerOptions, settings: SageMakerSettings) -> None:
    if settings.ports is not None:
        _refuse_unsafe(replace(options, allow_http=False), settings.ports)


def _refuse_unsafe(options: ServerOptions, ports: range) -> None:
    for on, port, what in (
        (options.allow_http, options.http_port, "HTTP"),
        (options.allow_grpc, options.grpc_port, "GRPC"),
        (options.allow_metrics, options.metrics_port, "metrics"),
    ):
        if on and port not in ports:
            raise ValueError(
                f"The server cannot listen to {what} requests at port {port}, allowed port range is "
                f"[{ports.start}, {ports.stop - 1}]"
            )


def _empty(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
