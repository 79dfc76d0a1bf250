"""Azure ML online endpoint host, with Azure's settings, routes and scoring scripts.

    python -m remora_adapters.azureml [FLAG ...]

Configure ``/v2/health/live`` as liveness route and ``/v2/health/ready`` as readiness route. ``/`` combines both and
would restart a deployment that loads slowly.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora._version import __version__
from remora.options import EngineOptions, ServerOptions
from remora.server.host import ExtraPort, Host
from remora.system.json_text import read_json
from remora_adapters.azureml.cors import Origins

if TYPE_CHECKING:
    from remora.server.host import ServerContext
    from remora.server.http.exchange import Service
    from remora_adapters.azureml.entry_script import EntryScript

_log = logging.getLogger("remora.azureml")

_PORT, _HEALTH_PORT, _HIGHEST_PORT = 5001, 5000, 65_535
_APP_ROOT = "/var/azureml-app"
_EXIT_S = 25
"""Less than the 30 s between SIGTERM and SIGKILL."""
_LEVELS: dict[str, dict[str, Any]] = {
    "DEBUG": {"log_verbose": 1},
    "INFO": {},
    "WARNING": {"log_info": False},
    "ERROR": {"log_info": False, "log_warning": False},
    "CRITICAL": {"log_info": False, "log_warning": False, "log_error": False},
}
_UNSUPPORTED = ("AML_APP_INSIGHTS_ENABLED", "AML_MODEL_DC_STORAGE_ENABLED", "AZUREML_DEBUG_PORT")
"""Variables of Azure's server without effect here; setting one logs a warning."""
_NAMES = ("SERVICE_NAME", "SERVICE_VERSION", "SERVICE_PATH_PREFIX")
_DEPTH = 3
"""Directory levels to search, because a registered folder adds its name below the mount."""


def host(environ: Mapping[str, str]) -> Host:
    """Return the settings of a deployment.

    ``AZUREML_MODEL_DIR`` holds the models: a repository there or below the registered folder's name, one model, or one
    file. ``SERVER_PORT`` is the port; ``SEPERATE_HEALTH_ENDPOINT=true`` (Azure's spelling) adds ``HEALTH_PORT``.
    ``AZUREML_ENTRY_SCRIPT`` (below ``AML_APP_ROOT``) is the scoring script; with a script, no model is loaded at
    startup.

    ``SERVICE_NAME``, ``SERVICE_VERSION`` and ``SERVICE_PATH_PREFIX`` appear in the documents at ``/swagger.json``.
    ``AML_CORS_ORIGINS`` lists the origins whose pages may read answers, separated by commas, or ``*``.

    ``AZUREML_LOG_LEVEL`` is DEBUG, INFO, WARNING, ERROR or CRITICAL. A file may set variables that the environment
    lacks: ``AZUREML_CONFIG_FILE``, or ``config.json`` below ``AML_APP_ROOT`` or in the script's directory.

    Raises ValueError for invalid numbers, levels, origins or version headers, and for an unreadable file.
    """
    environ = {**_read_config_file(environ), **environ}
    root = Path(environ.get("AML_APP_ROOT", _APP_ROOT))
    named = environ.get("AZUREML_ENTRY_SCRIPT", "")
    has_script = bool(named) or (root / "main.py").is_file()
    models = environ.get("AZUREML_MODEL_DIR", "")

    @cache
    def front(context: ServerContext) -> Service:  # cached, because both ports share one script
        from remora_adapters.azureml.scoring import ScoringService, ScoringSettings  # while the models load
        from remora_adapters.azureml.swagger import Named

        for name in _UNSUPPORTED:
            if environ.get(name, "").lower() not in ("", "false"):
                _log.warning("%s is set but has no effect on this server", name)
        script = entry_script() if has_script else None
        default = environ.get("REMORA_DEFAULT_MODEL", "")
        names = Named(*(environ.get(name, default_name) for name, default_name in zip(_NAMES, Named(), strict=True)))
        settings = ScoringSettings(script, timeout_ms, default, root, version, origins, names)
        return ScoringService(context, settings)

    def entry_script() -> EntryScript:
        from remora_adapters.azureml.entry_script import EntryScript

        search = [
            root,
            *([root / environ["AZUREML_SOURCE_DIRECTORY"]] if "AZUREML_SOURCE_DIRECTORY" in environ else []),
        ]
        return EntryScript(root / named if named else None, tuple(search), at_a_time=workers)

    version = _version(environ)
    origins = Origins(environ.get("AML_CORS_ORIGINS", ""))
    workers = _number(environ, "WORKER_COUNT", 1)
    timeout_ms = _number(environ, "SCORING_TIMEOUT_MS", 3_600_000)
    extra_ports: tuple[ExtraPort, ...] = ()
    if environ.get("SEPERATE_HEALTH_ENDPOINT") == "true":
        port = _number(environ, "HEALTH_PORT", _HEALTH_PORT, _HIGHEST_PORT)
        extra_ports = (ExtraPort("health", "0.0.0.0", port, front),)
    if has_script:
        engine = EngineOptions(
            model_repository=(str(models or root),), model_control_mode="explicit", exit_timeout_secs=_EXIT_S
        )
    else:
        place = find_models(Path(models)) if models else None
        # Azure mounts at .../NAME/VERSION, and NAME is the name of a model without a folder.
        engine = EngineOptions(
            paths=(str(place),) if place else (),
            model_name=Path(models).parent.name if models else "",
            exit_timeout_secs=_EXIT_S,
        )
    port = _number(environ, "SERVER_PORT", _PORT, _HIGHEST_PORT)
    server = ServerOptions(http_address="0.0.0.0", http_port=port, allow_grpc=False, allow_metrics=False)
    return Host(engine, replace(server, **_severities(environ)), front, extra_ports)


