"""Vertex AI host, with predict and rawPredict on the port and routes that the platform sets.

python -m remora_adapters.vertex [FLAG ...]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, port_of

if TYPE_CHECKING:
    from remora.server.host import ServerContext
    from remora.server.http.exchange import Service

_PORT = 8080
_MODELS = "/models"
_EXIT_S = 25
"""Less than the 30 s between SIGTERM and SIGKILL."""


def host(environ: Mapping[str, str]) -> Host:
    """Return the settings of a deployed model.

    ``AIP_HTTP_PORT`` is the port, ``AIP_HEALTH_ROUTE`` and ``AIP_PREDICT_ROUTE`` the paths. The models are at
    ``AIP_STORAGE_URI`` (gs://, which the container itself reads), unless ``REMORA_MODEL_REPOSITORY`` names another
    location. ``REMORA_DEFAULT_MODEL`` is the target of predict among several models.

    Raises ValueError for an invalid port or path.
    """
    port = port_of(environ, "AIP_HTTP_PORT", _PORT)
    health, predict = _route(environ, "AIP_HEALTH_ROUTE", "/health"), _route(environ, "AIP_PREDICT_ROUTE", "/predict")
    if health == predict:
        raise ValueError(f"AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are both {health}: they must differ")
    default = environ.get("REMORA_DEFAULT_MODEL", "")

    def front(context: ServerContext) -> Service:
        from remora_adapters.vertex.predicting import VertexService  # while the models load

        return VertexService(context, health, predict, default)

    place = environ.get("REMORA_MODEL_REPOSITORY") or environ.get("AIP_STORAGE_URI") or _MODELS
    server = ServerOptions(http_address="0.0.0.0", http_port=port, allow_grpc=False, allow_metrics=False)
    return Host(EngineOptions(paths=(place,), exit_timeout_secs=_EXIT_S), server, front)


def _route(environ: Mapping[str, str], name: str, default: str) -> str:
    route = environ.get(name) or default
    if not route.startswith("/") or "?" in route or not route.isascii():
        raise ValueError(f"{name}={route}: expected a path such as {default}")
    return route


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "vertex", *(sys.argv[1:] if arguments is None else arguments)])
