"""Tables of the parts that plug into the server.

A row names a part as ``module:attribute`` or as a module, so that nothing is imported before it is needed. remora's own
parts and those of other packages use the same hooks (docs/plugins.md): other packages name theirs as entry points in
the group ``remora.KIND``, such as ``remora.backends``. These are read only for a name that the table lacks, because
that takes 40 ms.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from remora.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Runtime(NamedTuple):
    """Backend with the runtime that it needs.

    Attributes:
        target: class of `remora.backends.Backend`.
        files: names of the model files that it reads.
        distributions: alternative distributions, of which one is enough.
        on_gpu: those distributions that support GPUs.
        extra: extra of remora that installs one of them.
    """

    target: str
    files: str
    distributions: tuple[str, ...] = ()
    on_gpu: tuple[str, ...] = ()
    extra: str = ""


BACKENDS = {
    "onnxruntime": Runtime(
        "remora.backends.onnxruntime:OnnxRuntimeBackend",
        "model.onnx",
        ("onnxruntime-gpu", "onnxruntime"),
        ("onnxruntime-gpu",),
        "onnx",
    ),
    "python": Runtime("remora.backends.python:PythonBackend", "model.py"),
    "fil": Runtime(
        "remora_runtimes.trees:TreesBackend",
        "xgboost.json, xgboost.ubj, model.txt, checkpoint.tl",
        ("xgboost", "xgboost-cpu", "lightgbm", "treelite"),
        (),
        "trees",
    ),
    "generation": Runtime(
        "remora_llm.backends.onnx:GenerationBackend", "genai_config.json", ("tokenizers",), (), "generation"
    ),
    "native": Runtime("remora_runtimes.native:NativeBackend", "model.so"),
    "openvino_genai": Runtime(
        "remora_llm.backends.openvino_genai:OpenVinoGenAiBackend",
        "openvino_model.xml, model.gguf",
        ("openvino-genai",),
        (),
        "openvino-genai",
    ),
    "openvino": Runtime(
        "remora_runtimes.openvino:OpenVinoBackend", "model.xml, model.onnx", ("openvino",), (), "openvino"
    ),
    "tensorflow": Runtime(
        "remora_runtimes.tensorflow:TensorFlowBackend",
        "model.savedmodel",
        ("tensorflow", "tensorflow-cpu"),
        ("tensorflow",),
        "tensorflow",
    ),
    "tensorrt": Runtime(
        "remora_runtimes.tensorrt:TensorRtBackend", "model.plan", ("tensorrt",), ("tensorrt",), "tensorrt"
    ),
    "pytorch": Runtime(
        "remora_runtimes.pytorch:PyTorchBackend", "model.pt, model.pt2", ("torch",), ("torch",), "torch"
    ),
    "vllm": Runtime("remora_llm.backends.vllm:VllmBackend", "model.json", ("vllm",), ("vllm",), "vllm"),
    "ensemble": Runtime("remora.backends.registry:EnsembleBackend", "configuration only"),
}
"""Backends by name."""

HOSTS = {
    name: f"remora_adapters.{name}"
    for name in ("azureml", "cloud_run", "container", "knative", "kserve", "sagemaker", "vertex")
}
"""Hosts by name: modules with `remora.server.host.Adapter.host`."""


METRICS = ("remora_llm.measuring:generation_families",)
"""Functions that return the families of ready models, given as `remora.models.served_model.ServedModel`."""

BATCHES = "remora_tools.deciders.explaining:explain_batches"
"""Explains the batches of a served model at a time for `remora explain`."""

ANSWERS = "remora_llm.measuring:explain_answers"
"""Explains the answers of a language model for `remora explain`."""


CAPTURE = "remora_tools.traffic.capture:open_capture"
"""Opens the capture of requests that the engine's options ask for, with its clock; see `remora.tracing.Capture`."""

RELEASES = "remora_tools.rollout.releases:Releases"
"""Releases of an engine's models; see `remora.models.rollout`."""

SHADOWS = "remora_tools.rollout.shadow_targets:shadow_settings"
"""Opens the shadows of the options with a clock; see `remora.models.rollout`."""

CACHES = {"redis": "remora_adapters.redis_cache:open_cache"}
"""Response caches beside the local one by name: functions of their settings and of a monotonic clock."""

METRIC_SINKS = {
    "emf": "remora_adapters.telemetry.embedded_metrics:open_sink",
    "otlp": "remora_adapters.telemetry.metrics:open_sink",
}
"""Destinations of metrics by name; see `remora.management.export.MetricsSink`."""

SPAN_SINK = "remora_adapters.telemetry.traces:SpanSink"
"""Destination of traces in mode ``opentelemetry``; see `remora.tracing.writer`."""

LOG_EXPORT = "remora_adapters.telemetry.logs:LogExport"
"""Export of log records for ``--log-export=otlp``."""


class Command(NamedTuple):
    """Command of the command line.

    ``target`` is a function that adds the arguments to the command's parser; see `remora.cli.arguments`.
    """

    heading: str
    help: str
    target: str


class Routes(NamedTuple):
    """Group of HTTP routes with the beginnings of its paths.

    ``target`` is a `remora.server.http.route_groups.RouteGroup`. With ``names_requests``, each answer has a request id.
    """

    prefixes: tuple[str, ...]
    target: str
    names_requests: bool = False


