"""Knative Serving host, with all protocols on the port that the platform sets.

    python -m remora_adapters.knative [FLAG ...]

Requests wait for a cold start, and shutdown completes those in flight. The port's name selects the protocol of the
gateways: HTTP/2, and so gRPC, for ``h2c``, and HTTP/1.1 for any other name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, all_on_one_port, models_of, port_of

MODEL_DIRECTORIES = ("/mnt/models", "/models")
"""Default locations of the models, of which the first existing one is used."""
_PORT = 8080
_RESERVED = (8008, 8012, 8013, 8022, 9090, 9091)
"""Ports that Knative's validation reserves for its sidecar."""
_LAME_DUCK_S = 5
"""Time during which routers still send requests to a terminating pod."""
_EXIT_S = 295
"""Less than Knative's grace period, the revision's timeout of 300 s unless set."""


def host(environ: Mapping[str, str]) -> Host:
    """Return settings with all protocols on ``PORT``. Raises ValueError for a reserved port."""
    port = port_of(environ, "PORT", _PORT)
    if port in _RESERVED:
        raise ValueError(f"PORT={port}: this port is reserved by Knative; the default is {_PORT}")
    server = ServerOptions(
        http_address="0.0.0.0",
        http_port=port,
        allow_grpc=False,
        grpc_on_http_port=True,
        allow_metrics=False,
        lame_duck_secs=_LAME_DUCK_S,
    )
    places = models_of(environ, MODEL_DIRECTORIES)
    return Host(EngineOptions(paths=places, exit_timeout_secs=_EXIT_S), server, all_on_one_port)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "knative", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
