"""KServe predictor that serves /mnt/models over V1, V2 and gRPC.

    python -m remora_adapters.kserve [--model-name NAME] [FLAG ...]

The storage initializer downloads the models to /mnt/models. A modelcar (``oci://``) links them there while the server
starts, which then waits for the link. A ServingRuntime passes ``--model-name={{.Name}}``, the
name of a model whose files lie in /mnt/models itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
_POLL_S = 0.1
_LINK_S = 300
"""Limit of the wait for a modelcar, whose image is already on the node when the server starts."""
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

    def front(context: ServerContext) -> Service:
        from remora_adapters.kserve.serving import KServeService  # while the models load

        return KServeService(context, as_kserve=answers == "kserve", openai=prefix)

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


def wait_for_modelcar(environ: Mapping[str, str], sleep: Callable[[float], object] = time.sleep) -> None:
    """Wait until the models are there, if KServe announces by ``MODEL_INIT_MODE=async`` that they may come later.

    Return after five minutes in any case: the server then reports what is missing.
    """
    if environ.get("MODEL_INIT_MODE") != "async":
        return
    place = Path(environ.get("REMORA_MODEL_REPOSITORY") or MODELS)
    for _ in range(round(_LINK_S / _POLL_S)):
        if place.is_dir():
            return
        sleep(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    wait_for_modelcar(os.environ)
    return run(["serve", "--host-platform", "kserve", *(sys.argv[1:] if arguments is None else arguments)])
