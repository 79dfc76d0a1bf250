"""Every setting of the engine, written once; command line, help and reference are made from these fields.

A field's name is its flag: ``http_port`` is ``--http-port``. Names and defaults are Triton's where Triton has one.
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
    """A dataclass field that is a command line option. ``many``: may be given again, kept as a tuple."""
    metadata = {"help": help, "metavar": metavar, "many": many, "choices": choices}
    return field(default=() if many else default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What is served, and how it is loaded."""

    model_repository: tuple[str | Path, ...] = option(
        "A model repository: a directory with one folder per model, or the URL of one: s3://, gs://, as://. May be "
        "given again.",
        metavar="DIR",
        many=True,
    )
    paths: tuple[str | Path, ...] = option(
        "A repository, one model's directory, a model file such as model.onnx, an archive, or the URL of any of them.",
        metavar="PATH",
        many=True,
    )
    model_cache_directory: str = option(
        "Where models of clouds and archives are kept for the next start; the user's cache directory when empty.",
        default="",
        metavar="DIR",
    )
    model_cache_byte_size: int = option(
        "What that directory may hold; models not used for the longest time go first, those in use stay.",
        default=50 << 30,
        metavar="BYTES",
    )
    model_name: str = option(
        "What a model is called whose files lie directly at PATH, instead of that folder's or file's name.",
        default="",
        metavar="NAME",
    )
    id: str = option("The server's name in its metadata.", default="triton", metavar="NAME")
    model_control_mode: str = option(
        "none: load everything at start. poll: and follow what changes in the repositories. explicit: load what "
        "--load-model names, then what clients ask for. ondemand: load a model at its first request.",
        default="none",
        choices=CONTROL_MODES,
    )
    load_model: tuple[str, ...] = option(
        "A model to load at start in explicit mode; * for all of them. In mode ondemand it also stays. May be given "
        "again.",
        metavar="NAME",
        many=True,
    )
    model_memory_budget: int = option(
        "How much memory all models together may take by estimate; 0 for what there is. In mode ondemand the least "
        "recently used idle ones go.",
        default=0,
        metavar="BYTES",
    )
    memory_gate: bool = option("Refuse a load whose estimated peak does not fit into memory.", default=True)
    repository_poll_secs: int = option(
        "How often the repositories are looked at in mode poll; 0 for never.", default=15, metavar="S"
    )
    model_namespacing: bool = option(
        "Models of one name in several repositories are different models, each for the ensembles of its repository.",
        default=False,
    )
    model_load_retry_count: int = option("How often a load that fails is tried again.", default=0, metavar="N")
    exit_on_error: bool = option("Stop when a model cannot be loaded at start.", default=True)
    strict_readiness: bool = option("Ready only when every model is ready.", default=True)
    disable_auto_complete_config: bool = option(
        "Take configurations as they are written; derive nothing from the model.", default=False
    )
    model_config_name: str = option("Use configs/NAME.pbtxt of a model where there is one.", default="", metavar="NAME")
    model_load_thread_count: int = option("How many models load at the same time.", default=4, metavar="N")
    backend_config: tuple[str, ...] = option(
        "A setting of a backend: BACKEND,KEY=VALUE. May be given again.", metavar="BACKEND,KEY=VALUE", many=True
    )
    backend_directory: str = option(
        "Backends beside the installed ones, for the models whose backend is NAME: DIR/NAME/model.py, "
        "DIR/NAME/backend.py or DIR/NAME/libremora_NAME.so.",
        default="",
        metavar="DIR",
    )
    host_policy: tuple[str, ...] = option(
        "Which processors the instances of a host policy run on: NAME,numa-node=N or NAME,cpu-cores=0-3,8. Names are "
        "those of instance groups, or cpu, gpu_0, gpu_1 ..., model. May be given again.",
        metavar="NAME,KEY=VALUE",
        many=True,
    )
    model_load_gpu_limit: tuple[str, ...] = option(
        "No more instances are made on a GPU of whose memory a larger fraction is taken. May be given again.",
        metavar="DEVICE:FRACTION",
        many=True,
    )
    min_supported_compute_capability: str = option(
        "GPUs of a lower compute capability are not used.", default="6.0", metavar="N.N"
    )
    allow_gpu_metrics: bool = option("Tell of the GPUs among the metrics, where there are any.", default=True)
    derived_warmup: bool = option(
        "Run zeros through models without model_warmup before they are ready, where that is cheap and safe.",
        default=False,
    )
    batching_delay: bool = option(
        "Let batchers hold requests back for company, as configurations say. Off where requests come one at a time.",
        default=True,
    )
    delay_scheduler: int = option(
        "For tests: batchers send nothing until so many requests wait, then never hold back again.",
        default=0,
        metavar="N",
    )
    refuse_late: bool = option(
        "Refuse a request on arrival when it would be answered after its deadline.",
        default=False,
    )
    rate_limit: str = option(
        "execution_count: instances take turns at the resources that their rate_limiter names, by priority. "
        "off: nobody waits.",
        default="off",
        choices=RATE_LIMITS,
    )
    rate_limit_resource: tuple[str, ...] = option(
        "How much there is of a resource, on each device or on one. As much as the most demanding instance needs of "
        "each when none is given. May be given again.",
        metavar="NAME:COUNT[:DEVICE]",
        many=True,
    )
    backlog_delay_scheduler: int = option(
        "For tests, with --delay-scheduler: direct sequence batchers also wait for so many requests without a slot.",
        default=0,
        metavar="N",
    )
    wait_for_models: bool = option(
        "Requests that come before the models of the start are loaded wait for them; false: they fail, as for models "
        "that are not there.",
        default=True,
    )
    max_waiting_requests: int = option(
        "How many requests over HTTP may wait for models that are being loaded; more are refused.",
        default=1024,
        metavar="N",
    )
    waiting_secs: int = option(
        "The longest that a request waits for a model that is being loaded, unless its own deadline is sooner.",
        default=60,
        metavar="S",
    )
    exit_timeout_secs: int = option("How long to wait for requests under way when stopping.", default=30, metavar="S")
    cache_config: tuple[str, ...] = option(
        "The response cache, for models with response_cache { enable: true }: local,size=BYTES, or redis,host=NAME "
        "with redis,port=NUMBER. May be given again.",
        metavar="CACHE,KEY=VALUE",
        many=True,
    )
    response_cache_byte_size: int = option(
        "Older form of --cache-config=local,size=BYTES; 0 for no cache.", default=0, metavar="BYTES"
    )
    metrics_config: tuple[str, ...] = option(
        "About the metrics: counter_latencies=false, histogram_latencies=true, summary_latencies=true, "
        "summary_quantiles=0.5:0.05,0.9:0.01. May be given again.",
        metavar="KEY=VALUE",
        many=True,
    )
    trace_config: tuple[str, ...] = option(
        "A setting of traces: level=TIMESTAMPS or TENSORS, rate=N for every Nth request, count=N, mode=triton or "
        "opentelemetry; triton,file=FILE, triton,log-frequency=N; opentelemetry,url=URL and more. May be given again.",
        metavar="[MODE,]KEY=VALUE",
        many=True,
    )
    trace_file: str = option("Older form of --trace-config=triton,file=FILE.", default="", metavar="FILE")
    trace_level: tuple[str, ...] = option(
        "Older form of --trace-config=level=LEVEL. May be given again.", metavar="LEVEL", many=True
    )
    trace_rate: int = option("Older form of --trace-config=rate=N.", default=1000, metavar="N")
    trace_count: int = option("Older form of --trace-config=count=N.", default=-1, metavar="N")
    trace_log_frequency: int = option("Older form of --trace-config=triton,log-frequency=N.", default=0, metavar="N")

    def least_capability(self) -> tuple[int, int]:
        """The lowest compute capability of a GPU that is used. Raises ValueError."""
        major, _, minor = self.min_supported_compute_capability.partition(".")
        if not major.isdecimal() or not (minor or "0").isdecimal():
            text = self.min_supported_compute_capability
            raise ValueError(f"--min-supported-compute-capability={text}: give a number such as 7.5")
        return int(major), int(minor or "0")

    def backend_settings(self) -> Mapping[str, Mapping[str, str]]:
        """``--backend-config`` as backend -> key -> value; "" holds what is for all backends.

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
    """How much there is of each (resource, device), device None for all of them [I09]; None without a limiter.

    Raises ValueError for an entry that is not NAME:COUNT or NAME:COUNT:DEVICE.
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
    """The response cache's kind and what was said of it, None for no cache [K01].

    Raises ValueError for entries that are not CACHE,KEY=VALUE, for an unknown cache, and with Triton's texts for two
    caches. It repeats no values: one of them may be a password.
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
            "--cache-config names local and redis: take the entries of one of them out"
        )
    return next(iter(found.items()), None)


def cache_size(given: Mapping[str, str]) -> int:
    """The local cache's size in bytes. Raises ValueError for other settings, and for a size that is no number."""
    for key in given:
        if key != "size":
            raise ValueError(f"--cache-config=local,{key}: the local cache has no setting '{key}'; it has size")
    text = given["size"]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--cache-config=local,size={text}: expected a number of bytes")
    return int(text)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens and what it accepts."""

    allow_http: bool = option("Serve V2 over HTTP.", default=True)
    http_address: str = option(
        "Address for HTTP. Loopback unless told otherwise; 0.0.0.0 for all interfaces.",
        default="127.0.0.1",
        metavar="ADDR",
    )
    http_port: int = option("Port for HTTP.", default=8000, metavar="PORT")
    reuse_http_port: bool = option(
        "Let several processes listen on the HTTP port. Each needs its own --metrics-port, or --allow-metrics=false.",
        default=False,
    )
    http_header_forward_pattern: str = option(
        "Request headers whose names this regular expression finds become request parameters.",
        default="",
        metavar="REGEX",
    )
    http_restricted_api: tuple[str, ...] = option(
        "Groups of calls that need a header with a value, such as model-repository,statistics:admin-key=@FILE. "
        "@FILE takes the value from a file, @env:NAME from a variable. May be given again.",
        metavar="GROUP,...:HEADER=VALUE",
        many=True,
    )
    allowed_host: tuple[str, ...] = option(
        "A host name that requests to a loopback address may carry, and whose web pages may load models and change "
        "settings. May be given again.",
        metavar="NAME",
        many=True,
    )
    http_max_input_size: int = option(
        "The longest request body, in bytes, also once inflated.", default=64 << 20, metavar="BYTES"
    )
    client_errors: str = option(
        "The HTTP status of requests that cannot be read: malformed JSON, data of another shape than declared, no "
        "inputs. Triton's is 500; with 400, alerts on server errors do not fire for mistakes of clients.",
        default="500",
        choices=("500", "400"),
    )
    http_max_json_depth: int = option(
        "As many arrays as this in each other are refused in JSON data; 1024 is the most that can be read.",
        default=100,
        metavar="N",
    )
    http_max_chunks: int = option(
        "The most non-empty chunks of a chunked request body; 0 for any number.", default=65_536, metavar="N"
    )
    allow_grpc: bool = option("Serve V2 over gRPC.", default=True)
    grpc_address: str = option("Address for gRPC; the HTTP address when empty.", default="", metavar="ADDR")
    grpc_port: int = option("Port for gRPC.", default=8001, metavar="PORT")
    grpc_on_http_port: bool = option(
        "Answer gRPC on the HTTP port too, without TLS. --http-max-input-size then holds for gRPC, and so does "
        "--http-restricted-api unless --grpc-restricted-protocol is given.",
        default=False,
    )
    grpc_transport: str = option(
        "What carries gRPC: our own HTTP/2, which is several times quicker for small messages and answers requests "
        "of plain HTTP/2 on the HTTP port too, or grpcio.",
        default="own",
        choices=("own", "grpcio"),
    )
    grpc_header_forward_pattern: str = option(
        "Metadata whose keys this regular expression finds become request parameters.", default="", metavar="REGEX"
    )
    grpc_restricted_protocol: tuple[str, ...] = option(
        "As --http-restricted-api, for gRPC; the metadata key is triton-grpc-protocol-HEADER. May be given again.",
        metavar="GROUP,...:HEADER=VALUE",
        many=True,
    )
    grpc_infer_thread_count: int = option(
        "gRPC requests that may be under way at the same time; with our own transport those that need a thread, as "
        "loads do and inferences do not.",
        default=64,
        metavar="N",
    )
    reuse_grpc_port: bool = option("Let several processes listen on the gRPC port.", default=False)
    grpc_use_ssl: bool = option("gRPC over TLS, with the certificate and key given.", default=False)
    grpc_use_ssl_mutual: bool = option(
        "TLS, and only for clients whose certificate --grpc-root-cert vouches for.", default=False
    )
    grpc_server_cert: str = option("The gRPC server's certificate chain, a PEM file.", default="", metavar="FILE")
    grpc_server_key: str = option("The gRPC server's private key, a PEM file.", default="", metavar="FILE")
    grpc_root_cert: str = option("The authorities that vouch for gRPC clients, a PEM file.", default="", metavar="FILE")
    grpc_infer_response_compression_level: str = option(
        "How much gRPC's answers to inference are compressed, for clients that accept it: low is gzip as in Triton, "
        "medium and high are deflate where a client accepts both.",
        default="none",
        choices=("none", "low", "medium", "high"),
    )
    grpc_keepalive_time: int = option("Silence after which a gRPC client is pinged.", default=7_200_000, metavar="MS")
    grpc_keepalive_timeout: int = option("How long a ping may stay unanswered.", default=20_000, metavar="MS")
    grpc_keepalive_permit_without_calls: bool = option("Ping gRPC connections that carry no call too.", default=False)
    grpc_http2_max_pings_without_data: int = option(
        "Pings before data must have been sent; 0 for any.", default=2, metavar="N"
    )
    grpc_http2_min_recv_ping_interval_without_data: int = option(
        "A gRPC client that pings more often gets a strike.", default=300_000, metavar="MS"
    )
    grpc_http2_max_ping_strikes: int = option(
        "Strikes before a gRPC connection is closed; 0 for any.", default=2, metavar="N"
    )
    grpc_max_connection_age: int = option(
        "Age at which gRPC clients must connect anew; 0 for never.", default=0, metavar="MS"
    )
    grpc_max_connection_age_grace: int = option("Time for running calls then; 0 for any.", default=0, metavar="MS")
    idle_connection_secs: int = option(
        "How long a connection may have no request before it is closed; 0 for any time. Keep it above the idle time of "
        "load balancers: Google's have 600 s.",
        default=620,
        metavar="S",
    )
    lame_duck_secs: int = option(
        "After SIGTERM, go on serving that long while not being ready, so that traffic goes elsewhere.",
        default=0,
        metavar="S",
    )
    allow_sagemaker: bool = option(
        "Serve Amazon SageMaker's routes as Triton does, on a port of their own.", default=False
    )
    sagemaker_port: int = option("Port for SageMaker, on all interfaces.", default=8080, metavar="PORT")
    sagemaker_safe_port_range: str = option(
        "Ports that the other listeners must keep to, such as 9000-9100.", default="", metavar="LOW-HIGH"
    )
    allow_metrics: bool = option("Serve Prometheus metrics.", default=True)
    metrics_address: str = option("Address for metrics; the HTTP address when empty.", default="", metavar="ADDR")
    metrics_port: int = option("Port for metrics.", default=8002, metavar="PORT")
    allow_client_shm: bool = option(
        "Let clients on this machine put tensors into POSIX or CUDA shared memory. They can then read and write what "
        "is in /dev/shm, and crash the server: only for clients that are trusted.",
        default=False,
    )
    max_client_shm_regions: int = option(
        "How many regions of shared memory clients may have registered at a time; each takes a file descriptor.",
        default=512,
        metavar="N",
    )
    log_verbose: int = option("More log lines from 1 on.", default=0, metavar="N")
    log_info: bool = option("Log what is going on.", default=True)
    log_warning: bool = option("Log what may be wrong.", default=True)
    log_error: bool = option("Log what is wrong.", default=True)
    log_format: str = option(
        "How log lines give the time: default is local time, ISO8601 that of UTC.",
        default="default",
        choices=("default", "ISO8601"),
    )


IGNORED_FLAGS: dict[str, str] = {
    "http-thread-count": "one event loop serves all connections",
    "grpc-infer-allocation-pool-size": "nothing is pooled",
    "grpc-max-response-pool-size": "nothing is pooled",
    "sagemaker-thread-count": "one event loop serves all connections",
    "buffer-manager-thread-count": "tensors are views, not copies",
    "pinned-memory-pool-byte-size": "there is no such pool",
    "cuda-memory-pool-byte-size": "the runtimes manage device memory",
    "cuda-virtual-address-size": "the runtimes manage device memory",
    "enable-peer-access": "the runtimes manage device memory",
    "metrics-interval-ms": "metrics are read when they are asked for",
    "allow-vertex-ai": "--host-platform=vertex serves as Vertex AI asks for",
    "vertex-ai-port": "--host-platform=vertex takes the port from the platform",
    "vertex-ai-thread-count": "one event loop serves all connections",
    "vertex-ai-default-model": "--host-platform=vertex takes the model from the platform",
    "cache-directory": "caches are Python packages",
    "repoagent-directory": "there are no repository agents",
    "allow-cpu-metrics": "they are always on",
    "log-file": "the log goes to standard error",
}
"""Flags of tritonserver that change nothing here, and why: accepted with a warning, so that command lines carry over.
Flags that would change who may do what are not among them: those are refused until they work."""
