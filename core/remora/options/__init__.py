"""Option dataclasses of engine and server, the source of flags, help and reference.

A field's name is its flag: ``http_port`` is ``--http-port``. Names and defaults are Triton's where Triton has the
option. `EngineOptions` and `ServerOptions` are composed of fragments by subject; a new option is one field in the
module of its subject. They have no ``repr``, because values may be secrets.
"""

from __future__ import annotations

from dataclasses import dataclass

from remora.options.cache import CacheOptions, cache_settings, cache_size
from remora.options.execution import RATE_LIMITS, BackendOptions, SchedulingOptions, rate_limits
from remora.options.fields import composed, fragment, option
from remora.options.grpc_port import GrpcConnectionOptions, GrpcOptions, GrpcTlsOptions
from remora.options.http_port import HttpOptions, HttpTlsOptions, TokenOptions
from remora.options.models import CONTROL_MODES, LoadWaitOptions, ModelOptions, RepositoryOptions
from remora.options.observation import CaptureOptions, LogOptions, MetricsOptions, ShadowOptions, TraceOptions
from remora.options.triton import BOOLEANS, IGNORED_FLAGS

__all__ = [
    "BOOLEANS",
    "CONTROL_MODES",
    "IGNORED_FLAGS",
    "RATE_LIMITS",
    "EngineOptions",
    "ServerOptions",
    "cache_settings",
    "cache_size",
    "rate_limits",
]


@fragment
class _ShutdownOptions:
    """Time that a shutdown may take."""

    __slots__ = ()

    exit_timeout_secs: int = option("Time for requests in flight at shutdown, in seconds.", default=30, metavar="S")


@fragment
class _ConnectionOptions:
    """Lifetime and memory of connections."""

    __slots__ = ()

    idle_connection_secs: int = option(
        "Idle time before a connection is closed, in seconds; 0: never. Keep it above the idle timeout of load "
        "balancers (Google: 600 s).",
        default=620,
        metavar="S",
    )
    max_held_bytes: int = option(
        "Bytes of requests and unread answers that all connections together may hold; further uploads wait a moment "
        "and are refused (503, RESOURCE_EXHAUSTED). 0: a quarter of the container's memory; -1: unlimited.",
        default=0,
        metavar="BYTES",
    )
    max_connection_bytes: int = option(
        "The same for one connection. A single request or answer may be larger. HTTP/2: a client that leaves more than "
        "an eighth of it unread may send no further bodies until it reads, and its connection is closed after 20 s in "
        "which it reads nothing. 0: half of --max-held-bytes, at most "
        "256 MiB; -1: unlimited.",
        default=0,
        metavar="BYTES",
    )
    lame_duck_secs: int = option(
        "Time to keep serving after SIGTERM while not ready, in seconds, so that load balancers redirect traffic.",
        default=0,
        metavar="S",
    )


@fragment
class _FrontOptions:
    """Processes for connections."""

    __slots__ = ()

    frontends: str = option(
        "Front processes, which own the connections, decode requests and encode responses for the engine's process; "
        "0: none. auto: none below 4 cores, else one for each 3 cores, at most 6.",
        default="0",
        metavar="N|auto",
    )
    frontend_poll_us: int = option(
        "Longest time in microseconds that a front process and the engine's process poll for a single client's next "
        "message before they sleep; 0: never. They do not poll with less than two processors.",
        default=1000,
        metavar="US",
    )


@fragment
class _ExtraPortOptions:
    """Ports for platforms and metrics."""

    __slots__ = ()

    allow_sagemaker: bool = option("Serve Amazon SageMaker's routes as Triton does, on a separate port.", default=False)
    sagemaker_port: int = option("Port for SageMaker, on all interfaces.", default=8080, metavar="PORT")
    sagemaker_safe_port_range: str = option(
        "Range for all other ports, such as 9000-9100.", default="", metavar="LOW-HIGH"
    )
    allow_metrics: bool = option("Serve Prometheus metrics.", default=True)
    metrics_address: str = option("Address for metrics; empty: the HTTP address.", default="", metavar="ADDR")
    metrics_port: int = option("Port for metrics.", default=8002, metavar="PORT", basic=True)


@fragment
class _SharedMemoryOptions:
    """Shared memory of clients."""

    __slots__ = ()

    allow_client_shm: bool = option(
        "Let local clients put tensors into POSIX or CUDA shared memory. Enable only for trusted clients: they can "
        "read and write /dev/shm.",
        default=False,
    )
    max_client_shm_regions: int = option(
        "Shared memory regions that clients may register; each takes a file descriptor.",
        default=512,
        metavar="N",
    )


@dataclass(frozen=True, slots=True, repr=False, match_args=False)
@composed
class EngineOptions(
    RepositoryOptions,
    ModelOptions,
    BackendOptions,
    SchedulingOptions,
    LoadWaitOptions,
    _ShutdownOptions,
    CacheOptions,
    MetricsOptions,
    TraceOptions,
    CaptureOptions,
    ShadowOptions,
):
    """Models to serve and how to load them."""


@dataclass(frozen=True, slots=True, repr=False, match_args=False)
@composed
class ServerOptions(
    HttpOptions,
    HttpTlsOptions,
    TokenOptions,
    GrpcOptions,
    GrpcTlsOptions,
    GrpcConnectionOptions,
    _ConnectionOptions,
    _FrontOptions,
    _ExtraPortOptions,
    _SharedMemoryOptions,
    LogOptions,
):
    """Listening ports and request limits of the server."""

    @property
    def message_bytes(self) -> int:
        """Limit of a client's message on the gRPC port."""
        return self.http_max_input_size if self.grpc_on_http_port else self.grpc_max_message_size
