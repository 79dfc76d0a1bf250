"""Google Cloud Run: one port that the platform names, requests that wait for a cold start, an end within ten seconds.

    python -m remora_adapters.cloud_run [FLAG ...]

The file system is memory: models are better mounted from a bucket or read from ``gs://`` than copied into the image's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, all_on_one_port, models_of, port_of

MODEL_DIRECTORIES = ("/models", "/mnt/models")
"""Where models are looked for when nothing says: the first of these that is there."""
_PORT = 8080
_EXIT_S = 8
"""SIGKILL comes 10 s after SIGTERM, and no request is sent in between."""


def host(environ: Mapping[str, str]) -> Host:
    """All on the port of ``PORT``: REST, health, metrics, and gRPC, which the platform passes on as it is.

    ``REMORA_MODEL_REPOSITORY`` names the models' folder or URL. Raises ValueError for what is no port.
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
    """Serve until SIGTERM; returns the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "cloud_run", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
