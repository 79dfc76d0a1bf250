"""KServe: a predictor that serves what the storage initializer put into /mnt/models, by V1, V2 and gRPC.

    python -m remora_adapters.kserve [--model-name NAME] [FLAG ...]

A ServingRuntime passes ``--model-name={{.Name}}``: so is a model called whose files lie in /mnt/models itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host

if TYPE_CHECKING:
    from remora.server.host import ServerContext
    from remora.server.http.http1 import Service

MODELS = "/mnt/models"
_PORT, _GRPC_PORT = 8080, 8081
_ANSWERS = ("kserve", "triton")
_LAME_DUCK_S = 5
"""A Deployment's pod is still sent requests for a while after SIGTERM: routers learn late of its end."""
_EXIT_S = 20
"""SIGKILL comes 30 s after SIGTERM."""


def host(environ: Mapping[str, str]) -> Host:
    """The settings of a predictor: port 8080, which KServe's agent has fixed, and 8081 for gRPC.

    gRPC is on 8080 as well, for predictors that Knative runs: it lets one port through.

    ``REMORA_MODEL_REPOSITORY`` stands in for /mnt/models. ``REMORA_V2_ANSWERS=triton`` has V2 answer as Triton does
    where KServe's own server differs. Metrics are on the same port, at ``/metrics``.

    Raises ValueError for other answers than those two.
    """
    answers = environ.get("REMORA_V2_ANSWERS", "kserve")
    if answers not in _ANSWERS:
        raise ValueError(f"REMORA_V2_ANSWERS={answers}: expected {' or '.join(_ANSWERS)}")

    def front(inside: ServerContext) -> Service:
        from remora_adapters.kserve.serving import KServeService  # while the models load

        return KServeService(inside, as_kserve=answers == "kserve")

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
    """Serve until SIGTERM; returns the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "kserve", *(sys.argv[1:] if arguments is None else arguments)])