ROUTES = (
    Routes(
        ("/v1/", "/openai/v1/", "/tokenize", "/detokenize", "/rerank", "/score"),
        "remora_llm.routes.group",
        names_requests=True,
    ),
    Routes(("/models/",), "remora.server.http.typed_group"),
)
"""Groups of routes beside V2's."""


START = "Start here"
"""First heading of the help, with the commands that a newcomer needs: `serve` and those below."""

_SERVE, _TALK, _MEASURE = "Serve models", "Talk to a running server", "Measure"
_PLATFORMS, _CLOUDS = "Platforms", "Models in clouds"
COMMANDS = {
    "init": Command(START, "create a new model from a template", "remora_tools.functions:add_init"),
    "export": Command(
        _SERVE, "write the decorated functions of a file as a Triton repository", "remora_tools.functions:add_export"
    ),
    "export-llm": Command(
        _SERVE, "export a language model of Hugging Face for ONNX Runtime", "remora_llm.export_llm:add_export_llm"
    ),
    "build": Command(
        _SERVE, "write the build context of an image with a model and its packages", "remora_deploy.commands:add_build"
    ),
    "config": Command(
        _SERVE, "show, check or derive model configurations, without a server", "remora.cli.commands:add_config"
    ),
    "backends": Command(_SERVE, "list the backends and their installed runtimes", "remora.cli.commands:add_backends"),
    "infer": Command(START, "send one inference request", "remora_tools.client.commands:add_infer"),
    "models": Command(
        _TALK, "list, load or unload the models of a running server", "remora_tools.client.commands:add_models"
    ),
    "explain": Command(
        _TALK,
        "show why batches have their size and answers take their time, and what would change it",
        "remora_tools.client.commands:add_explain",
    ),
    "startup": Command(_TALK, "show the startup times of a server", "remora_tools.client.commands:add_startup"),
    "release": Command(
        "Release versions",
        "send a part of a model's requests to another version",
        "remora_tools.client.commands:add_release",
    ),
    "score": Command("Score files", "run the rows of a file through a model", "remora_tools.commands:add_score"),
    "bench": Command(
        START, "measure a server under load, or the time to a first answer", "remora_tools.commands:add_bench"
    ),
    "tune": Command(_MEASURE, "find the settings of models for a latency objective", "remora_tools.commands:add_tune"),
    "cost": Command(_MEASURE, "compare scale to zero with always on, from a request log", "remora_tools.cost:add_cost"),
    "replay": Command(
        _MEASURE, "send captured requests again and compare the answers", "remora_tools.commands:add_replay"
    ),
    "emulate": Command(_PLATFORMS, "test a server against a platform's contract", "remora_deploy.commands:add_emulate"),
    "manifests": Command(
        _PLATFORMS, "print deployment files computed from models", "remora_deploy.commands:add_manifests"
    ),
    "image": Command(_PLATFORMS, "build container images", "remora_deploy.commands:add_image"),
    "deploy": Command(
        START, "deploy to a platform; show, call, roll back or remove a service", "remora_deploy.commands:add_deploy"
    ),
    "pull": Command(_CLOUDS, "download models from cloud storage", "remora_tools.storage:add_pull"),
    "cache": Command(_CLOUDS, "list or clear the local cache of downloaded models", "remora_tools.storage:add_cache"),
    "keys": Command("Security", "make and revoke API keys of a server", "remora_tools.keys:add_keys"),
    "version": Command("About this installation", "print the installed versions", "remora.cli.commands:add_version"),
}
"""Commands beside `serve` by name, in the order of the help."""


def find_installed(kind: str, name: str) -> Any:
    """Return the part of another package with this name, None without any.

    ``kind`` is the end of the entry points' group, such as "backends". Raises as `load_installed`.
    """
    return next((load_installed(entry) for entry in installed(kind) if entry.name == name), None)


def load_installed(entry: EntryPoint) -> Any:
    """Return the part that an entry point names. Raises ConfigError if it cannot be loaded."""
    try:
        return entry.load()
    except Exception as error:  # code of another package, which may fail in any way
        place = f" of {entry.dist.name}" if entry.dist is not None else ""
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{entry.value}{place} cannot be loaded as '{entry.name}': {reason}") from error


def installed(kind: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of other packages, by name."""
    from importlib.metadata import entry_points  # takes 40 ms

    return tuple(sorted(entry_points(group=f"remora.{kind}"), key=lambda entry: entry.name))


def load(target: str) -> Any:
    """Return the part that a row names."""
    module, _, attribute = target.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def load_for(feature: str, target: str) -> Any:
    """Return the part that a row names, for a feature.

    Raises UnsupportedError with the name of the feature if the package is not installed.
    """
    if not is_present(target):
        raise UnsupportedError(f"{feature} needs the package {target.partition('.')[0]}, which is not installed")
    return load(target)


def is_present(target: str) -> bool:
    """Return True if the package of a row is installed; only the server's own always is."""
    return _is_installed(target.partition(":")[0].partition(".")[0])


@cache  # because a path of a package that is not installed would search all folders for each request
def _is_installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a namespace is what an installation left behind
