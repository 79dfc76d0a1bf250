"""Plain container host, with Triton's ports and the usual model mounts.

    python -m remora_adapters.container [FLAG ...]

It accepts every flag of `remora serve`, so a tritonserver command line carries over unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from remora.cli import main as run
from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, models_of

MODEL_DIRECTORIES = ("/models", "/mnt/models")
"""Default locations of the models, of which the first existing one is used."""


def host(environ: Mapping[str, str]) -> Host:
    """Return settings that listen on all interfaces.

    Publishing the container's ports controls access.
    ``REMORA_MODEL_REPOSITORY`` is the models' folder; a path or ``--model-repository`` overrides it.
    """
    places = models_of(environ, MODEL_DIRECTORIES)
    return Host(EngineOptions(paths=places), ServerOptions(http_address="0.0.0.0"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    return run(["serve", "--host-platform", "container", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
