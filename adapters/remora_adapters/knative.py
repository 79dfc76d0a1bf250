"""Knative Serving: one port that the platform names, requests that wait for a cold start, an end that loses none.

    python -m remora_adapters.knative [FLAG ...]

Knative lets one port through: REST, health and metrics are there, and gRPC. Which of them its gateways send is the
port's name: ``h2c`` has them speak HTTP/2, so gRPC, and any other name HTTP/1.1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, all_on_one_port, models_of, port_of

MODEL_DIRECTORIES = ("/mnt/models", "/models")
"""Where models are looked for when nothing says: the first of these that is there."""
_PORT = 8080
_TAKEN = (8008, 8012, 8013, 8022, 9090, 9091)
"""Ports that Knative's validation refuses for containers: they are its own sidecar's."""
_LAME_DUCK_S = 5
"""The platform's routers learn late of a pod's end; what they still send meanwhile is answered."""
_EXIT_S = 295
"""Knative's grace is the revision's timeout, 300 s unless set: requests may take as long."""


def host(environ: Mapping[str, str]) -> Host:
    """All on the port of ``PORT``. Raises ValueError for a port that Knative does not take."""
    port = port_of(environ, "PORT", _PORT)
    if port in _TAKEN:
        raise ValueError(f"PORT={port}: Knative keeps this port for itself; {_PORT} is usual")
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
    """Serve until SIGTERM; returns the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "knative", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
