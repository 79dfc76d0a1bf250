"""Google Cloud Run host, with all protocols on the port that the platform sets.

    python -m remora_adapters.cloud_run [FLAG ...]

Requests wait for a cold start, and shutdown takes less than ten seconds. The file system is in memory, so mount models
from a bucket or read them from ``gs://`` instead of copying them.

With ``REMORA_PUBSUB_TOPIC`` the server also takes messages of push subscriptions at ``/pubsub/v2/models/NAME/infer``
and publishes the answers to that topic (see `pubsub`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, all_on_one_port, models_of, port_of

if TYPE_CHECKING:
    from remora.server.host import ServerContext
    from remora.server.http.exchange import Service

MODEL_DIRECTORIES = ("/models", "/mnt/models")
"""Default locations of the models, of which the first existing one is used."""
_PORT = 8080
_EXIT_S = 8
"""Less than the 10 s between SIGTERM and SIGKILL, during which no request is sent."""


def host(environ: Mapping[str, str]) -> Host:
    """Return settings with REST, health, metrics and gRPC on ``PORT``.

    ``REMORA_MODEL_REPOSITORY`` is the models' folder or URL. ``PUBSUB_EMULATOR_HOST`` names an emulator of Pub/Sub.
    Raises ValueError for an invalid port or topic.
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
    front = _with_push(environ) if environ.get("REMORA_PUBSUB_TOPIC") else all_on_one_port
    return Host(EngineOptions(paths=places, exit_timeout_secs=_EXIT_S), server, front)


def _with_push(environ: Mapping[str, str]) -> Callable[[ServerContext], Service]:
    """Return the factory of a service with push endpoints. Raises ValueError."""
    from remora_adapters.cloud_run.pubsub import Publisher, PushService

    topic, emulator = environ["REMORA_PUBSUB_TOPIC"], environ.get("PUBSUB_EMULATOR_HOST", "")
    publish = Publisher(topic, f"http://{emulator}", "") if emulator else Publisher(topic)
    return lambda context: PushService(context, all_on_one_port(context), publish)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code."""
    from remora.cli import main as run

    return run(["serve", "--host-platform", "cloud_run", *(sys.argv[1:] if arguments is None else arguments)])
