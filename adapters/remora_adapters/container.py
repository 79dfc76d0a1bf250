"""A plain container: Triton's ports on all interfaces, and models where Triton's image and KServe mount them.

    python -m remora_adapters.container [FLAG ...]

Every flag of `remora serve` holds here too, so a tritonserver command line carries over as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from remora.cli import main as run
from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, models_of

MODEL_DIRECTORIES = ("/models", "/mnt/models")
"""Where models are looked for when neither flag nor variable says: the first of these that is there."""


def host(environ: Mapping[str, str]) -> Host:
    """All interfaces, since whoever publishes a container's port has decided who may reach it.

    ``REMORA_MODEL_REPOSITORY`` names the models' folder; a path or ``--model-repository`` on the command line wins.
    """
    places = models_of(environ, MODEL_DIRECTORIES)
    return Host(EngineOptions(model_repository=places), ServerOptions(http_address="0.0.0.0"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit code."""
    return run(["serve", "--host-platform", "container", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
