"""Options of metrics, traces and the log."""

from __future__ import annotations

from remora.options.fields import fragment, option


@fragment
class MetricsOptions:
    """What the metrics report, and where they are sent."""

    __slots__ = ()

    metrics_config: tuple[str, ...] = option(
        "Metrics setting: counter_latencies=false, histogram_latencies=true, summary_latencies=true, "
        "summary_quantiles=0.5:0.05,0.9:0.01. Repeatable.",
        metavar="KEY=VALUE",
        many=True,
    )
    metrics_export: tuple[str, ...] = option(
        "Send the metrics at an interval. otlp[=URL]: to an OpenTelemetry collector, such as "
        "otlp=http://collector:4318. emf[=NAMESPACE]: as lines of CloudWatch's embedded metric format in the log. "
        "Repeatable.",
        metavar="otlp[=URL]|emf[=NAMESPACE]",
        many=True,
    )
    metrics_export_secs: float = option(
        "Interval of --metrics-export, in seconds; 0: only at shutdown.", default=60.0, metavar="S"
    )


@fragment
class TraceOptions:
    """Which requests are traced and where traces go."""

    __slots__ = ()

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


@fragment
class CaptureOptions:
    """Which requests are kept with their answers, for `remora replay`."""

    __slots__ = ()

    capture: str = option(
        "File to which inference requests are appended with their answers, a line of JSON each, for 'remora replay'; "
        "or the URL of a folder in a bucket (s3://, gs://, az://), which gets files of 16 MiB, or of a minute. With "
        "the suffix .parquet, a local folder or a bucket gets Parquet files.",
        default="",
        metavar="FILE|URL",
    )
    capture_share: str = option("Share of the requests to capture.", default="1", metavar="SHARE")
    capture_max_bytes: int = option(
        "Size of all captured requests at which capturing ends, in bytes.", default=1 << 30, metavar="BYTES"
    )
    capture_redact: tuple[str, ...] = option(
        "Model whose tensors are captured, or logged as differences of shadows, without their values, or some of them; "
        "* for all models. Captures of a model whose tensors are all redacted have no custom parameters. Repeatable.",
        metavar="MODEL[:TENSOR,...]",
        many=True,
    )


SHADOW_PROCESSORS = 0.002
"""Default of --shadow-processors, so small that copies hardly change the 99th percentile of the requests."""


@fragment
class ShadowOptions:
    """Which destinations and comparisons shadows may have, and where differences are kept."""

    __slots__ = ()

    shadow_url: tuple[str, ...] = option(
        "Name for the address of another V2 server that shadows may use: 'remora release shadow MODEL --to NAME'. "
        "Repeatable.",
        metavar="NAME=URL",
        many=True,
    )
    shadow_processors: float = option(
        "Processors that the copies of each shadow may use on average on this server, such as 0.02 for 2 percent of "
        "one; more copies are dropped.",
        default=SHADOW_PROCESSORS,
        metavar="N",
    )
    shadow_compare: tuple[str, ...] = option(
        "Name for a function of a Python file that compares a model's outputs with those of a shadow. The server runs "
        "the file. Repeatable.",
        metavar="NAME=FILE:FUNCTION",
        many=True,
    )
    shadow_differences: str = option(
        "File to which differences of shadows are appended, a line of JSON each, at most 10 a second; --capture-redact "
        "applies.",
        default="",
        metavar="FILE",
    )
    shadow_differences_max_bytes: int = option(
        "Size of the file at which logging of differences ends, in bytes.", default=64 << 20, metavar="BYTES"
    )


@fragment
class LogOptions:
    """What the log contains."""

    __slots__ = ()

    log_verbose: int = option("Verbosity of the log; 0: no verbose messages.", default=0, metavar="N", basic=True)
    log_info: bool = option("Log informational messages.", default=True)
    log_warning: bool = option("Log warnings.", default=True)
    log_error: bool = option("Log errors.", default=True)
    log_format: str = option(
        "Form of the log. default: lines with local time. ISO8601: lines with UTC. json: one JSON object a line.",
        default="default",
        choices=("default", "ISO8601", "json"),
    )
    log_export: str = option(
        "Send the log's records, those of the access log included, to an OpenTelemetry collector as well: otlp, or "
        "otlp=URL.",
        default="off",
        metavar="off|otlp[=URL]",
    )
    access_log: str = option(
        "Requests to log when they are answered: all, errors (HTTP 400 and above, gRPC statuses other than OK), or the "
        "errors and a share of the others, such as 0.01.",
        default="off",
        metavar="off|all|errors|SHARE",
        basic=True,
    )
    request_ids: bool = option(
        "Answer each HTTP request with its X-Request-Id, or with a new one, and log it with the request.",
        default=False,
    )
