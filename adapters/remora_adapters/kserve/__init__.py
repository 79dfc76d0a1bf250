"""KServe predictor that serves /mnt/models over V1, V2 and gRPC.

    python -m remora_adapters.kserve [--model-name NAME] [FLAG ...]

The storage initializer downloads the models to /mnt/models. A ServingRuntime passes ``--model-name={{.Name}}``, the
name of a model whose files lie in /mnt/models itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host

if TYPE_CHECKING:
    from remora.server.host import ServerContext
    from remora.server.http.exchange import Service

MODELS = "/mnt/models"
_PORT, _GRPC_PORT = 8080, 8081
_ANSWERS = ("kserve", "triton")
_LAME_DUCK_S = 5
"""Time during which routers still send requests to a pod after SIGTERM."""
_EXIT_S = 20
"""Less than the 30 s between SIGTERM and SIGKILL."""


def host(environ: Mapping[str, str]) -> Host:
    """Return the settings of a predictor.

    HTTP is on port 8080, which KServe fixes, and gRPC on 8081. gRPC is on 8080 as well,
    because Knative exposes only one port.

    ``REMORA_MODEL_REPOSITORY`` replaces /mnt/models. ``REMORA_V2_ANSWERS=triton`` selects Triton's V2 answers where
    KServe's own server differs. ``KSERVE_OPENAI_ROUTE_PREFIX`` replaces ``openai`` in the paths of OpenAI's routes.
    Metrics are on the same port, at ``/metrics``.

    Raises ValueError for any other value of ``REMORA_V2_ANSWERS``.
    """
    answers = environ.get("REMORA_V2_ANSWERS", "kserve")
    if answers not in _ANSWERS:
        raise ValueError(f"REMORA_V2_ANSWERS={answers}: expected {' or '.join(_ANSWERS)}")

    prefix = environ.get("KSERVE_OPENAI_ROUTE_PREFIX", "openai").strip("/")

    def front(inside: ServerContext) -> Service:
        from remora_adapters.kserve.serving import KServeService  # while the models load

        return KServeService(inside, as_kserve=answers == "kserve", openai=prefix)

    server = ServerOptions(
        http_address="0.0.0.0",
        http_port=_PORT,
        grpc_port=_GRPC_PORT,
        grpc_on_http_port=True,
        allow_metrics=False,
        lame_duck_secs=_LAME_DUCK_S,
    )
    place = environ.get("REMORA_MODEL_REPOSITORY") or MODELS
    return Host(EngineOptions(paths=(place,), exit_timeout_secs=_EXIT_S), server, front)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "kserve", *(sys.argv[1:] if arguments is None else arguments)])