def _read_config_file(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in Azure's configuration file, if any.

    Raises ValueError for an unreadable file.
    """
    root = Path(environ.get("AML_APP_ROOT", _APP_ROOT))
    named = environ.get("AZUREML_CONFIG_FILE", "")
    beside = (root / environ.get("AZUREML_ENTRY_SCRIPT", "main.py")).parent
    usual = (place / "config.json" for place in (root, beside))
    path = Path(named) if named else next((path for path in usual if path.is_file() and path.stat().st_size), None)
    if path is None:
        return {}
    try:
        found = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"AZUREML_CONFIG_FILE: {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"AZUREML_CONFIG_FILE: {path} is not a JSON object")
    # The file may hold other keys than Azure's variables, and numbers as values.
    plain = {name: value for name, value in found.items() if isinstance(value, str | int)}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in plain.items()}


def find_models(directory: Path) -> Path:
    """Return the repository, model or file in a mounted directory, through single folders."""
    from remora.api.storage import LocalRepository

    place = directory
    for _ in range(_DEPTH):
        if not place.is_dir():
            break
        found = LocalRepository(place, any_layout=True).models()
        if any(folder.versions for folders in found.values() for folder in folders):
            return place
        inner = [entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        if len(inner) != 1:
            break
        place = inner[0]
    return directory


def _number(environ: Mapping[str, str], name: str, default: int, most: int = (1 << 32) - 1) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 11 and 0 < int(text) <= most):
        raise ValueError(f"{name}={text[:40]}: expected a whole number from 1 to {most}")
    return int(text)


def _severities(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the log options for ``AZUREML_LOG_LEVEL``. Raises ValueError."""
    level = environ.get("AZUREML_LOG_LEVEL") or "INFO"
    if level.upper() not in _LEVELS:
        raise ValueError(f"AZUREML_LOG_LEVEL={level[:40]}: expected one of {', '.join(_LEVELS)}")
    return _LEVELS[level.upper()]


def _version(environ: Mapping[str, str]) -> str:
    """Return the server version header of each answer. Raises ValueError for an invalid value."""
    enabled = environ.get("SERVER_VERSION_LOG_RESPONSE_ENABLED", "true").lower() == "true"
    text = environ.get("HTTP_X_MS_SERVER_VERSION") or (f"remora/{__version__}" if enabled else "")
    if not (text.isascii() and text.isprintable()):
        raise ValueError("HTTP_X_MS_SERVER_VERSION: expected printable ASCII")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "azureml", *(sys.argv[1:] if arguments is None else arguments)])
