"""Google Cloud Run host, with all protocols on the port that the platform sets.

    python -m remora_adapters.cloud_run [FLAG ...]

Requests wait for a cold start, and shutdown takes less than ten seconds. The file system is in memory, so mount models
from a bucket or read them from ``gs://`` instead of copying them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, all_on_one_port, models_of, port_of

MODEL_DIRECTORIES = ("/models", "/mnt/models")
"""Default locations of the models, of which the first existing one is used."""
_PORT = 8080
_EXIT_S = 8
"""Less than the 10 s between SIGTERM and SIGKILL, during which no request is sent."""


def host(environ: Mapping[str, str]) -> Host:
    """Return settings with REST, health, metrics and gRPC on ``PORT``.

    ``REMORA_MODEL_REPOSITORY`` is the models' folder or URL. Raises ValueError for an invalid port.
    """
    server = ServerOptions(
        http_address="0.0.0.0",
        http_port=port_of(environ, "PORT", _PORT),
        allow_grpc=False,
        grpc_on_http_port=True,
        allow_metrics=False,
        lame_duck_secs=0,
    )
    places = models_of(environ, MODEL_DIRECTORIES)
    return Host(EngineOptions(paths=places, exit_timeout_secs=_EXIT_S), server, all_on_one_port)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "cloud_run", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
