"""Option dataclasses of engine and server, the source of flags, help and reference.

A field's name is its flag: ``http_port`` is ``--http-port``. Names and defaults are Triton's where Triton has the
option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTROL_MODES = ("none", "poll", "explicit", "ondemand")
RATE_LIMITS = ("off", "execution_count")
BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Triton's spelling of booleans [V05], in lower case."""


def option(
    help: str, *, default: Any = None, metavar: str = "", many: bool = False, choices: tuple[str, ...] = ()
) -> Any:
    """Return a dataclass field that is a command-line option.

    With ``many`` it repeats and is a tuple.
    """
    metadata = {"help": help, "metavar": metavar, "many": many, "choices": choices}
    return field(default=() if many else default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Models to serve and how to load them."""

    model_repository: tuple[str | Path, ...] = option(
        "Model repository: a directory with one folder per model, or its URL (s3://, gs://, as://). Repeatable.",
        metavar="DIR",
        many=True,
    )
    paths: tuple[str | Path, ...] = option(
        "A repository, a model directory, a model file such as model.onnx, an archive, or the URL of any of them.",
        metavar="PATH",
        many=True,
    )
    model_cache_directory: str = option(
        "Cache directory for models from cloud storage and archives; empty: the user's cache directory.",
        default="",
        metavar="DIR",
    )
    model_cache_byte_size: int = option(
        "Size limit of the model cache, in bytes; the least recently used models that are not in use are evicted.",
        default=50 << 30,
        metavar="BYTES",
    )
    model_name: str = option(
        "Name of the model whose files lie directly at PATH; empty: the name of that folder or file.",
        default="",
        metavar="NAME",
    )
    id: str = option("Server name in the metadata.", default="triton", metavar="NAME")
    model_control_mode: str = option(
        "none: load all models at startup. poll: also reload models when their repository changes. explicit: load "
        "the --load-model models, then what clients request. ondemand: load each model at its first request.",
        default="none",
        choices=CONTROL_MODES,
    )
    load_model: tuple[str, ...] = option(
        "Model to load at startup in explicit mode; * for all. In ondemand mode it is never evicted. Repeatable.",
        metavar="NAME",
        many=True,
    )
    model_memory_budget: int = option(
        "Limit of the estimated memory of all models, in bytes; 0: the available memory. In ondemand mode the least "
        "recently used idle models are evicted.",
        default=0,
        metavar="BYTES",
    )
    memory_gate: bool = option("Refuse a load whose estimated peak memory does not fit.", default=True)
    repository_poll_secs: int = option(
        "Polling interval of the repositories in poll mode, in seconds; 0: never.", default=15, metavar="S"
    )
    model_namespacing: bool = option(
        "Treat models of the same name in several repositories as different; an ensemble uses those of its repository.",
        default=False,
    )
    model_load_retry_count: int = option("Retries of a failed load.", default=0, metavar="N")
    exit_on_error: bool = option("Exit when a model fails to load at startup.", default=True)
    strict_readiness: bool = option("Report ready only when every model is ready.", default=True)
    disable_auto_complete_config: bool = option(
        "Use configurations as written; derive nothing from the model.", default=False
    )
    model_config_name: str = option("Use configs/NAME.pbtxt of a model that has it.", default="", metavar="NAME")
    model_load_thread_count: int = option("Models that load concurrently.", default=4, metavar="N")
    backend_config: tuple[str, ...] = option("Backend setting. Repeatable.", metavar="BACKEND,KEY=VALUE", many=True)
    backend_directory: str = option(
        "Directory of custom backends: DIR/NAME/model.py, DIR/NAME/backend.py or DIR/NAME/libremora_NAME.so for "
        "backend NAME.",
        default="",
        metavar="DIR",
    )
    host_policy: tuple[str, ...] = option(
        "Processors for the instances of a host policy: NAME,numa-node=N or NAME,cpu-cores=0-3,8. NAME is the "
        "host_policy of an instance group, or cpu, gpu_0, gpu_1 ..., model. Repeatable.",
        metavar="NAME,KEY=VALUE",
        many=True,
    )
    model_load_gpu_limit: tuple[str, ...] = option(
        "Create no further instance on a GPU whose used memory exceeds this fraction. Repeatable.",
        metavar="DEVICE:FRACTION",
        many=True,
    )
    min_supported_compute_capability: str = option(
        "Ignore GPUs below this compute capability.", default="6.0", metavar="N.N"
    )
    allow_gpu_metrics: bool = option("Report GPU metrics if the machine has GPUs.", default=True)
    derived_warmup: bool = option(
        "Warm up models without model_warmup by inferring zeros before they are ready, where that is cheap and safe.",
        default=False,
    )
    batching_delay: bool = option(
        "Honor the queue delays of the batchers. Turn off where requests arrive one at a time.",
        default=True,
    )
    delay_scheduler: int = option(
        "For tests: hold all batches until N requests are queued, then never delay again.",
        default=0,
        metavar="N",
    )
    refuse_late: bool = option(
        "Refuse a request on arrival if its response would miss the deadline.",
        default=False,
    )
    rate_limit: str = option(
        "execution_count: instances take the resources of their rate_limiter by priority. off: no rate limiter.",
        default="off",
        choices=RATE_LIMITS,
    )
    rate_limit_resource: tuple[str, ...] = option(
        "Units of a resource, per device or on one; default: what the most demanding instance needs. Repeatable.",
        metavar="NAME:COUNT[:DEVICE]",
        many=True,
    )
    backlog_delay_scheduler: int = option(
        "For tests, with --delay-scheduler: direct sequence batchers also wait for N requests without a slot.",
        default=0,
        metavar="N",
    )
    wait_for_models: bool = option(
        "Hold requests until the startup models are loaded; if false, answer them as for unknown models.",
        default=True,
    )
    max_waiting_requests: int = option(
        "HTTP requests that may wait for loading models; further ones are refused.",
        default=1024,
        metavar="N",
    )
    waiting_secs: int = option(
        "Longest wait of a request for a loading model, in seconds; an earlier deadline of the request applies.",
        default=60,
        metavar="S",
    )
    exit_timeout_secs: int = option("Time for requests in flight at shutdown, in seconds.", default=30, metavar="S")
    cache_config: tuple[str, ...] = option(
        "Response cache for models with response_cache { enable: true }: local,size=BYTES, or redis,host=NAME and "
        "redis,port=NUMBER. Repeatable.",
        metavar="CACHE,KEY=VALUE",
        many=True,
    )
    response_cache_byte_size: int = option(
        "Older form of --cache-config=local,size=BYTES; 0: no cache.", default=0, metavar="BYTES"
    )
    metrics_config: tuple[str, ...] = option(
        "Metrics setting: counter_latencies=false, histogram_latencies=true, summary_latencies=true, "
        "summary_quantiles=0.5:0.05,0.9:0.01. Repeatable.",
        metavar="KEY=VALUE",
        many=True,
    )
    trace_config: tuple[str, ...] = option(
        "Trace setting: level=TIMESTAMPS or TENSORS, rate=N for every Nth request, count=N, mode=triton or "
        "opentelemetry; triton,file=FILE, triton,log-frequency=N; opentelemetry,url=URL and more. Repeatable.",
        metavar="[MODE,]KEY=VALUE",
        many=True,
    )
    trace_file: str = option("Older form of --trace-config=triton,file=FILE.", default="", metavar="FILE")
    trace_level: tuple[str, ...] = option(
        "Older form of --trace-config=level=LEVEL. Repeatable.", metavar="LEVEL", many=True
    )
    trace_rate: int = option("Older form of --trace-config=rate=N.", default=1000, metavar="N")
    trace_count: int = option("Older form of --trace-config=count=N.", default=-1, metavar="N")
    trace_log_frequency: int = option("Older form of --trace-config=triton,log-frequency=N.", default=0, metavar="N")

    def least_capability(self) -> tuple[int, int]:
        """Return the lowest compute capability of a GPU that is used. Raises ValueError."""
        major, _, minor = self.min_supported_compute_capability.partition(".")
        if not major.isdecimal() or not (minor or "0").isdecimal():
            text = self.min_supported_compute_capability
            raise ValueError(f"--min-supported-compute-capability={text}: expected a number such as 7.5")
        return int(major), int(minor or "0")

    def backend_settings(self) -> Mapping[str, Mapping[str, str]]:
        """Return ``--backend-config`` as backend -> key -> value, with "" for all backends.

        Raises ValueError for an entry that is not BACKEND,KEY=VALUE.
        """
        settings: dict[str, dict[str, str]] = {}
        for entry in self.backend_config:
            backend, comma, pair = entry.rpartition(",")
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise ValueError(f"--backend-config={entry}: expected BACKEND,KEY=VALUE such as python,key=value")
            settings.setdefault(backend if comma else "", {})[key] = value
        return settings


def rate_limits(options: EngineOptions) -> dict[tuple[str, int | None], int] | None:
    """Return the units of each (resource, device) [I09], or None without a limiter.

    Device None means all devices. Raises ValueError for an entry that is not NAME:COUNT or NAME:COUNT:DEVICE.
    """
    stated: dict[tuple[str, int | None], int] = {}
    for entry in options.rate_limit_resource:
        name, *numbers = entry.split(":")
        if not name or len(numbers) not in (1, 2) or not all(text.isascii() and text.isdigit() for text in numbers):
            raise ValueError(
                f"--rate-limit-resource={entry}: expected NAME:COUNT or NAME:COUNT:DEVICE such as memory:4:0"
            )
        stated[name, int(numbers[1]) if len(numbers) == 2 else None] = int(numbers[0])
    return None if options.rate_limit == "off" else stated


_CACHES = ("local", "redis")


def cache_settings(options: EngineOptions) -> tuple[str, dict[str, str]] | None:
    """Return the response cache's kind and settings, None for no cache [K01].

    Raises ValueError for entries that are not CACHE,KEY=VALUE, for an unknown cache, and with Triton's texts for two
    caches. The error repeats no values because a value may be a password.
    """
    if options.response_cache_byte_size and options.cache_config:
        raise ValueError(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
            "Please provide one or the other."
        )
    if options.response_cache_byte_size:
        return "local", {"size": str(options.response_cache_byte_size)}
    found: dict[str, dict[str, str]] = {}
    for entry in options.cache_config:
        cache, _, pair = entry.partition(",")
        key, equals, value = pair.partition("=")
        if not cache or not equals or not key:
            raise ValueError(f"--cache-config={cache},...: expected CACHE,KEY=VALUE such as local,size=1048576")
        if cache not in _CACHES:
            raise ValueError(
                f"--cache-config={cache},{key}: there is no cache '{cache}'; there is {', '.join(_CACHES)}"
            )
        found.setdefault(cache, {})[key] = value
    if len(found) > 1:
        raise ValueError(
            "found multiple cache configurations, but only a single cache is currently supported\n"
            "--cache-config names local and redis: remove the entries of one of them"
        )
    return next(iter(found.items()), None)


def cache_size(given: Mapping[str, str]) -> int:
    """Return the local cache's size in bytes.

    Raises ValueError for other settings or a bad size.
    """
    for key in given:
        if key != "size":
            raise ValueError(f"--cache-config=local,{key}: the local cache has no setting '{key}'; it has size")
    text = given["size"]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--cache-config=local,size={text}: expected a number of bytes")
    return int(text)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Listening ports and request limits of the server."""

    allow_http: bool = option("Serve V2 over HTTP.", default=True)
    http_address: str = option(
        "Address for HTTP; 0.0.0.0: all interfaces.",
        default="127.0.0.1",
        metavar="ADDR",
    )
    http_port: int = option("Port for HTTP.", default=8000, metavar="PORT")
    reuse_http_port: bool = option(
        "Let several processes listen on the HTTP port. Each needs another --metrics-port, or --allow-metrics=false.",
        default=False,
    )
    http_header_forward_pattern: str = option(
        "Regular expression of the request headers to pass on as request parameters.",
        default="",
        metavar="REGEX",
    )
    http_restricted_api: tuple[str, ...] = option(
        "Endpoint groups that require a header, such as model-repository,statistics:admin-key=@FILE. @FILE reads "
        "the value from a file, @env:NAME from an environment variable. Repeatable.",
        metavar="GROUP,...:HEADER=VALUE",
        many=True,
    )
    allowed_host: tuple[str, ...] = option(
        "Host name that requests to loopback may carry; its pages may load models and change settings. Repeatable.",
        metavar="NAME",
        many=True,
    )
    http_max_input_size: int = option(
        "Longest request body, in bytes, before and after decompression.", default=64 << 20, metavar="BYTES"
    )
    client_errors: str = option(
        "HTTP status for malformed requests: invalid JSON, data that contradicts its shape, no inputs. 500 is "
        "Triton's; 400 keeps client mistakes out of alerts on server errors.",
        default="500",
        choices=("500", "400"),
    )
    http_max_json_depth: int = option(
        "Nesting depth at which arrays in JSON data are refused; at most 1024.",
        default=100,
        metavar="N",
    )
    http_max_chunks: int = option(
        "Non-empty chunks that a chunked request body may have; 0: unlimited.", default=65_536, metavar="N"
    )
    allow_grpc: bool = option("Serve V2 over gRPC.", default=True)
    grpc_address: str = option("Address for gRPC; empty: the HTTP address.", default="", metavar="ADDR")
    grpc_port: int = option("Port for gRPC.", default=8001, metavar="PORT")
    grpc_on_http_port: bool = option(
        "Serve gRPC on the HTTP port too, without TLS. --http-max-input-size then applies to gRPC, and so does "
        "--http-restricted-api unless --grpc-restricted-protocol is given.",
        default=False,
    )
    grpc_transport: str = option(
        "gRPC implementation. own: built-in HTTP/2 (faster; also serves REST over h2c). grpcio: the reference library "
        "(excludes --grpc-on-http-port).",
        default="own",
        choices=("own", "grpcio"),
    )
    grpc_header_forward_pattern: str = option(
        "Regular expression of the metadata keys to pass on as request parameters.", default="", metavar="REGEX"
    )
    grpc_restricted_protocol: tuple[str, ...] = option(
        "As --http-restricted-api, for gRPC; the metadata key is triton-grpc-protocol-HEADER. Repeatable.",
        metavar="GROUP,...:HEADER=VALUE",
        many=True,
    )
    grpc_infer_thread_count: int = option(
        "Concurrent gRPC requests; with --grpc-transport=own only those that need a thread, such as loads.",
        default=64,
        metavar="N",
    )
    reuse_grpc_port: bool = option("Let several processes listen on the gRPC port.", default=False)
    grpc_use_ssl: bool = option("Serve gRPC over TLS, with --grpc-server-cert and --grpc-server-key.", default=False)
    grpc_use_ssl_mutual: bool = option(
        "Serve gRPC over TLS and require a client certificate signed by --grpc-root-cert.", default=False
    )
    grpc_server_cert: str = option("Certificate chain of the gRPC server, a PEM file.", default="", metavar="FILE")
    grpc_server_key: str = option("Private key of the gRPC server, a PEM file.", default="", metavar="FILE")
    grpc_root_cert: str = option("Certificate authorities of gRPC clients, a PEM file.", default="", metavar="FILE")
    grpc_infer_response_compression_level: str = option(
        "Compression of gRPC inference responses for clients that accept it. low: gzip, as in Triton. medium, high: "
        "deflate if the client accepts both.",
        default="none",
        choices=("none", "low", "medium", "high"),
    )
    grpc_keepalive_time: int = option("Idle time before a keepalive ping, in ms.", default=7_200_000, metavar="MS")
    grpc_keepalive_timeout: int = option("Time for the answer to a ping, in ms.", default=20_000, metavar="MS")
    grpc_keepalive_permit_without_calls: bool = option("Ping gRPC connections without active calls too.", default=False)
    grpc_http2_max_pings_without_data: int = option(
        "Pings before the server must send data; 0: unlimited.", default=2, metavar="N"
    )
    grpc_http2_min_recv_ping_interval_without_data: int = option(
        "Shortest interval between a client's pings, in ms; else a strike.",
        default=300_000,
        metavar="MS",
    )
    grpc_http2_max_ping_strikes: int = option(
        "Strikes before a gRPC connection is closed; 0: unlimited.", default=2, metavar="N"
    )
    grpc_max_connection_age: int = option(
        "Age at which a gRPC connection is closed, in ms; 0: never.", default=0, metavar="MS"
    )
    grpc_max_connection_age_grace: int = option(
        "Time for its active calls, in ms; 0: unlimited.", default=0, metavar="MS"
    )
    idle_connection_secs: int = option(
        "Idle time before a connection is closed, in seconds; 0: never. Keep it above the idle timeout of load "
        "balancers (Google: 600 s).",
        default=620,
        metavar="S",
    )
    lame_duck_secs: int = option(
        "Time to keep serving after SIGTERM while not ready, in seconds, so that load balancers redirect traffic.",
        default=0,
        metavar="S",
    )
    allow_sagemaker: bool = option("Serve Amazon SageMaker's routes as Triton does, on a separate port.", default=False)
    sagemaker_port: int = option("Port for SageMaker, on all interfaces.", default=8080, metavar="PORT")
    sagemaker_safe_port_range: str = option(
        "Range for all other ports, such as 9000-9100.", default="", metavar="LOW-HIGH"
    )
    allow_metrics: bool = option("Serve Prometheus metrics.", default=True)
    metrics_address: str = option("Address for metrics; empty: the HTTP address.", default="", metavar="ADDR")
    metrics_port: int = option("Port for metrics.", default=8002, metavar="PORT")
    allow_client_shm: bool = option(
        "Let local clients put tensors into POSIX or CUDA shared memory. Enable only for trusted clients: they can "
        "read and write /dev/shm and crash the server.",
        default=False,
    )
    max_client_shm_regions: int = option(
        "Shared memory regions that clients may register; each takes a file descriptor.",
        default=512,
        metavar="N",
    )
    log_verbose: int = option("Verbosity of the log; 0: no verbose messages.", default=0, metavar="N")
    log_info: bool = option("Log informational messages.", default=True)
    log_warning: bool = option("Log warnings.", default=True)
    log_error: bool = option("Log errors.", default=True)
    log_format: str = option(
        "Time stamps in log lines. default: local time. ISO8601: UTC.",
        default="default",
        choices=("default", "ISO8601"),
    )


IGNORED_FLAGS: dict[str, str] = {
    "http-thread-count": "one event loop serves all connections",
    "grpc-infer-allocation-pool-size": "the server has no such pool",
    "grpc-max-response-pool-size": "the server has no such pool",
    "sagemaker-thread-count": "one event loop serves all connections",
    "buffer-manager-thread-count": "tensors are views, not copies",
    "pinned-memory-pool-byte-size": "the server has no such pool",
    "cuda-memory-pool-byte-size": "the runtimes manage device memory",
    "cuda-virtual-address-size": "the runtimes manage device memory",
    "enable-peer-access": "the runtimes manage device memory",
    "metrics-interval-ms": "metrics are read at each scrape",
    "allow-vertex-ai": "--host-platform=vertex serves the routes of Vertex AI",
    "vertex-ai-port": "--host-platform=vertex takes the port from the platform",
    "vertex-ai-thread-count": "one event loop serves all connections",
    "vertex-ai-default-model": "--host-platform=vertex takes the model from the platform",
    "cache-directory": "caches are Python packages",
    "repoagent-directory": "repository agents are not supported",
    "allow-cpu-metrics": "CPU metrics are always on",
    "log-file": "the log goes to standard error",
}
"""Flags of tritonserver that have no effect here, with the reason; accepted with a warning for existing command lines.
Unsupported flags that restrict access are refused instead."""
